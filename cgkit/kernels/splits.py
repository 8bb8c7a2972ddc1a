"""Over how many programs the decode kernel divides a context. No Triton here: benchmarks ask without a GPU."""

from __future__ import annotations


def splits_for(programs: int, max_context: int, *, chunk: int, most: int, wanted: int) -> int:
    """A power of two; 1 when the batch fills the device.

    Args:
        programs: pairs of request and KV head, each of which has one program at least.
        max_context: positions that a block table holds.
        chunk: the least positions that are worth a program.
        most: programs for one pair, at most.
        wanted: programs that fill the device.
    """
    useful = min(wanted // programs, -(-max_context // chunk), most)
    return 1 << (useful.bit_length() - 1) if useful > 1 else 1
