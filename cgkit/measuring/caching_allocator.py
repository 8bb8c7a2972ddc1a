"""A model of the allocators that a graph pool draws from, without a device.

:class:`PoolSimulator` answers "how large does the pool get if these blocks are asked for and given back in
this order". Two sets of rules: PyTorch's CUDA caching allocator inside a private pool (its constants are those of
``c10/core/AllocatorConfig.h``, its rules those of ``c10/cuda/CUDACachingAllocator.cpp``: ``get_allocation_size``,
``should_split``, ``get_free_block``; default settings, so neither expandable segments nor anything else that
``PYTORCH_ALLOC_CONF`` changes), and the emulated platform's own pool (``cgkit/capturing/emulated_pool.py``).
Addresses are made up: segments stand in the order in which they were taken.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Any

from cgkit.errors import CgkitError

MIB = 2**20


@dataclass(frozen=True)
class AllocatorRules:
    """How an allocator rounds, takes segments and splits blocks. All figures are bytes.

    ``granule``: a request is rounded up to a multiple of it. ``small_request``: up to here a request is served from
    small segments of ``small_segment``; 0: there is one kind of segment. Above, requests below
    ``large_request`` share segments of ``large_segment``, and others get their own, rounded up to
    ``segment_granule``. A block is split if more than ``large_remainder`` (small blocks: at least ``granule``)
    would be left; otherwise the whole block counts as allocated.
    """

    name: str
    granule: int = 512
    small_request: int = MIB
    small_segment: int = 2 * MIB
    large_request: int = 10 * MIB
    large_segment: int = 20 * MIB
    segment_granule: int = 2 * MIB
    large_remainder: int = MIB

    def rounded(self, nbytes: int) -> int:
        """The size of the block that a request of ``nbytes`` needs."""
        return max(self.granule, -(-nbytes // self.granule) * self.granule)

    def is_small(self, size: int) -> bool:
        """Whether a block of ``size`` (rounded) comes from the small segments."""
        return size <= self.small_request

    def segment_for(self, size: int) -> int:
        """The size of the segment that is taken for a block of ``size`` if none has room."""
        if self.is_small(size):
            return self.small_segment
        if size < self.large_request:
            return self.large_segment
        return -(-size // self.segment_granule) * self.segment_granule

    def splits(self, small: bool, remaining: int) -> bool:
        """Whether a block is split so that ``remaining`` stays free."""
        return remaining >= self.granule if small else remaining > self.large_remainder


#: torch's CUDA caching allocator, default settings.
CUDA_RULES = AllocatorRules("cuda caching allocator")
#: The emulated pool: a segment is as large as the request that no free block could serve.
EMULATED_RULES = AllocatorRules("emulated pool", 512, 0, 0, 0, 0, 512, 0)


@dataclass
class _Segment:
    number: int
    size: int
    small: bool


class _Block:
    __slots__ = ("after", "before", "free", "offset", "segment", "size")

    def __init__(self, segment: _Segment, offset: int, size: int) -> None:
        self.segment, self.offset, self.size = segment, offset, size
        self.free = False
        self.before: _Block | None = None
        self.after: _Block | None = None

    @property
    def key(self) -> tuple[int, int, int]:
        """Best fit: the smallest block, of equal ones that at the lowest address."""
        return (self.size, self.segment.number, self.offset)


class PoolSimulator:
    """Blocks of one private pool on one stream. Segments are never given back, as while recording.

    Attributes:
        reserved, allocated, requested: bytes taken from the device, in blocks that are lent (an unsplit
            remainder counts, as in ``torch.cuda.memory_snapshot()``), and asked for of them.
        peak_allocated: the most that was allocated at once, since :meth:`reset_peak`.
    """

    def __init__(self, rules: AllocatorRules = CUDA_RULES) -> None:
        self.rules = rules
        self.reserved = self.allocated = self.requested = self.peak_allocated = 0
        self._segments: list[_Segment] = []
        self._first: list[_Block] = []  # of each segment
        self._free: dict[bool, list[tuple[tuple[int, int, int], _Block]]] = {True: [], False: []}
        self._lent: dict[int, tuple[_Block, int]] = {}
        self._next = 0

    def alloc(self, nbytes: int) -> int:
        """Lends a block for ``nbytes``; returns its number. 0 bytes take nothing (number 0).

        Raises:
            CgkitError: ``nbytes`` is negative.
        """
        if nbytes < 0:
            raise CgkitError(f"nbytes={nbytes} is negative: a block has 0 bytes or more")
        if nbytes == 0:
            return 0
        size = self.rules.rounded(nbytes)
        small = self.rules.is_small(size)
        block = self._best(small, size) or self._grow(small, size)
        if self.rules.splits(small, block.size - size):
            self._split(block, size)
        block.free = False
        self._next += 1
        self._lent[self._next] = (block, nbytes)
        self.allocated += block.size
        self.requested += nbytes
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return self._next

    def free(self, number: int) -> None:
        """Takes block ``number`` back and merges it with free neighbours.

        Raises:
            CgkitError: it is not lent.
        """
        if number == 0:
            return
        if number not in self._lent:
            raise CgkitError(f"block {number} is not lent: it was freed before, or never given out")
        block, nbytes = self._lent.pop(number)
        self.allocated -= block.size
        self.requested -= nbytes
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._withdraw(neighbour)
                left, right = sorted((block, neighbour), key=lambda each: each.offset)
                block = self._merge(left, right)
        self._offer(block)

    def reset_peak(self) -> None:
        """Begins a new measurement of :attr:`peak_allocated`."""
        self.peak_allocated = self.allocated

    @property
    def live(self) -> dict[int, tuple[int, int, int]]:
        """Lent blocks by number: (segment, offset, size)."""
        return {n: (b.segment.number, b.offset, b.size) for n, (b, _) in self._lent.items()}

    def to_frame(self) -> Any:
        """A row a block: ``segment``, ``segment_bytes``, ``pool`` ("small", "large", or "any"), ``offset_bytes``,
        ``block_bytes``, ``state`` ("live" or "free"); as :func:`cgkit.measuring.segments.pool_segments` gives them."""
        import pandas as pd

        rows: list[dict[str, Any]] = []
        kinds = {True: "small", False: "large" if self.rules.small_request else "any"}
        for segment, block in zip(self._segments, self._first):
            each: _Block | None = block
            while each is not None:
                rows.append(
                    {
                        "segment": segment.number,
                        "segment_bytes": segment.size,
                        "pool": kinds[segment.small],
                        "offset_bytes": each.offset,
                        "block_bytes": each.size,
                        "state": "free" if each.free else "live",
                    }
                )
                each = each.after
        columns = ["segment", "segment_bytes", "pool", "offset_bytes", "block_bytes", "state"]
        return pd.DataFrame(rows, columns=columns)

    def __repr__(self) -> str:
        return (
            f"PoolSimulator({self.rules.name}: {self.reserved:,} bytes reserved in {len(self._segments)} "
            f"segments, {self.allocated:,} allocated, peak {self.peak_allocated:,})"
        )

    # --- inside ----------------------------------------------------------------------------------

    def _best(self, small: bool, size: int) -> _Block | None:
        free = self._free[small]
        at = bisect.bisect_left(free, (size, -1, -1), key=lambda entry: entry[0])
        return free.pop(at)[1] if at < len(free) else None

    def _grow(self, small: bool, size: int) -> _Block:
        segment = _Segment(len(self._segments), self.rules.segment_for(size), small)
        block = _Block(segment, 0, segment.size)
        self._segments.append(segment)
        self._first.append(block)
        self.reserved += segment.size
        return block

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.segment, block.offset + size, block.size - size)
        rest.before, rest.after = block, block.after
        if rest.after is not None:
            rest.after.before = rest
        block.size, block.after = size, rest
        self._offer(rest)

    def _merge(self, left: _Block, right: _Block) -> _Block:
        left.size += right.size
        left.after = right.after
        if right.after is not None:
            right.after.before = left
        return left

    def _offer(self, block: _Block) -> None:
        block.free = True
        bisect.insort(self._free[block.segment.small], (block.key, block), key=lambda entry: entry[0])

    def _withdraw(self, block: _Block) -> None:
        free = self._free[block.segment.small]
        at = bisect.bisect_left(free, block.key, key=lambda entry: entry[0])
        assert free[at][1] is block
        del free[at]


class PoolsApart:
    """As a :class:`PoolSimulator`, of which every name that is used has one of its own (``use(name)``): what
    recorded pieces would take if they did not share.

    Attributes:
        pools: name -> its simulator. ``reserved``, ``allocated`` and ``peak_allocated`` are sums over them.
    """

    def __init__(self, rules: AllocatorRules = CUDA_RULES) -> None:
        self.rules = rules
        self.pools: dict[str, PoolSimulator] = {}
        self._lent: list[tuple[PoolSimulator, int]] = []
        self.use("")

    def use(self, name: str) -> None:
        """What is asked for from now on comes from the pool of this name."""
        self._now = self.pools.setdefault(name, PoolSimulator(self.rules))

    def alloc(self, nbytes: int) -> int:
        """As :meth:`PoolSimulator.alloc`, from the pool in use."""
        number = self._now.alloc(nbytes)
        if number:
            self._lent.append((self._now, number))
            number = len(self._lent)
        return number

    def free(self, number: int) -> None:
        """As :meth:`PoolSimulator.free`, to the pool that lent the block."""
        if number:
            pool, own = self._lent[number - 1]
            pool.free(own)

    def reset_peak(self) -> None:
        """Begins a new measurement in each pool."""
        for pool in self.pools.values():
            pool.reset_peak()

    @property
    def reserved(self) -> int:
        """Bytes taken from the device."""
        return sum(pool.reserved for pool in self.pools.values())

    @property
    def allocated(self) -> int:
        """Bytes in lent blocks."""
        return sum(pool.allocated for pool in self.pools.values())

    @property
    def peak_allocated(self) -> int:
        """The peaks of all pools together."""
        return sum(pool.peak_allocated for pool in self.pools.values())

    def to_frame(self) -> Any:
        """The blocks of all pools one under the other, segments numbered through."""
        import pandas as pd

        frames, first = [], 0
        for pool in self.pools.values():
            frame = pool.to_frame()
            frames.append(frame.assign(segment=frame["segment"] + first))
            first += len(frame["segment"].unique())
        return pd.concat(frames, ignore_index=True)
