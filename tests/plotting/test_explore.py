"""What the explorer is given and writes; how it behaves in a browser is tested in test_explore_page.py."""

import builtins
import re
import sys

import numpy as np
import pandas as pd
import pytest

from cgkit.plotting import About
from cgkit.plotting.explore import explore, one_step, script
from cgkit.plotting.explore.pack import pack, unpack
from tests.plotting import timelines

STEPS = pd.DataFrame(
    {"step": [0, 1], "process": 0, "start_us": [0.0, 200.0], "dur_us": [200.0, 310.0], "name": ["a", "b"]}
)


def test_the_block_holds_every_event_once_and_its_ties():
    events = timelines.pieces(4)
    head, columns = unpack(pack(events))
    assert head["count"] == len(events)
    assert sorted(columns["index"]) == list(range(len(events)))
    names = [head["texts"]["name"][code] for code in columns["name"]]
    assert names == events["name"].astype(str).to_numpy()[columns["index"]].tolist()
    for i, by in enumerate(columns["launched_by"]):
        expected = events["launched_by"].iloc[columns["index"][i]]
        assert (columns["index"][by] if by >= 0 else -1) == expected
    assert columns["start"] == pytest.approx(
        events["start_us"].to_numpy()[columns["index"]] - events["start_us"].min()
    )
    assert (np.diff(columns["row"]) >= 0).all()
    assert all((np.diff(columns["start"][columns["row"] == row]) >= 0).all() for row in set(columns["row"]))


def test_a_part_of_a_trace_keeps_its_ties():
    events = timelines.eager(20)
    part = events[(events["start_us"] > 60) & (events["start_us"] < 160)]
    head, columns = unpack(pack(part))
    assert head["count"] == len(part)
    tied = np.flatnonzero(columns["launched_by"] >= 0)
    assert len(tied)
    launches = columns["index"][columns["launched_by"][tied]]
    assert (events["launched_by"].to_numpy()[columns["index"][tied]] == launches).all()


def test_the_block_is_small_and_the_same_each_time():
    events = timelines.eager(25_000)
    block = pack(events)
    assert block == pack(events)
    assert len(block) < 8 * len(events)  # bytes; the frame takes more than a hundred an event


def test_a_step_is_what_overlaps_it_and_the_gpu_work_it_launched():
    events = timelines.eager(40)
    part, steps = one_step(events, STEPS, 1)
    assert steps["name"].tolist() == ["b"]
    launches = part[part["kind"] == "launch"]
    assert launches["start_us"].between(197, 510).all()
    kernels = part[part["kind"] == "kernel"]
    assert kernels["launched_by"].isin(launches.index).all() and len(kernels) == len(launches)
    with pytest.raises(ValueError, match="step 7 is not in this timeline; it has: 0, 1"):
        explore(events, steps=STEPS, step=7)


def test_a_cell_holds_the_widget_and_a_picture_for_where_it_cannot_run():
    pytest.importorskip("anywidget", reason="anywidget is not installed")
    data, metadata = explore(timelines.eager(5), About("toy"))._repr_mimebundle_()
    assert {"text/plain", "image/png", "application/vnd.jupyter.widget-view+json"} <= set(data)
    assert "toy" in metadata["image/png"]["alt"] and "events" in metadata["image/png"]["alt"]


def test_without_anywidget_there_is_the_picture_and_the_way_out(monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name == "anywidget":
            raise ModuleNotFoundError("No module named 'anywidget'", name="anywidget")
        return real(name, *args, **kwargs)

    from cgkit.plotting.explore import widget

    widget._widget_class.cache_clear()
    monkeypatch.setattr(builtins, "__import__", missing)
    monkeypatch.delitem(sys.modules, "anywidget", raising=False)
    data, _ = explore(timelines.eager(5))._repr_mimebundle_()
    widget._widget_class.cache_clear()
    assert "application/vnd.jupyter.widget-view+json" not in data
    assert "pip install" in data["text/html"] and "<img alt=" in data["text/html"]


def test_the_page_is_one_file_that_names_no_address(tmp_path):
    bill = pd.DataFrame({"side": ["cpu"], "part": ["kernel_launches"], "us": [120.25], "share": [0.5]})
    about = About("</script><b>", "eager", "batch 1", "H200", recorded="an H200")
    page = explore(timelines.eager(5), about, notes=["5 of 5 kernels tied"]).save(
        tmp_path / "a/b.html", bill=bill
    )
    text = page.read_text()
    assert not re.search(r"""(?:src|href|url\()\s*=?\s*["']?(?:https?:)?//""", text)
    assert "default-src 'none'" in text
    for shown in ("recorded on an H200", "5 of 5 kernels tied", "kernel launches", "120.2", "50.0%"):
        assert shown in text
    assert "<b>" not in text.split("<main")[1].split("</header>")[0]


def test_the_script_loads_nothing():
    assert not re.search(r"\bimport\b\s*[({'\"]|fetch\(|XMLHttpRequest|WebSocket|https?://", script())
