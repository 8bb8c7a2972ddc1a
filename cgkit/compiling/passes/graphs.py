"""Small questions about a post-grad graph, and nodes put into one with the values that Inductor expects of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from cgkit import torch_hooks

aten = torch.ops.aten
#: Operators whose result is their first argument's memory.
VIEWS = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.slice.Tensor,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.squeeze.default,
        aten.unsqueeze.default,
        aten.expand.default,
        aten.select.int,
        aten.alias.default,
        aten.detach.default,
        aten.as_strided.default,
        aten.view.dtype,
    }
)


def tensor_value(node: Any) -> Tensor | None:
    """The fake tensor that a node stands for, or None."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def same_sizes(one: Any, other: Any) -> bool:
    """Whether two lists of sizes are equal for certain. Asks symbols, adds no assumption about them."""
    return len(one) == len(other) and all(_expression(a) == _expression(b) for a, b in zip(one, other))


def _expression(size: Any) -> Any:
    return size if isinstance(size, int) else torch_hooks.symbolic_expression(size)


def same_layout(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors have the same type, device, shape and strides for certain."""
    if one is None or other is None or one.dtype != other.dtype or one.device != other.device:
        return False
    return same_sizes(one.shape, other.shape) and same_sizes(one.stride(), other.stride())


def root_of(node: fx.Node) -> fx.Node:
    """The node whose memory ``node`` is a view of: itself, if it is no view."""
    while node.target in VIEWS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def views_of(node: fx.Node) -> Iterator[fx.Node]:
    """``node`` and every view of it, and of those."""
    yield node
    for user in list(node.users):
        if user.target in VIEWS and user.args[0] is node:
            yield from views_of(user)


def leaves_the_graph(node: fx.Node) -> bool:
    """Whether ``node``, or a view of it, is an output or is copied into an input at the end."""
    return any(
        user.op == "output" or user.target is aten.copy_.default
        for view in views_of(node)
        for user in view.users
    )


def call_with_value(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """What ``target`` gives on the fake values of nodes."""
    value = lambda n: n.meta["val"]  # noqa: E731
    real_args, real_kwargs = fx.map_arg(args, value), fx.map_arg(kwargs or {}, value)
    found = [value(n) for n in nodes_in((args, kwargs))]
    mode = torch_hooks.fake_mode_of(found) or _mode_of_graph(args, kwargs)
    if mode is None:
        return target(*real_args, **real_kwargs)
    with torch_hooks.running_fake(mode), torch_hooks.without_new_guards(mode):
        return target(*real_args, **real_kwargs)


def nodes_in(arguments: Any) -> list[fx.Node]:
    """The nodes among arguments, however deep they lie."""
    nodes: list[fx.Node] = []
    fx.map_arg(arguments, nodes.append)
    return nodes


def _mode_of_graph(*arguments: Any) -> Any:
    """The fake mode of the graph that the nodes among ``arguments`` are of (symbols alone do not tell it)."""
    for node in nodes_in(arguments)[:1]:
        return torch_hooks.fake_mode_of(n.meta.get("val") for n in node.graph.nodes)
    return None


def insert(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> fx.Node:
    """A call put in where the graph inserts, with its fake value."""
    node = graph.call_function(target, args, kwargs or {})
    node.meta["val"] = call_with_value(target, args, kwargs)
    return node


def size_of(graph: fx.Graph, node: fx.Node, dim: int) -> Any:
    """The size of ``node`` along ``dim`` as an argument: a number, or a node that gives the symbol."""
    value = node.meta["val"].shape[dim]
    return value if isinstance(value, int) else insert(graph, aten.sym_size.int, (node, dim))


def positions(graph: fx.Graph) -> dict[fx.Node, int]:
    """Each node's place."""
    return {node: index for index, node in enumerate(graph.nodes)}
