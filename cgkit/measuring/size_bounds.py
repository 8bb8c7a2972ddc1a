"""Lower bounds for the search of the best sizes, by pricing the budget (Lagrange's relaxation).

If a byte and a size cost something, the best list without any budget is found in one pass, and no list within the
budget is cheaper than its cost less what the budget itself would cost. That holds for any prices; good prices make
it tight.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from cgkit.measuring.best_sizes import Choice

_ROUNDS, _TRIES = 3, 24


class Bounds:
    """``rest[i]``: what is at least added to a list that ends at ``i``; ``most``: the cost of a list that fits.

    Attributes:
        byte, size: the prices.
    """

    def __init__(self, choice: Choice, steps: np.ndarray, allowed: int, limit: float) -> None:
        self.choice, self.steps, self.allowed, self.limit = choice, steps, allowed, limit
        self.most = choice.uncaptured
        self.byte = self.size = 0.0
        worst = max(choice.uncaptured, float((choice.replay * choice.held[-1]).max()))
        for _ in range(_ROUNDS):
            if np.isfinite(limit):
                self.byte = self._best(lambda price: self._dual(price, self.size), worst / max(limit, 1.0))
            if allowed < len(choice.sizes):
                self.size = self._best(lambda price: self._dual(self.byte, price), worst)
        self.rest = self._rest(self.byte, self.size)[0]

    def least(self, costs: np.ndarray, own: np.ndarray, numbers: np.ndarray, last: int) -> np.ndarray:
        """What lists that begin so, and end at ``last`` as yet, cost at least."""
        return costs + self.rest[last] + self._priced(own, numbers)

    def _priced(self, own: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Prices of what was taken, less those of the budget."""
        bytes_price = self.byte * (own - self.limit) if np.isfinite(self.limit) else 0.0
        return bytes_price + self.size * (numbers - self.allowed)

    def _best(self, value: Callable[[float], float], top: float) -> float:
        """The price with the highest bound, of 0 and a geometric bracket that is narrowed (the bound is concave)."""
        prices = np.array([0.0, *np.geomspace(top * 1e-9, top, _TRIES)])
        values = [value(price) for price in prices]
        at = int(np.argmax(values))
        low, high = prices[max(at - 1, 0)], prices[min(at + 1, len(prices) - 1)]
        best = (values[at], prices[at])
        for _ in range(_TRIES):
            left, right = low + (high - low) / 3, high - (high - low) / 3
            first, second = value(left), value(right)
            best = max(best, (first, left), (second, right))
            low, high = (low, right) if first >= second else (left, high)
        return float(best[1])

    def _dual(self, byte: float, size: float) -> float:
        """The bound on the cost of all lists at these prices; a list that fits lowers ``most``."""
        rest, following = self._rest(byte, size)
        choice = self.choice
        starts = choice.replay * choice.held + byte * choice.each + size + rest
        first = int(starts.argmin())
        self._try(first, following)
        budget = (byte * self.limit if np.isfinite(self.limit) else 0.0) + size * self.allowed
        return min(float(starts[first]) - budget, choice.uncaptured)

    def _rest(self, byte: float, size: float) -> tuple[np.ndarray, np.ndarray]:
        """For each last size: the least that comes on top, and the size that follows (itself: none)."""
        choice = self.choice
        rest = choice.above + byte * choice.shared
        following = np.arange(len(rest))
        own = byte * choice.each + size
        for i in range(len(rest) - 2, -1, -1):
            onward = self.steps[i, i + 1 :] + own[i + 1 :] + rest[i + 1 :]
            at = int(onward.argmin())
            if onward[at] < rest[i]:
                rest[i], following[i] = onward[at], i + 1 + at
        return rest, following

    def _try(self, first: int, following: np.ndarray) -> None:
        choice, indices = self.choice, [first]
        while following[indices[-1]] != indices[-1]:
            indices.append(int(following[indices[-1]]))
        last = indices[-1]
        if len(indices) > self.allowed or choice.shared[last] + choice.each[indices].sum() > self.limit:
            return
        cost = choice.replay[first] * choice.held[first] + choice.above[last]
        cost += sum(self.steps[j, i] for j, i in pairwise(indices))
        self.most = min(self.most, float(cost))
