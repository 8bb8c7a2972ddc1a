"""The CUDA platform: ``torch.cuda.CUDAGraph`` over one shared pool (HIP: the same class).

``torch.cuda.graph``, the usual way in, synchronises and empties the allocator's cache before each
recording; a model of 17 pieces and 11 sizes has 187 of them. Here both happen once, at the start of
a :meth:`CudaPlatform.session`, and each recording is only begin, run, end, on the session's stream
(the article: only the first graph collects garbage, heading "捕获一次的成本与 weak ref 技巧").
"""

from __future__ import annotations

import gc
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from cgkit import torch_hooks
from cgkit.capturing.pool_bytes import PoolBytes
from cgkit.errors import CaptureError
from cgkit.tensor_trees import map_tensors

logger = logging.getLogger(__name__)
T = TypeVar("T")


#: Graphs whose capture CUDA refused to begin or to end. The pinned-memory allocator of torch 2.11 goes on
#: asking them whether a stream belongs to their capture, so they must not be destroyed.
_refused: list[torch.cuda.CUDAGraph] = []


class CudaPool:
    """A pool of the allocator, by its id: ``handle``.

    A refused capture spoils the id for good: the allocator of pinned memory believes that it is still
    recording into it, and nothing can tell it otherwise. The pool then goes on under a new id, and
    ``spoiled`` keeps the old ones, whose memory is freed with the rest.
    """

    __slots__ = ("handle", "spoiled")

    def __init__(self) -> None:
        self.spoiled: list[tuple[int, int]] = []
        self.handle: tuple[int, int] = tuple(torch.cuda.graph_pool_handle())  # type: ignore[assignment]

    def spoil(self) -> None:
        """Goes on under a new id."""
        self.spoiled.append(self.handle)
        self.handle = tuple(torch.cuda.graph_pool_handle())  # type: ignore[assignment]

    @property
    def handles(self) -> list[tuple[int, int]]:
        """All ids that the pool has had."""
        return [*self.spoiled, self.handle]


class CudaGraph:
    """One recorded graph. ``replay`` is the bound method of torch's C class: torch 2.13 puts a
    Python method with a liveness check around it, which would be paid once a piece."""

    __slots__ = ("_kept", "graph", "replay")

    def __init__(self, graph: torch.cuda.CUDAGraph, kept: bool = False) -> None:
        self.graph = graph
        self._kept = kept
        self.replay: Callable[[], None] = super(torch.cuda.CUDAGraph, graph).replay

    def prepared_replay(self, stream: torch_hooks.LaunchStream) -> Callable[[], None] | None:
        """The cheapest replay there is, for a plan; see :func:`cgkit.torch_hooks.fixed_graph_launch`. Replays once."""
        return torch_hooks.fixed_graph_launch(self.graph, stream.device_index, stream)

    def num_nodes(self) -> int | None:
        """Counted where the platform keeps its graphs and ``cuda.bindings`` is installed; else None:
        torch destroys the editable graph after instantiating it."""
        if not self._kept:
            return None
        try:
            from cuda.bindings import runtime
        except ImportError:
            return None
        error, _, count = runtime.cudaGraphGetNodes(self.graph.raw_cuda_graph(), numNodes=0)
        return int(count) if int(error) == 0 else None


