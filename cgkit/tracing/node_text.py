"""What stands in a node of an fx graph, as text and names: its constants, its shape, what it writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from cgkit.torch_hooks import OpOverload, bound_argument, mutated_arguments, operator_of


def leaves(node: fx.Node) -> Iterator[tuple[str, str, str]]:
    """(where, text, name) for each leaf of a node's arguments; ``name`` is that of a node, or "" for a
    constant. ``where`` is "0", "1[2]" or a keyword."""
    for index, argument in enumerate(node.args):
        yield from _leaf(str(index), argument)
    for name, argument in node.kwargs.items():
        yield from _leaf(name, argument)


def constants(arguments: Iterable[tuple[str, str, str]]) -> str:
    """Those of :func:`leaves` that are no nodes, without those left at None: ``3, dim=-1``."""
    given = [(where, text) for where, text, node in arguments if not node and text != "None"]
    return ", ".join(text if where[0].isdigit() else f"{where}={text}" for where, text in given)


def _leaf(where: str, value: Any) -> Iterator[tuple[str, str, str]]:
    if isinstance(value, fx.Node):
        yield where, value.name, value.name
    elif isinstance(value, (tuple, list)) and any(isinstance(v, (fx.Node, tuple, list)) for v in value):
        for index, element in enumerate(value):
            yield from _leaf(f"{where}[{index}]", element)
    elif isinstance(value, slice) and any(
        isinstance(v, fx.Node) for v in (value.start, value.stop, value.step)
    ):
        for name in ("start", "stop", "step"):
            yield from _leaf(f"{where}.{name}", getattr(value, name))
    else:
        yield where, _constant_text(value), ""


def _constant_text(value: Any) -> str:
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return str(value).removeprefix("torch.")
    if isinstance(value, slice):
        parts = ["" if v is None else str(v) for v in (value.start, value.stop, value.step)]
        return ":".join(parts if parts[2] else parts[:2])
    if isinstance(value, tuple) and any(isinstance(v, slice) or v is Ellipsis for v in value):
        return "(" + ", ".join("..." if v is Ellipsis else _constant_text(v) for v in value) + ")"
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    return repr(value)


def shape_text(value: Any) -> tuple[str, str]:
    """Shape and dtype as text; of a number its symbol and type; of a tuple how many it holds."""
    if isinstance(value, torch.Tensor):
        return "(" + ", ".join(map(str, value.shape)) + ")", str(value.dtype).removeprefix("torch.")
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return str(value), {"SymInt": "int", "SymFloat": "float", "SymBool": "bool"}[type(value).__name__]
    if isinstance(value, (tuple, list)):
        return f"{len(value)} values", ""
    return ("", "") if value is None else (repr(value), type(value).__name__)


def written_values(node: fx.Node) -> set[str]:
    """The nodes into whose values ``node`` writes, as far as its schema or its name (``add_``) tells."""
    if node.op not in ("call_function", "call_method"):
        return set()
    op: Any = node.target
    if not isinstance(op, OpOverload):
        op = getattr(op, "default", None) if operator_of(op) else None
    if isinstance(op, OpOverload):
        values = [bound_argument(op, name, node.args, node.kwargs) for name in mutated_arguments(op)]
    else:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        in_place = (name.endswith("_") and not name.endswith("__")) or name == "setitem"
        values = [*(node.args[:1] if in_place else ()), node.kwargs.get("out")]
    return {value.name for value in values if isinstance(value, fx.Node)}


def reads_from(nodes: Iterable[fx.Node]) -> dict[str, list[str]]:
    """For each node whom it gets its inputs from: the node that made a value, or the last that wrote into it."""
    writer: dict[str, str] = {}
    found = {}
    for node in nodes:
        found[node.name] = list(dict.fromkeys(writer.get(i.name, i.name) for i in node.all_input_nodes))
        writer.update(dict.fromkeys(written_values(node), node.name))
    return found
