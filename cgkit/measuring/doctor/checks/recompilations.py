"""Calls that would be traced again if the guards stood, and which guard triggers it."""

from __future__ import annotations

import contextlib
import io
import re
import time
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn

from cgkit import torch_hooks
from cgkit.config import CompilationLevel
from cgkit.errors import CgkitError
from cgkit.measuring.doctor.checks.dropped_guards import failing_sizes
from cgkit.measuring.doctor.findings import Finding, at
from cgkit.measuring.doctor.patient import Patient, cannot_run
from cgkit.measuring.doctor.registry import NotCheckedError, check
from cgkit.tracing.arguments import Arguments, stand_ins
from cgkit.tracing.frames import Frame, called_from, innermost_outside_torch
from cgkit.tracing.own_code import with_own_code
from cgkit.tracing.trace import dims_of_call

_LINE = re.compile(r"#[^\n]*?(\S+\.py):(\d+) in ")
_LOCAL = re.compile(r"L\['(\w+)'\]")
_FEW = 4
_ONE = "a call of one token"


class Again(NamedTuple):
    """A call that was traced again: which, the guards that failed, the line of the first, what it took."""

    call: str
    reasons: tuple[str, ...]
    frame: Frame | None
    seconds: float
    usual_seconds: float


@check("recompilation")
def recompilations(patient: Patient) -> Iterator[Finding]:
    """Calls the model under Dynamo's guards: the example twice, other sizes, the other calls."""
    if patient.traced is None:
        return
    guards_stand = patient.config.level is CompilationLevel.DYNAMO_AS_IS
    for again in traced_again(patient):
        same = again.call == "the same call again"
        usual_one = again.call == _ONE and again.reasons[0].startswith(
            "2 <= "
        )  # each kind of call once: 1, and more
        yield Finding(
            "recompilation",
            "warning" if same or (guards_stand and not usual_one) else "info",
            f"under guards, {again.call} would be traced again, since a guard fails: "
            f"{'; '.join(again.reasons[:_FEW])}. "
            + (
                "Level 1 does so"
                if guards_stand
                else "Without guards the first graph is taken for it, and the model tried against it (dropped-guard, "
                "zero-one)"
            ),
            "keep out of forward what changes in Python from call to call"
            if same
            else "nothing to do, if it is only once for each kind of call"
            if guards_stand
            else "nothing to do without guards",
            cost=f"{again.seconds:.2f} s for that call instead of {again.usual_seconds * 1e3:.2g} ms, uncompiled",
            again="torch._logging.set_logs(recompiles=True)",
            **at(again.frame),
        )


def traced_again(patient: Patient) -> list[Again]:
    """The calls of :func:`_calls` that Dynamo traces again, made one after the other."""
    own = own_forward(patient.model)
    run, found = torch_hooks.segments(own)
    usual, again = 0.0, []
    try:
        for number, (label, args, kwargs) in enumerate(_calls(patient)):
            failed, graphs, started = len(found.failed), found.graphs, time.perf_counter()
            try:
                with patient.unharmed(), contextlib.redirect_stdout(io.StringIO()):
                    run(*args, **kwargs)
            except Exception as error:
                if number == 0:
                    raise NotCheckedError(cannot_run(error)) from error
                continue
            seconds = time.perf_counter() - started
            if number == 0:
                continue
            if found.graphs == graphs or len(found.failed) == failed:
                usual = seconds
                continue
            reasons = tuple(dict.fromkeys(_said(text) for text in found.failed[failed:]))
            frame = next((f for text in found.failed[failed:] if (f := _line_of(patient, text))), None)
            again.append(Again(label, reasons, frame, seconds, usual))
    finally:
        found.forget()
    return again


def _calls(patient: Patient) -> Iterator[tuple[str, Any, Any]]:
    """(label, args, kwargs) of the calls to be made, the first with its dynamic dimensions marked."""
    try:
        arguments = Arguments(patient.name, patient.signature, patient.args, patient.kwargs)
        given = patient.marked if patient.marked is not None else {}
        dims = dims_of_call(patient.model, arguments, given)
        args, kwargs = patient.copies()
        args, kwargs, enlarged = stand_ins(patient.signature, args, kwargs, dims, torch_hooks.mark_dynamic)
    except CgkitError as error:
        raise NotCheckedError(str(error)) from error
    yield "the first call", *((args, kwargs) if not enlarged else patient.call_of_size(2))
    if not enlarged:
        yield "the same call again", *patient.copies()
    for size in _sizes(patient):
        yield _ONE if size == 1 else f"a call of {size} tokens", *patient.call_of_size(size)
    for number, (args, kwargs) in enumerate(patient.others):
        yield f"other_inputs[{number}]", args, kwargs


def _sizes(patient: Patient) -> list[int]:
    """With guards left standing some of the sizes that run; else those alone that break a guard on sizes."""
    if not patient.is_dynamic or not patient.num_tokens or patient.traced is None:
        return []
    if patient.config.level is CompilationLevel.DYNAMO_AS_IS:
        sizes = [1, patient.num_tokens + 1, patient.sizes.largest]
    else:
        guards = torch_hooks.size_guards(patient.traced.fake_mode)
        sizes = [failing[0] for guard in guards if (failing := failing_sizes(patient, guard))]
    return [size for size in dict.fromkeys(sizes) if size != patient.num_tokens]


def own_forward(model: nn.Module) -> Any:
    """``model.forward`` with a code object of its own, so that what Dynamo keeps for it can be dropped again."""
    forward = model.forward
    function = getattr(forward, "__func__", None)
    if not isinstance(function, FunctionType):

        def called(*args: Any, **kwargs: Any) -> Any:
            return model(*args, **kwargs)

        return called
    return MethodType(with_own_code(function), model)


def _said(reason: str) -> str:
    """A guard's text without the entry's number, the comment and ``L[...]``."""
    text = re.sub(r"^\d+/\d+: ", "", reason.split("\nUser stack")[0]).split("#")[0]
    return _LOCAL.sub(r"\1", " ".join(text.split()))


def _line_of(patient: Patient, reason: str) -> Frame | None:
    """The user's line that a guard's text names; torch keeps only the end of a file's name."""
    if patient.traced is None:
        return None
    found = []
    for name, number in _LINE.findall(reason):  # one a use of the size: torch's own come first
        file = next((each for each in patient.traced.traced_files if each.endswith(name)), name)
        found.append((file, int(number), ""))
    line = innermost_outside_torch(found)
    return None if line is None else called_from(patient.traced.graph_module.graph, line)
