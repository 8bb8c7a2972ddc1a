"""What a recorded graph is, whoever records it: the protocol of the two platforms.

Implements the article's "CUDAGraphWrapper ... platform independent" (heading "两层封装：为什么是
PiecewiseBackend 套着 CUDAGraphWrapper", two layers of wrapping): the wrapper asks the platform and
never CUDA itself. HIP is the same torch class as CUDA; without a GPU the emulated platform keeps
the same contract, and says that it is emulated.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from cgkit.capturing.pool_bytes import PoolBytes
from cgkit.errors import ConfigError

T = TypeVar("T")

__all__ = ["GraphPlatform", "PoolBytes", "RecordedGraph", "get_platform"]


class RecordedGraph(Protocol):
    """One recording. ``replay`` is bound, so that calling it costs no look-up on the way."""

    def replay(self) -> None:
        """Repeats what was recorded, on the addresses of the recording."""
        ...

    def num_nodes(self) -> int | None:
        """How many nodes the graph has; None if that cannot be told cheaply."""
        ...


@runtime_checkable
class GraphPlatform(Protocol):
    """Records and replays. ``emulated`` says that no figure of it is a GPU's."""

    name: str
    emulated: bool

    def new_pool(self) -> Any:
        """A memory pool that many graphs share (the article: ``graph_pool``)."""
        ...

    def record(self, fn: Callable[[], T], pool: Any) -> tuple[RecordedGraph, T]:
        """Records ``fn()`` without running it; its outputs lie in ``pool`` and hold no result yet.

        Raises:
            CaptureError: ``fn`` does something that cannot be recorded; nothing is left half open.
            torch.OutOfMemoryError: the pool could not grow.
        """
        ...

    def weak_ref(self, value: Any, pool: Any) -> Any:
        """``value`` with its tensors that lie in ``pool`` replaced by ones that own no memory."""
        ...

    def pool_bytes(self, pool: Any) -> PoolBytes:
        """What ``pool`` takes, exactly."""
        ...

    def free(self, pool: Any) -> None:
        """Drops every graph recorded in ``pool`` and gives its memory back."""
        ...

    def synchronize(self) -> None:
        """Waits until all replays have finished."""
        ...


def get_platform(name: str = "auto", device: torch.device | str | None = None) -> GraphPlatform:
    """The platform called ``name`` ("auto", "cuda" or "emulated") for tensors on ``device``.

    "auto" is CUDA for a CUDA (or HIP) device, and emulated otherwise; without a device, CUDA if
    there is one.

    Raises:
        ConfigError: an unknown name, "cuda" without a GPU, or a device that the platform does not serve.
    """
    if name not in ("auto", "cuda", "emulated"):
        raise ConfigError(f"graph_platform={name!r} is unknown; use auto, cuda or emulated")
    on_cuda = torch.cuda.is_available() if device is None else torch.device(device).type == "cuda"
    if name == "emulated" and device is not None and on_cuda:
        raise ConfigError(
            f"graph_platform='emulated' repeats operators on the CPU, and the model is on {device}; "
            "use 'cuda' or 'auto', or move the model to the CPU"
        )
    if name == "emulated" or (name == "auto" and not on_cuda):
        from cgkit.capturing.emulated import EmulatedPlatform

        return EmulatedPlatform()
    if not torch.cuda.is_available():
        raise ConfigError(
            f"graph_platform={name!r} needs a GPU, and torch {torch.__version__} sees none; use 'emulated' "
            "or 'auto' (same contract, no speed), or install a torch build for your GPU"
        )
    if not on_cuda:
        raise ConfigError(
            f"graph_platform='cuda' records on a GPU, and the model is on {device}; move it there "
            "(`model.cuda()`), or use 'auto'"
        )
    from cgkit.capturing.cuda import CudaPlatform

    return CudaPlatform(device)


def session(platform: GraphPlatform) -> AbstractContextManager[Any]:
    """What ``platform`` needs around a whole capture pass: CUDA's side stream, nothing elsewhere."""
    make = getattr(platform, "session", None)
    return nullcontext() if make is None else make()


def reserved_bytes(platform: GraphPlatform, pool: Any) -> int:
    """Bytes that ``pool`` has reserved, by the cheapest way that the platform has.

    CUDA answers what the process has reserved since the pool was made: exact while only recordings
    allocate, and some hundred times cheaper than walking the pool, which would otherwise be a third
    of the time that recording takes.
    """
    quick = getattr(platform, "quick_reserved_bytes", None)
    return platform.pool_bytes(pool).reserved if quick is None else quick(pool)


class RecordingMemory:
    """What one recording does to a pool, exactly. Made before it; :meth:`found` after it, outputs still owned.

    Costs two walks over the pool's segments, so only a reader of :class:`cgkit.events.GraphMemory` pays for it.
    """

    def __init__(self, platform: GraphPlatform, pool: Any) -> None:
        self._platform, self._pool = platform, pool
        self._before = platform.pool_bytes(pool)
        begin = getattr(platform, "begin_peak", None)
        self._mark = None if begin is None else begin(pool)

    def found(self) -> tuple[int, int, int, int, int]:
        """Reserved before and after, allocated before and after, and the peak of allocated, in bytes."""
        before, after = self._before, self._platform.pool_bytes(self._pool)
        end = getattr(self._platform, "end_peak", None)
        inside = max(before.allocated, after.allocated) if end is None else end(self._pool, self._mark)
        return before.reserved, after.reserved, before.allocated, after.allocated, inside


def peak_bytes(platform: GraphPlatform, pool: Any) -> int:
    """The most bytes that were allocated at once since the session began; the pool's if unknown."""
    peak = getattr(platform, "peak_bytes", None)
    return platform.pool_bytes(pool).allocated if peak is None else peak(pool)
