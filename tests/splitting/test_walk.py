"""A step gone through with its calls handed over, and pieces as code: the same values as the graphs'."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import nn

from cgkit.capturing.emulated_layouts import Layouts
from cgkit.splitting import register_op, split_graph, unregister_op
from cgkit.splitting.piece_code import piece_code
from cgkit.splitting.walk import walk
from cgkit.tracing import trace

from .toys import ATTENTION, Toy


def walked(split, inputs, seen):
    """The outputs by a walk that really calls everything, and what it was handed."""

    def run_piece(piece, given):
        seen.append(piece.name)
        return piece.graph_module(*given)

    def run_call(piece, target, args, kwargs):
        seen.append((piece.name, target))
        return (
            (getattr(args[0], target)(*args[1:], **kwargs))
            if isinstance(target, str)
            else target(*args, **kwargs)
        )

    return walk(split, inputs, run_piece, run_call)


def executed(split, *args):
    """The outputs of the stitching code, and the graph's inputs."""
    inputs = []

    def execute(*given):
        inputs.extend(given)
        return split.stitch()(*given)

    outputs = []
    split.bind(lambda *given: outputs.append(execute(*given)) or outputs[0])(*args)
    return outputs[0], inputs


def test_operators_are_handed_over_as_overloads():
    split = split_graph(trace(Toy(), torch.randn(4, 8)), ["splittoy::attention"])
    expected, inputs = executed(split, torch.randn(3, 8))
    seen = []
    assert torch.equal(walked(split, inputs, seen)[0], expected[0])
    assert seen == ["submod_0", ("submod_1", ATTENTION), "submod_2", ("submod_3", ATTENTION), "submod_4"]


class Between(nn.Module):
    """Methods, a function, elements of a tuple and of a tensor, and numbers at the cuts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        first, second = (x + 1).split(4, dim=1)
        y = (first * second + rows * 2).softmax(-1)
        return torch.relu(y * 2)[:, 1] + rows


@pytest.mark.parametrize("ops", [["aten::split"], ["aten::softmax", "aten::relu"]])
def test_methods_functions_and_elements(ops):
    split = split_graph(trace(Between(), torch.randn(5, 8)), ops)
    expected, inputs = executed(split, x := torch.randn(6, 8))
    seen = []
    assert torch.equal(walked(split, inputs, seen)[0], expected[0])
    assert torch.equal(expected[0], Between()(x))
    handed = [each[1] for each in seen if isinstance(each, tuple)]
    assert handed == (["split"] if len(ops) == 1 else ["softmax", torch.relu])


def test_an_element_of_a_tensor_and_arithmetic_on_tensors_are_handed_over():
    graph = torch.fx.Graph()
    added = graph.call_function(operator.add, (graph.placeholder("x"), 1))
    row = graph.call_function(operator.getitem, (added, 0))  # without example values: of a tuple, perhaps
    graph.output((graph.call_function(operator.mul, (row, 2)),))
    split = split_graph(torch.fx.GraphModule(nn.Module(), graph), ["aten::add"])
    seen, given = [], torch.randn(3, 4)
    assert torch.equal(walked(split, [given], seen)[0], (given[0] + 1) * 2)
    assert seen == [("submod_0", operator.add), ("submod_0", operator.getitem), "submod_1"]


def noted(x: torch.Tensor) -> torch.Tensor:
    raise AssertionError("the implementation ran where only shapes were asked for")


class Whole(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.ops.splittoy.noted(x) * x.shape[0]
        y.add_(1)
        kept = torch.empty_like(y)
        kept.copy_(y)
        out = torch.empty_like(y)
        torch.ops.splittoy.attention(y, y, y, out)
        return out + kept, kept[1:], x


def test_a_pieces_code_gives_what_its_graph_gives_and_reaches_fake_implementations():
    register_op("noted", noted, [], torch.empty_like, namespace="splittoy")
    try:
        split = split_graph(trace(Whole(), torch.randn(4, 8)), ["splittoy::attention"])
        piece = split.capturable[0]
        code = piece_code(piece)
        assert "add_" in code.source and "copy_" in code.source  # nobody uses what they return
        args = [6 if name.startswith("s") else torch.empty(6, 8) for name in piece.input_names]
        ours, theirs = (Layouts().of_piece(each, args) for each in (code, piece.graph_module))
        assert ours == theirs and len(ours.outputs) == len(piece.output_names) > 1
    finally:
        unregister_op("splittoy::noted")


def test_a_pieces_code_computes_the_piece():
    split = split_graph(trace(Toy(), torch.randn(4, 8)), ["splittoy::attention"])
    piece = split.capturable[2]
    args = [5 if name.startswith("s") else torch.randn(5, 8) for name in piece.input_names]
    (ours,), (theirs,) = piece_code(piece)(*args), piece.graph_module(*args)
    assert torch.equal(ours, theirs) and torch.equal(ours, args[-1] + 1)
