"""Chrome traces made small: cut to their steps, and freed of what names a machine or a person."""

from __future__ import annotations

import re
from typing import Any

#: Arguments of an event that say something about the run; the rest is dropped from recordings.
_KEPT_ARGS = (
    "correlation", "stream", "device", "bytes", "grid", "block", "registers per thread", "shared memory",
    "graph id", "graph node id", "External id", "External Id", "kind", "memory bandwidth (GB/s)",
)  # fmt: skip
_OURS = re.compile(r"cgkit( |:(?!:))")  # and no operator of the namespace cgkit ("cgkit::unified_...")
_TOP = ("schemaVersion", "displayTimeUnit", "deviceProperties", "distributedInfo", "cgkit")


def cut_to_steps(trace: dict[str, Any], step: str) -> dict[str, Any]:
    """``trace`` without what happened outside of its ranges named ``step``; the ranges of cgkit become annotations.

    Kineto's "ProfilerStep#1", which would span all steps, goes too. A trace without such a range stays as it is.
    """
    events = [event for event in trace["traceEvents"] if isinstance(event, dict)]
    steps = [event for event in events if event.get("name") == step and event.get("ph") == "X"]
    if steps:
        begin = min(event["ts"] for event in steps)
        end = max(event["ts"] + event["dur"] for event in steps)
        events = [event for event in events if _within(event, begin, end)]
    for event in events:
        if event.get("cat") == "cpu_op" and _OURS.match(str(event.get("name", ""))):
            event["cat"] = "user_annotation"
    return {**trace, "traceEvents": events}


def _within(event: dict[str, Any], begin: float, end: float) -> bool:
    if event.get("ph") == "M":
        return True
    at = event.get("ts")
    if not isinstance(at, (int, float)) or str(event.get("name", "")).startswith("ProfilerStep#"):
        return False
    return begin <= at and at + event.get("dur", 0) <= end + 1  # a microsecond for the clocks


def scrubbed(trace: dict[str, Any]) -> dict[str, Any]:
    """``trace`` fit to be kept: no host, user or path, times from 0, no arrows that repeat the correlation.

    What :class:`cgkit.measuring.timeline.Timeline` reads is all there.
    """
    events = trace["traceEvents"]
    first = min((event["ts"] for event in events if event.get("ph") == "X"), default=0.0)
    kept = [_slim(event, first) for event in events if event.get("ph") in ("X", "M")]
    return {name: trace[name] for name in _TOP if name in trace} | {"traceEvents": kept}


def _slim(event: dict[str, Any], first: float) -> dict[str, Any]:
    slim: dict[str, Any] = {
        name: event[name] for name in ("ph", "cat", "name", "pid", "tid") if name in event
    }
    if event.get("ph") == "X":
        slim["ts"] = round(event["ts"] - first, 3)
        slim["dur"] = round(event.get("dur", 0.0), 3)
        slim["name"] = without_paths(str(slim["name"]))
        args = {name: event["args"][name] for name in _KEPT_ARGS if name in event.get("args", {})}
    else:
        slim["ts"] = 0.0
        args = {name: _plain(value) for name, value in event.get("args", {}).items()}
    if args:
        slim["args"] = args
    return slim


def without_paths(text: str) -> str:
    """Folders before a file's name are cut: ``/home/me/x/model.py(3): f`` becomes ``model.py(3): f``."""
    return re.sub(r"(?:[A-Za-z]:)?[\\/]?(?:[\w.\-+@]+[\\/])+(?=[\w\-+@]+\.\w+)", "", text)


def _plain(value: Any) -> Any:
    """What a name of a process or thread says, without the executable's path."""
    return without_paths(value) if isinstance(value, str) else value
