"""Where a model takes another path for another size: found by watching which instructions run."""

from __future__ import annotations

import contextlib
import io
import linecache
import sys
from typing import Any

from cgkit.measuring.doctor.patient import Patient
from cgkit.tracing.frames import Frame, is_library_file

#: After so many instructions nothing more is written down.
_MOST = 200_000


def parting(patient: Patient, size: int, other: int) -> Frame | None:
    """The line after which a call of ``size`` tokens goes another way than one of ``other``; None if none does."""
    first, second = _steps(patient, size), _steps(patient, other)
    before = None
    for one, two in zip(first, second):
        if one != two:
            break
        before = one
    else:
        if len(first) == len(second):
            return None
    if before is None:
        return None
    file, line, _ = before
    return file, line, linecache.getline(file, line).strip()


def _steps(patient: Patient, size: int) -> list[tuple[str, int, int]]:
    """(file, line, instruction) in the order in which the user's code runs."""
    found: list[tuple[str, int, int]] = []

    def local(frame: Any, event: str, _: Any) -> Any:
        if event == "opcode" and len(found) < _MOST:
            found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_lasti))
        return local

    def begin(frame: Any, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if is_library_file(file) or file.startswith("<"):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return local

    args, kwargs = patient.call_of_size(size)
    before = sys.gettrace()
    with patient.unharmed(), contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Exception):
        sys.settrace(begin)
        try:
            patient.model(*args, **kwargs)
        finally:
            sys.settrace(before)
    return found
