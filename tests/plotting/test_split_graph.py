import itertools
import re
import stat
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest

from cgkit.errors import ConfigError
from cgkit.plotting import About, split_dot, split_graph
from cgkit.plotting.split_model import make_model, short, tensor_text
from cgkit.plotting.style import SERIES, SPLITTING
from cgkit.plotting.svg_text import text_width
from tests.plotting import frames

SVG = "{http://www.w3.org/2000/svg}"


def drawn(frame, **options):
    return split_graph(frame, engine="own", **options)


def parts(picture, kind: str) -> list[ElementTree.Element]:
    root = ElementTree.fromstring(picture.svg())
    return [group for group in root.iter(f"{SVG}g") if kind in group.get("class", "").split()]


def texts(element: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in element.iter(f"{SVG}text")]


# --- what the picture says --------------------------------------------------------------------------


def test_a_deep_model_is_folded_and_says_how_often():
    picture = drawn(frames.pieces(80), about=About(model="toy"), edges=frames.edges(80))
    assert [piece.get("data-piece") for piece in parts(picture, "cg-piece")] == [
        *("submod_0", "submod_1", "submod_2", "submod_159", "submod_160")
    ]
    (fold,) = parts(picture, "cg-fold")
    assert fold.get("data-times") == "79"
    assert "79 × the same: submod_1 … submod_158" in texts(fold)
    svg = picture.svg()
    assert "161 pieces: 81 to compile and record (3 different), 80 that split them" in svg
    assert ">toy<" in svg


def test_equal_pieces_share_a_colour_and_splitting_ones_are_dashed():
    pieces = parts(drawn(frames.pieces(3)), "cg-piece")  # first, (attention, middle) x 2, attention, last
    rects = [piece.find(f"{SVG}rect") for piece in pieces]
    colours = [rect.get("stroke") for rect in rects]
    assert colours[1] == colours[3] == colours[5] == SPLITTING
    assert colours[2] == colours[4]
    assert len({colours[0], colours[2], colours[6], SPLITTING}) == 4
    assert [rect.get("stroke-dasharray") is not None for rect in rects] == [False, True] * 3 + [False]
    assert [piece.get("data-content") for piece in pieces] == ["A", "", "B", "", "B", "", "C"]


def test_more_contents_than_colours_are_told_apart_by_their_letters():
    rows = [("capturable", f"aten.op{i}") for i in range(30)]
    frame = pd.DataFrame([(f"submod_{i}", kind, 1, ops) for i, (kind, ops) in enumerate(rows)])
    frame.columns = ["piece", "kind", "nodes", "operators"]
    pieces = parts(drawn(frame), "cg-piece")
    letters = [piece.get("data-content") for piece in pieces]
    assert len(set(letters)) == 30 and letters[26:28] == ["AA", "AB"]
    assert {piece.find(f"{SVG}rect").get("stroke") for piece in pieces} == set(SERIES)


def test_without_keys_equal_operators_count_as_equal():
    assert "29 × the same" in drawn(frames.pieces(30, keys=False)).svg()


def test_edges_say_what_crosses_with_symbolic_shapes():
    picture = drawn(frames.pieces(2), edges=frames.edges(2))
    edges = [texts(edge) for edge in parts(picture, "cg-edge")]
    assert ["q_0 [s0, 9·64] bf16", "out_0 [s0, 9·64] bf16"] in edges
    assert ["out_0 [s0, 9·64] bf16 (written)"] in edges  # attention wrote it: it comes from there
    assert ["rest_0 [s0, 9·64] bf16  from submod_0"] in edges  # past the attention
    assert "takes tokens [s0] i64, and 1 weights" in picture.svg()
    assert "returns last [s0, 9·64] bf16" in picture.svg()


def test_what_leaves_a_folded_run_is_named_after_its_last_repetition():
    edges = [texts(edge) for edge in parts(drawn(frames.pieces(80), edges=frames.edges(80)), "cg-edge")]
    assert ["q_158 [s0, 9·64] bf16", "out_158 [s0, 9·64] bf16"] in edges
    assert ["rest_158 [s0, 9·64] bf16  from submod_158"] in edges


