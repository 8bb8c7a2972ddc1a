"""The pool from inside: its segments and the blocks in them.

A recorded graph's outputs are weak, so once capturing is over the pool owns memory of which nothing is
allocated: :attr:`cgkit.measuring.memory.Ledger.fullest` is the layout at the moment that used the most.
"""

from __future__ import annotations

from typing import Any

from cgkit import torch_hooks
from cgkit.capturing.captured import CapturedGraphs

COLUMNS = ["segment", "segment_bytes", "pool", "offset_bytes", "block_bytes", "state"]


def pool_segments(captured: CapturedGraphs) -> Any:
    """The pool of ``captured`` now, a row a block: ``segment`` (its number by address), ``segment_bytes``,
    ``pool`` ("small", "large" or, of the emulated pool, "any"), ``offset_bytes``, ``block_bytes``, ``state``
    ("live" or "free")."""
    return blocks_of(captured.platform, captured.pool)


def blocks_of(platform: Any, pool: Any) -> Any:
    """As :func:`pool_segments`, of a platform and one of its pools."""
    import pandas as pd

    if platform.emulated:
        rows = [
            (segment, total, "any", offset, size, "free" if free else "live")
            for segment, total, offset, size, free in pool.blocks()
        ]
        return pd.DataFrame(rows, columns=COLUMNS)
    rows = []
    for number, (_, total, small, blocks) in enumerate(_of_cuda(pool)):
        offset = 0
        for size, used in blocks:
            rows.append(
                (number, total, "small" if small else "large", offset, size, "live" if used else "free")
            )
            offset += size
    return pd.DataFrame(rows, columns=COLUMNS)


def segment_ranges(platform: Any, pool: Any) -> list[tuple[int, int]]:
    """(address, bytes) of each segment, numbered as in :func:`blocks_of`."""
    if platform.emulated:
        return pool.segment_ranges()
    return [(address, total) for address, total, _, _ in _of_cuda(pool)]


def _of_cuda(pool: Any) -> list[tuple[int, int, bool, list[tuple[int, bool]]]]:
    """The segments under all ids that the pool has had, by address."""
    return sorted(segment for handle in pool.handles for segment in torch_hooks.pool_blocks(handle))
