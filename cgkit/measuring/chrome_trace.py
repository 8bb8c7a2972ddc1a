"""Reads a chrome trace as Kineto writes it: a file, whole or damaged, becomes columns.

JSON, plain or gzip; an object with ``traceEvents`` or a bare list. The events are decoded in batches
into typed structs (msgspec), so that a trace of a million events never stands in memory as Python
objects. What is broken is left out and counted: a file that ends in the middle of an event gives all
events before it. Times stay exact: where they are too large for a float64 to hold nanoseconds
(microseconds since 1970), they are decoded as decimals and the first one is subtracted before anything is rounded.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from cgkit.errors import TimelineError
from cgkit.measuring import trace_text

#: Above this many microseconds a float64 cannot tell one nanosecond from the next.
EXACT_BELOW_US = 2.0**43
_BATCH = 50_000
_PYTHON = "python_function"


class _Args(msgspec.Struct, gc=False):
    correlation: int | None = None
    stream: int | None = None
    device: int | None = None
    name: str | None = None  # of metadata: a thread's or a process's


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str | None = None
    name: str | None = None
    pid: int | str | None = None
    tid: int | str | None = None
    ts: float | None = None
    dur: float | None = None
    args: _Args | None = None


class _ExactEvent(_Event, gc=False):
    ts: Decimal | None = None  # type: ignore[assignment]


class _AnyEvent(msgspec.Struct):
    """For events that are not typed as Kineto's are; see :func:`_lenient`."""

    ph: Any = ""
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    args: Any = None


class _File(msgspec.Struct):
    traceEvents: list[msgspec.Raw]  # noqa: N815 - the format's own names
    deviceProperties: Any = None  # noqa: N815
    distributedInfo: Any = None  # noqa: N815
    baseTimeNanoseconds: Any = None  # noqa: N815
    cgkit: Any = None

    def header(self) -> dict[str, Any]:
        """The other keys of the top level that we use."""
        return {name: getattr(self, name) for name in self.__struct_fields__[1:]}


@dataclass
class RawTrace:
    """One file: what is needed of its events, as arrays of equal length, in the file's order.

    ``start_us`` counts from ``base_us`` (exact), ``dur_us`` in microseconds. ``name``, ``category``,
    ``pid`` and ``tid`` are codes into the lists of the same names. ``correlation``, ``stream`` and
    ``device`` are -1 where the event has none.
    """

    names: list[str]
    categories: list[str]
    pids: list[int | str]
    tids: list[int | str]
    start_us: NDArray[np.float64]
    dur_us: NDArray[np.float64]
    name: NDArray[np.int32]
    category: NDArray[np.int16]
    pid: NDArray[np.int32]
    tid: NDArray[np.int32]
    correlation: NDArray[np.int64]
    stream: NDArray[np.int32]
    device: NDArray[np.int32]
    base_us: Decimal
    source: str = ""
    header: dict[str, Any] = field(default_factory=dict)
    thread_names: dict[tuple[int | str, int | str], str] = field(default_factory=dict)
    process_names: dict[int | str, str] = field(default_factory=dict)
    events_read: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    truncated: bool = False
    warnings: list[str] = field(default_factory=list)


def read(path: str | Path, *, python: bool = False) -> RawTrace:
    """Reads one file; ``python`` keeps the events of Python functions (most of a trace made with stacks).

    Raises:
        TimelineError: there is no such file, it is empty, or there is no event in it that could be read.
    """
    path = Path(path)
    data, warnings = trace_text.contents(path)
    return parse(data, source=path.name, python=python, warnings=warnings)


def parse(
    data: bytes | bytearray, *, source: str = "", python: bool = False, warnings: Sequence[str] = ()
) -> RawTrace:
    """Reads the text of a trace (UTF-8). ``source`` is what messages call it."""
    warnings = list(warnings)
    truncated = bool(warnings)
    try:
        whole = msgspec.json.decode(data, type=_File | list[msgspec.Raw])
        raws: Sequence[Any] = whole.traceEvents if isinstance(whole, _File) else whole
        header = whole.header() if isinstance(whole, _File) else {}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        try:
            raws, header, what = trace_text.salvage(data, source)
        except TimelineError as error:
            if not warnings:
                raise
            raise TimelineError(f"{'; '.join(warnings)}: {error}") from None
        warnings += what
        truncated = True
    builder = _Builder(python)
    for at in range(0, len(raws), _BATCH):
        batch = raws[at : at + _BATCH]
        builder.add(batch, _text_of(batch, data))
    return builder.finish(source, header, len(raws), truncated, warnings)


def _text_of(raws: Sequence[Any], data: bytes | bytearray) -> bytes:
    """The events as the text of one list. They lie behind each other in ``data``: then that is one copy."""
    first, last = (np.frombuffer(raw, np.uint8) for raw in (raws[0], raws[-1]))
    base = np.frombuffer(data, np.uint8).ctypes.data
    start, end = first.ctypes.data - base, last.ctypes.data + len(last) - base
    if 0 <= start < end <= len(data):
        return b"[" + data[start:end] + b"]"
    return b"[" + b",".join(map(bytes, raws)) + b"]"


