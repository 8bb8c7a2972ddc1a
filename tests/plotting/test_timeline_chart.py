"""Structure of the static pictures: which elements are there and how long they are. All data is synthetic."""

import io
import re
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from cgkit import recordings
from cgkit.measuring import bill
from cgkit.measuring.timeline import Timeline
from cgkit.plotting import About, svg, title_of
from cgkit.plotting import timeline_layout as rows_of
from cgkit.plotting.explore.pack import pack
from cgkit.plotting.timeline_canvas import RASTERISE_ABOVE, short_name
from cgkit.plotting.timeline_chart import compare_timelines, timeline
from tests.measuring.synthetic import Trace
from tests.plotting import timelines

ABOUT = About("toy", "eager", "batch 1", "no device", emulated=True)
DRAW = {
    "timeline": lambda **kw: timeline(timelines.eager(), ABOUT, **kw),
    "compare": lambda **kw: compare_timelines(
        [timelines.eager(), timelines.pieces()], ["eager", "pieces"], ABOUT, **kw
    ),
}
each = pytest.mark.parametrize("draw", DRAW.values(), ids=DRAW)


def boxes(ax: Axes, label: str) -> np.ndarray:
    """(left, top, right, bottom) of all rectangles of one paint."""
    found = [c for c in ax.collections if isinstance(c, PolyCollection) and c.get_label() == label]
    corners = [path.get_extents().extents for c in found for path in c.get_paths()]
    return np.array(corners).reshape(-1, 4)


