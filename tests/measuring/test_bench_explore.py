"""The benchmark of the interactive timeline runs; how fast it is stands in data/recordings, not in a test."""

import shutil

import pytest

from cgkit.errors import CgkitError
from cgkit.measuring import bench_explore
from cgkit.measuring.event_kinds import KINDS


def test_it_measures_every_view():
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    try:
        chromium = bench_explore.find_chromium()
    except CgkitError as error:
        pytest.skip(str(error))
    frame = bench_explore.measure([2000], frames=5, chromium=chromium)
    assert list(frame["view"]) == list(bench_explore.VIEWS)
    assert set(frame["events"]) == {2000}
    assert frame["events_in_view"].is_monotonic_decreasing and frame["events_in_view"].iloc[0] == 2000
    assert (frame[["draw_median_ms", "frame_median_ms"]] > 0).all(axis=None)
    assert "Chromium" in frame["browser"].iloc[0]


def test_without_a_browser_it_says_what_to_name(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(CgkitError, match="--chromium"):
        bench_explore.find_chromium()


def test_the_synthetic_timeline_is_a_timeline():
    events = bench_explore.synthetic(4000)
    assert len(events) == 4000 and events["start_us"].is_monotonic_increasing
    kernels = events[events["kind"] == "kernel"]
    assert (events["kind"].to_numpy()[kernels["launched_by"]] == "launch").all()
    assert (kernels["start_us"].to_numpy() >= events["start_us"].to_numpy()[kernels["launched_by"]]).all()
    ends = kernels["start_us"] + kernels["dur_us"]
    assert (
        kernels["start_us"].to_numpy()[1:] >= ends.to_numpy()[:-1] - 1e-6
    ).all()  # one stream: one after the other
    assert set(events["kind"]) <= set(KINDS)
