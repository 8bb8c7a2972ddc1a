"""Charts of launch costs, on made-up figures: what they say, not how they look."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from cgkit.plotting import About, against_nodes, crossover, launch_costs, launch_overhead, svg, title_of

ABOUT = About(model="made up", mode="PIECEWISE", batch="batch 1", device="no device", emulated=True)


def labels(ax) -> list[str]:
    figure = ax.get_figure()
    legends = [*figure.legends, *([ax.get_legend()] if ax.get_legend() else [])]
    return [text.get_text() for legend in legends for text in legend.get_texts()]


def launches(**costs: list[float]) -> pd.DataFrame:
    return pd.DataFrame([{"kind": kind, "dur_us": us} for kind, each in costs.items() for us in each])


def test_a_histogram_counts_both_kinds_and_states_medians():
    ax = launch_costs(launches(launch=[4, 5, 6, 0.0], graph_launch=[30.0]), ABOUT)
    assert labels(ax) == ["3 x kernel launch, median 5.0 µs", "1 x graph launch, median 30.0 µs"]
    assert "What 4 launches cost the CPU (1 of no length left out)" in title_of(ax)
    assert "emulated graphs" in title_of(ax) and "µs" in ax.get_xlabel()
    assert sum(patch.get_height() for patch in ax.patches) == 4


@pytest.mark.parametrize("costs", [[7.0], [7.0, 7.0], [0.001, 90000.0]])
def test_any_range_of_costs_has_ticks(costs):
    ax = launch_costs(launches(launch=costs))
    low, high = ax.get_xlim()
    assert sum(low <= tick <= high for tick in ax.get_xticks()) >= 3


def test_no_launches_is_said():
    assert "No launches" in title_of(launch_costs(launches(launch=[]).reindex(columns=["kind", "dur_us"])))


def case(what, count, median, unit=""):
    return {
        "what": what, "count": count, "unit": unit, "median_us": median, "low_us": median * 0.9,
        "high_us": median * 1.2,
    }  # fmt: skip


CASES = pd.DataFrame(
    [case("torch operator, an empty kernel", 1, 5.0)]
    + [case("cudaGraphLaunch", n, 6 + 0.1 * n, "nodes") for n in (1, 16, 256)]
)


def test_claims_are_hatched_and_called_claims():
    claims = pd.DataFrame([{"what": "kernel launch", "low_us": 5.0, "high_us": 10.0, "source": "x"}])
    ax = launch_overhead(CASES, ABOUT, claims=claims)
    names = [text.get_text() for text in ax.get_yticklabels()]
    assert names[-1] == "article: kernel launch" and "cudaGraphLaunch: 1 node" in names
    assert sum(bool(patch.get_hatch()) for patch in ax.patches) == 1
    assert any("claimed" in text.get_text() for text in ax.texts)


def test_a_graphs_launch_against_its_nodes():
    ax = against_nodes(CASES, ABOUT)
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["1", "16", "256"]
    line = next(line for line in ax.lines if line.get_linestyle() == "--")
    assert list(line.get_ydata()) == [5.0, 80.0, 1280.0]
    assert "not measured" in title_of(against_nodes(CASES[:1]))


def curves() -> tuple[pd.DataFrame, pd.DataFrame]:
    rows = [
        {
            "mode": mode, "batch": batch, "wall_ms": max(host, batch / 10), "gpu_busy_ms": batch / 10,
            "roofline_ms": batch / 12, "predicted_ms": max(host, batch / 12),
        }
        for mode, host in (("eager", 9.0), ("FULL", 0.05), ("compiled", 2.0))
        for batch in (1, 16, 64)
    ]  # fmt: skip
    crossings = [
        {"mode": "eager", "measured_batch": math.inf, "predicted_batch": 108.0},
        {"mode": "FULL", "measured_batch": 0.0, "predicted_batch": 0.0},
        {"mode": "compiled", "measured_batch": 20.0, "predicted_batch": 24.0},
    ]
    return pd.DataFrame(rows), pd.DataFrame(crossings)


def test_the_crossover_says_until_where_each_mode_is_launch_bound():
    ax = crossover(*curves(), ABOUT)
    said = set(labels(ax))
    assert {
        "eager: every batch (predicted: to 108)",
        "FULL: no batch (predicted: none)",
        "compiled: to 20 (predicted: to 24)",
        "GPU busy (FULL)",
    } <= said
    assert ax.get_xscale() == ax.get_yscale() == "log" and "ms" in ax.get_ylabel()


def test_without_a_gpu_there_is_a_prediction_only():
    frame, crossings = curves()
    frame["gpu_busy_ms"], crossings["measured_batch"] = None, None
    said = labels(crossover(frame, crossings, ABOUT))
    assert "eager: to 108 (predicted)" in said and not any("busy" in text for text in said)


def test_they_draw_on_given_axes_and_as_svg():
    from matplotlib.figure import Figure

    figure = Figure()
    one, two = figure.subplots(1, 2)
    assert launch_costs(launches(launch=[5.0]), ABOUT, ax=one) is one
    assert crossover(*curves(), ABOUT, ax=two) is two
    text = svg(one, "two charts")
    assert 'aria-label="two charts"' in text
