"""Work and memory on a stream that is not the one that is captured; and waiting for a stream on the host."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from cgkit import torch_hooks
from cgkit.capturing.debugging.eager import as_written
from cgkit.measuring.doctor.checks.capture_rules import host_sync
from cgkit.measuring.doctor.findings import Finding
from cgkit.measuring.doctor.observe import Sight, calling_lines
from cgkit.measuring.doctor.patient import Patient, cannot_run
from cgkit.measuring.doctor.registry import NotCheckedError, check
from cgkit.torch_hooks import OpOverload, TorchDispatchMode


@dataclass
class _Use:
    """The operators of one line on one stream: was it forked from the capturing one, is there new memory?"""

    sight: Sight
    stream: int
    forked: bool
    allocates: bool


@dataclass
class _Seen:
    known: bool = True
    uses: dict[Any, _Use] = field(default_factory=dict)
    waits: list[Sight] = field(default_factory=list)
    joined: frozenset[int] = frozenset()


class _Streams(TorchDispatchMode):
    """Notes on which stream each operator is called."""

    supports_higher_order_operators = True

    def __init__(self, seen: _Seen) -> None:
        super().__init__()
        self.seen = seen
        self.main, _ = torch_hooks.stream_now()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number, follows = torch_hooks.stream_now()
        if number != self.main:
            frames = calling_lines()
            key = number, frames[-1] if frames else None
            if key not in self.seen.uses:
                sight = Sight(str(func), frames[-1] if frames else None, frames=tuple(frames))
                self.seen.uses[key] = _Use(sight, number, self.main in follows, False)
            self.seen.uses[key].allocates |= _allocates(func)
        return func(*args, **(kwargs or {}))


def _allocates(func: OpOverload) -> bool:
    if isinstance(func, torch_hooks.HigherOrderOperator):
        return True
    return not func.is_view and None in torch_hooks.written_arguments(func)


@check("other-stream", "host-sync")
def streams(patient: Patient) -> Iterator[Finding]:
    """Runs the model eagerly, under stand-ins for ``torch.cuda``'s streams where there is no GPU."""
    if not patient.config.mode:
        return
    seen = _run(patient)
    for use in seen.uses.values():
        yield _finding(use, seen)
    for sight in seen.waits:
        yield host_sync(sight)


def _run(patient: Patient) -> _Seen:
    seen = _Seen()

    def waited(what: str) -> None:
        frames = calling_lines()
        seen.waits.append(Sight(what, frames[-1] if frames else None, frames=tuple(frames)))

    with torch_hooks.stand_in_streams(waited) as seen.known, patient.unharmed():
        args, kwargs = patient.copies()
        watch = _Streams(seen)
        try:
            with contextlib.redirect_stdout(io.StringIO()), as_written(), watch:
                patient.model(*args, **kwargs)
        except Exception as error:
            raise NotCheckedError(cannot_run(error)) from error
        seen.joined = torch_hooks.stream_now()[1]
    return seen


def _finding(use: _Use, seen: _Seen) -> Finding:
    what = f"{use.sight.operator} is called on another stream than the one that is captured"
    fix = "do it on the current stream; or wait in both directions: side.wait_stream(current) before, "
    fix += "current.wait_stream(side) after"
    severity = "error"
    if not seen.known:
        severity = "warning"
        what += (
            ": it is recorded only if that stream waits for the capturing one, and this one for it afterwards"
        )
    elif not use.forked:
        what += (
            ", and that stream does not wait for it: the operator runs once, while recording, and no replay "
        )
        what += "repeats it"
    elif use.stream not in seen.joined:
        what += ", which does not wait for it afterwards: the capture ends with unjoined work and is refused"
    else:
        severity = "warning" if use.allocates else "info"
        what += ", which waits for it afterwards: it is recorded as a branch of the graph"
    if use.allocates:
        what += "; its output is allocated there, and the shared pool may give that memory to an operator of the other "
        what += "stream without waiting"
        fix += ", and allocate on the current stream"
    return Finding(
        "other-stream",
        severity,
        what,
        fix,
        again="cgkit.torch_hooks.stand_in_streams()  # where there is no GPU",
        stream=f"a side stream ({use.stream})",
        **use.sight.where(),
    )