def test_an_opened_piece_shows_its_operators_and_breaks_the_fold():
    picture = drawn(frames.pieces(80), edges=frames.edges(80), nodes={"submod_40": frames.nodes()})
    (opened,) = parts(picture, "cg-open")
    assert opened.get("data-piece") == "submod_40" and opened.get("data-content") == "B"
    inside = parts(picture, "cg-node")
    assert [texts(node) for node in inside] == [
        ["x", "[s0, 64] f32"],
        ["linear", "[s0, 64] f32", "⟵ layers.0.weight"],
        ["add 1", "[s0, 64] f32"],
        ["return"],
    ]
    assert [fold.get("data-times") for fold in parts(picture, "cg-fold")] == ["19", "59"]


@pytest.mark.parametrize("name", ["模型", 'модель <&> "quoted"', "a\x00b\x1b[0m", "\ud800", "x" * 500, "🙂"])
def test_names_in_any_language_make_a_valid_picture(name):
    frame = frames.pieces(1, keys=False)
    frame.loc[0, "operators"] = name
    for picture in (drawn(frame, about=About(model=name)), split_graph(frame, About(model=name))):
        assert ElementTree.fromstring(picture.svg()).tag == f"{SVG}svg"
        picture.svg().encode()


def test_a_model_without_a_splitting_operator_is_one_piece():
    frame = frames.pieces(0)
    picture = drawn(frame)
    assert len(parts(picture, "cg-piece")) == 1
    assert "1 piece: 1 to compile and record (1 different), 0 that split them" in picture.svg()


def test_the_picture_is_the_same_each_time():
    assert drawn(frames.pieces(7)).svg() == drawn(frames.pieces(7)).svg()


@pytest.mark.parametrize("layers", [0, 1, 2, 3, 30])
@pytest.mark.parametrize("opened", [False, True])
def test_nothing_leaves_the_picture_and_no_two_boxes_overlap(layers, opened):
    nodes = {"submod_0": frames.nodes()} if opened else {}
    picture = drawn(
        frames.pieces(layers), about=About(model="m" * 60), edges=frames.edges(layers), nodes=nodes
    )
    root = ElementTree.fromstring(picture.svg())
    width, height = float(root.get("width")), float(root.get("height"))
    spans = []
    for piece in parts(picture, "cg-piece"):
        rect = piece.find(f"{SVG}rect")
        x, y, w, h = (float(rect.get(name)) for name in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and x + w <= width and y + h <= height
        spans.append((y, y + h))
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(spans))
    for text in root.iter(f"{SVG}text"):
        size = float(text.get("font-size", 14))
        assert 0 < float(text.get("y")) < height
        if text.get("text-anchor") is None:
            assert float(text.get("x")) + 0.9 * text_width(text.text or "", size) <= width


# --- dot --------------------------------------------------------------------------------------------


