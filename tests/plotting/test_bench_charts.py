"""Charts of the compiler's benchmarks, on made-up figures: what they say, and that nothing is cut or covered."""

from __future__ import annotations

import pytest

from cgkit.plotting import compile_charts, start_charts, title_of
from tests.plotting import frames

CHARTS = {
    "startup": lambda: start_charts.startup(frames.starts()),
    "adaptors": lambda: start_charts.adaptors(frames.adaptors()),
    "dedup": lambda: start_charts.dedup(frames.dedup()),
    "static": lambda: compile_charts.static(frames.static()),
    "static, one shape": lambda: compile_charts.static(frames.static(1)),
    "static, the product": lambda: compile_charts.static(frames.static(0)),
    "candidates": lambda: compile_charts.candidates(frames.candidates()),
    "passes": lambda: compile_charts.passes(frames.passes()),
    "passes without a GPU": lambda: compile_charts.passes(frames.passes(gpu=False)),
    "custom_ops": lambda: compile_charts.custom_ops(frames.passes()),
}


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


@pytest.mark.parametrize("draw", CHARTS.values(), ids=CHARTS)
def test_no_word_is_cut_off_and_no_legend_lies_over_data(draw):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = draw().get_figure()
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    whole, renderer = figure.bbox, canvas.get_renderer()
    words = [word for ax in figure.axes for word in (*ax.texts, ax.xaxis.label, ax.yaxis.label)]
    for ax in figure.axes:  # a tick outside of the limits has a label that is not drawn
        for which, labels, ends in (
            (0, ax.get_xticklabels(), ax.get_xlim()),
            (1, ax.get_yticklabels(), ax.get_ylim()),
        ):
            words += [each for each in labels if min(ends) <= each.get_position()[which] <= max(ends)]
    for word in words:
        box = word.get_window_extent(renderer)
        if word.get_text() and word.get_visible():
            assert box.x0 >= whole.x0 - 1 and box.x1 <= whole.x1 + 1, word
            assert box.y0 >= whole.y0 - 1 and box.y1 <= whole.y1 + 1, word
    for legend in figure.legends:
        box = legend.get_window_extent(renderer)
        assert not any(box.overlaps(ax.get_window_extent(renderer)) for ax in figure.axes)
        assert box.x1 <= whole.x1 + 1
    assert not any(ax.get_legend() for ax in figure.axes)


def test_a_warm_start_is_drawn_beside_its_cold_one():
    ax = start_charts.startup(frames.starts())
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names == [f"toy-llama-{n}, {cache}" for n in (4, 80) for cache in ("cold", "warm")]
    # of two warm ones the shorter: 1.5 of 15 seconds in the compile stage, 7.54 of 21.04 in all
    assert "7.5 s: 36% of cold, compile stage 10%" in texts(ax)
    assert "at most 10% of it is left" in title_of(ax)


def test_an_adaptor_says_what_it_keeps():
    ax = start_charts.adaptors(frames.adaptors())
    assert texts(ax) == [
        "17.0 s: keeps 3 x artefact, 36 files, 3.0 MiB", "2.0 s", "0.5 s: keeps nothing", "0.5 s",
    ]  # fmt: skip


def test_depth_is_compared_with_the_shallowest():
    title = title_of(start_charts.dedup(frames.dedup().sample(frac=1, random_state=1)))
    assert title == "20 times the layers: 1.10 times the compile time, 20.0 times the trace"


def test_static_is_drawn_over_general_and_the_library_too():
    frame = frames.static()
    ax = compile_charts.static(frame)
    assert len(ax.get_figure().axes) == 2 and len(ax.get_yticklabels()) == 19
    drawn = sorted(
        line.get_xdata()[0] for line in ax.lines if line.get_marker() == "D" and len(line.get_xdata()) == 1
    )
    tuned = frame[frame["callable"] == "static, tuned"]
    assert drawn == pytest.approx(sorted(1 / tuned["times_general"]))
    assert "0.80 to 0.98 of the general time, median 0.89" in title_of(ax)
    assert texts(ax)[0] == "20.0 µs"


def test_the_fastest_candidates_are_drawn_with_the_library():
    ax = compile_charts.candidates(frames.candidates())
    assert (
        title_of(ax)
        == "21 candidates for 8x2048 by 2048x3072, the fastest 16 drawn and the library; 1 failed"
    )
    assert texts(ax)[0] == "10.00 µs, chosen" and len(texts(ax)) == 17
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names[0] == "M, N, K 16x32x32, 1 stage, 2 warps" and names[-1] == "mm"
    assert len(texts(compile_charts.candidates(frames.candidates(6)))) == 6  # of seven one failed


def test_passes_have_a_panel_a_number_and_a_bar_a_batch():
    first, second, third = compile_charts.passes(frames.passes()).get_figure().axes
    assert first.get_xlabel().startswith("kernels a layer") and len(first.patches) == 7
    assert [round(bar.get_width()) for bar in second.patches] == [60, 55, 50, 45, 40, 35, 30]
    assert len(third.patches) == 14 and sum(line.get_marker() == "|" for line in third.lines) == 28
    (plain, *_) = compile_charts.passes(frames.passes(gpu=False)).get_figure().axes
    assert "Inductor" in plain.get_xlabel()
    assert "of each different piece" in second.get_xlabel()
    newer = frames.passes().rename(columns={"bytes_at_16_tokens": "step_bytes_at_16_tokens"})
    _, second, _ = compile_charts.passes(newer).get_figure().axes
    assert "of a step" in second.get_xlabel() and round(second.patches[0].get_width()) == 60
