"""What a check finds: a stable code, what, where, what it costs, how to fix it, how to see it again."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from cgkit.errors import CgkitError
from cgkit.tracing.frames import Frame, innermost_outside_torch, is_library_file

#: From the worst to the mildest.
SEVERITIES = ("error", "warning", "info")

#: ``file:line: source`` (the recorder's errors), or ``at file:line`` and the source in the next line (the trace's).
_PLACE = re.compile(r"^\s*(?:at )?(\S*\.py|/\S+?|<\S+>):(\d+)(?::[ ]*([^\n]*)|\n\s+([^\n]*))?$", re.M)


#: The keys of a finding as plain data, in the order of a table's columns.
FIELDS = (
    "code", "severity", "file", "line", "source", "what", "cost", "fix", "again", "command", "stack", "stream", "check",
)  # fmt: skip

#: So many callers of a line are shown in text; the data has them all.
_SHOWN = 4


@dataclass(frozen=True)
class Finding:
    """One thing that a check found.

    Attributes:
        code: stable, to be searched and counted by: "graph-break", "host-sync", ...
        severity: "error" (cannot be recorded, or computes something else), "warning" (works, and will hurt),
            "info" (true of this model, and good to know).
        what: in a sentence or two.
        fix: what to do.
        file, line, source: the user's line; "" and 0 where there is none.
        cost: what it costs, measured; "" where nothing was measured.
        again: a Python expression that shows it again by itself, where there is one.
        stack: how the line was reached, from the outermost, each "file:line: source"; () where that is not known.
        stream: of an operator that a capture refuses: on which stream it was called.
        check: the check that found it.
        command: shows it again: what to type, or in Python what to call.
    """

    code: str
    severity: str
    what: str
    fix: str
    file: str = ""
    line: int = 0
    source: str = ""
    cost: str = ""
    again: str = ""
    stack: tuple[str, ...] = ()
    stream: str = ""
    check: str = field(default="", compare=False)
    command: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES:
            raise CgkitError(f"severity={self.severity!r} is none of {', '.join(SEVERITIES)}")

    @property
    def place(self) -> str:
        """ "file:line", or ""."""
        return f"{self.file}:{self.line}" if self.file else ""

    @property
    def order(self) -> tuple[int, str, str, int]:
        """Worst first, then by code and place."""
        return (SEVERITIES.index(self.severity), self.code, self.file, self.line)

    def facts(self) -> dict[str, Any]:
        """The finding as plain data."""
        return {name: getattr(self, name) for name in FIELDS} | {"stack": list(self.stack)}

    def __repr__(self) -> str:
        lines = [f"{self.severity.upper()} {self.code}: {self.what}"]
        if self.file:
            lines.append(f"  at {self.place}")
        if self.source:
            lines.append(f"      {self.source}")
        if len(self.stack) > 1:
            lines.append("  reached through " + " -> ".join(self.stack[:-1][-_SHOWN:]))
        told = ("stream", "cost", "fix", "again", "command")
        for name, text in ((name, getattr(self, name)) for name in told):
            if text:
                lines.append(f"  {name}: {text}")
        return "\n".join(lines)


def at(frame: Frame | None) -> dict[str, Any]:
    """A frame as the fields ``file``, ``line`` and ``source`` of a finding."""
    if frame is None:
        return {}
    file, line, source = frame
    return {"file": file, "line": line, "source": source.strip() or linecache.getline(file, line).strip()}


def at_innermost(frames: Any) -> dict[str, Any]:
    """The innermost of ``frames`` that is not torch's, and the way there."""
    frames = list(frames)
    found = at(innermost_outside_torch(frames))
    return {**found, "stack": stack_of(frames)} if found else {}


def stack_of(frames: Iterable[Frame]) -> tuple[str, ...]:
    """Frames that are not torch's as text, each "file:line: source"."""
    kept = []
    for file, line, source in frames:
        if not is_library_file(file):
            text = source.strip() or linecache.getline(file, line).strip()
            kept.append(f"{file}:{line}" + (f": {text}" if text else ""))
    return tuple(dict.fromkeys(kept))


def at_message(message: str) -> dict[str, Any]:
    """The place that one of cgkit's own errors names: ``at file:line`` and the source after it."""
    match = _PLACE.search(message)
    if match is None:
        return {}
    return at((match[1], int(match[2]), match[3] or match[4] or ""))
