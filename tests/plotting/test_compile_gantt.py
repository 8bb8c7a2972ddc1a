import pandas as pd
import pytest
from matplotlib.figure import Figure

from cgkit.plotting import compile_cards, compile_gantt, title_of
from cgkit.plotting.compile_gantt import MOST
from tests.plotting import frames


def labels(ax) -> list[str]:
    return [label.get_text() for label in ax.get_yticklabels()]


def test_one_bar_a_thing_shared_pieces_counted_where_they_come_from():
    ax = compile_gantt(frames.log())
    assert labels(ax) == [
        *("trace", "split", "compile  submod_0", "compile  submod_2", "compile  submod_60"),
        *("capture  PIECEWISE 8", "capture  PIECEWISE 4"),
    ]
    assert [round(bar.get_width(), 6) for bar in ax.patches] == [2.0, 0.05, 4.0, 2.0, 1.0, 0.5, 0.5]
    assert [round(bar.get_x(), 6) for bar in ax.patches] == [0.0, 2.0, 2.1, 6.1, 8.1, 9.1, 9.6]
    notes = [text.get_text() for text in ax.texts]
    assert "2.00 s, found in Inductor's cache, shared with 28 equal pieces" in notes
    assert "0.50 s, 31 graphs, 0.30 s of it recording" in notes
    assert title_of(ax) == (
        "10.1 s from trace to graphs. 31 compilations asked for: 2 compiled, 1 found in Inductor's cache, 28 shared"
    )


def test_a_hit_is_hollow_and_stages_are_hatched_each_in_its_way():
    ax = compile_gantt(frames.log())
    filled = [bar.get_facecolor()[3] > 0 for bar in ax.patches]
    assert filled == [True, True, True, False, True, True, True]
    assert len({bar.get_hatch() for bar in ax.patches}) == 4


def test_bars_keep_their_true_length():
    frame = pd.DataFrame(
        [{**frames.log().iloc[0], "seconds": 1e-4}, {**frames.log().iloc[2], "seconds": 100.0}]
    )
    assert compile_gantt(frame).patches[0].get_width() == 1e-4


def test_many_different_pieces_are_summed_up_beyond_the_longest():
    row = frames.log().iloc[2]
    rows = [
        {**row, "what": f"p{i}", "piece": f"p{i}", "start_s": float(i), "seconds": 0.1 + 0.01 * i}
        for i in range(40)
    ]
    ax = compile_gantt(pd.DataFrame(rows))
    assert len(labels(ax)) == MOST and labels(ax)[-1] == f"compile  {40 - MOST + 1} shorter ones"
    assert len(ax.patches) == 40  # each of them still stands in its place


def test_nothing_makes_an_empty_chart():
    ax = Figure().add_subplot()
    assert compile_gantt(frames.log().head(0), ax=ax) is ax


@pytest.mark.parametrize("seen", [1, 2])
def test_counters_that_differ_are_marked_by_sign_and_colour(seen):
    html = compile_cards.counters(frames.counters(seen))
    assert html.count("class=cg-wrong") == html.count("≠") == seen - 1
    assert "one graph &lt;a model&gt;" in html
