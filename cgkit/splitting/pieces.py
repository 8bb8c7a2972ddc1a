"""The pieces themselves: one sub graph each, with what crosses into it and out of it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from cgkit.splitting.assign import Assignment
from cgkit.splitting.matching import operator_name
from cgkit.splitting.values import fake_value, is_number
from cgkit.torch_hooks import free_symbol_names


@dataclass(frozen=True, eq=False)
class Piece:
    """One piece of a split graph.

    ``graph_module`` takes the values named ``input_names`` and always returns a tuple, those named
    ``output_names`` (names of nodes of the whole graph). A capturable piece gets the graph-level symbols
    that occur in its inputs first, then everything else in the order in which it is first used.
    """

    index: int
    is_splitting: bool
    graph_module: fx.GraphModule
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    #: The operators that it calls, in order, as ``ns::name``; elements taken of a tuple are left out.
    ops: tuple[str, ...]

    @property
    def name(self) -> str:
        """``submod_<index>``, as in the article's printed graphs."""
        return f"submod_{self.index}"

    @property
    def kind(self) -> str:
        """``"splitting"`` or ``"capturable"``."""
        return "splitting" if self.is_splitting else "capturable"

    @property
    def on_fakes(self) -> Callable[..., Any]:
        """What gives, called with fake inputs, outputs of the piece's shapes that share memory as the piece's do."""
        return self.graph_module

    def __repr__(self) -> str:
        names = ", ".join(self.ops[:4]) + (f", ... ({len(self.ops)})" if len(self.ops) > 4 else "")
        crossing = f"{len(self.input_names)} in, {len(self.output_names)} out"
        return f"Piece({self.name}, {self.kind}, {crossing}: {names})"


def build_pieces(root: fx.GraphModule, assignment: Assignment, symbols: dict[str, fx.Node]) -> list[Piece]:
    """Builds the pieces of ``root``; ``symbols`` are its graph-level symbols (see Piece)."""
    builder = _Builder(root, assignment, symbols)
    return [builder.build(index) for index in range(len(assignment.pieces))]


class _Builder:
    def __init__(self, root: fx.GraphModule, assignment: Assignment, symbols: dict[str, fx.Node]) -> None:
        self.root = root
        self.assignment = assignment
        self.symbols = symbols
        self.symbols_of: dict[fx.Node, frozenset[str]] = {}

    def build(self, index: int) -> Piece:
        nodes = self.assignment.pieces[index]
        local = self.local_nodes(nodes)
        inside = {*nodes, *local}
        used = dict.fromkeys(operand for node in (*nodes, *local) for operand in node.all_input_nodes)
        inputs = [node for node in used if node not in inside]
        if not self.assignment.is_splitting[index]:
            inputs = self.symbols_first(inputs)
        outputs = [node for node in nodes if self.leaves(node, index)]
        name = f"submod_{index}"
        return Piece(
            index,
            self.assignment.is_splitting[index],
            fx.GraphModule(self.root, _sub_graph(inputs, nodes, local, outputs), name),
            tuple(node.name for node in inputs),
            tuple(node.name for node in outputs),
            tuple(operator_name(node) for node in nodes if node.target is not operator.getitem),
        )

    def local_nodes(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """The constants and the number arithmetic that the piece makes for itself."""
        found: set[fx.Node] = set()
        todo = [operand for node in nodes for operand in node.all_input_nodes]
        while todo:
            node = todo.pop()
            if node in self.assignment.local and node not in found:
                found.add(node)
                todo.extend(node.all_input_nodes)
        return found

    def symbols_first(self, inputs: list[fx.Node]) -> list[fx.Node]:
        """Before all others the symbols of the tensors' shapes (the batch symbol is the first), then
        those that are only computed with, each in the graph's order."""
        tensors = [node for node in inputs if not is_number(node)]
        in_shapes = frozenset().union(*map(self.symbol_names, tensors))
        in_numbers = frozenset().union(*map(self.symbol_names, inputs)) - in_shapes
        first = [node for name, node in self.symbols.items() if name in in_shapes]
        first += [node for name, node in self.symbols.items() if name in in_numbers]
        return list(dict.fromkeys([*first, *inputs]))

    def symbol_names(self, node: fx.Node) -> frozenset[str]:
        if node not in self.symbols_of:
            self.symbols_of[node] = free_symbol_names(fake_value(node))
        return self.symbols_of[node]

    def leaves(self, node: fx.Node, index: int) -> bool:
        return any(user.op == "output" or self.assignment.piece_of.get(user) != index for user in node.users)


def _sub_graph(
    inputs: list[fx.Node], nodes: list[fx.Node], local: set[fx.Node], outputs: list[fx.Node]
) -> fx.Graph:
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        new[node] = graph.placeholder(node.name, type_expr=node.type)
        new[node].meta = {**node.meta}

    def copied(node: fx.Node) -> fx.Node:
        if node not in new:  # a local node, at its first use
            new[node] = graph.node_copy(node, copied)
        return new[node]

    for node in nodes:
        new[node] = graph.node_copy(node, copied)
    result = graph.output(tuple(new[node] for node in outputs))
    result.meta["example_value"] = tuple(fake_value(node) for node in outputs)
    return graph
