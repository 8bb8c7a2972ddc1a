"""Where the model is not one graph: every break, and what running in segments costs a step."""

from __future__ import annotations

import contextlib
import io
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from cgkit import torch_hooks
from cgkit.measuring.doctor.findings import Finding, at, at_innermost, at_message
from cgkit.measuring.doctor.patient import Patient
from cgkit.measuring.doctor.registry import check
from cgkit.tracing.frames import Frame, frames_in

#: So many steps are timed, eagerly and in segments, in turn.
_STEPS = 21

_FIX = (
    "rewrite the line so that it does not depend on a tensor's values, or on what Dynamo cannot follow; move it out "
    "of forward; or hide it in an operator (cgkit.register_op)"
)
_AGAIN = 'torch.compile(model, backend="eager", fullgraph=True)(*example_inputs)'


@check("graph-break", "trace-failed")
def graph_breaks(patient: Patient) -> Iterator[Finding]:
    """Why the model is not one graph. Breaks after the first are found by letting Dynamo break."""
    if patient.failure is None:
        return
    cost, found = _in_segments(patient)
    breaks = list(found.breaks)
    cause = patient.failure.__cause__
    if type(cause).__name__ == "Unsupported":  # the first: it may stand before all graphs, and be in none
        breaks.insert(0, _first_break(cause))
    seen: set[Any] = set()
    for reason, frames in breaks:
        where = at_innermost(frames)
        place = where.get("file"), where.get("line")
        if place in seen:
            continue
        seen.add(place)
        yield Finding("graph-break", "error", _sentence(reason), _FIX, cost=cost, again=_AGAIN, **where)
    if not breaks and not patient.specialised:
        message = str(patient.failure)
        reason, _, way_out = message.partition("what to do: ")
        what = " ".join(reason.partition("reason: ")[2].split()) or " ".join(reason.split())
        yield Finding(
            "trace-failed",
            "error",
            f"the model cannot be traced as one graph: {what}",
            way_out or "call the model eagerly with the same arguments",
            again="cgkit.trace(model, *example_inputs)",
            **(at_message(message) or at(patient.head)),
        )


def _first_break(cause: Any) -> tuple[str, list[Frame]]:
    stack = getattr(cause, "real_stack", None) or ()
    frames = [(f.filename, f.lineno or 0, f.line or "") for f in stack] or frames_in(str(cause))
    return str(cause), frames


def _sentence(reason: str) -> str:
    """Dynamo's reason without its advice."""
    if reason.startswith("generic_jump"):
        return "Dynamo breaks the graph: a branch depends on a tensor's value"
    lines = [line.strip() for line in reason.split("\n\n")[0].splitlines()]
    kept = [line for line in lines if line and not line.startswith(("Hint:", "Developer debug"))]
    return "Dynamo breaks the graph: " + "; ".join(line.removeprefix("Explanation: ") for line in kept)


def _in_segments(patient: Patient) -> tuple[str, torch_hooks.Segments]:
    """The cost of the segments in words, and the breaks that were met."""
    model = patient.model

    def forward(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    run, found = torch_hooks.segments(forward)
    args, kwargs = patient.copies()
    try:
        with patient.unharmed(), contextlib.redirect_stdout(io.StringIO()):
            try:
                run(*args, **kwargs)
                run(*args, **kwargs)
                eager, segmented = _in_turn(lambda: forward(*args, **kwargs), lambda: run(*args, **kwargs))
            except Exception as error:  # the model's own; the breaks before it count all the same
                found.error = error
                return "", found
    finally:
        found.forget()
    more = segmented - eager
    what = f"{more:.0f} us more than eager" if more > 0 else "no longer than eager"
    return (
        f"{found.graphs} segments; a step through Dynamo's guards took {segmented:.0f} us, {what} (median of {_STEPS} "
        f"on {patient.device}, segments run operator by operator), and none of it can be recorded",
        found,
    )


def _in_turn(*functions: Callable[[], Any]) -> list[float]:
    """The median time of each in microseconds, taken in turn."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(_STEPS):
        for kept, function in zip(times, functions):
            start = time.perf_counter()
            function()
            kept.append((time.perf_counter() - start) * 1e6)
    return [statistics.median(kept) for kept in times]
