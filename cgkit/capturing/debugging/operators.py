"""Which operator of a piece is the first to differ: the piece is built up to somewhere, and again up to elsewhere.

What a compiled or recorded piece computes inside cannot be seen. So its graph is cut off behind one operator, what is
alive there is returned, and that shorter piece goes the same way (compiled, recorded) and is compared with its eager
run; bisection finds the first operator behind which it differs. A fault that only the whole piece shows (a fusion that
the cut takes apart) cannot be told so: then there is no answer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from cgkit.capturing.debugging.eager import run_on_copies, runs_apart
from cgkit.splitting.matching import operator_name
from cgkit.splitting.values import fake_value, is_number
from cgkit.tracing.frames import user_line

#: A part of a piece's graph -> what is called with the piece's inputs.
Build = Callable[[fx.GraphModule], Callable[..., Any]]


class Culprit(NamedTuple):
    """An operator: its name (``aten::relu``, ``relu``), its node, the user's line ("" where unknown)."""

    operator: str
    node: str
    line: str

    def __str__(self) -> str:
        return f"{self.operator} (node {self.node}{', ' + self.line if self.line else ''})"


def first_differing_operator(
    graph_module: fx.GraphModule, given: Sequence[Any], build: Build
) -> Culprit | None:
    """The first operator of a piece behind which ``build`` gives something else than the eager run; None: no telling.

    Args:
        given: the piece's inputs.
        build: makes a callable of a part of the graph with the same placeholders.
    """
    steps = [node for node in graph_module.graph.nodes if _computes(node)]
    if not steps or not _differs(graph_module, steps[-1], given, build):
        return None
    low, high = -1, len(steps) - 1  # behind steps[low] nothing differs, behind steps[high] something does
    while high - low > 1:
        middle = (low + high) // 2
        if _differs(graph_module, steps[middle], given, build):
            high = middle
        else:
            low = middle
    return culprit(steps[high])


def culprit(node: fx.Node) -> Culprit:
    """What to call ``node``; an element of a tuple is called after what made the tuple."""
    source = node
    while source.target is operator.getitem and isinstance(source.args[0], fx.Node):
        source = source.args[0]
    place = user_line(source)
    line = f"{place[0]}:{place[1]}: {place[2]}" if place else ""
    return Culprit(operator_name(source), node.name, line)


def up_to(graph_module: fx.GraphModule, last: fx.Node) -> fx.GraphModule | None:
    """The graph up to ``last``, returning the tensors that are alive there; None where there are none."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in graph_module.graph.nodes:
        new[node] = graph.node_copy(node, lambda n: new[n])
        if node is last:
            break
    made = [node for node in new if _is_tensor(node) and node.op != "placeholder"]
    alive = [node for node in made if node is last or any(user not in new for user in node.users)]
    alive = list(dict.fromkeys([*alive, *(node for node in last.all_input_nodes if node in made)]))
    if not alive:
        return None
    graph.output(tuple(new[node] for node in alive)).meta["example_value"] = tuple(map(fake_value, alive))
    return fx.GraphModule(graph_module, graph)


def _differs(graph_module: fx.GraphModule, last: fx.Node, given: Sequence[Any], build: Build) -> bool:
    part = up_to(graph_module, last)
    if part is None:
        return False
    expected = run_on_copies(part, given)
    if expected.random:
        return False
    got = run_on_copies(build(part), given)
    return runs_apart(expected, got.outputs, got.given, part, given) is not None


def _computes(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method", "call_module") and not is_number(node)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(fake_value(node), torch.Tensor)
