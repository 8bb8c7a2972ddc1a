"""The best list of capture sizes under a budget, found exactly by dynamic programming.

Given candidate sizes ``c[0] < c[1] < ...``: a list of sizes splits the batches at its sizes, a batch up to its
largest size runs as the least size that holds it, and a batch above runs without a graph. What the sizes up to
``c[i]`` cost depends on nothing above ``c[i]``, so the best list that ends at ``c[i]`` extends a best one that
ends at some ``c[j]``, ``j < i``. The memory that a size adds is carried along; what the largest size takes (the
shared pool) is known at the end.

Nothing here knows about graphs: it is given costs, counts and bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Two costs that differ by less than this share of themselves are equal: sums of floats in another order.
EQUAL = 1e-12


@dataclass(frozen=True)
class Choice:
    """What may be chosen, and what it costs.

    Attributes:
        sizes: candidates, ascending.
        replay: cost of a step recorded for each of them.
        held: how many steps have at most so many tokens, for each of them.
        above: cost of all steps with more tokens, which run without a graph.
        uncaptured: cost of all steps if no size is recorded.
        shared, each: bytes if it is the largest; bytes that it adds.
        most_bytes, most_sizes: the budget; None: no limit.
    """

    sizes: Sequence[int]
    replay: np.ndarray
    held: np.ndarray
    above: np.ndarray
    uncaptured: float
    shared: np.ndarray
    each: np.ndarray
    most_bytes: float | None = None
    most_sizes: int | None = None

    def steps(self) -> np.ndarray:
        """``[j, i]``: the cost of the steps between candidate ``j`` and ``i``, run as ``i``; infinite unless j < i."""
        between = self.held[None, :] - self.held[:, None]
        return np.where(np.tri(len(self.sizes), k=-1, dtype=bool).T, self.replay[None, :] * between, np.inf)


def best_sizes(choice: Choice) -> tuple[int, ...]:
    """The sizes with the least cost within the budget, ascending; () where no graph pays, or none fits.

    Among lists of equal cost the one with the fewest sizes, then with the fewest bytes.
    """
    limit = np.inf if choice.most_bytes is None else choice.most_bytes
    allowed = len(choice.sizes) if choice.most_sizes is None else min(choice.most_sizes, len(choice.sizes))
    fits = choice.shared + choice.each <= limit
    if allowed < 1 or not fits.any():
        return ()
    found = _equal_bytes if len(set(choice.each)) == 1 else _any_bytes
    ends = found(choice, allowed, float(limit))
    ends.append(_End(choice.uncaptured, 0, 0.0, ()))
    least = min(end.cost for end in ends)
    equal = [end for end in ends if end.cost <= least * (1 + EQUAL)]
    best = min(equal, key=lambda end: (end.number, end.bytes, end.cost))
    return tuple(choice.sizes[index] for index in best.indices)


@dataclass(frozen=True)
class _End:
    """A whole list: its cost, how many sizes, its bytes, and which."""

    cost: float
    number: int
    bytes: float
    indices: tuple[int, ...]


def _equal_bytes(choice: Choice, allowed: int, limit: float) -> list[_End]:
    """Every size adds the same: the bytes of a list follow from its number of sizes and its largest."""
    own = float(choice.each[0])
    steps = choice.steps()
    bound = _unlimited(choice, steps, choice.shared + own <= limit)
    costs = choice.replay * choice.held
    came_from: list[np.ndarray] = []
    ends: list[_End] = []
    least = np.inf
    for number in range(1, allowed + 1):
        if number > 1:
            through = costs[:, None] + steps
            came_from.append(through.argmin(axis=0))
            costs = through.min(axis=0)
        total = np.where(choice.shared + number * own <= limit, costs + choice.above, np.inf)
        if not np.isfinite(total).any():  # so many sizes are not to be had, or do not fit
            break
        if total.min() < least:
            least = float(total.min())
            for last in np.flatnonzero(total <= least * (1 + EQUAL)):
                indices = _back(came_from, int(last))
                size = float(choice.shared[last] + number * own)
                ends.append(_End(float(total[last]), number, size, indices))
        if least <= bound:
            break
    return ends


def _unlimited(choice: Choice, steps: np.ndarray, fits: np.ndarray) -> float:
    """The least cost with as many sizes as one likes: no list is better."""
    costs = choice.replay * choice.held
    for index in range(1, len(costs)):
        costs[index] = min(costs[index], (costs[:index] + steps[:index, index]).min())
    return float(np.where(fits, costs + choice.above, np.inf).min())


def _back(came_from: Sequence[np.ndarray], last: int) -> tuple[int, ...]:
    indices = [last]
    for step in reversed(came_from):
        indices.append(int(step[indices[-1]]))
    return tuple(reversed(indices))


#: (bytes added so far, cost so far, sizes so far, the entry before, the candidate)
_Entry = tuple[float, float, int, Any, int]


def _any_bytes(choice: Choice, allowed: int, limit: float) -> list[_End]:
    """Sizes add different bytes: for each last size all lists that no other beats in both cost and bytes.

    While the number of sizes can bind, lists of different lengths are kept apart.
    """
    steps = choice.steps()
    room = limit - float(choice.shared.min())
    binds = allowed < len(choice.sizes)
    first: list[list[_Entry]] = [
        _kept([(float(choice.each[i]), float(choice.replay[i] * choice.held[i]), 1, None, i)], room)
        for i in range(len(choice.sizes))
    ]
    ends = _ends(choice, first, limit)
    if not binds:
        grown: list[list[_Entry]] = []
        for i in range(len(choice.sizes)):
            grown.append(_kept([*first[i], *_extended(grown, choice, steps, i)], room))
        return _ends(choice, grown, limit)
    entries = first
    for _ in range(allowed - 1):
        entries = [_kept(_extended(entries[:i], choice, steps, i), room) for i in range(len(choice.sizes))]
        if not any(entries):
            break
        ends += _ends(choice, entries, limit)
    return ends


def _extended(entries: list[list[_Entry]], choice: Choice, steps: np.ndarray, i: int) -> list[_Entry]:
    own = float(choice.each[i])
    return [
        (entry[0] + own, entry[1] + float(steps[j, i]), entry[2] + 1, entry, i)
        for j, lists in enumerate(entries[:i])
        for entry in lists
    ]


def _kept(entries: list[_Entry], room: float) -> list[_Entry]:
    """Those that fit, and that none with at most as many bytes beats in cost, or equals with fewer sizes."""
    kept: list[_Entry] = []
    best = (np.inf, 0)
    for entry in sorted(entries, key=lambda entry: entry[:3]):
        if entry[0] <= room and (entry[1], entry[2]) < best:
            best = (entry[1], entry[2])
            kept.append(entry)
    return kept


def _ends(choice: Choice, entries: list[list[_Entry]], limit: float) -> list[_End]:
    ends = []
    for last, lists in enumerate(entries):
        for entry in lists:
            size = entry[0] + float(choice.shared[last])
            if size <= limit:
                ends.append(_End(entry[1] + float(choice.above[last]), entry[2], size, _indices(entry)))
    return ends


def _indices(entry: _Entry | None) -> tuple[int, ...]:
    found = []
    while entry is not None:
        found.append(entry[4])
        entry = entry[3]
    return tuple(reversed(found))
