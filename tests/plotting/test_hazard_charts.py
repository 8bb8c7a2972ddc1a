"""Pictures of hazards: what the frame says is what is drawn."""

import itertools

import pandas as pd

from cgkit.hazards import KINDS
from cgkit.plotting import About, hazard_charts, title_of

EMULATED = About(device="cpu", emulated=True)


def texts(ax):
    return [text.get_text() for text in ax.texts]


def test_both_lines_of_each_case_are_drawn_in_a_panel_of_its_own():
    rows = [("a", 1, 1.0, 2.0), ("a", 2, 2.0, 2.0), ("b", 1, 5.0, 7.0)]
    first = hazard_charts.silent(pd.DataFrame(rows, columns=["case", "step", "python", "replay"]), EMULATED)
    panels = first.figure.axes
    assert [ax.get_title(loc="left") for ax in panels] == ["a", "b"]
    python, replay = panels[0].get_lines()
    assert list(python.get_ydata()) == [1, 2] and list(replay.get_ydata()) == [2, 2]
    assert "emulated" in first.figure.get_suptitle()


def test_a_ring_for_each_call_that_was_compiled_in():
    calls = [("n", 1, 90.0, True), ("n", 2, 80.0, True), ("t", 1, 90.0, True), ("t", 2, 0.1, False)]
    ax = hazard_charts.step_times(pd.DataFrame(calls, columns=["way", "call", "ms", "compiled"]))
    rings = [line for line in ax.get_lines() if line.get_markersize() == 13]
    assert [list(ring.get_xdata()) for ring in rings] == [[1, 2], [1]]
    assert "ms" in ax.get_ylabel()


def test_the_road_says_where_the_search_ended():
    frame = pd.DataFrame(
        [
            ("traced", "same", "", "", ""),
            ("split", "differs", "submod_2", "aten::tanh", "up to 1"),
            ("compiled", "not reached", "", "", ""),
        ],
        columns=["stage", "verdict", "piece", "operator", "difference"],
    )
    ax = hazard_charts.road(frame, EMULATED)
    assert "submod_2\naten::tanh" in texts(ax) and texts(ax).count("not reached") == 1
    refused = frame.assign(
        verdict=["same", "same", "refused"], piece="", operator="", difference="MovedInputError"
    )
    assert "MovedInputError" in texts(hazard_charts.road(refused))


def test_each_exhibit_stands_in_its_tools_column():
    rows = [("one", "slow", "doctor"), ("two", "wrong numbers", "debug=True"), ("three", "slow", "doctor")]
    ax = hazard_charts.museum(pd.DataFrame(rows, columns=["id", "kind", "tool"]), EMULATED)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["two", "one", "three"]
    tools = [label.get_text() for label in ax.get_xticklabels()]
    wrong, slow, stops = ax.get_lines()
    assert tools == ["doctor", "debug=True"] and list(wrong.get_xdata()) == [1]
    assert list(slow.get_ydata()) == [1, 2] and len(stops.get_xdata()) == 0
    assert "emulated" in title_of(ax)


def test_every_kind_of_harm_has_a_look():
    assert tuple(hazard_charts.KINDS) == KINDS


def test_names_of_tools_do_not_touch():
    tools = [
        "doctor",
        "explain_cache",
        "dispatcher.explain",
        "counters_table",
        "the recording itself",
        "debug=True",
    ]
    tools += ["predict_pool", "the dump itself"]
    rows = [(f"overwritten-output-{number}", "slow", tool) for number, tool in enumerate(tools)]
    ax = hazard_charts.museum(pd.DataFrame(rows, columns=["id", "kind", "tool"]))
    ax.figure.draw_without_rendering()
    extents = [label.get_window_extent() for label in ax.get_xticklabels()]
    assert len(extents) == len(tools)
    assert all(a.x1 + 2 < b.x0 for a, b in itertools.pairwise(extents))
