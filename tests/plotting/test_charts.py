import matplotlib as mpl
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cgkit.plotting import (
    About,
    Picture,
    capture_seconds,
    compile_charts,
    compile_gantt,
    compile_times,
    memory_charts,
    ms_per_token,
    padding_charts,
    padding_steps,
    plan_charts,
    save,
    start_charts,
    svg,
    title_of,
)
from tests.plotting import frames

ABOUT = About("toy", "FULL", "5 requests", "cpu", emulated=True)
DRAW = {
    "compile_gantt": lambda **kw: compile_gantt(frames.log(), ABOUT, **kw),
    "compile_times": lambda **kw: compile_times(frames.compilations(), ABOUT, **kw),
    "capture_seconds": lambda **kw: capture_seconds(frames.captures(), ABOUT, **kw),
    "ledger": lambda **kw: memory_charts.ledger(frames.captures(), ABOUT, **kw),
    "waterfall": lambda **kw: memory_charts.waterfall(frames.memory(), ABOUT, **kw),
    "orders": lambda **kw: memory_charts.orders(frames.orders(), ABOUT, **kw),
    "by_largest": lambda **kw: memory_charts.by_largest(frames.by_largest(), ABOUT, **kw),
    "by_number": lambda **kw: plan_charts.by_number(*frames.by_number(), ABOUT, **kw),
    "segments": lambda **kw: memory_charts.segments(frames.segments(), ABOUT, **kw),
    "lifetimes": lambda **kw: memory_charts.lifetimes(*frames.lifetimes(), ABOUT, **kw),
    "prediction": lambda **kw: memory_charts.prediction(frames.captures(), frames.captures(), ABOUT, **kw),
    "staircase": lambda **kw: padding_charts.staircase(frames.padding(), ABOUT, seen=[3, 5], **kw),
    "staircases": lambda **kw: padding_charts.staircase(frames.ladders(), ABOUT, **kw),
    "waste": lambda **kw: padding_charts.waste(frames.ladders(), "padded", ABOUT, **kw),
    "coverage": lambda **kw: padding_charts.coverage(frames.coverage(), ABOUT, **kw),
    "expected": lambda **kw: padding_charts.expected(frames.expected(), "real", ABOUT, **kw),
    "padding_steps": lambda **kw: padding_steps(frames.steps(), ABOUT, **kw),
    "ms_per_token": lambda **kw: ms_per_token(frames.times(), ABOUT, **kw),
    "startup": lambda **kw: start_charts.startup(frames.starts(), ABOUT, **kw),
    "adaptors": lambda **kw: start_charts.adaptors(frames.adaptors(), ABOUT, **kw),
    "dedup": lambda **kw: start_charts.dedup(frames.dedup(), ABOUT, **kw),
    "static": lambda **kw: compile_charts.static(frames.static(), ABOUT, **kw),
    "candidates": lambda **kw: compile_charts.candidates(frames.candidates(), ABOUT, **kw),
    "passes": lambda **kw: compile_charts.passes(frames.passes(), ABOUT, **kw),
    "custom_ops": lambda **kw: compile_charts.custom_ops(frames.passes(gpu=False), ABOUT, **kw),
}
each = pytest.mark.parametrize("draw", DRAW.values(), ids=DRAW)


@each
def test_draws_on_the_axes_that_it_is_given_and_returns_them(draw):
    ax = Figure().add_subplot()
    assert draw(ax=ax) is ax
    assert ax.has_data()
    assert isinstance(draw(), Axes)


@each
def test_the_title_says_of_what_and_that_it_is_emulated(draw):
    title = title_of(draw())
    for part in ("toy", "FULL", "5 requests", "cpu", "emulated"):
        assert part in title


@each
def test_beside_other_axes_the_title_is_over_its_own(draw):
    left, right = Figure().subplots(1, 2)
    draw(ax=right)
    assert "toy" in right.get_title(loc="left")
    assert left.get_title(loc="left") == ""


@each
def test_no_global_setting_changes(draw):
    before = dict(mpl.rcParams)
    svg(draw(), "alt")
    assert dict(mpl.rcParams) == before


@each
def test_svg_is_the_same_each_time_and_dateless(draw):
    first, second = svg(draw(), "alt", "a"), svg(draw(), "alt", "a")
    assert first == second
    assert "dc:date" not in first
    assert 'aria-label="alt"' in first


def test_ids_of_two_pictures_do_not_meet():
    import re

    ids = [set(re.findall(r'\bid="([^"]+)"', svg(DRAW["ledger"](), "alt", p))) for p in ("a", "b")]
    assert ids[0] and not ids[0] & ids[1]


def test_shared_pieces_are_counted_and_cost_nothing():
    ax = compile_times(frames.compilations(30))
    assert title_of(ax) == "3 of 31 pieces really compiled, 13.0 s"
    assert [bar.get_width() for bar in ax.patches] == [9.0, 3.0, 1.0]
    assert [bar.get_x() for bar in ax.patches] == [0.0, 9.0, 12.0]
    assert any("28 equal pieces" in text.get_text() for text in ax.texts)


def test_padding_is_what_was_run_less_what_was_asked_for():
    title = title_of(padding_steps(frames.steps()))
    real, padded = 167 + 100 + 5, 167 + 160 + 5
    assert title == f"20 of 26 steps were padded; {(padded - real) / padded:.1%} of all rows computed"


def test_the_staircase_counts_the_waste_of_its_sizes():
    stairs = padding_charts.staircase
    assert "0% of the padded tokens is padding" in title_of(stairs(frames.padding((1, 2, 3, 4))))
    assert "38% of the padded tokens is padding" in title_of(stairs(frames.padding((4,))))  # 0+1+2+3 of 16


def test_save_takes_the_format_from_the_name(tmp_path):
    assert save(DRAW["ledger"](), tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in save(DRAW["ledger"](), tmp_path / "a.svg").read_text()
    assert "currentColor" not in Picture("<svg fill='currentColor'/>").save(tmp_path / "b.svg").read_text()
    with pytest.raises(ValueError, match=r"name the file \*\.svg"):
        save("<svg/>", tmp_path / "c.png")


def test_a_picture_of_thousands_of_marks_is_an_image_of_dots():
    ax = Figure().subplots()
    ax.scatter(range(6000), range(6000), marker="s", c=range(6000))
    for place in range(800):
        ax.text(place, place, "x")
    shown = Picture(ax, 'a "large" picture').svg()
    assert shown.startswith('<img alt="a &quot;large&quot; picture"') and "data:image/png;base64," in shown
    assert len(shown) < 400_000
    small = Figure().subplots()
    assert Picture(small, "small").svg().startswith("<svg")
