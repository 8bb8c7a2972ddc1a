"""Going through a split graph once, with values: what its stitching code would do, piece by piece.

The stitching code is what runs; this is for whoever wants to know what it *would* run, and hand in something
else: a replay plan is laid out so. One node at a time, hence slow, and only done at capture.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from cgkit.splitting.pieces import Piece
from cgkit.splitting.values import SYM_SIZE, called_overload, is_arithmetic

if TYPE_CHECKING:
    from cgkit.splitting.split_graph import SplitGraph

#: (piece, inputs in the order of ``piece.input_names``) -> outputs as ``piece.output_names``.
RunPiece = Callable[[Piece, Sequence[Any]], Sequence[Any]]
#: (piece, what is called, args, kwargs) -> its result.
RunCall = Callable[[Piece, Any, tuple[Any, ...], dict[str, Any]], Any]


def walk(split: SplitGraph, inputs: Sequence[Any], run_piece: RunPiece, run_call: RunCall) -> Any:
    """Goes through ``split`` in order and returns the graph's outputs.

    Args:
        inputs: the graph's, in order.
        run_piece: called for each capturable piece.
        run_call: called for each node of a splitting piece that is neither arithmetic on numbers, nor the size of a
            tensor, nor an element of a tuple. What is called is an overload where that can be told, else the node's
            target, the name of a tensor's method for ``call_method``.
    """
    return _Walk(split, run_piece, run_call).run(inputs)


class _Walk:
    def __init__(self, split: SplitGraph, run_piece: RunPiece, run_call: RunCall) -> None:
        self.split, self.run_piece, self.run_call = split, run_piece, run_call
        self.assignment = split.assignment
        self.values: dict[fx.Node, Any] = {}

    def run(self, inputs: Sequence[Any]) -> Any:
        graph = self.split.graph_module.graph
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        self.values.update(zip(placeholders, inputs, strict=True))
        by_name = {node.name: node for node in graph.nodes}
        for node in self.assignment.prologue:
            self.values[node] = self.plain(node)
        for piece in self.split.pieces:
            if piece.is_splitting:
                for node in self.assignment.pieces[piece.index]:
                    self.values[node] = self.between(piece, node)
                continue
            given = [self.value(by_name[name]) for name in piece.input_names]
            made = self.run_piece(piece, given)
            self.values.update(zip([by_name[name] for name in piece.output_names], made, strict=True))
        return self.argument(graph.output_node().args[0])

    def between(self, piece: Piece, node: fx.Node) -> Any:
        """The value of one node of a splitting piece."""
        element = node.target is operator.getitem and isinstance(self.value(node.args[0]), (tuple, list))  # type: ignore[arg-type]
        if element or node.target is SYM_SIZE or is_arithmetic(node):
            return self.plain(node)
        args, kwargs = self.argument(node.args), self.argument(node.kwargs)
        if node.op == "call_method":
            return self.run_call(piece, str(node.target), args, kwargs)
        if node.op == "call_module":
            target: Any = self.split.graph_module.get_submodule(str(node.target))
        else:
            target = called_overload(node) or node.target
        return self.run_call(piece, target, args, kwargs)

    def value(self, node: fx.Node) -> Any:
        """The value of a node; what belongs to no piece is worked out when it is first asked for."""
        if node not in self.values:
            self.values[node] = self.plain(node)
        return self.values[node]

    def plain(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return operator.attrgetter(str(node.target))(self.split.graph_module)
        function: Any = node.target
        return function(*self.argument(node.args), **self.argument(node.kwargs))

    def argument(self, arg: Any) -> Any:
        return fx.node.map_arg(arg, self.value)
