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

from cgkit.measuring.size_bounds import Bounds

#: Two costs that differ by less than this share of themselves are equal: sums of floats in another order.
EQUAL = 1e-12
#: A list is given up if its bound exceeds the best known by more than this share: bounds are sums of floats too.
SLACK = 1e-9


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


@dataclass(frozen=True)
class _Lists:
    """Lists that end at one size, a row each: bytes added, cost, how many sizes, and the list that each extends (the
    index of its last size, -1 for none, and its row there)."""

    own: np.ndarray
    costs: np.ndarray
    numbers: np.ndarray
    before: np.ndarray
    rows: np.ndarray

    def __getitem__(self, which: Any) -> _Lists:
        return _Lists(*(getattr(self, name)[which] for name in self.__dataclass_fields__))


def _any_bytes(choice: Choice, allowed: int, limit: float) -> list[_End]:
    """Sizes add different bytes: for each last size all lists that no other beats in cost and bytes, and in the
    number of sizes where that can bind; and of those only such as may yet become the best (:class:`Bounds`)."""
    steps = choice.steps()
    bounds = Bounds(choice, steps, allowed, limit)
    binds = allowed < len(choice.sizes)
    room = limit - float(choice.shared.min())
    held: list[_Lists] = []
    for i in range(len(choice.sizes)):
        lists = _ending_at(i, choice, steps, held)
        lists = lists[(lists.own <= room) & (lists.numbers <= allowed)]
        hopeful = bounds.least(lists.costs, lists.own, lists.numbers, i) <= bounds.most * (1 + SLACK)
        held.append(_unbeaten(lists[hopeful], binds))
    ends = []
    for last, lists in enumerate(held):
        whole = lists.own + choice.shared[last]
        for row in np.flatnonzero(whole <= limit):
            cost, number = float(lists.costs[row] + choice.above[last]), int(lists.numbers[row])
            ends.append(_End(cost, number, float(whole[row]), _indices(held, last, int(row))))
    return ends


def _ending_at(i: int, choice: Choice, steps: np.ndarray, held: list[_Lists]) -> _Lists:
    """The list of candidate ``i`` alone, and all lists that end below it with ``i`` added."""
    own, cost = choice.each[i], choice.replay[i] * choice.held[i]
    parts = [_Lists(*(np.array([value]) for value in (own, cost, 1, -1, 0)))]
    for j, lists in enumerate(held):
        size = len(lists.own)
        if size:
            before = np.full(size, j)
            costs = lists.costs + steps[j, i]
            parts.append(_Lists(lists.own + own, costs, lists.numbers + 1, before, np.arange(size)))
    return _Lists(
        *(np.concatenate([getattr(p, name) for p in parts]) for name in _Lists.__dataclass_fields__)
    )


def _unbeaten(lists: _Lists, binds: bool) -> _Lists:
    """Without those that another with at most as many bytes (and, if it ``binds``, just as many sizes) beats in
    cost, or equals with fewer sizes."""
    order = np.lexsort((lists.numbers, lists.costs, lists.own, lists.numbers if binds else 0 * lists.numbers))
    kept: list[int] = []
    group, best = -1, (np.inf, 0)
    for row in order:
        number = int(lists.numbers[row])
        if binds and number != group:
            group, best = number, (np.inf, 0)
        if (lists.costs[row], number) < best:
            best = (float(lists.costs[row]), number)
            kept.append(int(row))
    return lists[kept]


def _indices(held: list[_Lists], last: int, row: int) -> tuple[int, ...]:
    found = []
    while last >= 0:
        found.append(last)
        last, row = int(held[last].before[row]), int(held[last].rows[row])
    return tuple(reversed(found))
