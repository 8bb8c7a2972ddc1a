"""What the stages report while they work: typed events, and who reads them.

Stages report, they do not count. A stage calls :func:`emit`; counters and progress bars subscribe.
Events are for things that happen once (a trace, a
compilation, a recording) or once a step; nothing is emitted inside a step's replay. An event that
nobody reads costs one attribute check when guarded by :func:`has_readers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from cgkit.token_ranges import Shape


@dataclass(frozen=True)
class Event:
    """Base of all events. ``readers`` belongs to each class, so that the check is one attribute."""

    readers: ClassVar[tuple[Callable[[Any], None], ...]] = ()

    def __init_subclass__(cls) -> None:
        cls.readers = ()


E = TypeVar("E", bound=Event)
T = TypeVar("T")


# --- tracing ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelSeen(Event):
    """A decorated model, or a runner, goes down the road for the first time at level 1 or higher."""

    model: str


@dataclass(frozen=True)
class DynamoAsIs(Event):
    """A model runs at level 1: plain ``torch.compile``, guards and all."""

    model: str


@dataclass(frozen=True)
class GraphTraced(Event):
    """Dynamo handed over one graph."""

    model: str
    nodes: int
    inputs: int
    seconds: float


@dataclass(frozen=True)
class TraceLoaded(Event):
    """A model's trace, its split and its plan were read from disk: no Dynamo, nothing cut."""

    model: str
    pieces: int
    capturable: int
    path: str
    seconds: float


@dataclass(frozen=True)
class TraceSaved(Event):
    """A model's trace was written to disk, beside its compiled pieces."""

    model: str
    path: str


# --- splitting -------------------------------------------------------------------------------


@dataclass(frozen=True)
class GraphSplit(Event):
    """A graph was cut. ``pieces`` counts all, ``capturable`` those without a splitting operator."""

    model: str
    pieces: int
    capturable: int
    seconds: float


# --- compiling -------------------------------------------------------------------------------


@dataclass(frozen=True)
class CompileRequested(Event):
    """One piece at one shape was asked for (``shape`` None: the general, symbolic one; else a size or a range)."""

    piece: str
    shape: Shape


@dataclass(frozen=True)
class PieceCompiled(Event):
    """A piece was really compiled (nothing shared, nothing loaded) by ``adaptor``."""

    piece: str
    shape: Shape
    adaptor: str
    key: str
    seconds: float


@dataclass(frozen=True)
class PieceShared(Event):
    """A piece has the content of ``owner``, compiled before: its callable is used again."""

    piece: str
    shape: Shape
    owner: str
    key: str


@dataclass(frozen=True)
class CacheEntryUpdated(Event):
    """The compile cache on disk got a new entry."""

    key: str


@dataclass(frozen=True)
class ArtifactSaved(Event):
    """A compiled piece was written to disk."""

    key: str
    path: str


@dataclass(frozen=True)
class ArtifactLoaded(Event):
    """A compiled piece was read from disk instead of being compiled."""

    piece: str
    shape: Shape
    key: str
    path: str
    seconds: float


@dataclass(frozen=True)
class CompilationFinished(Event):
    """The last piece and the last compile size of a model are compiled."""

    model: str
    seconds: float


# --- capturing -------------------------------------------------------------------------------


@dataclass(frozen=True)
class CaptureTriggered(Event):
    """A runner (or :func:`cgkit.capture`) starts to record one batch descriptor in one mode."""

    mode: str
    num_tokens: int
    uniform_decode: bool


@dataclass(frozen=True)
class GraphCaptured(Event):
    """One graph was recorded. Bytes are those of the shared pool, before and after."""

    name: str
    mode: str
    num_tokens: int
    uniform_decode: bool
    emulated: bool
    seconds: float
    pool_reserved_before_bytes: int
    pool_reserved_after_bytes: int


@dataclass(frozen=True)
class GraphMemory(Event):
    """The pool around one recording, exactly. Emitted only if somebody reads it: finding out walks the pool.

    ``after`` is with the graph's outputs still owned; ``peak_allocated_bytes`` is the most inside the recording.
    ``nodes`` is None where they cannot be counted. ``platform`` and ``pool`` are for readers that look further.
    """

    name: str
    mode: str
    num_tokens: int
    uniform_decode: bool
    emulated: bool
    seconds: float
    nodes: int | None
    reserved_before_bytes: int
    reserved_after_bytes: int
    allocated_before_bytes: int
    allocated_after_bytes: int
    peak_allocated_bytes: int
    platform: Any
    pool: Any


@dataclass(frozen=True)
class PlanBuilt(Event):
    """A replay plan was laid out for one PIECEWISE key, and gives what the module path gives."""

    model: str
    num_tokens: int
    kind: str  # "any batch" or "decode"
    calls: int
    seconds: float


@dataclass(frozen=True)
class PlanRefused(Event):
    """No replay plan could be laid out for one PIECEWISE key: the module path serves it."""

    model: str
    num_tokens: int
    kind: str  # "any batch" or "decode"
    reason: str


@dataclass(frozen=True)
class PlanPassedOver(Event):
    """A PIECEWISE step takes the module path, because it has no plan or is not the step of one."""

    model: str
    num_tokens: int
    reason: str


@dataclass(frozen=True)
class CaptureFinished(Event):
    """All sizes are recorded and the lock is set."""

    model: str
    graphs: int
    emulated: bool
    seconds: float
    pool_reserved_bytes: int
    peak_allocated_bytes: int


# --- serving ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepRan(Event):
    """One step of the runner. Emitted only if somebody reads it."""

    kind: str  # "prefill" or "decode"
    num_reqs: int
    num_tokens: int
    num_padded_tokens: int
    mode: str  # what was taken: FULL, PIECEWISE or NONE
    seconds: float


@dataclass(frozen=True)
class EngineStepRan(Event):
    """One step of an engine: its :class:`~cgkit.serving.step_report.StepReport`. Emitted only if somebody reads it."""

    report: Any


# --- progress --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Progress(Event):
    """A stage that takes seconds tells how far it is; ``done == total`` ends it."""

    stage: str
    done: int
    total: int
    what: str = ""


def emit(event: Event) -> None:
    """Hands ``event`` to every reader of its type, in the order in which they subscribed."""
    for reader in type(event).readers:
        reader(event)


def counted(stage: str, items: Sequence[T], what: Callable[[T], str] = str) -> Iterator[T]:
    """The ``items``, while readers of :class:`Progress` see which of them is at work and how many are done."""
    for done, item in enumerate(items):
        emit(Progress(stage, done, len(items), what(item)))
        yield item
    emit(Progress(stage, len(items), len(items)))


def has_readers(kind: type[Event]) -> bool:
    """Whether anybody reads ``kind``: ask before building an event once a step."""
    return bool(kind.readers)


def subscribe(kind: type[E], reader: Callable[[E], None]) -> Callable[[], None]:
    """Calls ``reader(event)`` for each event of exactly type ``kind``; returns what undoes it."""
    kind.readers = (*kind.readers, reader)

    def unsubscribe() -> None:
        kind.readers = tuple(r for r in kind.readers if r is not reader)

    return unsubscribe


@contextmanager
def record(*kinds: type[Event]) -> Iterator[list[Event]]:
    """Collects all events of ``kinds`` (all types if none is named) that happen in the block."""
    log: list[Event] = []
    undo = [subscribe(kind, log.append) for kind in (kinds or Event.__subclasses__())]
    try:
        yield log
    finally:
        for unsubscribe in undo:
            unsubscribe()
