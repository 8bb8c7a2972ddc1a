"""A small language of patterns for post-grad graphs, and the nodes that a match may take away.

A pattern is a tree of :class:`Call`, :class:`Var`, :class:`Num`, :class:`Cast` and :class:`OneOf`; :func:`match` walks
it backwards from the last node. It is written by hand rather than traced (Inductor traces its patterns from
Python, through the decompositions of the day), so that it can be read, and so that one pattern says in
``OneOf`` in which shapes torch 2.11 and 2.13 bring the same computation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cgkit import torch_hooks
from cgkit.compiling.passes.graphs import tensor_value

aten = torch.ops.aten
CONVERT = torch.ops.prims.convert_element_type.default
#: Memory that holds nothing yet, and the sizes that it was asked for with.
BUFFERS = (
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    torch.ops.prims.empty_strided.default,
    aten.new_empty.default,
    aten.sym_size.int,
)
CASTS = (CONVERT, aten._to_copy.default)


@dataclass(frozen=True)
class Var:
    """Any node; the same one wherever the name stands."""

    name: str


@dataclass(frozen=True)
class Num:
    """A number: ``value``, or any one, kept under ``name``."""

    name: str = ""
    value: float | None = None


@dataclass(frozen=True)
class Call:
    """A call of one of ``ops``; ``args`` are the leading arguments, in any order if ``commutes``."""

    ops: tuple[Any, ...]
    args: tuple[Any, ...]
    commutes: bool = False


@dataclass(frozen=True)
class Cast:
    """``inner``, converted to ``to`` (any floating type if None), or as it is if it has that type already."""

    inner: Any
    to: torch.dtype | None = None


@dataclass(frozen=True)
class OneOf:
    """The first of ``options`` that matches."""

    options: tuple[Any, ...]


@dataclass(frozen=True)
class Written:
    """What an out-parameter operator wrote: the tensor for its argument ``out`` in a functional graph.

    ``args`` maps names of the operator's arguments to patterns.
    """

    op: Any
    out: str
    args: tuple[tuple[str, Any], ...]


Pattern = Var | Num | Call | Cast | OneOf | Written


@dataclass(frozen=True)
class Found:
    """A match so far: nodes and numbers by name, and the nodes that were gone through."""

    values: dict[str, Any]
    nodes: tuple[fx.Node, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def also(self, node: fx.Node) -> Found:
        return Found(self.values, (*self.nodes, node))


def match(pattern: Any, value: Any, found: Found | None = None) -> Found | None:
    """How ``pattern`` matches what ends in ``value`` (a node, or an argument); None if it does not."""
    found = found or Found({})
    if isinstance(pattern, Var):
        return _bind(pattern.name, value, found) if isinstance(value, fx.Node) else None
    if isinstance(pattern, Num):
        return _number(pattern, value, found)
    if isinstance(pattern, OneOf):
        return next((m for option in pattern.options if (m := match(option, value, found))), None)
    if isinstance(pattern, Cast):
        return _cast(pattern, value, found)
    if isinstance(pattern, Call):
        return _call(pattern, value, found)
    if isinstance(pattern, Written):
        return _written(pattern, value, found)
    return found if value == pattern else None


def _bind(name: str, value: Any, found: Found) -> Found | None:
    if name in found.values:
        return found if found.values[name] is value or found.values[name] == value else None
    return Found({**found.values, name: value}, found.nodes)


def _number(pattern: Num, value: Any, found: Found) -> Found | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if pattern.value is not None and value != pattern.value:
        return None
    return _bind(pattern.name, value, found) if pattern.name else found


def _cast(pattern: Cast, value: Any, found: Found) -> Found | None:
    tensor = tensor_value(value)
    if tensor is None or (pattern.to is not None and tensor.dtype != pattern.to):
        return None
    if value.target in CASTS and (m := match(pattern.inner, value.args[0], found.also(value))):
        return m
    return match(pattern.inner, value, found)


def _call(pattern: Call, value: Any, found: Found) -> Found | None:
    if not isinstance(value, fx.Node) or value.target not in pattern.ops:
        return None
    plain = (
        value.target not in CASTS
    )  # of a conversion, what else is said (a device, a layout) is not looked at
    if len(value.args) < len(pattern.args) or (
        plain and (value.kwargs or len(value.args) > len(pattern.args))
    ):
        return None
    given = tuple(value.args[: len(pattern.args)])
    found = found.also(value)
    for order in (given, given[::-1]) if pattern.commutes else (given,):
        if (m := _all(zip(pattern.args, order), found)) is not None:
            return m
    return None


def _all(pairs: Iterable[tuple[Any, Any]], found: Found | None) -> Found | None:
    for pattern, value in pairs:
        if found is None:
            return None
        found = match(pattern, value, found)
    return found


def _written(pattern: Written, value: Any, found: Found) -> Found | None:
    if not (isinstance(value, fx.Node) and getattr(value.target, "__name__", "") == "getitem"):
        return None
    call, index = value.args
    if not (isinstance(call, fx.Node) and call.target is torch_hooks.auto_functionalized()):
        return None
    if call.args[0] is not pattern.op or index != written_index(pattern.op, pattern.out):
        return None
    return _all([(p, call.kwargs.get(name)) for name, p in pattern.args], found.also(value).also(call))


def written_index(op: Any, out: str) -> int:
    """Where the auto-functionalised ``op`` returns the new tensor of its argument ``out``."""
    returns = max(1, torch_hooks.number_of_returns(op))
    return returns + torch_hooks.mutated_arguments(op).index(out)


def through_casts(node: fx.Node) -> fx.Node:
    """``node`` before it was converted between floating types."""
    while node.target in CASTS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def used_elsewhere(nodes: Iterable[fx.Node], allowed: Iterable[fx.Node]) -> list[fx.Node]:
    """Those of ``nodes`` (``allowed`` apart) that something outside of ``nodes`` needs."""
    inside, free = set(nodes), set(allowed)
    return [node for node in inside - free if any(user not in inside for user in node.users)]


def erase_unused(nodes: Iterable[fx.Node]) -> None:
    """Erases those of ``nodes`` that nobody uses any more, the last first, and buffers that were for them alone."""
    left = list(dict.fromkeys(nodes))
    while dead := [node for node in left if not node.users]:
        for node in dead:
            buffers = [source for source in node.all_input_nodes if source.target in BUFFERS]
            node.graph.erase_node(node)
            left.remove(node)
            left += [buffer for buffer in buffers if buffer not in left]
