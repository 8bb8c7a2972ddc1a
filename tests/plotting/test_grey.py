"""What a picture tells apart by colour is also told apart on paper without colours: by lightness or by hatching."""

import itertools
from importlib import import_module

import pytest

from cgkit.plotting.style import MODE_HATCHES, MODES
from tests.plotting import frames


def module(name):
    """A module of pictures: some share their name with the function that the package offers."""
    return import_module(f"cgkit.plotting.{name}")


BILL = list(module("bill").LOOKS.items())
NAMES = [name for name, _ in BILL]
#: Name of a picture -> what stands side by side in it, as {name: (colour, hatch)}.
TABLES = {
    "bill, CPU": {name: look[1:] for name, look in BILL[: NAMES.index("busy")]},
    "bill, GPU": {name: look[1:] for name, look in BILL[NAMES.index("busy") :]},
    "batches": dict(enumerate(module("compile_charts").BATCHES)),
    "backends": module("compile_charts").BACKENDS,
    "host": module("host_chart").LOOKS,
    "kinds of calls": {name: look[:2] for name, look in module("launch_charts")._KINDS.items()},
    "compile stages": module("compile_gantt").STAGES,
    "memory": module("memory_charts").PARTS,
    "pieces": {colour: (colour, "") for colour in module("timeline_layout").PIECE_COLOURS},
    "covered": module("padding_charts").COVERED,
    "steps": {mode: (MODES[mode], hatch) for mode, hatch in module("serve_charts")._HATCHES.items()},
    "recorded": {mode: (MODES[mode], MODE_HATCHES.get(mode, "")) for mode in ("FULL", "PIECEWISE")},
    "starts": {name: look for name, _, *look in module("start_charts").PARTS},
    "caches": {name: look for name, *look in module("start_charts").CACHES},
}


def lightness(colour: str) -> float:
    from matplotlib.colors import to_rgb

    return sum(weight * part for weight, part in zip((0.299, 0.587, 0.114), to_rgb(colour)))


@pytest.mark.parametrize("name", TABLES)
def test_what_is_side_by_side_is_apart_in_grey(name):
    table = TABLES[name]
    assert len(table) > 1
    alike = [
        (one, other)
        for (one, (a, hatch)), (other, (b, other_hatch)) in itertools.combinations(table.items(), 2)
        if hatch == other_hatch and abs(lightness(a) - lightness(b)) < 0.08
    ]
    assert alike == []


def test_what_is_written_on_a_bar_or_a_box_stays_dark_on_a_dark_page():
    from cgkit import recordings
    from cgkit.plotting.style import INK, svg

    full = recordings.load("h200-trace-llama-3.2-1b-b1-FULL")
    drawn = [full.bill().plot(), full.plot(step=0), module("padding_charts").coverage(frames.coverage())]
    for ax in drawn:
        written = [text for text in ax.texts if text.get_bbox_patch() or text.get_text().endswith(" %")]
        assert written and all(text.get_color() != INK for text in written), ax.get_title(loc="left")
        assert "currentColor" in svg(ax, "a picture")  # what stands on the page itself follows it
