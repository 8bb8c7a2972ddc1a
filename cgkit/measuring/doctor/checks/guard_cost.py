"""What Dynamo's guards cost a step, where the configuration lets them stand."""

from __future__ import annotations

import contextlib
import io
import statistics
import time
from collections.abc import Iterator

import torch

from cgkit import torch_hooks
from cgkit.config import CompilationLevel
from cgkit.measuring.doctor.checks.dropped_guards import guard_rows
from cgkit.measuring.doctor.checks.recompilations import own_forward
from cgkit.measuring.doctor.findings import Finding
from cgkit.measuring.doctor.patient import Patient, cannot_run
from cgkit.measuring.doctor.registry import NotCheckedError, check

#: So many calls with guards and as many past them, in turn.
_CALLS = 31


@check("guard-cost")
def guard_cost(patient: Patient) -> Iterator[Finding]:
    """Level 1 only: the others drop every guard."""
    if patient.traced is None or patient.config.level is not CompilationLevel.DYNAMO_AS_IS:
        return
    try:
        guarded, past = _medians(patient)
    except Exception as error:  # the model's own
        raise NotCheckedError(cannot_run(error)) from error
    yield Finding(
        "guard-cost",
        "info",
        f"{len(guard_rows(patient))} guards are evaluated at each step: level 1 is plain torch.compile",
        "level 2 or 3 drops them; what then changes unseen is told by dropped-guard",
        cost=f"{guarded * 1e6:.0f} us a step on this host, and {past * 1e6:.0f} us with the guards skipped (medians of "
        f"{_CALLS}, uncompiled)",
        again="torch.compiler.set_stance(skip_guard_eval_unsafe=True)",
    )


def _medians(patient: Patient) -> tuple[float, float]:
    """Seconds of a call with its guards, and with them skipped."""
    run, found = torch_hooks.segments(own_forward(patient.model))
    args, kwargs = patient.copies()
    times: tuple[list[float], list[float]] = ([], [])
    try:
        with patient.unharmed(), contextlib.redirect_stdout(io.StringIO()):
            for _ in range(2):
                run(*args, **kwargs)
            for _ in range(_CALLS):
                for kept, skipping in zip(times, (False, True)):
                    with torch.compiler.set_stance("default", skip_guard_eval_unsafe=skipping):
                        started = time.perf_counter()
                        run(*args, **kwargs)
                        kept.append(time.perf_counter() - started)
    finally:
        found.forget()
    return statistics.median(times[0]), statistics.median(times[1])
