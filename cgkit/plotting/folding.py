"""Folding a long row of pieces: a deep model says the same thing many times, a picture says it once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Run:
    """Items ``start`` to ``start + length - 1``, and the same again ``times`` times in a row."""

    start: int
    length: int
    times: int

    @property
    def end(self) -> int:
        """The first index after the run and all its repetitions."""
        return self.start + self.length * self.times


def fold(keys: Sequence[Hashable], least: int = 3, longest: int = 8) -> list[Run]:
    """Splits ``keys`` into runs that cover it in order.

    A block of up to ``longest`` items is folded if it is repeated at least ``least`` times; of several
    that could be, the one that covers most, then the shortest. What is not folded is a run of
    ``times == 1`` and one item each.
    """
    runs: list[Run] = []
    at = 0
    while at < len(keys):
        best = Run(at, 1, 1)
        for length in range(1, min(longest, (len(keys) - at) // 2) + 1):
            block, times = keys[at : at + length], 1
            while keys[at + times * length : at + (times + 1) * length] == block:
                times += 1
            if times >= least and times * length > best.length * best.times:
                best = Run(at, length, times)
        runs.append(best)
        at = best.end
    return runs


def blocks_of_equal(labels: Sequence[Any]) -> list[tuple[int, int, Any]]:
    """Runs of equal labels as (start, stop, label)."""
    blocks: list[tuple[int, int, Any]] = []
    for index, label in enumerate(labels):
        if blocks and blocks[-1][2] == label:
            blocks[-1] = (blocks[-1][0], index + 1, label)
        else:
            blocks.append((index, index + 1, label))
    return blocks
