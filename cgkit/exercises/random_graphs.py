"""Small random fx graphs, full of what a cut can break: writes in place, tuples, writes through out-parameters.

For exercise 03-5, where the reader's own way of numbering pieces is tried on them.
"""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from cgkit.exercises.core import Verdict, nearly, wrong


def hinge(x: torch.Tensor, out: torch.Tensor) -> None:
    """The operator to cut at: writes into ``out``, as attention does."""
    out.copy_(x.cumsum(0) + 1)


def is_splitting(node: fx.Node) -> bool:
    """Whether ``node`` is one to cut at."""
    return node.op == "call_function" and node.target is hinge


def random_graph(seed: int, steps: int = 12) -> fx.Graph:
    """A graph over two inputs of shape (4, 4) that returns its last three values. The same seed, the same graph."""
    chance = random.Random(seed)
    graph = fx.Graph()
    values = [graph.placeholder("x"), graph.placeholder("y")]
    late: list[fx.Node] = []  # tuples of which an element is taken later, perhaps behind a cut
    for kind in chance.choices(("add", "write", "tuple", "cut", "cut", "element"), k=steps):
        a, b = chance.choice(values), chance.choice(values)
        if kind == "add":
            values.append(graph.call_function(torch.add, (a, b)))
        elif kind == "write":
            graph.call_method(chance.choice(("mul_", "add_")), (a, b))
        elif kind == "tuple":
            late.append(graph.call_function(torch.sort, (a, 0)))
        elif kind == "element" and late:
            values.append(graph.call_function(operator.getitem, (chance.choice(late), 0)))
        elif kind == "cut":
            out = graph.call_function(torch.zeros_like, (a,)) if chance.random() < 0.7 else b
            graph.call_function(hinge, (a, out))
            values.append(out)
    graph.output(tuple(values[-3:]))
    graph.lint()
    return graph


def run(nodes: list[fx.Node]) -> list[torch.Tensor]:
    """Runs ``nodes`` of a random graph in this order: what it returns, and its inputs afterwards.

    Raises:
        KeyError: a node comes before one that it takes something from.
    """
    torch_state = torch.Generator().manual_seed(0)
    known: dict[fx.Node, Any] = {}
    inputs = []
    for node in nodes:
        args = fx.node.map_arg(node.args, lambda n: known[n])
        if node.op == "placeholder":
            known[node] = torch.rand(4, 4, generator=torch_state) / 2
            inputs.append(known[node])
        elif node.op == "output":
            returned: Any = args[0]
            return [*(value.clone() for value in returned), *inputs]
        elif node.op == "call_method":
            known[node] = getattr(args[0], str(node.target))(*args[1:])
        else:
            known[node] = node.target(*args)  # type: ignore[operator]
    raise ValueError("the nodes hold no output")


def judge(graph: fx.Graph, piece_of: Mapping[fx.Node, int]) -> Verdict | None:
    """What is wrong with a numbering of the graph's pieces; None if nothing is."""
    nodes = list(graph.nodes)
    body = [node for node in nodes if node.op not in ("placeholder", "output")]
    missing = [node for node in body if node not in piece_of]
    if missing:
        return wrong(f"The node {missing[0].name} ({missing[0].target}) belongs to no piece.")
    kinds: dict[int, bool] = {}
    for node in body:
        if kinds.setdefault(piece_of[node], is_splitting(node)) != is_splitting(node):
            return wrong(f"Piece {piece_of[node]} holds an operator to cut at and others.")
    place = {node: index for index, node in enumerate(nodes)}
    ordered = sorted(body, key=lambda node: (piece_of[node], place[node]))
    ends = (
        [node for node in nodes if node.op == "placeholder"],
        [node for node in nodes if node.op == "output"],
    )
    try:
        same = all(map(torch.equal, run([*ends[0], *ordered, *ends[1]]), run(nodes)))
    except KeyError as error:
        return wrong(f"Run piece by piece, something reads {error.args[0]} before it is made.")
    if not same:
        return wrong(
            "Run piece by piece it gives something else: the order of a write and a read has changed."
        )
    apart = [n for n in body if n.target is operator.getitem and piece_of[n] != piece_of[n.args[0]]]
    if apart:
        return nearly(
            f"Every result is right, but a tuple crosses from piece to piece (before {apart[0].name})."
        )
    numbers = sorted(kinds)
    if any(not kinds[a] and not kinds[b] for a, b in itertools.pairwise(numbers)):
        return nearly("Every result is right, but two pieces side by side could be one.")
    return None