class CudaPlatform:
    """Records by stream capture on one device.

    One stream is the premise of the shared pool and of weak outputs: whoever overlaps work on
    another stream (sampling, copies of inputs) orders it with events.

    Args:
        device: where to record; None: the current device.
        keep_graphs: keep the editable graph beside the executable one, so that its nodes can be
            listed (more host memory, and a slower recording).
    """

    name = "cuda"
    emulated = False

    def __init__(self, device: torch.device | str | None = None, keep_graphs: bool = False) -> None:
        index = None if device is None else torch.device(device).index
        self.device = torch.cuda.current_device() if index is None else index
        self.keep_graphs = keep_graphs
        self._stream: torch.cuda.Stream | None = None
        self._graphs: dict[CudaPool, list[CudaGraph]] = {}
        self._ranges: dict[CudaPool, tuple[int, list[int], list[int]]] = {}
        self._grown: dict[CudaPool, int] = {}
        self._to_release: dict[CudaPool, list[tuple[int, int]]] = {}
        self._peak_so_far = 0  # of the session, before the last begin_peak

    def __repr__(self) -> str:
        return f"CudaPlatform(cuda:{self.device})"

    def new_pool(self) -> CudaPool:
        """A pool that the platform's graphs share; it grows when something is recorded."""
        with torch.cuda.device(self.device):
            torch.cuda.init()
            pool = CudaPool()
        self._graphs[pool] = []
        return pool

    @property
    def stream(self) -> torch.cuda.Stream:
        """The side stream on which everything is recorded (a capture may not be on the default one).

        Always the same one, as the allocator reuses a pool's memory only within a stream.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        return self._stream

    @contextmanager
    def session(self) -> Iterator[None]:
        """Around a whole capture pass: garbage and cache are cleared once, and warm-ups, recordings
        and what runs eagerly between them share the side stream.

        The warm-ups are what makes libraries allocate their workspaces for this stream; done on
        another one, the first recording would put them into the pool.
        """
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._peak_so_far = 0
            outer = torch.cuda.current_stream()
            self.stream.wait_stream(outer)
            collecting = gc.isenabled()
            gc.disable()
            try:
                with torch.cuda.stream(self.stream):
                    yield
            finally:
                if collecting:
                    gc.enable()
                outer.wait_stream(self.stream)
                torch.cuda.synchronize()
                torch.cuda.empty_cache()  # what warm-ups left cached for the side stream serves no other

    def record(self, fn: Callable[[], T], pool: CudaPool) -> tuple[CudaGraph, T]:
        """Records the kernels that ``fn`` launches; see :class:`~cgkit.capturing.GraphPlatform`.

        Raises:
            CaptureError: a capture is already under way, or CUDA invalidated this one.
        """
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError("a stream capture is already under way on this stream: recordings do not nest")
        graph = torch.cuda.CUDAGraph(keep_graph=self.keep_graphs)
        outer = torch.cuda.current_stream(self.device)
        own = self.stream
        if outer != own:
            own.wait_stream(outer)
        before = self._reserved()
        with torch.cuda.stream(own):
            try:
                # Only this thread's calls can spoil the capture: a notebook has other threads at work.
                graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")  # type: ignore[arg-type]
                output = fn()
            except BaseException:
                self._abandon(graph, pool)
                raise
            try:
                graph.capture_end()
                if self.keep_graphs:
                    graph.instantiate()
            except RuntimeError:
                self._abandon(graph, pool, ended=True)
                raise
        if outer != own:
            outer.wait_stream(own)
        # Nothing but the pool grows meanwhile: captured allocations go there, and this thread makes no other.
        self._grown[pool] = self._grown.get(pool, 0) + max(0, self._reserved() - before)
        recorded = CudaGraph(graph, self.keep_graphs)
        self._graphs.setdefault(pool, []).append(recorded)
        return recorded, output

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: CudaPool, ended: bool = False) -> None:
        """Ends a capture that failed, so that the stream and the allocator work on."""
        if not ended:
            try:
                graph.capture_end()
                return
            except RuntimeError:  # invalidated: CUDA has ended it and says so
                pass
        if torch_hooks.end_failed_capture(self.device, pool.handle):
            self._to_release.setdefault(pool, []).append(pool.handle)
        _refused.append(graph)
        pool.spoil()
        try:
            torch_hooks.end_generator_capture(self.device)
        except RuntimeError as error:  # a lost device: the error that is on its way says so; or no memory
            logger.warning("random numbers may not be drawn on cuda:%d any more: %s", self.device, error)

    def weak_ref(self, value: Any, pool: CudaPool) -> Any:
        """``value`` with tensors of ``pool`` replaced by non-owning ones; others are left as they are."""

        def weak(_: str, tensor: torch.Tensor) -> torch.Tensor:
            return torch_hooks.weak_tensor(tensor) if self.holds(tensor, pool) else tensor

        return map_tensors(weak, value)

    def holds(self, tensor: torch.Tensor, pool: CudaPool) -> bool:
        """Whether the tensor's memory belongs to ``pool``."""
        return tensor.is_cuda and self._owns(tensor.untyped_storage().data_ptr(), pool)

    def launch_stream(self) -> torch_hooks.LaunchStream:
        """The stream of prepared launches: the current one of this device, looked up once a step."""
        return torch_hooks.LaunchStream(self.device)

    def _owns(self, address: int, pool: CudaPool) -> bool:
        """Whether ``address`` lies in the pool. Its segments are listed anew only after something grew."""
        reserved, starts, ends = self._ranges.get(pool, (-1, [], []))
        for _ in range(2):
            at = bisect_right(starts, address) - 1
            if at >= 0 and address < ends[at]:
                return True
            now = self._reserved()
            if now == reserved:
                return False
            segments = sorted(self._segments(pool))
            starts, ends = [start for start, _, _ in segments], [start + size for start, size, _ in segments]
            reserved = now
            self._ranges[pool] = (reserved, starts, ends)
        return False

    @staticmethod
    def _segments(pool: CudaPool) -> list[tuple[int, int, int]]:
        """(address, total bytes, allocated bytes) of each segment."""
        return [segment for handle in pool.handles for segment in torch_hooks.pool_segments(handle)]

    def _reserved(self) -> int:
        """Bytes that the process has reserved on the device (the nested statistics: no flattening)."""
        stats = torch.cuda.memory.memory_stats_as_nested_dict(self.device)
        return stats["reserved_bytes"]["all"]["current"] if stats else 0

    def quick_reserved_bytes(self, pool: CudaPool) -> int:
        """By how much recordings have grown the pool: see ``reserved_bytes`` in platform.py."""
        return self._grown.get(pool, 0)

    def pool_bytes(self, pool: CudaPool) -> PoolBytes:
        """What the pool takes, from the allocator's list of segments."""
        segments = self._segments(pool)
        return PoolBytes(sum(size for _, size, _ in segments), sum(used for _, _, used in segments))

    def peak_bytes(self, pool: CudaPool) -> int:
        """The most bytes allocated on the device since the session began, the pool's included."""
        return max(self._peak_so_far, torch.cuda.max_memory_allocated(self.device))

    def begin_peak(self, pool: CudaPool) -> tuple[int, int]:
        """Begins to look for the peak of one recording; returns what :meth:`end_peak` needs."""
        self._peak_so_far = self.peak_bytes(pool)
        torch.cuda.reset_peak_memory_stats(self.device)
        return self.pool_bytes(pool).allocated, torch.cuda.memory_allocated(self.device)

    def end_peak(self, pool: CudaPool, mark: tuple[int, int]) -> int:
        """The most bytes allocated in the pool at once since :meth:`begin_peak`: while a recording runs,
        nothing but the pool grows."""
        in_pool, on_device = mark
        return in_pool + torch.cuda.max_memory_allocated(self.device) - on_device

    def free_bytes(self) -> int:
        """Bytes that the device could still give, those cached by the allocator included."""
        free, _ = torch.cuda.mem_get_info(self.device)
        stats = torch.cuda.memory.memory_stats_as_nested_dict(self.device)
        cached = stats["reserved_bytes"]["all"]["current"] - stats["allocated_bytes"]["all"]["current"]
        return free + cached

    def free(self, pool: CudaPool) -> None:
        """Resets the pool's graphs, which gives its memory back to the device."""
        torch.cuda.synchronize(self.device)
        for recorded in self._graphs.pop(pool, []):
            recorded.graph.reset()
        for handle in self._to_release.pop(pool, []):
            torch_hooks.release_pool(self.device, handle)
        self._ranges.pop(pool, None)
        self._grown.pop(pool, None)
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Waits for the device."""
        torch.cuda.synchronize(self.device)