def legend(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


@each
def test_draws_on_the_axes_that_it_is_given_and_says_of_what(draw):
    ax = Figure().add_subplot()
    assert draw(ax=ax) is ax
    title = title_of(draw())
    for part in ("toy", "eager", "batch 1", "no device", "emulated"):
        assert part in title
    assert "µs" in ax.get_xlabel()


@each
def test_no_global_setting_changes_and_svg_is_the_same_each_time(draw):
    before = dict(mpl.rcParams)
    assert svg(draw(), "alt") == svg(draw(), "alt")
    assert dict(mpl.rcParams) == before


def test_every_event_is_as_long_as_it_took():
    events = timelines.eager(8)
    ax = timeline(events)
    launches = boxes(ax, "kernel launch")
    expected = events[events["kind"] == "launch"]
    assert launches[:, 0] == pytest.approx(expected["start_us"].to_numpy())
    assert launches[:, 2] - launches[:, 0] == pytest.approx(expected["dur_us"].to_numpy())


def test_below_a_pixel_the_area_is_the_time():
    events = timelines.eager(20_000)
    ax = timeline(events, most_deep=None)
    gpu = [label for label in legend(ax) if label.startswith("kernel:")]
    drawn = np.concatenate([boxes(ax, label) for label in gpu])
    height = 0.78
    area = ((drawn[:, 2] - drawn[:, 0]) * (drawn[:, 3] - drawn[:, 1])).sum() / height
    assert area == pytest.approx(events.loc[events["kind"] == "kernel", "dur_us"].sum(), rel=0.01)
    assert "shorter than a pixel" in ax.get_xlabel() and "not stretched" in ax.get_xlabel()


def test_few_collections_however_many_events():
    ax = timeline(timelines.eager(20_000))
    assert len(ax.collections) < 20 and len(ax.patches) == 0


def test_many_rectangles_become_a_bitmap_in_svg():
    events = timelines.eager(RASTERISE_ABOVE + 500)
    ax = timeline(events, ax=Figure(figsize=(400, 4)).add_subplot())
    assert any(c.get_rasterized() for c in ax.collections)
    assert not any(c.get_rasterized() for c in timeline(timelines.eager(20)).collections)


def test_arrows_lead_from_each_launch_to_its_kernel():
    events = timelines.eager(6)
    ax = timeline(events)
    (arrows,) = [c for c in ax.collections if c.get_gid() == "cg-arrows"]
    kernels = events[events["kind"] == "kernel"]
    ends = np.array(arrows.get_segments())
    assert ends[:, 0, 0] == pytest.approx(events.loc[kernels["launched_by"], "start_us"].to_numpy())
    assert ends[:, 1, 0] == pytest.approx(kernels["start_us"].to_numpy())
    assert not [c for c in timeline(events, arrows=False).collections if c.get_gid() == "cg-arrows"]


def test_a_graph_launch_opens_into_a_bracket_over_its_kernels():
    events = timelines.pieces(layers=3, nodes=5)
    ax = timeline(events)
    brackets = [line for line in ax.lines if line.get_gid() == "cg-bracket"]
    assert len(brackets) == (events["kind"] == "graph_launch").sum() == 4
    first = events[(events["graph_launch"] >= 0) & (events["piece"] == "submod_0")]
    left, right = brackets[0].get_xdata()
    assert (left, right) == pytest.approx(
        (first["start_us"].min(), (first["start_us"] + first["dur_us"]).max())
    )


@pytest.mark.parametrize("mode", ["FULL", "reduce-overhead"])
def test_the_note_at_a_bracket_stands_beside_the_name_of_the_call_that_waits(mode):
    figure = recordings.load(f"h200-trace-llama-3.2-1b-b1-{mode}").plot(step=0).get_figure()
    figure.canvas.draw()
    texts = figure.axes[0].texts
    (note,) = (text for text in texts if text.get_gid() == "cg-bracket-note")
    (name,) = (text for text in texts if text.get_text() == "cudaDeviceSynchronize")
    assert not note.get_window_extent().overlaps(name.get_window_extent())


def test_attention_is_hatched_and_pieces_differ():
    events = timelines.pieces(layers=6)
    codes, palette = rows_of.paints(events)
    kernels = (events["kind"] == "kernel").to_numpy()
    looks = {
        piece: {(palette[c].colour, palette[c].hatch) for c in codes[kernels & (events["piece"] == piece)]}
        for piece in events.loc[kernels, "piece"].unique()
    }
    assert all(len(look) == 1 for look in looks.values())
    plain = [next(iter(look)) for piece, look in looks.items() if int(piece[7:]) % 2 == 0]
    assert len(set(plain)) == len(plain) == 7
    attention = {next(iter(look)) for piece, look in looks.items() if int(piece[7:]) % 2 == 1}
    assert len(attention) == 1 and not attention & set(plain)
    assert next(iter(attention))[1] != ""


def test_gaps_are_shaded_with_their_cause():
    events = timelines.eager(10)
    gaps = rows_of.gpu_gaps(events).assign(cause="idle_launching")
    assert "idle" in legend(timeline(events))
    ax = timeline(events, gaps=gaps)
    assert "idle: CPU launching" in legend(ax)
    shaded = boxes(ax, "idle: CPU launching")
    assert shaded[:, 2] - shaded[:, 0] == pytest.approx(gaps["dur_us"].to_numpy())


def test_a_window_and_lanes_choose_what_is_drawn():
    events = timelines.eager(40)
    ax = timeline(events, window=(100.0, 200.0))
    assert ax.get_xlim() == (0, 100)
    assert boxes(ax, "annotation")[0, [0, 2]] == pytest.approx([0, 100])
    one = timeline(events, lanes=[timelines.GPU_LANE])
    assert [label.get_text() for label in one.get_yticklabels()] == [timelines.GPU_LANE]


def test_runs_are_compared_on_one_time_axis():
    eager, pieces = timelines.eager(40), timelines.pieces(3)
    pieces["start_us"] += 1e6  # another trace, another clock
    ax = compare_timelines([eager, pieces], ["eager", "PIECEWISE"])
    walls = [extent[1] - extent[0] for extent in map(rows_of.extent, (eager, pieces))]
    assert ax.get_xlim()[1] == pytest.approx(max(walls))
    texts = " ".join(text.get_text() for text in ax.texts)
    assert f"eager: {walls[0]:,.2f} µs" in texts and f"PIECEWISE: {walls[1]:,.2f} µs" in texts
    with pytest.raises(ValueError, match="2 timelines, 1 names"):
        compare_timelines([eager, pieces], ["eager"])


def test_timelines_are_compared_by_their_median_step():
    runs = [
        Timeline(timelines.eager(20), {"mode": "eager"}),
        Timeline(timelines.pieces(3), {"mode": "PIECEWISE"}),
    ]
    ax = Timeline.plot_against(runs)
    assert title_of(ax).startswith("One time axis: eager against PIECEWISE")
    assert any(label.startswith("idle: ") for label in legend(ax))
    with pytest.raises(ValueError, match="no timeline"):
        Timeline.plot_against([])


def test_nothing_at_all_is_drawn_too():
    nothing = timelines.eager(2).iloc[:0]
    assert isinstance(timeline(nothing), Axes)
    cpu_only = timelines.eager(2)
    cpu_only = cpu_only[cpu_only["stream"] < 0]
    assert "kernel launch" in legend(timeline(cpu_only))


def test_busy_columns_are_exact():
    start = np.array([0.0, 0.9, 5.0])
    share = rows_of.busy_columns(start, start + np.array([0.5, 0.4, 1.0]), 0.0, 1.0, 7)
    assert share == pytest.approx([0.6, 0.3, 0, 0, 0, 1.0, 0])


def test_nested_and_overlapping_events_get_rows_of_their_own():
    build = timelines.Builder()
    for start, dur in ((0, 10), (0, 4), (4, 6), (5, 2), (9, 3)):
        build.cpu("op", "aten::x", start, dur)
    layout = rows_of.layout(build.frame())
    assert layout.row.tolist() == [0, 1, 1, 2, 2]


def test_streams_and_processes_are_kept_apart():
    one, other = timelines.eager(4), timelines.eager(4)
    other["process"] = 1
    other["lane"] = ("rank 1 · " + other["lane"].astype(str)).astype("category")
    one["lane"] = ("rank 0 · " + one["lane"].astype(str)).astype("category")
    both = pd.concat([one, other]).sort_values("start_us", kind="stable", ignore_index=True)
    groups = rows_of.layout(both).groups
    assert [(group.process, group.side) for group in groups] == [
        (process, side) for process in (0, 1) for side in ("work", "calls", "gpu")
    ]
    assert groups[0].label.startswith("rank 0")


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void at::native::vectorized_elementwise_kernel<4>(int)", "vectorized_elementwise_kernel"),
        ("内核", "内核"),
        ("torch/nn/modules/module.py(1500): _call_impl", "_call_impl"),
    ],
)
def test_names_are_shortened_to_what_tells(name, short):
    assert short_name(name, 60) == short
    assert len(short_name(name, 7)) <= 7


