"""Putting an out-parameter operator in the place of matched nodes.

The operator goes in auto-functionalised, so that the graph stays functional and later passes can match across it;
:class:`~cgkit.compiling.passes.functionalization.FixFunctionalization` makes the call in-place at the end.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from cgkit import torch_hooks
from cgkit.compiling.passes.graphs import (
    call_with_value,
    insert,
    positions,
    same_layout,
    size_of,
    tensor_value,
)
from cgkit.compiling.passes.matching import written_index

aten = torch.ops.aten


def place_for(graph: fx.Graph, inputs: Sequence[fx.Node], users: Sequence[fx.Node]) -> fx.Node | None:
    """The node before which a call of ``inputs`` can stand, and still come before all ``users``; None if there is
    no such place."""
    where = positions(graph)
    last = max((*inputs, *(n for n in graph.nodes if n.op == "placeholder")), key=where.__getitem__)
    if any(where[user] <= where[last] for user in users):
        return None
    return last.next


def empty_like(graph: fx.Graph, like: fx.Node, dtype: torch.dtype) -> fx.Node:
    """A contiguous tensor with the shape of ``like``, holding nothing."""
    return insert(graph, aten.empty_like.default, (like,), _empty(dtype))


def empty_column(graph: fx.Graph, like: fx.Node, dtype: torch.dtype) -> fx.Node:
    """A tensor (..., 1) with the rows of ``like``, holding nothing."""
    value = like.meta["val"]
    sizes = [size_of(graph, like, dim) for dim in range(value.dim() - 1)] + [1]
    return insert(
        graph,
        aten.empty.memory_format,
        (sizes,),
        {"dtype": dtype, "device": value.device, "pin_memory": False},
    )


def fits(like: fx.Node, replaced: fx.Node) -> bool:
    """Whether :func:`empty_like` of ``like`` has the layout of ``replaced``."""
    old = tensor_value(replaced)
    if old is None or tensor_value(like) is None:
        return False
    return same_layout(call_with_value(aten.empty_like.default, (like,), _empty(old.dtype)), old)


def _empty(dtype: torch.dtype) -> dict[str, Any]:
    return {"dtype": dtype, "memory_format": torch.contiguous_format}


def call_functional(graph: fx.Graph, op: Any, arguments: Mapping[str, Any]) -> dict[str, fx.Node]:
    """Inserts ``op``, auto-functionalised; the new tensor of each argument that it writes, by name."""
    call = graph.call_function(torch_hooks.auto_functionalized(), (op,), dict(arguments))
    written = torch_hooks.mutated_arguments(op)
    returns = max(1, torch_hooks.number_of_returns(op))
    values: list[Any] = [None] * returns + [arguments[name].meta["val"] for name in written]
    call.meta["val"] = tuple(values)
    new = {}
    for name in written:
        index = written_index(op, name)
        new[name] = graph.call_function(operator.getitem, (call, index))
        new[name].meta["val"] = values[index]
    return new


def is_scalar(node: Any) -> bool:
    """Whether ``node`` is one float32 number in a tensor."""
    value: Tensor | None = tensor_value(node)
    return value is not None and value.dtype is torch.float32 and all(size == 1 for size in value.shape)
