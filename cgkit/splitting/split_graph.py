"""``split_graph``: one graph -> pieces, and the object that holds them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from cgkit.display import Shown, drawn
from cgkit.errors import SplitError
from cgkit.events import GraphSplit, emit
from cgkit.splitting.assign import Assignment, assign
from cgkit.splitting.frames import edges_frame, nodes_frame, pieces_frame
from cgkit.splitting.matching import splitting_nodes
from cgkit.splitting.node_lines import NodeLine, node_lines
from cgkit.splitting.normalise import normalised_copy
from cgkit.splitting.pieces import Piece, build_pieces
from cgkit.splitting.regions import refuse_cut_regions
from cgkit.splitting.stitch import Stitching, StitchingCode
from cgkit.splitting.values import fake_value

if TYPE_CHECKING:
    import pandas as pd

    from cgkit.tracing import TracedGraph


def split_graph(
    graph: TracedGraph | fx.GraphModule, splitting_ops: Sequence[str] | None = None
) -> SplitGraph:
    """Cuts ``graph`` at ``splitting_ops`` into capturable pieces and splitting pieces, in order.

    Args:
        graph: what :func:`cgkit.trace` gave, or any fx graph (it is left as it is).
        splitting_ops: operators as ``ns.name`` or ``ns::name``, with or without ``.overload``; empty:
            no cut. None: those of :data:`cgkit.config.DEFAULT_SPLITTING_OPS` that the graph holds.

    Raises:
        SplitError: a splitting operator is malformed or not in the graph (the message lists those that are); or it
            lies in a region of autocast, which would begin in one piece and end in another.

    Source: the article's "split_graph 的切图算法" (the splitting algorithm of split_graph). Not built on
    ``fx.passes.split_module`` as there: what crosses a cut, and in which order, is fixed here, and
    sizes, allocations and neighbouring splitting operators are treated as vLLM does today (PR #37395).
    """
    split = cut(graph, splitting_ops)
    emit(GraphSplit(split.model_name, len(split.pieces), split.num_capturable, split.seconds))
    return split


def cut(graph: TracedGraph | fx.GraphModule, splitting_ops: Sequence[str] | None = None) -> SplitGraph:
    """:func:`split_graph` without the event: for a graph that is only made again to be looked at."""
    start = time.perf_counter()
    bare = isinstance(graph, fx.GraphModule)
    original: fx.GraphModule = graph if bare else graph.graph_module  # type: ignore[union-attr,assignment]
    graph_module, symbols = normalised_copy(original)
    names, nodes = splitting_nodes(graph_module.graph, splitting_ops)
    assignment = assign(graph_module.graph, nodes, symbols.values())
    refuse_cut_regions(graph_module.graph, assignment, names)
    pieces = build_pieces(graph_module, assignment, symbols)
    return SplitGraph(
        traced=None if bare else graph,  # type: ignore[arg-type]
        graph_module=graph_module,
        assignment=assignment,
        pieces=pieces,
        splitting_ops=names,
        seconds=time.perf_counter() - start,
    )


class SplitGraph(Shown):
    """A graph in pieces, and how they go together again.

    Attributes:
        traced: the trace it came from, or None for a bare fx graph.
        graph_module: the whole graph with sizes decomposed (a copy); the pieces hold its nodes.
        pieces: all pieces in order; run one after the other they are the graph.
        splitting_ops: the operators that were cut at, as ``ns::name[.overload]``.
        assignment: which node of ``graph_module`` belongs to which piece.
        inputs: the names of the graph's inputs, in order.
        example_inputs: an example of each (fake tensors, SymInts); None if the graph brought none.
        model_name: the traced model's class, or the fx graph's.
        seconds: how long the cutting took.
    """

    def __init__(
        self,
        traced: TracedGraph | None,
        graph_module: fx.GraphModule,
        assignment: Assignment,
        pieces: list[Piece],
        splitting_ops: tuple[str, ...],
        seconds: float,
    ) -> None:
        self.traced = traced
        self.graph_module = graph_module
        self.pieces = pieces
        self.splitting_ops = splitting_ops
        self.seconds = seconds
        self.model_name: str = traced.model_name if traced is not None else type(graph_module).__name__
        placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
        self.inputs = [node.name for node in placeholders]
        self.example_inputs: list[Any] | None = _examples(traced, placeholders)
        self.assignment = assignment
        self._stitchings: dict[bool, StitchingCode] = {}
        self._default: Callable[..., Any] | None = None
        self._lines: dict[int, list[NodeLine]] = {}

    @property
    def capturable(self) -> list[Piece]:
        """The pieces without a splitting operator, in order: those that are compiled and recorded."""
        return [piece for piece in self.pieces if not piece.is_splitting]

    @property
    def num_capturable(self) -> int:
        """How many pieces are compiled and recorded."""
        return len(self.capturable)

    @property
    def outputs(self) -> Any:
        """What the graph returns: node names (and literals) in the structure in which it returns them."""
        output = self.graph_module.graph.output_node()
        return fx.node.map_arg(output.args[0], lambda node: node.name)

    @property
    def source(self) -> str:
        """The generated function that runs the pieces, as :meth:`stitch` compiles it."""
        return self._stitching(inline=True).source

    def stitch(
        self, callables: Sequence[Callable[..., Any]] | None = None, inline_splitting: bool = True
    ) -> Callable[..., Any]:
        """A function ``execute(*graph inputs)`` that runs all pieces and returns the graph's outputs.

        Args:
            callables: one for each capturable piece, in order, called like the piece: ``(*inputs) ->
                tuple`` or list. None: the pieces themselves, uncompiled.
            inline_splitting: the nodes of splitting pieces stand in the function itself. False: they
                are called as well, and ``callables`` has one for every piece.

        Raises:
            SplitError: the number of callables does not fit.
        """
        if callables is None:
            callables = [p.graph_module for p in self.pieces if not (inline_splitting and p.is_splitting)]
        return self._stitching(inline_splitting).compile(callables)

    def bind(self, execute: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """A function that is called like the model (or the fx graph) and runs ``execute`` (default: the
        uncompiled pieces) in place of the graph."""
        execute = self.stitch() if execute is None else execute
        if self.traced is not None:
            return self.traced.bind(execute)
        graph = self.graph_module.graph

        def call(*args: Any) -> Any:
            return graph.process_outputs(execute(*graph.process_inputs(*args)))

        return call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the uncompiled pieces as the model (or the fx graph) would be called."""
        if self._default is None:
            self._default = self.bind()
        return self._default(*args, **kwargs)

    def piece(self, which: str | int | Piece) -> Piece:
        """The piece of that name (``submod_2``) or number.

        Raises:
            SplitError: there is none; the message says which there are.
        """
        if isinstance(which, Piece):
            return which
        for piece in self.pieces:
            if which in (piece.name, piece.index):
                return piece
        names = f"{self.pieces[0].name} to {self.pieces[-1].name}" if self.pieces else "none"
        raise SplitError(f"{self.model_name} has no piece {which!r}; it has {names}")

    def lines(self, which: str | int | Piece) -> list[NodeLine]:
        """The nodes of one piece as plain data."""
        piece = self.piece(which)
        if piece.index not in self._lines:
            self._lines[piece.index] = node_lines(self, piece)
        return self._lines[piece.index]

    def to_frame(self) -> pd.DataFrame:
        """One row a piece: ``piece``, ``kind``, ``nodes``, ``inputs``, ``outputs``, ``operators``,
        ``content`` (equal for pieces whose nodes do the same)."""
        return pieces_frame(self, [len(nodes) for nodes in self.assignment.pieces])

    def edges_frame(self) -> pd.DataFrame:
        """One row a value and piece that takes it: ``value``, ``from_piece`` ("" for an input of the
        graph), ``to_piece`` ("" for what the graph returns), ``written_by`` (the last piece before that
        writes into it, or ""), ``role``, ``shape``, ``dtype``, ``source``."""
        return edges_frame(self)

    def nodes_frame(self, which: str | int | Piece) -> pd.DataFrame:
        """One row a node of one piece: ``node``, ``role``, ``operator``, ``constants``, ``text``,
        ``shape``, ``dtype``, ``reads_from`` (nodes: who made an input, or wrote into it last), ``source``.

        Raises:
            SplitError: there is no such piece.
        """
        return nodes_frame(self.lines(which))

    def draw(self, open: Sequence[str | int] = (), engine: str = "auto") -> Any:
        """The split graph as a picture, deep models folded (needs ``cgkit[plot]``).

        Args:
            open: pieces whose operators are drawn, by name (``"submod_2"``) or number.
            engine: "dot" (Graphviz), "own" (no other program), or "auto": dot where there is one.

        Raises:
            SplitError: there is no such piece.
        """
        names = [self.piece(which).name for which in open]
        return drawn(self, open=names, engine=engine)

    def __repr__(self) -> str:
        at = ", ".join(self.splitting_ops) or "nothing"
        head = (
            f"SplitGraph of {self.model_name}: {len(self.pieces)} pieces ({self.num_capturable} capturable), "
            f"cut at {at}, {self.seconds * 1e3:.0f} ms"
        )
        shown = self.pieces if len(self.pieces) <= 12 else [*self.pieces[:5], None, *self.pieces[-4:]]
        rows = [f"  {piece!r}" if piece else f"  ... {len(self.pieces) - 9} more" for piece in shown]
        return "\n".join([head, *rows])

    def stitching(self, inline: bool = True) -> StitchingCode:
        """The generated code that :meth:`stitch` compiles."""
        return self._stitching(inline)

    def _stitching(self, inline: bool) -> StitchingCode:
        if inline not in self._stitchings:
            self._stitchings[inline] = Stitching(self.graph_module, self.assignment, self.pieces, inline)
        return self._stitchings[inline]


def _examples(traced: TracedGraph | None, placeholders: list[fx.Node]) -> list[Any] | None:
    if traced is not None:
        return list(traced.example_inputs)
    values = [fake_value(node) for node in placeholders]
    return None if any(value is None for value in values) else values
