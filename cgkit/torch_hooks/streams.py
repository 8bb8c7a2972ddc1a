"""CUDA streams where there is no GPU: stand-ins that note the order in which streams wait for each other.

``torch.cuda.Stream()`` raises without a GPU. A model that uses side streams can be looked at all the same: what a
capturing stream allows depends on which stream an operator was called on, and on who waits for whom, and both are
known on the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_numbers = itertools.count(1)


class StandInStream:
    """A stream's place in the order: what it has been told to wait for. Run on torch 2.13 (CPU)."""

    def __init__(self, device: Any = None, priority: int = 0, **more: Any) -> None:
        self.number = next(_numbers)
        self.follows: set[int] = (
            set()
        )  # streams whose work, as far as it had come, precedes what comes next here
        self.device, self.priority = torch.device("cpu"), priority
        self.cuda_stream = self.stream_id = self.number

    def wait_stream(self, other: StandInStream) -> None:
        self.follows |= {other.number, *other.follows}

    def wait_event(self, event: StandInEvent) -> None:
        self.follows |= event.follows

    def record_event(self, event: StandInEvent | None = None) -> StandInEvent:
        event = event if event is not None else StandInEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _streams.synchronized("torch.cuda.Stream.synchronize()")

    def query(self) -> bool:
        _streams.synchronized("torch.cuda.Stream.query()")
        return True


class StandInEvent:
    """An event: what had been done on the stream that recorded it. Run on torch 2.13 (CPU)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.follows: set[int] = set()

    def record(self, stream: StandInStream | None = None) -> None:
        stream = stream if stream is not None else _streams.current
        self.follows = {stream.number, *stream.follows}

    def wait(self, stream: StandInStream | None = None) -> None:
        (stream if stream is not None else _streams.current).wait_event(self)

    def synchronize(self) -> None:
        _streams.synchronized("torch.cuda.Event.synchronize()")

    def query(self) -> bool:
        _streams.synchronized("torch.cuda.Event.query()")
        return True

    def elapsed_time(self, other: StandInEvent) -> float:
        _streams.synchronized("torch.cuda.Event.elapsed_time()")
        return 0.0


class _StreamContext:
    def __init__(self, stream: StandInStream | None) -> None:
        self.stream, self.before = stream, _streams.current

    def __enter__(self) -> None:
        self.before, _streams.current = _streams.current, self.stream or _streams.current

    def __exit__(self, *error: Any) -> None:
        _streams.current = self.before


class _Streams:
    """The current stream, and who is told when the host waits."""

    def __init__(self) -> None:
        self.main = StandInStream()
        self.current = self.main
        self.on_wait: Callable[[str], None] = lambda what: None

    def synchronized(self, what: str) -> None:
        self.on_wait(what)


_streams = _Streams()


def _set_stream(stream: StandInStream | None) -> None:
    _streams.current = stream if stream is not None else _streams.current


def _patched() -> dict[str, Any]:
    return {
        "Stream": StandInStream,
        "Event": StandInEvent,
        "stream": _StreamContext,
        "set_stream": _set_stream,
        "current_stream": lambda device=None: _streams.current,
        "default_stream": lambda device=None: _streams.main,
        "synchronize": lambda device=None: _streams.synchronized("torch.cuda.synchronize()"),
    }


@contextmanager
def stand_in_streams(on_wait: Callable[[str], None] = lambda what: None) -> Iterator[bool]:
    """Stands in for ``torch.cuda``'s streams and events where there is no GPU; with one, changes nothing.

    ``on_wait`` is told where the host would wait. Gives whether stand-ins are in place. May be nested.
    Run on torch 2.13 (CPU).
    """
    if torch.cuda.is_available():
        yield False
        return
    patched = _patched()
    before = {name: getattr(torch.cuda, name) for name in patched}
    waits, current = _streams.on_wait, _streams.current
    for name, value in patched.items():
        setattr(torch.cuda, name, value)
    _streams.on_wait, _streams.current = on_wait, _streams.main
    try:
        yield True
    finally:
        _streams.on_wait, _streams.current = waits, current
        for name, value in before.items():
            setattr(torch.cuda, name, value)


def stream_now() -> tuple[int, frozenset[int]]:
    """The current stream's number, and the streams whose work it has waited for (empty on a GPU, where the
    driver alone knows). Run on torch 2.13 (CPU)."""
    if torch.cuda.is_available():
        return torch.cuda.current_stream().cuda_stream, frozenset()
    return _streams.current.number, frozenset(_streams.current.follows)
