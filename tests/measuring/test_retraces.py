"""Counting traces, timing the way to a graph, and what becomes of changes after a trace."""

import pytest
import torch
from torch import nn

from cgkit.errors import CgkitError
from cgkit.measuring.after_trace import after_trace
from cgkit.measuring.dispatch_cost import BYTECODE, FILTERED, GUARDS, dispatch_cost
from cgkit.measuring.retraces import WAYS, count_traces, dynamo_runs_by_level
from cgkit.plotting import About, scan_charts, trace_charts
from tests.tracing.models import Branchy, Mlp


def calls(*sizes):
    return [(torch.ones(size, 8),) for size in sizes]


def test_each_way_counts_its_own_graphs_each_time():
    for _ in range(2):  # what was learned about a size the first time must not be known the second time
        frame = count_traces(Mlp(1), calls(4, 4, 7, 1))
        graphs = frame.groupby("way")["graphs"].agg(list)
        assert graphs["torch.compile, dynamic=False"] == [1, 1, 2, 3]
        assert graphs["torch.compile"] == [1, 1, 2, 3]
        assert graphs["torch.compile, dynamic=True"] == [1, 1, 1, 2]
        assert graphs["cgkit.trace"] == [1, 1, 1, 1]
        assert frame["agrees"].all() and list(frame["size"][:4]) == [4, 4, 7, 1]


def test_a_trace_that_takes_the_wrong_branch_does_not_agree():
    frame = count_traces(Branchy(), [(torch.ones(4),), (torch.ones(3),)], ["torch.compile", "cgkit.trace"])
    assert list(frame["agrees"]) == [True, True, True, False]
    with pytest.raises(CgkitError, match="no way 'jit'"):
        count_traces(Mlp(1), calls(4), ["jit"])


def test_dynamo_runs_by_level_are_those_of_one_model_each_time():
    for _ in range(2):
        frame = dynamo_runs_by_level(Mlp(1), calls(4, 4, 7, 9))
        assert list(frame["dynamo_runs"]) == [0, 2, 1, 1]


def test_the_way_to_the_graph_is_timed_without_the_graph():
    frame = dispatch_cost(Mlp(1), torch.ones(4, 8), repeats=9, inner=1).set_index("way")
    assert list(frame.index) == [GUARDS, FILTERED, BYTECODE]
    assert (frame["low_us"] <= frame["us"]).all() and (frame["us"] <= frame["high_us"]).all()
    assert frame["guards"].iloc[0] > 10 and frame["inputs"].iloc[0] >= 3
    assert frame.loc[BYTECODE, "us"] < frame.loc[GUARDS, "us"]


class Options(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(8)), 2.0

    def forward(self, x: torch.Tensor, power: int = 1) -> torch.Tensor:
        return (x * self.weight * self.scale) ** power


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        (lambda model, args: model.weight.mul_(2), "followed"),
        (lambda model, args: setattr(model, "scale", 3.0), "unnoticed"),
        (lambda model, args: (args[0], 2), "refused"),
        (lambda model, args: setattr(model, "other", 3.0), "without effect"),
        (lambda model, args: (torch.ones(5, 8),), "followed"),
    ],
)
def test_what_becomes_of_a_change(change, outcome):
    assert after_trace(Options(), (torch.full((3, 8), 2.0),), change) == outcome


def test_charts_of_traces():
    frame = count_traces(Mlp(1), calls(4, 7, 1), list(WAYS)[-2:])
    frame.loc[frame.index[-1], "agrees"] = False
    ax = trace_charts.traces_by_call(frame, About("Mlp"))
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["4", "7", "1"]
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["torch.compile, dynamic=True: 2", "cgkit.trace: 1"]
    crosses = [line for line in ax.lines if line.get_marker() == "x"]
    assert [len(line.get_xdata()) for line in crosses] == [0, 1]


def test_the_chart_of_dispatch_has_a_line_a_way():
    frame = dispatch_cost(Mlp(1), torch.ones(4, 8), repeats=3, inner=1).assign(layers=1)
    ax = trace_charts.dispatch(frame)
    assert len(ax.lines) == 3 and ax.get_ylim()[0] == 0


def test_the_scan_climbs_as_far_as_it_has_come():
    import pandas as pd

    rows = [("add", 0, False), ("attend", 1, True), ("add", 2, False)]
    frame = pd.DataFrame(rows, columns=["operator", "piece", "splitting"])
    whole, half = scan_charts.scan(frame), scan_charts.scan(frame, upto=2)
    assert [round(bar.get_y() + bar.get_height() / 2) for bar in whole.patches] == [0, 1, 2]
    assert [round(bar.get_y() + bar.get_height() / 2) for bar in half.patches] == [0, 1, 0]
    assert "2 of 3 nodes scanned: 2 pieces" in half.figure.get_suptitle()
    assert scan_charts.scan(frame, upto=0).figure.get_suptitle().startswith("0 of 3")


def test_ways_to_cut_say_their_numbers():
    import pandas as pd

    rows = [("nothing", 1, 0, 1), ("attention", 5, 4, 3)]
    ax = scan_charts.ways_to_cut(pd.DataFrame(rows, columns=["cut at", "recorded", "between", "different"]))
    assert [text.get_text() for text in ax.texts] == [
        "1 + 0, 1 different to compile",
        "5 + 4, 3 different to compile",
    ]
