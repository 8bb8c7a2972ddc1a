"""What compilations took for granted of a trace's symbols.

Inductor for a GPU lets a kernel count in 32 bits, and writes into the trace's shape environment that the number of
tokens is small enough for it. All pieces of a trace share that environment: what one compilation has assumed, the next
one knows, and its code may rest on it without a word of its own. So whatever compilations have assumed so far is held
against each piece. And a piece's key leaves it out: else the first piece had another key at its second compilation,
and the second piece another one in a process that only loads the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from cgkit import torch_hooks


class Assumed:
    """What the compilations in one shape environment have assumed."""

    def __init__(self) -> None:
        self._guards: list[int] = []  # places among the environment's guards
        self._ranges: dict[Any, tuple[str, str]] = {}  # symbol -> its range without and with what was assumed

    @contextmanager
    def noted(self, fake_mode: Any) -> Iterator[None]:
        """Around a compilation."""
        count, before = len(torch_hooks.shape_guards(fake_mode)), torch_hooks.symbol_ranges(fake_mode)
        try:
            yield
        finally:
            self._guards += range(count, len(torch_hooks.shape_guards(fake_mode)))
            for symbol, now in torch_hooks.symbol_ranges(fake_mode).items():
                if symbol in before and now != before[symbol]:
                    self._ranges[symbol] = (self.range_without(symbol, before[symbol]), now)

    def range_without(self, symbol: Any, now: str) -> str:
        """A symbol's range as it was without what was assumed. ``now``: as it is."""
        without, with_it = self._ranges.get(symbol, (now, now))
        return without if now == with_it else now

    def texts(self, fake_mode: Any) -> tuple[str, ...]:
        """Each assumption as text."""
        guards = torch_hooks.shape_guards(fake_mode)
        return tuple(guards[place] for place in self._guards)

    def largest(self, fake_mode: Any) -> int | None:
        """The largest number that they let a symbol be; None if there are none, or one says something else."""
        bounds = torch_hooks.upper_bounds(fake_mode, self._guards)
        return min(bounds) if bounds else None


_by_environment: WeakKeyDictionary[Any, Assumed] = WeakKeyDictionary()


def assumed_in(fake_mode: Any) -> Assumed:
    """What was assumed in the shape environment of ``fake_mode``; of one without symbols, nothing."""
    environment = getattr(fake_mode, "shape_env", None)
    return Assumed() if environment is None else _by_environment.setdefault(environment, Assumed())
