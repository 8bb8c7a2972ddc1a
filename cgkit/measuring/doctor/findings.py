"""What a check finds: a stable code, what, where, what it costs, how to fix it, how to see it again."""

from __future__ import annotations

import linecache
import re
from dataclasses import dataclass
from typing import Any

from cgkit.errors import CgkitError
from cgkit.tracing.frames import Frame, innermost_outside_torch

#: From the worst to the mildest.
SEVERITIES = ("error", "warning", "info")

#: ``file:line: source`` (the recorder's errors), or ``at file:line`` and the source in the next line (the trace's).
_PLACE = re.compile(r"^\s*(?:at )?(\S*\.py|/\S+?|<\S+>):(\d+)(?::[ ]*([^\n]*)|\n\s+([^\n]*))?$", re.M)


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
        again: a command or expression that shows it again.
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
        return {
            name: getattr(self, name)
            for name in ("code", "severity", "file", "line", "source", "what", "cost", "fix", "again")
        }

    def __repr__(self) -> str:
        lines = [f"{self.severity.upper()} {self.code}: {self.what}"]
        if self.file:
            lines.append(f"  at {self.place}")
        if self.source:
            lines.append(f"      {self.source}")
        for name, text in (("cost", self.cost), ("fix", self.fix), ("again", self.again)):
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
    """The innermost of ``frames`` that is not torch's."""
    return at(innermost_outside_torch(list(frames)))


def at_message(message: str) -> dict[str, Any]:
    """The place that one of cgkit's own errors names: ``at file:line`` and the source after it."""
    match = _PLACE.search(message)
    if match is None:
        return {}
    return at((match[1], int(match[2]), match[3] or match[4] or ""))
