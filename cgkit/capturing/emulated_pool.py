"""The memory of emulated graphs: one pool that owns its bytes and lends them out.

Implements, without a GPU, what the article's "共享显存池" (one shared memory pool) relies on: the
addresses inside a recorded graph stay valid for as long as the pool lives, while the *same* bytes
may be given to the next recording as soon as no tensor owns them any more.

Two kinds of tensors lie on it. A strong one carries a lease: when the last tensor or view on its
storage dies, its block goes back to the free blocks. A weak one is made over the same bytes without
a lease, so it keeps nothing from being reused; it keeps only the bytes themselves from being
unmapped, so that nothing dangles.
"""

from __future__ import annotations

import bisect
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from cgkit import torch_hooks
from cgkit.capturing.pool_bytes import PoolBytes
from cgkit.errors import CaptureError, CaptureOutOfMemoryError

GRANULE = 512  # bytes; as in the CUDA caching allocator, blocks begin and end on multiples of it
_ALIGNMENT = 64  # bytes; what torch's CPU allocator gives, so that kernels take the same path
INTEGER_SENTINEL = 0x5A  # each byte of an integer that was never written: as an index, out of range


class _Segment:
    """One stretch of memory taken from the system, cut into blocks that lie side by side."""

    def __init__(self, size: int) -> None:
        memory = np.empty(size + _ALIGNMENT, dtype=np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        self.bytes = memory[start : start + size]
        self.address = self.bytes.ctypes.data
        self.size = size


class _Block:
    """Part of a segment: free, or lent to one storage. ``before``/``after`` are its neighbours."""

    __slots__ = ("after", "before", "free", "number", "offset", "segment", "size")

    def __init__(self, segment: _Segment, offset: int, size: int) -> None:
        self.segment, self.offset, self.size = segment, offset, size
        self.free = True
        self.number = 0  # which lease this is, counted over the pool's life
        self.before: _Block | None = None
        self.after: _Block | None = None


class EmulatedPool:
    """Memory shared by all emulated graphs that are recorded into it.

    Best fit with splitting and merging inside a segment; a segment is exactly as large as the
    request that no free block could serve. Hence the order matters as it does on a GPU: recorded
    from large to small, the smaller graphs live in the memory of the largest.

    Args:
        limit_bytes: the pool refuses to reserve more than this (to play out-of-memory on a laptop).

    Attributes:
        peak_allocated: the most bytes that owning tensors ever occupied at once, since the pool was
            made or :meth:`reset_peak`.
        freed: the pool was given back; its graphs no longer replay.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.reserved = 0
        self.allocated = 0
        self.peak_allocated = 0
        self.freed = False
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()  # recorded here; emptied with the pool
        self._segments: list[_Segment] = []  # by address
        self._addresses: list[int] = []
        self._free: list[tuple[int, int, _Block]] = []  # (size, tie breaker, block), sorted
        self._leased: dict[int, _Block] = {}  # by lease number
        # Leases end inside garbage collection, maybe while this very thread holds the lock: they
        # only leave their number here and the next call that needs to know takes it up.
        self._ended: deque[int] = deque()
        self._numbers = itertools.count(1)
        self._ties = itertools.count()
        self._lock = threading.Lock()

    # -- lending ------------------------------------------------------------------------------

    def storage(self, nbytes: int) -> torch.UntypedStorage:
        """A strong storage of ``nbytes`` bytes; it returns to the pool with its last tensor.

        Raises:
            CaptureOutOfMemoryError: the system, or ``limit_bytes``, does not allow so much.
            CaptureError: the pool was freed.
        """
        with self._lock:
            if self.freed:
                raise CaptureError("the graph pool was freed; record into a new one (platform.new_pool())")
            self._take_up_ended()
            block = self._take(-(-max(nbytes, 1) // GRANULE) * GRANULE)
            block.number = next(self._numbers)
            self._leased[block.number] = block
            self.allocated += block.size
            self.peak_allocated = max(self.peak_allocated, self.allocated)
            # The array object is the lease: torch's storage keeps it alive, and nothing else does.
            lease = block.segment.bytes[block.offset : block.offset + nbytes]
            weakref.finalize(lease, self._ended.append, block.number).atexit = False
        return torch.from_numpy(lease).untyped_storage()

    def tensor(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A strong tensor that holds the sentinel: NaN, True, or :data:`INTEGER_SENTINEL` bytes."""
        span = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride))
        if span == 0:
            return torch.empty_strided(tuple(size), tuple(stride), dtype=dtype)
        storage = self.storage(span * dtype.itemsize)
        fill_with_sentinel(storage, dtype)
        return on_storage(storage, 0, size, stride, dtype)

    def weak(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same bytes without a lease, if ``tensor`` lies in this pool; else ``tensor``."""
        segment = self._segment_of(tensor)
        if segment is None:
            return tensor
        storage = tensor.untyped_storage()
        start = storage.data_ptr() - segment.address
        over = torch.from_numpy(segment.bytes[start : start + storage.nbytes()]).untyped_storage()
        weak = on_storage(over, int(tensor.storage_offset()), tensor.size(), tensor.stride(), tensor.dtype)
        return torch_hooks.with_lazy_bits(weak, tensor.is_conj(), tensor.is_neg())

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's bytes belong to this pool."""
        return self._segment_of(tensor) is not None

    # -- accounts -----------------------------------------------------------------------------

    def bytes(self) -> PoolBytes:
        """What is reserved and what is occupied now, in bytes."""
        with self._lock:
            self._take_up_ended()
            return PoolBytes(self.reserved, self.allocated)

    def reset_peak(self) -> None:
        """Begins a new measurement of ``peak_allocated``."""
        with self._lock:
            self._take_up_ended()
            self.peak_allocated = self.allocated

    def blocks(self) -> list[tuple[int, int, int, int, bool]]:
        """Every block by address: (number of its segment, the segment's bytes, offset, bytes, free)."""
        with self._lock:
            self._take_up_ended()
            number = {id(segment): index for index, segment in enumerate(self._segments)}
            lent = list(self._leased.values())
            blocks = [*lent, *(block for _, _, block in self._free)]
            found = [(number[id(b.segment)], b.segment.size, b.offset, b.size, b.free) for b in blocks]
            return sorted(found)

    def segment_ranges(self) -> list[tuple[int, int]]:
        """(address, bytes) of each segment, by address; numbered as in :meth:`blocks`."""
        with self._lock:
            return [(segment.address, segment.size) for segment in self._segments]

    def mark(self) -> tuple[int, frozenset[int]]:
        """Where the pool stands; for :meth:`rollback`."""
        with self._lock:
            return next(self._numbers), frozenset(segment.address for segment in self._segments)

    def rollback(self, mark: tuple[int, frozenset[int]]) -> None:
        """Takes back all that was lent since ``mark``, even from tensors that still live.

        The traceback of a failed recording keeps its tensors; what they read is their own affair
        from now on (their bytes stay mapped).
        """
        first, addresses = mark
        with self._lock:
            self._take_up_ended()
            for number in [number for number in self._leased if number > first]:
                self._end(number)
            for segment in [segment for segment in self._segments if segment.address not in addresses]:
                self._drop(segment)

    def free(self) -> None:
        """Empties the graphs and gives the memory back. Bytes that someone's tensor still shows stay
        mapped for it."""
        with self._lock:
            self.freed = True
            self._segments, self._addresses, self._free = [], [], []
            self._leased = {}
            self.reserved = self.allocated = 0
        for graph in list(self.graphs):
            graph.clear()

    def __repr__(self) -> str:
        now = self.bytes()
        state = ", freed" if self.freed else ""
        return f"EmulatedPool(reserved={now.reserved}, allocated={now.allocated} bytes{state})"

    # -- inside (the lock is held) --------------------------------------------------------------

    def _segment_of(self, tensor: torch.Tensor) -> _Segment | None:
        if tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0 or storage.device.type != "cpu":
            return None
        address = storage.data_ptr()
        with self._lock:
            index = bisect.bisect_right(self._addresses, address) - 1
            if index < 0:
                return None
            segment = self._segments[index]
            return segment if address < segment.address + segment.size else None

    def _take(self, size: int) -> _Block:
        index = bisect.bisect_left(self._free, size, key=lambda entry: entry[0])
        block = self._free.pop(index)[2] if index < len(self._free) else self._grow(size)
        block.free = False
        if block.size > size:
            rest = _Block(block.segment, block.offset + size, block.size - size)
            rest.before, rest.after = block, block.after
            if rest.after is not None:
                rest.after.before = rest
            block.size, block.after = size, rest
            self._offer(rest)
        return block

    def _grow(self, size: int) -> _Block:
        if self.limit_bytes is not None and self.reserved + size > self.limit_bytes:
            raise self._out_of_memory(size, f"above its limit of {self.limit_bytes} bytes")
        try:
            segment = _Segment(size)
        except MemoryError as error:
            raise self._out_of_memory(size, "which the system refuses") from error
        index = bisect.bisect(self._addresses, segment.address)
        self._addresses.insert(index, segment.address)
        self._segments.insert(index, segment)
        self.reserved += size
        return _Block(segment, 0, size)

    def _out_of_memory(self, size: int, why: str) -> CaptureOutOfMemoryError:
        error = CaptureOutOfMemoryError(
            f"the emulated graph pool holds {self.reserved} bytes and needs {size} more, {why}; capture "
            "fewer or smaller sizes, largest first, or give it more room (EmulatedPlatform(limit_bytes=...))"
        )
        error.requested_bytes = size  # type: ignore[attr-defined]
        return error

    def _take_up_ended(self) -> None:
        while self._ended:
            self._end(self._ended.popleft())

    def _end(self, number: int) -> None:
        block = self._leased.pop(number, None)
        if block is None:  # taken back earlier by rollback() or free()
            return
        self.allocated -= block.size
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._withdraw(neighbour)
                block = self._merge(*sorted((block, neighbour), key=lambda part: part.offset))
        self._offer(block)

    def _merge(self, left: _Block, right: _Block) -> _Block:
        left.size += right.size
        left.after = right.after
        if right.after is not None:
            right.after.before = left
        return left

    def _offer(self, block: _Block) -> None:
        block.free = True
        bisect.insort(self._free, (block.size, next(self._ties), block))

    def _withdraw(self, block: _Block) -> None:
        index = bisect.bisect_left(self._free, block.size, key=lambda entry: entry[0])
        while self._free[index][2] is not block:
            index += 1
        del self._free[index]

    def _drop(self, segment: _Segment) -> None:
        self._free = [entry for entry in self._free if entry[2].segment is not segment]
        index = self._addresses.index(segment.address)
        del self._addresses[index], self._segments[index]
        self.reserved -= segment.size


def on_storage(
    storage: torch.UntypedStorage, offset: int, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """A tensor laid over a storage. Never an inference tensor: replay writes it in any mode."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty(0, dtype=dtype).set_(storage, offset, tuple(size), tuple(stride))


def fill_with_sentinel(storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
    """Overwrites a storage with what no operator would compute: NaN, True, a pattern in integers."""
    count = storage.nbytes() // dtype.itemsize
    if dtype.is_floating_point or dtype.is_complex:
        on_storage(storage, 0, (count,), (1,), dtype).fill_(float("nan"))
    elif dtype is torch.bool:
        on_storage(storage, 0, (count,), (1,), dtype).fill_(True)
    else:
        raw = on_storage(storage, 0, (storage.nbytes(),), (1,), torch.uint8)
        raw.fill_(INTEGER_SENTINEL)
