"""Which node belongs to which piece: one pass over the graph, in its order.

Implements the article's "split_graph 的切图算法" (the splitting algorithm of split_graph): the original
order is kept, because the graph is full of in-place writes whose order is their meaning. What differs
from the article, as vLLM learned later: splitting operators in a row share a piece, a ``getitem`` stays
with its producer, and what lies between two splitting operators and only allocates (or computes
numbers) makes no piece of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass, field

from torch import fx

from cgkit.splitting.values import (
    SYM_SIZE,
    changes_metadata,
    is_allocation,
    is_arithmetic,
    is_number,
    is_sequence,
)


@dataclass
class Assignment:
    """The outcome: nodes by piece, and those that belong to none."""

    #: The nodes of each piece, in the graph's order.
    pieces: list[list[fx.Node]] = field(default_factory=list)
    #: Whether each piece holds splitting operators.
    is_splitting: list[bool] = field(default_factory=list)
    #: The piece of each node that is in one.
    piece_of: dict[fx.Node, int] = field(default_factory=dict)
    #: Sizes of graph inputs: read once, before the first piece.
    prologue: list[fx.Node] = field(default_factory=list)
    #: Constants, and arithmetic on graph-level numbers: made again in each piece that uses them.
    local: set[fx.Node] = field(default_factory=set)


def assign(graph: fx.Graph, splitting: set[fx.Node], symbols: Collection[fx.Node]) -> Assignment:
    """Assigns every node of the (normalised) ``graph``; ``splitting`` are the nodes to cut at,
    ``symbols`` those that hold its graph-level symbols."""
    return _Pass(splitting, set(symbols), metadata_is_fixed=not changes_metadata(graph)).run(graph)


class _Pass:
    """The single pass. ``waiting`` holds nodes after a splitting operator that may yet turn out to need
    no piece of their own: allocations and numbers."""

    def __init__(self, splitting: set[fx.Node], symbols: set[fx.Node], metadata_is_fixed: bool) -> None:
        self.splitting = splitting
        self.symbols = symbols
        self.metadata_is_fixed = metadata_is_fixed
        self.result = Assignment()
        self.graph_numbers: set[fx.Node] = set()  # numbers that any piece may take or make
        self.waiting: list[fx.Node] = []

    def run(self, graph: fx.Graph) -> Assignment:
        for node in graph.nodes:
            if node.op == "placeholder":
                if is_number(node):
                    self.graph_numbers.add(node)
            elif node.op != "output" and not self._needs_no_piece(node):
                self._place(node)
        self._settle_waiting()
        return self.result

    def _needs_no_piece(self, node: fx.Node) -> bool:
        if node.op == "get_attr":
            self.result.local.add(node)
        elif node in self.splitting:
            return False
        elif is_arithmetic(node, self.graph_numbers.__contains__):
            self.result.local.add(node)
            self.graph_numbers.add(node)
        elif node in self.symbols or self._is_size_of_an_input(node):
            self.result.prologue.append(node)
            self.graph_numbers.add(node)
        else:
            return False
        return True

    def _is_size_of_an_input(self, node: fx.Node) -> bool:
        return self.metadata_is_fixed and node.target is SYM_SIZE and node.args[0].op == "placeholder"  # type: ignore[union-attr]

    def _place(self, node: fx.Node) -> None:
        result = self.result
        producer = _taken_from(node)
        if producer is not None and producer in result.piece_of:
            self._put(node, result.piece_of[producer])
        elif node in self.splitting:
            self._settle_waiting()
            if not result.pieces or not result.is_splitting[-1]:
                self._open(is_splitting=True)
            self._put(node, len(result.pieces) - 1)
        elif not result.pieces or (result.is_splitting[-1] and not self._may_wait(node)):
            self._open(is_splitting=False)
            self._place_waiting(len(result.pieces) - 1)
            self._put(node, len(result.pieces) - 1)
        elif result.is_splitting[-1]:
            self.waiting.append(node)
        else:
            self._put(node, len(result.pieces) - 1)

    def _may_wait(self, node: fx.Node) -> bool:
        if self.metadata_is_fixed and is_allocation(node):
            return True
        return node.target is SYM_SIZE or is_arithmetic(node)

    def _settle_waiting(self) -> None:
        """A splitting operator (or the graph's end) follows what is waiting, so it would be a piece of
        its own: it goes to the capturable piece before, where its buffers belong to the recording; or,
        if it is but numbers, stays beside the splitting operator; or becomes that piece after all."""
        if not self.waiting:
            return
        before = len(self.result.pieces) - 2  # the last piece is a splitting one: its predecessor is not
        if before >= 0 and self.metadata_is_fixed and self._exist_at(before):
            self._place_waiting(before)
        elif not any(map(is_allocation, self.waiting)):
            self._place_waiting(before + 1)
        else:
            self._open(is_splitting=False)
            self._place_waiting(before + 2)

    def _exist_at(self, piece: int) -> bool:
        """Whether all that the waiting nodes need exists at the end of ``piece``."""
        waiting = set(self.waiting)
        return all(
            operand in waiting or self.result.piece_of.get(operand, -1) <= piece
            for node in self.waiting
            for operand in node.all_input_nodes
        )

    def _open(self, is_splitting: bool) -> None:
        self.result.pieces.append([])
        self.result.is_splitting.append(is_splitting)

    def _place_waiting(self, piece: int) -> None:
        for node in self.waiting:
            self._put(node, piece)
        self.waiting.clear()

    def _put(self, node: fx.Node, piece: int) -> None:
        self.result.pieces[piece].append(node)
        self.result.piece_of[node] = piece


def _taken_from(node: fx.Node) -> fx.Node | None:
    """The tuple or list of which ``node`` takes an element, if that is what it does."""
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return None
    return node.args[0] if is_sequence(node.args[0]) and isinstance(node.args[1], int) else None
