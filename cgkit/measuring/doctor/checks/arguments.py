"""Arguments that are baked into the graph: None or not, and Python numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cgkit.errors import TraceError
from cgkit.measuring.doctor.findings import Finding, at
from cgkit.measuring.doctor.patient import Patient, cannot
from cgkit.measuring.doctor.registry import check
from cgkit.tracing.annotations import infer_dynamic_arg_dims


@check("none-argument", "frozen-number", "argument-differs")
def arguments(patient: Patient) -> Iterator[Finding]:
    """What of the example's arguments is baked in, and whether the other calls have it alike."""
    if patient.traced is None:
        return
    yield from _other_calls(patient)
    where = at(patient.head)
    yield from _may_be_none(patient, where)
    for name, value in patient.bound.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if number and name in patient.given:
            yield Finding(
                "frozen-number",
                "info",
                f"{name}={value!r} is a Python number: it is baked into the graph, and a call with another is refused",
                f"make {name!r} a tensor if it changes from call to call",
                again=f"cgkit.trace(model, ...).arguments.expected[{name!r}]",
                **where,
            )


def _may_be_none(patient: Patient, where: dict[str, Any]) -> Iterator[Finding]:
    tensors = infer_dynamic_arg_dims(patient.model.forward)
    names = [
        name
        for name, each in patient.signature.parameters.items()
        if each.default is None and name in tensors
    ]
    if names:
        said = ", ".join(f"{name} ({'None' if patient.bound[name] is None else 'given'})" for name in names)
        yield Finding(
            "none-argument",
            "info",
            f"tensors that may be None, and what they are in the example: {said}. The graph holds that path only, and "
            "a call the other way is refused",
            "pass each the same way in every call, or trace a second model for the other way",
            again="cgkit.doctor(model, *example_inputs, other_inputs=[...])",
            **where,
        )


def _other_calls(patient: Patient) -> Iterator[Finding]:
    assert patient.traced is not None
    for args, kwargs in patient.others:
        try:
            patient.traced.check_arguments(args, kwargs)
        except TraceError as error:
            message = cannot(error)
            none = "was None when" in message or "is None now" in message
            number = "are baked into the graph" in message
            code = "none-argument" if none else "frozen-number" if number else "argument-differs"
            what, _, fix = message.rpartition(". ")
            yield Finding(code, "error", what, fix, again="cgkit.trace(model, *example_inputs)(*other)")
        except TypeError as error:
            yield Finding(
                "argument-differs",
                "error",
                f"another call does not fit forward: {error}",
                "call it as the example",
            )