def _lenient(raw: bytes) -> _Event | None:
    """An event that is typed otherwise than Kineto's (``ts`` as a string, say), or None if it is hopeless."""
    try:  # the slower decoder also takes what is no strict JSON (NaN, half a surrogate)
        event = msgspec.convert(json.loads(raw), type=_AnyEvent)
    except (ValueError, RecursionError):  # among them msgspec's own errors
        return None
    args = event.args if isinstance(event.args, dict) else {}
    try:
        return _ExactEvent(
            ph=str(event.ph),
            cat=None if event.cat is None else _text(event.cat),
            name=None if event.name is None else _text(event.name),
            pid=_label(event.pid),
            tid=_label(event.tid),
            ts=None if event.ts is None else Decimal(str(event.ts)),
            dur=None if event.dur is None else float(event.dur),
            args=_Args(
                correlation=_integer(args.get("correlation")),
                stream=_integer(args.get("stream")),
                device=_integer(args.get("device")),
                name=_text(args["name"]) if "name" in args else None,
            ),
        )
    except (ValueError, TypeError, ArithmeticError, OverflowError):
        return None


def _text(value: Any) -> str:
    """As text that can be written as UTF-8."""
    return str(value).encode("utf-8", "replace").decode("utf-8")


def _label(value: Any) -> int | str | None:
    return value if isinstance(value, int) else _text(value) if isinstance(value, str) else None


def _integer(value: Any) -> int | None:
    try:
        number = int(value)
    except (ValueError, TypeError, OverflowError):
        return None
    return number if abs(number) < 2**62 else None


class _Codes(dict[Any, int]):
    """Gives each new key the next number."""

    def __missing__(self, key: Any) -> int:
        self[key] = code = len(self)
        return code