def fake_dot(folder: Path, body: str, monkeypatch) -> None:
    dot = folder / "dot"
    dot.write_text(f"#!/bin/sh\n{body}\n")
    dot.chmod(dot.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")
    monkeypatch.setattr(split_dot, "DOT_TIMEOUT_S", 0.5)


def test_without_dot_the_own_drawing_is_used(monkeypatch):
    monkeypatch.setattr(split_dot, "find_dot", lambda: None)
    picture = split_graph(frames.pieces(3), engine="dot")
    assert picture.engine == "own" and picture.svg() == drawn(frames.pieces(3)).svg()


@pytest.mark.parametrize("body", ["sleep 60", "exit 3", "echo nonsense", "kill -9 $$"])
def test_dot_that_hangs_or_fails_is_not_waited_for(monkeypatch, tmp_path, body):
    fake_dot(tmp_path, body, monkeypatch)
    started = time.monotonic()
    picture = split_graph(frames.pieces(3))
    assert time.monotonic() - started < 30  # given up after half a second, however slow the machine
    assert picture.engine == "own" and picture.svg() == drawn(frames.pieces(3)).svg()


def test_what_dot_drew_is_made_a_part_of_a_page(monkeypatch, tmp_path):
    fake_dot(
        tmp_path,
        "cat >/dev/null; echo '<?xml?><!DOCTYPE svg><svg><path stroke=\"black\"/></svg>'",
        monkeypatch,
    )
    picture = split_graph(frames.pieces(3))
    assert picture.engine == "dot" and picture.svg().startswith('<svg role="img" aria-label="7 pieces')
    assert "currentColor" in picture.svg() and "DOCTYPE" not in picture.svg()


def test_without_the_package_graphviz_the_own_drawing_is_used(monkeypatch):
    monkeypatch.setitem(sys.modules, "graphviz", None)
    picture = split_graph(frames.pieces(3))
    assert picture.engine == "own"
    with pytest.raises(ImportError):
        picture.source  # noqa: B018


def test_the_dot_text_has_clusters_for_what_is_folded_and_opened(tmp_path):
    frame, edges = frames.pieces(80), frames.edges(80)
    picture = split_graph(frame, edges=edges, nodes={"submod_0": frames.nodes()})
    source = picture.source
    assert source == picture.graph.source
    assert re.findall(r"subgraph (\w+)", source) == ["cluster_p0", "cluster_fold_1"]
    assert "79 × the same" in source and 'style="rounded,dashed,filled"' in source
    assert "q_158 [s0, 9·64] bf16" in source
    assert picture.save(tmp_path / "graph.dot").read_text() == source


@pytest.mark.skipif(split_dot.find_dot() is None, reason="needs Graphviz' dot, or the wheel graphviz-pure")
@pytest.mark.parametrize("name", ["toy", '模型 <&> \\N "x"', "\ud800"])
def test_the_real_dot_lays_it_out(name):
    nodes = {"submod_0": frames.nodes()}
    picture = split_graph(
        frames.pieces(80), About(model=name), edges=frames.edges(80), nodes=nodes, engine="dot"
    )
    assert picture.engine == "dot"
    root = ElementTree.fromstring(picture.svg())
    kinds = [group.get("class") for group in root.iter(f"{SVG}g")]
    assert kinds.count("cluster") == 2  # the fold, and the piece that is open
    assert kinds.count("node") == 4 + 4 + 2  # closed pieces, operators of the open one, both ends
    said = " ".join(t.text or "" for t in root.iter(f"{SVG}text"))
    assert "79 × the same" in said and "q_158 [s0, 9·64] bf16" in said


def test_an_unknown_engine_is_refused():
    with pytest.raises(ConfigError, match="engine='neato' is unknown; use one of auto, dot, own"):
        split_graph(frames.pieces(1), engine="neato")


# --- words ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype", "said"),
    [
        ("(s77, 9, 64)", "bfloat16", "[s77, 9·64] bf16"),
        ("(s77)", "int64", "[s77] i64"),
        ("()", "float32", "[] f32"),
        ("(2*s77, 4)", "float8_e4m3fn", "[2*s77, 4] float8_e4m3fn"),
        ("3 values", "", "3 values"),
    ],
)
def test_tensors_in_a_few_letters(shape, dtype, said):
    assert tensor_text(shape, dtype) == said


def test_operators_without_namespace_and_overload():
    names = ["aten::add.Tensor", "aten.add.Tensor", "my::op", "operator.getitem", ".frobnicate", "relu"]
    assert [short(name) for name in names] == ["add", "add", "op", "getitem", "frobnicate", "relu"]


def test_a_model_can_be_made_without_edges():
    model = make_model(frames.pieces(2), "title")
    assert [(wire.source, wire.target) for wire in model.wires] == [(0, 1), (1, 2), (2, 3), (3, 4)]
