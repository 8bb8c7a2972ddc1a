"""What compilations took for granted of a trace's symbols.

Inductor for a GPU lets a kernel count in 32 bits, and writes into the trace's shape environment that the number of
tokens is small enough for it. All pieces of a trace share that environment: what one compilation has assumed, the next
one knows, and its code may rest on it without a word of its own. So whatever compilations have assumed so far of a
piece's symbols is held against it. And a piece's key leaves it out: else the first piece had another key at its second
compilation, and the second piece another one in a process that only loads the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from cgkit import torch_hooks


class Held(NamedTuple):
    """What is held against one piece."""

    texts: tuple[str, ...]
    #: Input -> the largest number that may stand there: the smallest bound of its symbol.
    largest: Mapping[int, int]
    #: Whether something is assumed that ``largest`` does not say.
    more: bool


#: Nothing is.
NOTHING = Held((), {}, False)


class Assumed:
    """What the compilations in one shape environment have assumed."""

    def __init__(self) -> None:
        self.guards: list[int] = []  # places among the environment's guards
        self.fixed: dict[Any, int] = {}  # symbols that are numbers now
        self._ranges: dict[Any, tuple[str, str]] = {}  # symbol -> its range without and with what was assumed
        self._unsaid: set[Any] = set()  # symbols whose range became smaller without a guard

    @contextmanager
    def noted(self, fake_mode: Any) -> Iterator[None]:
        """Around a compilation, also one that fails."""
        count, before = torch_hooks.count_shape_guards(fake_mode), torch_hooks.symbol_ranges(fake_mode)
        fixed = torch_hooks.specialised_symbols(fake_mode)
        try:
            yield
        finally:
            new = range(count, torch_hooks.count_shape_guards(fake_mode))
            self.guards += new
            said = {
                symbol for guard in torch_hooks.shape_guard_facts(fake_mode, new) for symbol in guard.symbols
            }
            for symbol, now in torch_hooks.symbol_ranges(fake_mode).items():
                if symbol in before and now != before[symbol]:
                    self._ranges[symbol] = (self.range_without(symbol, before[symbol]), now)
                    self._unsaid |= {symbol} - said
            now_fixed = torch_hooks.specialised_symbols(fake_mode)
            self.fixed |= {symbol: number for symbol, number in now_fixed.items() if symbol not in fixed}

    def range_without(self, symbol: Any, now: str) -> str:
        """A symbol's range as it was without what was assumed. ``now``: as it is."""
        without, with_it = self._ranges.get(symbol, (now, now))
        return without if now == with_it else now

    def held(self, fake_mode: Any, inputs: Sequence[Any], since: int = 0) -> Held:
        """What is held against a piece with these inputs, of the guards from the ``since``-th of :attr:`guards` on."""
        places, symbols = _places(inputs)
        found = torch_hooks.shape_guard_facts(fake_mode, self.guards[since:])
        found = [guard for guard in found if guard.symbols & symbols]
        largest: dict[int, int] = {}
        more = bool(self._unsaid & symbols)
        for guard in found:
            at = places.get(next(iter(guard.symbols)), ()) if guard.largest is not None else ()
            more |= not at
            for place in at:
                largest[place] = min(guard.largest or 0, largest.get(place, guard.largest or 0))
        return Held(tuple(guard.text for guard in found), largest, more)


def _places(inputs: Sequence[Any]) -> tuple[dict[Any, list[int]], set[Any]]:
    """At which inputs each symbol stands by itself, and all symbols that stand anywhere."""
    places: dict[Any, list[int]] = {}
    symbols: set[Any] = set()
    for place, value in enumerate(inputs):
        numbers: tuple[Any, ...] = (value,)
        if isinstance(value, torch.Tensor):
            where = (*value.stride(), value.storage_offset()) if value.layout is torch.strided else ()
            numbers = (*value.shape, *where)
        for number in numbers:
            if isinstance(number, torch.SymInt):
                expression = torch_hooks.symbolic_expression(number)
                free: set[Any] = getattr(expression, "free_symbols", set())
                symbols |= free
                if number is value and free == {expression}:
                    places.setdefault(expression, []).append(place)
    return places, symbols


_by_environment: WeakKeyDictionary[Any, Assumed] = WeakKeyDictionary()


def assumed_in(fake_mode: Any) -> Assumed:
    """What was assumed in the shape environment of ``fake_mode``; of one without symbols, nothing."""
    environment = getattr(fake_mode, "shape_env", None)
    return Assumed() if environment is None else _by_environment.setdefault(environment, Assumed())
