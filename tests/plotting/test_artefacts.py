import subprocess
import sys

import pandas as pd
import pytest

from cgkit.capturing import CaptureSizes
from cgkit.counters import CompilationCounter
from cgkit.display import Shown
from cgkit.plotting import artefacts
from tests.plotting import frames


def artefact(name: str, frame=None, **members):
    """An object of a class of that bare name: all that plotting may know of a stage."""
    members["to_frame"] = lambda self: frame
    members["__repr__"] = lambda self: f"{name} of <toy>\n  second line"
    return type(name, (Shown,), members)()


SHOWN = {
    "TracedGraph": (artefact("TracedGraph", frames.tour_data().nodes), "aten.mul"),
    "SplitGraph": (
        artefact(
            "SplitGraph",
            frames.pieces(keys=False).assign(content=lambda frame: frame["operators"]),
            edges_frame=lambda self: frames.edges(),
            nodes_frame=lambda self, piece: frames.nodes(),
        ),
        "29 × the same",
    ),
    "CompiledGraph": (artefact("CompiledGraph", frames.compilations()), "3 of 31 pieces really compiled"),
    "CapturedGraphs": (artefact("CapturedGraphs", frames.captures()), "128 graphs recorded"),
    "CaptureSizes": (CaptureSizes([1, 2, 4]), "3 sizes"),
    "CompilationCounter": (CompilationCounter(num_graphs_seen=7), "num_graphs_seen"),
}


@pytest.mark.parametrize("name", SHOWN)
def test_each_artefact_shows_itself(name):
    thing, part = SHOWN[name]
    bundle = thing._repr_mimebundle_()
    assert part in bundle["text/html"]
    assert bundle["text/plain"] == repr(thing)
    assert "<toy>" not in bundle["text/html"]


def test_a_picture_that_fails_leaves_the_text():
    bundle = artefact("SplitGraph", None)._repr_mimebundle_()
    assert "text/html" not in bundle
    assert bundle["text/plain"].startswith("SplitGraph of <toy>")
    assert "could not be drawn" in bundle["text/plain"]


def test_nothing_is_drawn_before_something_is_shown():
    code = "import cgkit, cgkit.counters, sys; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_long_line_of_a_diff_is_not_cut_off():
    class Report:
        notes = ()

        def to_frame(self):
            return pd.DataFrame([("kept", "a"), ("removed", "b" * 400)], columns=["change", "line"])

        def __repr__(self):
            return "noop: matched 1"

    html = artefacts.pass_report(Report())
    assert "white-space:pre;" not in html and "overflow-x" not in html.split("</style>")[1]
    assert html.count("white-space:pre-wrap;overflow-wrap:anywhere") == 2  # one a line
