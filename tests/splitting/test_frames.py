"""A split graph as frames: what crosses, what is in a piece, which pieces are equal."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cgkit.errors import SplitError
from cgkit.splitting import split_graph
from cgkit.splitting.node_lines import content_digest
from cgkit.tracing import trace
from tests.splitting.toys import Llama, Toy

OPS = ["splittoy::attention"]


def llama(layers: int = 3):
    inputs = torch.arange(8) % 16, torch.arange(8).float()
    traced = trace(Llama(layers), *inputs, dynamic_arg_dims={"tokens": 0, "positions": 0})
    return split_graph(traced, OPS)


@pytest.fixture(scope="module")
def split():
    return llama()


def test_each_input_of_a_piece_is_an_edge(split):
    edges = split.edges_frame()
    for piece in split.pieces:
        rows = edges[edges["to_piece"] == piece.name]
        assert list(rows["value"]) == list(piece.input_names)
    made = {name: piece.name for piece in split.pieces for name in piece.output_names}
    for row in edges.to_dict("records"):
        assert row["from_piece"] == made.get(row["value"], "")


def test_edges_know_weights_numbers_and_who_wrote_a_buffer(split):
    edges = split.edges_frame()
    weights = edges[edges["role"] == "weight"]
    assert "layers.0.qkv.weight" in set(weights["source"])
    assert weights["value"].nunique() == len(list(Llama(3).parameters()))
    assert set(edges[edges["role"] == "number"]["dtype"]) == {"int"}
    into = edges[(edges["to_piece"] == "submod_2") & (edges["from_piece"] == "submod_0")]
    assert set(into["written_by"]) == {"submod_1", ""}  # attention's buffer, and the residual past it
    (returned,) = edges[edges["to_piece"] == ""].to_dict("records")
    assert returned["from_piece"] == split.pieces[-1].name


def test_shapes_are_symbolic(split):
    frame = split.nodes_frame("submod_2")
    symbol = next(line.name for line in split.lines("submod_2") if line.role == "number")
    linear = frame[frame["operator"] == "aten::linear"]
    assert all(shape.startswith(f"({symbol}, ") for shape in linear["shape"])


def test_equal_pieces_have_equal_content_and_no_others(split):
    frame = split.to_frame()
    content = dict(zip(frame["piece"], frame["content"]))
    assert content["submod_2"] == content["submod_4"]
    assert len({content[name] for name in ("submod_0", "submod_2", "submod_6")}) == 3
    assert content_digest(split.lines(2)) == content["submod_2"]


def test_a_changed_constant_and_a_changed_shape_change_the_content():
    def of(constant: float, width: int) -> str:
        class Adds(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * 2 + constant

        traced = trace(Adds(), torch.ones(4, width), dynamic_arg_dims={"x": 0})
        return split_graph(traced, []).to_frame()["content"][0]

    assert of(1.0, 8) == of(1.0, 8)
    assert len({of(1.0, 8), of(2.0, 8), of(1.0, 16)}) == 3


def test_what_reads_a_written_buffer_comes_after_the_writer():
    class Writes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.empty_like(x)
            y.copy_(x)
            y.add_(1)
            return y * 2

    split = split_graph(trace(Writes(), torch.ones(4), dynamic_arg_dims={"x": 0}), [])
    lines = {line.operator: line for line in split.lines(0) if line.role == "call"}
    assert lines["aten::add_"].reads_from == (lines["aten::copy_"].name,)
    assert lines["aten::mul"].reads_from == (lines["aten::add_"].name,)


def test_indices_read_as_they_are_written():
    class Indexes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, None, 1::2] + x[..., :3, None].sum()

    split = split_graph(trace(Indexes(), torch.ones(4, 6), dynamic_arg_dims={"x": 0}), [])
    constants = [line.constants for line in split.lines(0)]
    assert "(:, None, 1::2)" in constants and "(..., :3, None)" in constants


def test_two_splitting_calls_in_a_row_are_one_piece_with_both_inside():
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + 1
            a, b = torch.empty_like(x), torch.empty_like(x)
            torch.ops.splittoy.attention(x, x, x, a)
            torch.ops.splittoy.attention(a, a, a, b)
            return b * 2

    split = split_graph(trace(Twice(), torch.ones(4, 2), dynamic_arg_dims={"x": 0}), OPS)
    assert list(split.to_frame()["kind"]) == ["capturable", "splitting", "capturable"]
    second = [line for line in split.lines(1) if line.role == "call"]
    assert second[1].reads_from == (second[0].name, "b") or second[0].name in second[1].reads_from
    assert split.draw(open=[1], engine="own").svg().count('class="cg-node"') >= 4


def test_a_bare_graph_draws_as_well():
    bare = torch.fx.symbolic_trace(Toy())
    split = split_graph(bare, OPS)
    assert (split.edges_frame()["role"] == "value").all()
    assert "5 pieces" in split.draw(engine="own").svg()


def test_a_piece_that_is_not_there_is_named_with_those_that_are(split):
    with pytest.raises(SplitError, match="no piece 'submod_99'; it has submod_0 to submod_6"):
        split.draw(open=["submod_99"])
    assert split.piece(3) is split.piece("submod_3") is split.pieces[3]


def test_traced_and_split_show_themselves(split):
    for artefact in (split, split.traced):
        html = artefact._repr_mimebundle_()["text/html"]
        assert html.count("<svg") >= 1 and "layers.0.qkv.weight" in html
        assert artefact.draw(engine="own").engine == "own"


def test_a_deep_model_is_drawn_small():
    deep = llama(40)
    picture = deep.draw(engine="own")
    assert picture.svg().count('class="cg-piece') == 5 and "39 × the same" in picture.svg()
    opened = deep.draw(open=["submod_20"], engine="own").svg()
    assert "9 × the same" in opened and "29 × the same" in opened
    assert len(deep._repr_mimebundle_()["text/html"]) < 300_000
