"""The layered layout, on graphs that are drawn at random."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cgkit.plotting.layered import layered


@st.composite
def graphs(draw):
    count = draw(st.integers(0, 25))
    sizes = {i: (draw(st.integers(10, 200)), draw(st.integers(10, 60))) for i in range(count)}
    ends = st.integers(0, max(count - 1, 0))
    edges = draw(st.lists(st.tuples(ends, ends), max_size=60)) if count else []
    return sizes, [(min(a, b), max(a, b)) for a, b in edges if a != b]


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_no_two_nodes_overlap_every_edge_goes_down_and_all_is_inside(graph):
    sizes, edges = graph
    layout = layered(sizes, edges)
    boxes = []
    for node, (width, height) in sizes.items():
        x, y = layout.centre[node]
        boxes.append((x - width / 2, y - height / 2, x + width / 2, y + height / 2))
        assert boxes[-1][0] >= -1e-6 and boxes[-1][2] <= layout.width + 1e-6
        assert boxes[-1][1] >= -1e-6 and boxes[-1][3] <= layout.height + 1e-6
    for i, (a0, b0, a1, b1) in enumerate(boxes):
        for c0, d0, c1, d1 in boxes[i + 1 :]:
            assert a1 <= c0 + 1e-6 or c1 <= a0 + 1e-6 or b1 <= d0 + 1e-6 or d1 <= b0 + 1e-6
    assert set(layout.edges) == set(edges)
    for points in layout.edges.values():
        heights = [y for _, y in points]
        assert heights == sorted(heights) and heights[0] < heights[-1]
    assert layered(sizes, edges) == layout


def test_an_edge_that_passes_layers_goes_around_what_stands_there():
    sizes = dict.fromkeys("abcd", (100.0, 20.0))
    layout = layered(sizes, [("a", "b"), ("b", "c"), ("c", "d"), ("a", "d")])
    x, y = layout.centre["b"]
    for px, py in layout.edges["a", "d"][1:-1]:
        assert not (abs(px - x) < 50 and abs(py - y) < 10)


def test_an_edge_to_nowhere_or_backwards_is_left_out():
    assert layered({"a": (1, 1), "b": (1, 1)}, [("b", "a"), ("a", "z")]).edges == {}
