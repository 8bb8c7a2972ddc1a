"""Symbolic sizes: their names and expressions, and what is known and assumed of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from cgkit.torch_hooks.versions import gone


def free_symbol_names(value: Any) -> frozenset[str]:
    """The names of the symbols in ``value`` (a tensor's shape, strides and offset; a SymInt; a nest
    of them). Run on torch 2.11 (CUDA) and 2.13 (CPU)."""
    if isinstance(value, (tuple, list)):
        return frozenset().union(*(free_symbol_names(element) for element in value))
    if not isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return frozenset()
    from torch.fx.experimental.symbolic_shapes import free_symbols

    return frozenset(str(symbol) for symbol in free_symbols(value))


def plain_symbol_name(value: Any) -> str | None:
    """The symbol's name if ``value`` is a SymInt that is one bare symbol, like ``s77``; else None
    (``SymInt.node.expr``). Run on torch 2.11 (CUDA) and 2.13 (CPU)."""
    if not isinstance(value, torch.SymInt):
        return None
    expr = value.node.expr
    return str(expr) if expr.is_Symbol else None


def symbolic_expression(value: Any) -> Any:
    """The sympy expression of a SymInt, SymFloat or SymBool. Run on torch 2.11 (CUDA) and 2.13 (CPU)."""
    return value.node.expr


def substitute_symbols(value: Any, numbers: dict[Any, int]) -> Any:
    """``value`` with ``numbers`` for symbols; an int if none is left, else as it was.

    Run on torch 2.11 (CUDA) and 2.13 (CPU).
    """
    if not isinstance(value, torch.SymInt):
        return value
    import sympy

    expression = value.node.expr.xreplace({symbol: sympy.Integer(n) for symbol, n in numbers.items()})
    return int(expression) if expression.is_number else value


def ranged_fake_mode(low: int, high: int) -> tuple[Any, Any]:
    """A new fake mode with one symbol between ``low`` and ``high`` (example: ``high``), and that symbol.

    The symbol's expression; :func:`rewritten_size` puts it into sizes. Run on torch 2.13 (CPU).
    """
    from torch._dynamo.source import LocalSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    environment = ShapeEnv()
    narrow = getattr(environment, "constrain_symbol_range", None)
    if narrow is None:
        raise gone("torch.fx.experimental.symbolic_shapes.ShapeEnv.constrain_symbol_range")
    symbol = environment.create_symbol(high, LocalSource("tokens"), dynamic_dim=DimDynamic.DYNAMIC)
    narrow(symbol, low, high)
    return FakeTensorMode(shape_env=environment), symbol


def any_number(fake_mode: Any, name: str) -> Any:
    """A SymInt of ``fake_mode`` of which nothing is known, not even that it is no 0 or 1.

    Run on torch 2.13 (CPU).
    """
    from torch._dynamo.source import LocalSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = LocalSource(name)
    environment = fake_mode.shape_env
    make = getattr(environment, "create_unspecified_symbol", None)
    if make is None:
        raise gone("torch.fx.experimental.symbolic_shapes.ShapeEnv.create_unspecified_symbol")
    symbol = make(7, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return environment.create_symintnode(symbol, hint=7, source=source)


def rewritten_size(
    value: Any, symbol: Any, new: Any, fake_mode: Any, example: int, numbers: Mapping[Any, int] | None = None
) -> Any:
    """A size with ``new`` (of ``fake_mode``) for ``symbol`` and ``numbers`` for others, if nothing else symbolic is in
    it; else as it was.

    ``example``: the number that stands for the symbol. Run on torch 2.13 (CPU).
    """
    if not isinstance(value, torch.SymInt):
        return value
    import sympy

    expression = value.node.expr.xreplace({other: sympy.Integer(n) for other, n in (numbers or {}).items()})
    if not expression.free_symbols:
        return int(expression)
    if expression.free_symbols != {symbol}:
        return value
    hint = int(expression.xreplace({symbol: sympy.Integer(example)}))
    return fake_mode.shape_env.create_symintnode(expression.xreplace({symbol: new}), hint=hint)


def symbol_facts(fake_mode: Any, symbol: Any) -> tuple[str, str]:
    """What the shape environment knows of a symbol: its range and its example.

    Run on torch 2.11 (CUDA) and 2.13 (CPU).
    """
    environment = getattr(fake_mode, "shape_env", None)
    known_range = getattr(environment, "var_to_range", {}).get(symbol, "?")
    for name in ("backed_var_to_val", "var_to_val"):  # the name differs between versions
        values = getattr(environment, name, None)
        if values is not None and symbol in values:
            return str(known_range), str(values[symbol])
    return str(known_range), "?"


def symbol_ranges(fake_mode: Any) -> dict[Any, str]:
    """The range of each symbol that the shape environment knows, as text.

    Run on torch 2.11 and 2.13 (CPU).
    """
    environment = getattr(fake_mode, "shape_env", None)
    return {symbol: str(known) for symbol, known in getattr(environment, "var_to_range", {}).items()}


def specialised_symbols(fake_mode: Any) -> dict[Any, int]:
    """Symbols that the shape environment has fixed to a number meanwhile.

    Run on torch 2.11 (CUDA) and 2.13 (CPU).
    """
    replacements = getattr(getattr(fake_mode, "shape_env", None), "replacements", {})
    return {
        symbol: int(value) for symbol, value in replacements.items() if getattr(value, "is_Integer", False)
    }


def shape_guards(holder: Any) -> list[str]:
    """What has been assumed of the symbols of a fake mode (or of a tracing context's), in order, as
    text. Run on torch 2.11 (CUDA) and 2.13 (CPU)."""
    fake_mode = getattr(holder, "fake_mode", holder)
    return [str(guard.expr) for guard in getattr(getattr(fake_mode, "shape_env", None), "guards", ())]


class ShapeGuard(NamedTuple):
    """One assumption about symbols. ``largest``: all that it says is that its one symbol is at most this."""

    text: str
    symbols: frozenset[Any]
    largest: int | None


def count_shape_guards(fake_mode: Any) -> int:
    """How many assumptions :func:`shape_guards` would list. Run on torch 2.11 and 2.13 (CPU)."""
    return len(getattr(getattr(fake_mode, "shape_env", None), "guards", ()))


def shape_guard_facts(fake_mode: Any, places: Iterable[int]) -> list[ShapeGuard]:
    """What the assumptions at ``places`` of :func:`shape_guards` say: ``2048*s0 <= 2**31 - 1`` bounds s0 by 1048575.

    Inductor for a GPU adds such a bound for each kernel that it lets count in 32 bits.
    Run on torch 2.11 (CPU, CUDA build) and 2.13 (CPU).
    """
    guards = list(getattr(getattr(fake_mode, "shape_env", None), "guards", ()))
    expressions = [guards[place].expr for place in places]
    return [ShapeGuard(str(e), frozenset(e.free_symbols), _upper_bound(e)) for e in expressions]


def _upper_bound(expr: Any) -> int | None:
    """The largest whole number for which ``expr`` holds, where it is a bound of a polynomial that only grows."""
    import sympy

    if not isinstance(expr, sympy.LessThan | sympy.StrictLessThan) or len(expr.free_symbols) != 1:
        return None
    (symbol,) = expr.free_symbols
    difference = sympy.expand(expr.lhs - expr.rhs)  # at most 0, or below it
    if not difference.is_polynomial(symbol):
        return None
    *growing, rest = sympy.Poly(difference, symbol).all_coeffs()
    if not all(each.is_Integer for each in (*growing, rest)) or any(each < 0 for each in growing):
        return None
    room = -int(rest) - isinstance(expr, sympy.StrictLessThan)
    powers = [(int(factor), power) for power, factor in enumerate(reversed(growing), 1)]
    below, above = 0, max(room, 0) + 1  # of a polynomial that grows by at least one a step
    while above - below > 1:
        middle = (below + above) // 2
        if sum(factor * middle**power for factor, power in powers) <= room:
            below = middle
        else:
            above = middle
    return below


def without_new_guards(fake_mode: Any) -> contextlib.AbstractContextManager[Any]:
    """A context in which nothing that is asked of a symbol is kept as an assumption about it.

    Run on torch 2.13 (CPU).
    """
    shape_env = getattr(fake_mode, "shape_env", None)
    suppress = getattr(shape_env, "suppress_guards", None)
    return contextlib.nullcontext() if suppress is None else suppress()
