import re
import stat
import sys
from xml.etree import ElementTree

import pytest

from cgkit.plotting import About, split_graph
from cgkit.plotting.style import SPLITTING
from tests.plotting import frames


def boxes(svg: str) -> list[ElementTree.Element]:
    root = ElementTree.fromstring(svg)
    return list(root.iter("{http://www.w3.org/2000/svg}g"))


def test_a_deep_model_is_folded_and_says_how_often():
    svg = split_graph(frames.pieces(30), About(model="toy"))
    assert len(boxes(svg)) == 5
    assert "29 × the same" in svg
    assert "61 pieces: 31 to compile and record (3 different), 30 that split them" in svg
    assert "toy" in svg


def test_equal_pieces_share_a_colour_and_splitting_ones_are_dashed():
    shallow = frames.pieces(2)  # first, attention, middle, attention, last
    rects = [g.find("{http://www.w3.org/2000/svg}rect") for g in boxes(split_graph(shallow))]
    colours = [rect.get("stroke") for rect in rects]
    assert colours[1] == colours[3] == SPLITTING
    assert len(set(colours)) == 4
    assert [rect.get("stroke-dasharray") is not None for rect in rects] == [False, True, False, True, False]


def test_without_keys_equal_operators_count_as_equal():
    assert "29 × the same" in split_graph(frames.pieces(30, keys=False))


def test_the_picture_is_the_same_each_time():
    assert split_graph(frames.pieces(7)) == split_graph(frames.pieces(7))


@pytest.mark.parametrize("width", [300, 960, 2000])
def test_no_box_leaves_the_picture(width):
    svg = split_graph(frames.pieces(3), width=width)
    right = max(float(x) for x in re.findall(r'<rect x="([\d.]+)"', svg)) + 162
    assert right <= float(ElementTree.fromstring(svg).get("width"))


def test_without_dot_the_own_drawing_is_used(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert split_graph(frames.pieces(3), engine="dot") == split_graph(frames.pieces(3))


@pytest.mark.parametrize("body", ["sleep 5", "exit 3", "cat > /dev/null; echo '<svg from=\"dot\"></svg>'"])
def test_dot_that_hangs_or_fails_is_not_waited_for(monkeypatch, tmp_path, body):
    dot = tmp_path / "dot"
    dot.write_text(f"#!/bin/sh\n{body}\n")
    dot.chmod(dot.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(sys.modules["cgkit.plotting.split_graph"], "DOT_TIMEOUT_S", 0.5)
    svg = split_graph(frames.pieces(3), engine="dot")
    if "echo" in body:
        assert svg.startswith('<svg from="dot">')
    else:
        assert svg == split_graph(frames.pieces(3))
