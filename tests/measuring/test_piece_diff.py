"""Why do two pieces differ: laws of the diff, on lines drawn at random and on real pieces."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cgkit.compiling import compile_pieces
from cgkit.config import CompilationConfig
from cgkit.measuring.explain import explain
from cgkit.measuring.piece_diff import diff_nodes
from cgkit.splitting.node_lines import NodeLine
from tests.compiling.toys import split_llama

OPERATORS = ["aten::add", "aten::mul", "aten::linear", "my::op", "注意力"]


@st.composite
def pieces(draw):
    """A piece as lines: some inputs, then calls of earlier nodes with one constant each."""
    lines = []
    for i in range(draw(st.integers(1, 4))):
        role = draw(st.sampled_from(["value", "weight"]))
        lines.append(
            NodeLine(f"in_{i}", role, "", (), f"(s0, {draw(st.integers(1, 3))})", "float32", f"w.{i}")
        )
    for i in range(draw(st.integers(1, 12))):
        taken = draw(st.sampled_from([line.name for line in lines]))
        constant = str(draw(st.integers(0, 3)))
        arguments = (("0", taken, taken), ("1", constant, ""))
        operator = draw(st.sampled_from(OPERATORS))
        lines.append(NodeLine(f"n_{i}", "call", operator, arguments, "(s0, 2)", "float32"))
    last = lines[-1].name
    return [*lines, NodeLine("output", "output", "", (("0[0]", last, last),), "", "")]


def renamed(lines):
    """The same piece in another layer: every node and weight is called otherwise."""
    return [
        replace(
            line,
            name=f"other_{line.name}",
            source=line.source.replace("w.", "v."),
            arguments=tuple(
                (where, f"other_{node}" if node else text, f"other_{node}" if node else "")
                for where, text, node in line.arguments
            ),
        )
        for line in lines
    ]


@given(pieces())
def test_a_piece_does_not_differ_from_itself(lines):
    diff = diff_nodes(lines, lines)
    assert diff.equal and diff.differences == [] and diff.renamed == []
    assert [row.left for row in diff.rows] == [row.right for row in diff.rows] == lines


@given(pieces())
def test_names_are_no_difference(lines):
    diff = diff_nodes(lines, renamed(lines))
    assert diff.equal
    weights = [(line.source, line.source.replace("w.", "v.")) for line in lines if line.role == "weight"]
    assert diff.renamed == weights


@settings(max_examples=200)
@given(pieces(), st.data())
def test_one_changed_constant_is_the_only_difference_and_is_named(lines, data):
    calls = [i for i, line in enumerate(lines) if line.role == "call"]
    at = data.draw(st.sampled_from(calls))
    where, text, node = lines[at].arguments[1]
    other = list(renamed(lines))
    other[at] = replace(other[at], arguments=(other[at].arguments[0], (where, "1e-05", node)))
    diff = diff_nodes(lines, other, ("a", "b"))
    assert not diff.equal
    (row,) = diff.differences
    assert row.status == "changed" and row.left == lines[at]
    assert row.what == (f"constant (argument 1): {text} → 1e-05",)
    assert f"{text} → 1e-05" in diff.verdict() and lines[at].name in diff.verdict()
    assert "1e-05" in repr(diff)


@given(pieces(), pieces())
def test_every_node_of_both_is_in_the_diff_once_and_in_order(left, right):
    diff = diff_nodes(left, right)
    assert [row.left for row in diff.rows if row.left] == left
    assert [row.right for row in diff.rows if row.right] == right
    assert len(diff.to_frame()) == len(diff.rows)
    assert diff.equal == (not diff.differences)


@given(pieces(), st.data())
def test_a_node_too_many_does_not_make_the_rest_different(lines, data):
    extra = NodeLine("extra", "call", "my::extra", (("0", lines[0].name, lines[0].name),), "(s0)", "float32")
    at = data.draw(st.integers(sum(line.role != "call" for line in lines) - 1, len(lines) - 1))
    assume(at >= 1)
    diff = diff_nodes(lines, [*lines[:at], extra, *lines[at:]])
    (row,) = diff.differences
    assert row.status == "only right" and row.right == extra


# --- real pieces ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def explained():
    _, split = split_llama(4, epsilons=(1e-6, 1e-6, 1e-5, 1e-6))
    return explain(compile_pieces(split, CompilationConfig(compiler="eager", cudagraph_mode="NONE")))


def test_the_layer_with_another_epsilon_is_told_apart_by_it(explained):
    diff = explained.why_different("submod_2", "submod_4")
    assert not diff.equal
    assert [row.what for row in diff.differences] == [("constant (argument 1): 1e-06 → 1e-05",)]
    assert diff.differences[0].left.operator == "aten::add"
    names = dict(diff.renamed)
    assert names["layers.0.up.weight"] == "layers.1.up.weight"
    html = diff._repr_mimebundle_()["text/html"]
    assert html.count('class="cg-changed"') == 2  # once in the short table, once in the whole one
    assert "≠" in html and "1e-06 → 1e-05" in html


def test_pieces_that_share_are_said_to_be_equal():
    _, split = split_llama(4)
    explained = explain(compile_pieces(split, CompilationConfig(compiler="eager", cudagraph_mode="NONE")))
    diff = explained.why_different(2, 4)
    assert diff.equal and diff.key_lines == ()
    assert "one compilation serves both (only the names of 6 weights differ)" in repr(diff)


def test_the_first_and_a_middle_piece_differ_by_whole_nodes(explained):
    diff = explained.why_different("submod_0", "submod_2")
    only_right = [row.right.operator for row in diff.differences if row.status == "only right"]
    assert "aten::silu" in only_right
    assert any(
        row.status == "only left" and row.left.operator == "aten::embedding" for row in diff.differences
    )


def test_what_only_the_key_knows_is_shown():
    lines = [NodeLine("x", "value", "", (), "(s0)", "float32")]
    diff = diff_nodes(lines, lines, ("a", "b"), ["- input 0: stride (1)", "+ input 0: stride (2)"])
    assert not diff.equal and "not compiled alike: - input 0: stride (1)" in diff.verdict()
    assert "stride (2)" in repr(diff) and "stride (2)" in diff._repr_mimebundle_()["text/html"]
