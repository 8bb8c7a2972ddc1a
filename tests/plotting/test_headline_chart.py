"""The sheets of the headline and of the host's time, on made-up figures: what they say, not how they look."""

from __future__ import annotations

import pandas as pd
import pytest

from cgkit.plotting import About, headline_chart, host_chart, mode_charts, svg, title_of


def row(model, mode, wall, case="decode", batch=1, **more):
    held = {"model": model, "case": case, "mode": mode, "batch": batch, "wall_ms": wall, "cpu_ms": None}
    held |= {
        "gpu_busy_ms": None,
        "floor_ms": None,
        "ratio_to_eager": None,
        "emulated": False,
        "device": "made up",
    }
    return {**held, "prompt_tokens": 32, "new_tokens": 128, **more}


FRAME = pd.DataFrame(
    [
        row("small", "eager", 10.0, gpu_busy_ms=2.0, cpu_ms=9.0, floor_ms=0.5, ratio_to_eager=1.0),
        row("small", "FULL", 1.25, gpu_busy_ms=1.0, cpu_ms=0.1, floor_ms=0.5, ratio_to_eager=0.125),
        row("small", "eager", 1000.0, "generate", 8, ratio_to_eager=1.0),
        row("large", "eager", 20.0, ratio_to_eager=1.0),
    ]
)


def test_a_panel_a_model_and_case():
    ax = headline_chart.headline(FRAME)
    figure = ax.get_figure()
    assert len(figure.axes) == 4 and [panel.axison for panel in figure.axes] == [True, True, True, False]
    assert (
        "8.0 times eager (small, FULL, batch 1)" in figure.get_suptitle()
        and "made up" in figure.get_suptitle()
    )
    assert [panel.get_title(loc="left") for panel in figure.axes[:2]] == [
        "a decode step, batch 1 (ms)", "32 in, 128 out, batch 8 (ms)",
    ]  # fmt: skip
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert any("floor" in text for text in legend) and any("GPU busy" in text for text in legend)


def test_bars_carry_time_and_gain_and_what_is_missing_is_said():
    ax = headline_chart.panel(
        FRAME[FRAME["case"] == "decode"].query("model == 'small'"), ["eager", "PIECEWISE", "FULL"]
    )
    notes = [text.get_text() for text in ax.texts]
    assert notes == ["10.0", "not measured", "1.25  8.0×"]
    assert [round(bar.get_width(), 3) for bar in ax.patches] == [10.0, 2.0, 1.25, 1.0]  # wall, busy in it
    assert ax.lines[-1].get_xdata()[0] == 0.5  # the floor
    (legend,) = ax.get_figure().legends  # alone, it says itself what line, ticks and dark bars are
    assert any("floor" in text.get_text() for text in legend.get_texts()) and len(legend.get_texts()) == 4


def test_a_ratio_that_is_not_that_of_the_two_times_says_why():
    alone = pd.DataFrame([row("small", "reduce-overhead", 2.0, ratio_to_eager=0.15, twin_ms=1.4)])
    one = FRAME.query("model == 'small' and case == 'decode'").assign(twin_ms=None)
    ax = headline_chart.headline(pd.concat([one, alone]))  # as they were read: indices repeat
    assert "2.00  6.7×*" in [text.get_text() for text in ax.texts]
    legend = [text.get_text() for text in ax.get_figure().legends[0].get_texts()]
    assert "* own process: × by way of FULL_AND_PIECEWISE" in legend
    assert not any(
        "*" in text.get_text() for text in headline_chart.headline(one).get_figure().legends[0].get_texts()
    )


def test_recorded_and_emulated_are_said():
    frame = FRAME.assign(emulated=True)
    assert "emulated graphs" in headline_chart.headline(frame).get_figure().get_suptitle()
    recorded = FRAME.copy()
    recorded.attrs["recorded"] = "a made-up GPU, torch 0"
    assert "recorded on a made-up GPU" in headline_chart.headline(recorded).get_figure().get_suptitle()


HOST = pd.DataFrame(
    [
        {"path": path, "batch": 1, "part": part, "step_us": us, "whole_us": whole, "pieces": 4}
        for path, whole, parts in (
            (
                "module",
                100.0,
                {"attention launches": 60.0, "graph replays": 25.0, "wrapper": 16.0, "dispatcher": -1.0},
            ),
            ("full", 20.0, {"graph replays": 15.0, "dispatcher": 5.0}),
        )
        for part, us in parts.items()
    ]
)


def test_the_hosts_time_twice_whole_and_without_what_dwarfs_the_rest():
    ax = host_chart.host_time(HOST, About("made up", emulated=True))
    whole, zoomed = ax.get_figure().axes
    assert [t.get_text() for t in whole.texts] == ["100 µs (25.0 a piece)", "20.0 µs (5.0 a piece)"]
    assert [t.get_text() for t in zoomed.texts] == ["15.0 µs (3.8 a piece)", "5.0 µs (1.2 a piece)"]
    assert all(bar.get_width() >= 0 for bar in whole.patches)
    title = ax.get_figure().get_suptitle()
    assert "module 100 µs, full 20 µs" in title and "emulated graphs" in title
    legend = [text.get_text() for text in ax.get_figure().legends[0].get_texts()]
    assert legend == ["attention launches", "graph replays", "wrapper", "dispatcher"]


def test_it_draws_into_axes_of_others():
    from matplotlib.figure import Figure

    ax = Figure().add_subplot()
    assert host_chart.host_time(HOST, ax=ax) is ax and len(ax.get_figure().axes) == 1
    assert svg(ax, "x").startswith("<svg")


@pytest.mark.parametrize("rows", [0, 3])
def test_the_pool_while_recording(rows):
    frame = pd.DataFrame(
        [
            {"asked": "FULL", "order": i + 1, "seconds": 0.1, "pool_reserved_bytes": 2**20 * (i + 1), "graphs": 1,
             "num_tokens": 4 - i}
            for i in range(rows)
        ],
        columns=["asked", "order", "seconds", "pool_reserved_bytes", "graphs", "num_tokens"],
    )  # fmt: skip
    title = title_of(mode_charts.pool_while_recording(frame, About("made up")))
    assert ("FULL, 3.0 MiB" in title) if rows else ("Nothing was recorded" in title)


def test_a_pool_that_is_the_same_in_every_mode_has_no_winner():
    rows = [("FULL", 0, 0.1, 2**21, 1, 8), ("PIECEWISE", 0, 0.1, 2**21, 5, 8)]
    columns = ["asked", "order", "seconds", "pool_reserved_bytes", "graphs", "num_tokens"]
    frame = pd.DataFrame(rows, columns=columns)
    assert "Every mode's graphs take 2.0 MiB of pool" in title_of(mode_charts.pool_while_recording(frame))
    frame.loc[1, "pool_reserved_bytes"] = 2**22
    assert "PIECEWISE, 4.0 MiB" in title_of(mode_charts.pool_while_recording(frame))