class _Builder:
    """Collects batches of events into columns."""

    def __init__(self, python: bool) -> None:
        self.python = python
        self.exact = False
        self.base: Decimal | None = None
        self.names, self.categories, self.pids, self.tids = _Codes(), _Codes(), _Codes(), _Codes()
        self.columns: list[tuple[NDArray[Any], ...]] = []
        self.thread_names: dict[Any, str] = {}
        self.process_names: dict[Any, str] = {}
        self.skipped: Counter[str] = Counter()
        self.open: dict[Any, list[_Event]] = {}
        self.warnings: list[str] = []

    def add(self, raws: Sequence[Any], batch: bytes) -> None:
        """Decodes events, given each for itself and all as one list, and keeps what is needed of them."""
        events = self._decoded(raws, batch)
        complete = [e for e in events if e.ph == "X"]
        if len(complete) < len(events):
            complete += self._other_phases([e for e in events if e.ph != "X"])
        if not self.python:
            kept = [e for e in complete if e.cat != _PYTHON]
            if len(kept) < len(complete):
                self.skipped[_PYTHON] += len(complete) - len(kept)
            complete = kept
        good = [e for e in complete if e.ts is not None]
        if len(good) < len(complete):
            self.skipped["without a time"] += len(complete) - len(good)
        if good:
            self.columns.append(self._columns(good))

    def _decoded(self, raws: Sequence[Any], batch: bytes) -> list[_Event]:
        """All events of a batch together; if one is not typed as expected, one by one."""
        if not self.exact:
            try:
                events = msgspec.json.decode(batch, type=list[_Event])
                times = [e.ts for e in events if e.ts is not None]
                if not times or max(max(times), -min(times)) < EXACT_BELOW_US:
                    return events
                self.exact = True
            except (msgspec.MsgspecError, UnicodeDecodeError):
                pass
        try:
            return msgspec.json.decode(batch, type=list[_ExactEvent])  # type: ignore[return-value]
        except (msgspec.MsgspecError, UnicodeDecodeError):
            pass
        events = []
        for raw in map(bytes, raws):
            event = _lenient(raw)
            if event is None:
                self.skipped["unreadable"] += 1
            else:
                events.append(event)
        return events

    def _other_phases(self, events: list[_Event]) -> list[_Event]:
        """Pairs of begin and end become whole events; metadata is kept; instants and flows are counted."""
        whole = []
        for e in events:
            if e.ph == "B":
                self.open.setdefault((e.pid, e.tid), []).append(e)
            elif e.ph == "E":
                if stack := self.open.get((e.pid, e.tid)):
                    begun = stack.pop()
                    if e.ts is not None and begun.ts is not None:
                        begun.dur = _difference(e.ts, begun.ts)
                        whole.append(begun)
                    else:
                        self.skipped["without a time"] += 1
                else:
                    self.skipped["end without a begin"] += 1
            else:
                if e.ph == "M" and e.args is not None and e.args.name:
                    if e.name == "thread_name":
                        self.thread_names[e.pid, e.tid] = e.args.name
                    elif e.name == "process_name":
                        self.process_names[e.pid] = e.args.name
                label = {
                    "i": "instant",
                    "I": "instant",
                    "s": "flow",
                    "f": "flow",
                    "t": "flow",
                    "M": "metadata",
                }
                self.skipped[label.get(e.ph, f"phase {e.ph!r}")] += 1
        return whole

    def _columns(self, events: list[_Event]) -> tuple[NDArray[Any], ...]:
        args = [e.args or _NO_ARGS for e in events]

        def codes(of: _Codes, keys: list[Any], dtype: Any) -> NDArray[Any]:
            return np.array(list(map(of.__getitem__, keys)), dtype)

        return (
            self._starts([e.ts for e in events]),
            np.array([np.nan if e.dur is None else e.dur for e in events], np.float64),
            codes(self.names, [e.name for e in events], np.int32),
            codes(self.categories, [e.cat for e in events], np.int16),
            codes(self.pids, [e.pid for e in events], np.int32),
            codes(self.tids, [e.tid for e in events], np.int32),
            _integers([a.correlation for a in args], np.int64),
            _integers([a.stream for a in args], np.int32),
            _integers([a.device for a in args], np.int32),
        )

    def _starts(self, times: list[Any]) -> NDArray[np.float64]:
        if self.base is None:
            self.base = next((_exactly(t) for t in times if _finite(t)), Decimal(0))
        if not self.exact and set(map(type, times)) == {float} and abs(self.base) < Decimal(EXACT_BELOW_US):
            return np.array(times, np.float64) - float(self.base)
        base = self.base
        return np.array([_difference(t, base) for t in times], np.float64)

    def finish(
        self, source: str, header: dict[str, Any], read: int, truncated: bool, warnings: list[str]
    ) -> RawTrace:
        unfinished = sum(map(len, self.open.values()))
        if unfinished:
            self.skipped["begin without an end"] += unfinished
        if not self.columns:
            what = ", ".join(f"{count:,} {label}" for label, count in self.skipped.items()) or "none at all"
            raise TimelineError(f"{source or 'the trace'} has no event with a duration (its events: {what})")
        columns: list[Any] = [np.concatenate(parts) for parts in zip(*self.columns)]
        columns = _repaired(columns, self.skipped)
        if not len(columns[0]):
            raise TimelineError(f"{source or 'the trace'} has no event whose time and duration are numbers")
        for label in ("unreadable", "without a time", "time or duration is no number", "negative duration"):
            if count := self.skipped.get(label):
                warnings.append(f"{count:,} events left out: {label}")
        for label in ("begin without an end", "end without a begin"):
            if count := self.skipped.get(label):
                warnings.append(f"{count:,} events left out: {label}")
        arrays: dict[str, Any] = dict(zip(_COLUMNS, columns))
        return RawTrace(
            names=[name or "" for name in self.names],
            categories=[category or "" for category in self.categories],
            pids=["" if pid is None else pid for pid in self.pids],
            tids=["" if tid is None else tid for tid in self.tids],
            base_us=self.base or Decimal(0),
            source=source,
            header=header,
            thread_names=self.thread_names,
            process_names=self.process_names,
            events_read=read,
            skipped=dict(self.skipped),
            truncated=truncated,
            warnings=warnings,
            **arrays,
        )


_NO_ARGS = _Args()
_COLUMNS = ("start_us", "dur_us", "name", "category", "pid", "tid", "correlation", "stream", "device")


def _exactly(time: Any) -> Decimal:
    return time if isinstance(time, Decimal) else Decimal(repr(time))


def _difference(late: Any, early: Any) -> float:
    """Microseconds between two times, subtracted before anything is rounded; NaN where one is no time."""
    try:
        return float(_exactly(late) - _exactly(early)) if _finite(late) and _finite(early) else math.nan
    except ArithmeticError:  # 1e9999999 is a number that no Decimal can be subtracted from
        return math.nan


def _finite(time: Any) -> bool:
    return time.is_finite() if isinstance(time, Decimal) else bool(np.isfinite(time))


def _integers(values: list[int | None], dtype: Any) -> NDArray[Any]:
    """Whole numbers, -1 for none and for what does not fit."""
    try:
        return np.array([-1 if v is None else v for v in values], dtype)
    except OverflowError:
        most = np.iinfo(dtype).max
        return np.array([-1 if v is None or abs(v) > most else v for v in values], dtype)


def _repaired(columns: list[NDArray[Any]], skipped: Counter[str]) -> list[NDArray[Any]]:
    """Drops events whose time is no number or whose end lies before their start; counts them."""
    start, dur = columns[0], columns[1]
    with np.errstate(over="ignore", invalid="ignore"):
        finite = np.isfinite(start) & np.isfinite(dur) & np.isfinite(start + dur)
    backwards = finite & (dur < 0)
    skipped["time or duration is no number"] += int((~finite).sum())
    skipped["negative duration"] += int(backwards.sum())
    keep = finite & ~backwards
    return columns if keep.all() else [column[keep] for column in columns]
