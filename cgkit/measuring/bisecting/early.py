"""Stages 1 and 2: what the trace makes of the model, and the pieces of the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from cgkit.capturing.debugging.copies import copied
from cgkit.capturing.debugging.eager import MarkingAllocations, as_written, run_on_copies, undisturbed
from cgkit.capturing.debugging.operators import Culprit, culprit
from cgkit.numerics import first_apart
from cgkit.splitting import SplitGraph
from cgkit.tensor_trees import tensor_leaves
from cgkit.torch_hooks import TorchDispatchMode
from cgkit.tracing import TracedGraph

#: (operator, node or None, copies of the results)
Call = tuple[str, "fx.Node | None", list[torch.Tensor]]


class _Log(TorchDispatchMode):
    """Notes each operator that runs, with its results."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.node: fx.Node | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        name = str(func)
        if not name.startswith(("aten.empty", "aten.new_empty", "aten.detach")):
            results = [tensor.detach().clone() for _, tensor in tensor_leaves(made)]
            self.calls.append((name, self.node, results))
        return made


class _Following(fx.Interpreter):
    """Says which node is running."""

    def __init__(self, graph_module: fx.GraphModule, log: _Log) -> None:
        super().__init__(graph_module)
        self.log = log

    def run_node(self, n: fx.Node) -> Any:
        self.log.node = n
        return super().run_node(n)


def operator_of_trace(
    model: Any, traced: TracedGraph, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Culprit | None:
    """The first operator of the trace that the eager model does not call, or calls with another result.

    What the model calls and the trace does not (dead code) is no difference.
    """
    theirs, ours = _Log(), _Log()
    forward = model.forward
    for log, run in (
        (theirs, forward),
        (ours, traced.bind(lambda *inputs: _Following(traced.graph_module, ours).run(*inputs))),
    ):
        own_args, own_kwargs = copied((args, kwargs))
        with undisturbed((args, kwargs)), as_written(), torch.no_grad(), log:
            run(*own_args, **own_kwargs)
    at = 0
    for name, node, results in ours.calls:
        if node is None or node.op in ("placeholder", "output"):
            continue
        found = next(
            (
                place
                for place in range(at, len(theirs.calls))
                if theirs.calls[place][0] == name and first_apart(theirs.calls[place][2], results) is None
            ),
            None,
        )
        if found is None:
            return culprit(node)
        at = found + 1
    return None


def first_piece_apart(split: SplitGraph, inputs: Sequence[Any]) -> tuple[str, Culprit | None, str]:
    """The first piece that gives something else than its nodes in the whole graph: (piece, operator, how).

    ("", None, "") if none does: then the pieces are put together wrongly.
    """
    own = copied(tuple(inputs))
    whole = _Whole(split.graph_module, own)
    with undisturbed(inputs), torch.no_grad():
        for piece, nodes in zip(split.pieces, split.assignment.pieces):
            given = [whole.value(name) for name in piece.input_names]
            before = copied(tuple(given))
            with MarkingAllocations():
                for node in nodes:
                    whole.run(node)
            try:
                got = run_on_copies(piece.graph_module, before)
                apart = first_apart(
                    tuple(whole.value(name) for name in piece.output_names),
                    tuple(got.outputs),
                    unwritten=True,
                )
            except Exception as error:
                return piece.name, None, f"{type(error).__name__}: {error}"
            if apart is not None:
                return piece.name, _first_node_apart(split, piece, before), str(apart)
    return "", None, ""


class _Whole:
    """Runs the nodes of a graph in any order that their inputs allow."""

    def __init__(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self.runner = fx.Interpreter(graph_module)
        self.nodes = {node.name: node for node in graph_module.graph.nodes}
        placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
        self.runner.env.update(zip(placeholders, inputs))

    def run(self, node: fx.Node) -> Any:
        if node not in self.runner.env:
            for each in node.all_input_nodes:
                self.run(each)
            self.runner.env[node] = self.runner.run_node(node)
        return self.runner.env[node]

    def value(self, name: str) -> Any:
        return self.run(self.nodes[name])


def _first_node_apart(split: SplitGraph, piece: Any, given: Sequence[Any]) -> Culprit | None:
    """The first node of a piece that is not the node of that name in the whole graph."""
    whole = {node.name: node for node in split.graph_module.graph.nodes}
    runner = fx.Interpreter(piece.graph_module)
    own, other = copied((tuple(given), tuple(given)))
    placeholders = [node for node in piece.graph_module.graph.nodes if node.op == "placeholder"]
    runner.env.update(zip(placeholders, own))
    theirs = fx.Interpreter(split.graph_module)
    theirs.env.update({whole[node.name]: value for node, value in zip(placeholders, other)})
    for node in piece.graph_module.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        twin = whole.get(node.name)
        if twin is None:
            return culprit(node)
        runner.env[node] = runner.run_node(node)
        theirs.env[twin] = theirs.run_node(twin)
        if first_apart(theirs.env[twin], runner.env[node]) is not None:
            return culprit(node)
    return None
