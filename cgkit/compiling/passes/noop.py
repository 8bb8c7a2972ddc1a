"""NoOpElimination: reshapes, slices and slice_scatters that do nothing.

Implements the article's "NoOpEliminationPass". They come from code that is general (a view for a batch that is
flat already) and from functionalisation, and they stand between operators that a fusion looks for.

What looks like nothing may still be a copy, or give other strides. A node is taken away only if what takes its
place has the same shape, strides and type, and if no output of the graph becomes memory that is an input's or
another output's where it was memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from cgkit.compiling.passes.base import GraphPass
from cgkit.compiling.passes.graphs import (
    VIEWS,
    call_with_value,
    leaves_the_graph,
    same_layout,
    tensor_value,
)

aten = torch.ops.aten
RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


class NoOpElimination(GraphPass):
    """Removes identity reshapes (``-1`` and equal symbols too), shortens chains of them, removes slices that take
    all and slice_scatters that overwrite all."""

    name = "noop"

    def __call__(self, graph: fx.Graph) -> int:
        rules: dict[Any, Callable[[fx.Node], bool]] = {
            **dict.fromkeys(RESHAPES, self._reshape),
            aten.slice.Tensor: self._slice,
            aten.slice_scatter.default: self._slice_scatter,
        }
        return sum(rules[node.target](node) for node in list(graph.nodes) if node.target in rules)

    def _reshape(self, node: fx.Node) -> bool:
        changed = self._shorten(node)
        return self._replace(node, node.args[0]) or changed

    def _shorten(self, node: fx.Node) -> bool:
        """A reshape of a reshape becomes a reshape of what was there first."""
        inner = node.args[0]
        if not isinstance(inner, fx.Node) or inner.target not in RESHAPES:
            return False
        source, old = inner.args[0], tensor_value(node)
        if old is None or tensor_value(source) is None:
            return False
        try:
            new = call_with_value(node.target, (source, *node.args[1:]))
        except (RuntimeError, ValueError):  # no view of the first one has this shape
            return False
        if not same_layout(old, new):
            return False
        node.args = (source, *node.args[1:])
        _erase_if_unused(inner)
        return True

    def _slice(self, node: fx.Node) -> bool:
        """A slice of step 1 with the shape of its source starts at the start."""
        step = node.args[4] if len(node.args) > 4 else node.kwargs.get("step", 1)
        return bool(step == 1) and self._replace(node, node.args[0])

    def _slice_scatter(self, node: fx.Node) -> bool:
        """Overwrites all of a copy of its first argument: the second argument, in other memory."""
        step = node.args[5] if len(node.args) > 5 else node.kwargs.get("step", 1)
        source = node.args[1] if len(node.args) > 1 else node.kwargs.get("src")
        if (
            step != 1
            or not isinstance(source, fx.Node)
            or not same_layout(tensor_value(node), tensor_value(source))
        ):
            return False
        if not leaves_the_graph(node):
            return self._replace(node, source)
        with node.graph.inserting_before(node):
            copied = node.graph.call_function(aten.clone.default, (source,))
        copied.meta = dict(node.meta)
        return self._replace(node, copied)

    def _replace(self, node: fx.Node, by: Any) -> bool:
        if not isinstance(by, fx.Node) or not same_layout(tensor_value(node), tensor_value(by)):
            return False
        if node.target not in VIEWS and node.target is not aten.slice_scatter.default:
            return False
        node.replace_all_uses_with(by)
        node.graph.erase_node(node)
        return True


def _erase_if_unused(node: fx.Node) -> None:
    if not node.users:
        node.graph.erase_node(node)