def test_what_lies_too_deep_is_counted_in_the_note():
    frame = timelines.pieces()
    ax = timeline(frame, ABOUT, most_deep=1)
    left_out = int((rows_of.layout(frame, None, 1, ("work", "calls", "gpu")).row < 0).sum())
    assert left_out and f"draws all): {left_out:,} events" in ax.get_xlabel()
    assert "too deep" not in timeline(frame, ABOUT, most_deep=None).get_xlabel()


def test_a_name_is_no_wider_than_its_event():
    build = timelines.Builder()
    for layer in range(4):
        build.cpu("annotation", f"cgkit:eager:model.layers.{layer}", 1000.0 * layer, 870.0)
        launch = build.cpu("launch", "cudaLaunchKernel", 1000.0 * layer + 10, 20.0, correlation=layer)
        build.gpu("kernel", 1000.0 * layer + 40, 100.0, launch, piece=f"model.layers.{layer}.input_layernorm")
    ax = timeline(build.frame())
    ax.figure.draw_without_rendering()
    left, right = (ax.transData.transform((x, 0))[0] for x in (0.0, 870.0))
    names = [text for text in ax.texts if text.get_text().startswith("cgkit")]
    assert len(names) == 4
    assert all(text.get_window_extent().width <= right - left for text in names)


STRANGE = ("$\\frac{a$", "\x00\x01control", "two\nlines <b>&amp;</b> {0}", "\\$")


def strange(name: str) -> pd.DataFrame:
    trace = Trace()
    trace.mark(f"cgkit:replay:{name}", 0, 1000)
    trace.op(name, 0, 1000)
    trace.gpu(200, 1000, trace.call("launch", 100, 50), name=name)
    trace.events.append(
        {"ph": "M", "name": "thread_name", "pid": 100, "tid": 100, "args": {"name": f"name {name}"}}
    )
    for event in trace.events:
        event["pid"] = 99 if event["pid"] == 100 else event["pid"]  # not the main thread: it has its name
    return trace.timeline().events


@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.parametrize("name", STRANGE)
def test_a_strange_name_is_drawn_as_it_is_and_leaves_a_whole_svg(name):
    about = About(f"model {name}", name, device=name)
    for ax in (
        timeline(strange(name), about),
        compare_timelines([strange(name)], [name], about),
        bill.plot([Timeline(strange(name), {"mode": name, "model": name}).bill()]),
    ):
        words = " ".join(re.sub("[\x00\x01]+", " ", name).split())
        assert words in title_of(ax)
        text = svg(ax, "alt")
        assert words in " ".join("".join(ElementTree.fromstring(text).itertext()).split())


@pytest.mark.filterwarnings("error:constrained_layout")
@pytest.mark.parametrize("draw", [timeline, lambda events: compare_timelines([events], ["mode " * 40])])
def test_names_of_any_length_leave_room_for_the_drawing(draw):
    ax = draw(strange("long name " * 30))
    ax.figure.savefig(io.BytesIO())
    assert ax.get_position().width > 0.25
    assert max(map(len, legend(ax))) <= 36


@pytest.mark.filterwarnings("error:constrained_layout")
def test_a_mode_of_any_length_leaves_room_for_its_bill():
    ax = bill.plot([Timeline(timelines.eager(), {"mode": "mode " * 40}).bill()])
    ax.figure.savefig(io.BytesIO())
    assert ax.get_position().width > 0.4


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda e: e.drop(columns=["launched_by", "lane"]),
            "no column lane, launched_by: draw Timeline.events",
        ),
        (lambda e: pd.concat([e, e]), "row 0 is there twice"),
        (lambda e: e.assign(dur_us=e["dur_us"].where(e.index != 3)), r"1 events have no .* row 3"),
    ],
)
@pytest.mark.parametrize("draw", [timeline, lambda e: compare_timelines([e], ["one"]), pack])
def test_a_frame_of_which_no_true_picture_can_be_drawn_is_refused(draw, spoil, message):
    with pytest.raises(ValueError, match=message):
        draw(spoil(timelines.eager()))
