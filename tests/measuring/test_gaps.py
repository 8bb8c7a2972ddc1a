"""Idle times of the GPU and their cause, on a synthetic timeline whose answer is known."""

import pytest

from cgkit.measuring.bill import whole
from cgkit.measuring.gaps import gaps
from cgkit.measuring.timeline import Timeline
from tests.measuring.foreign import trace_path
from tests.plotting import timelines


def known() -> Timeline:
    build = timelines.Builder()
    build.cpu("annotation", "cgkit step", 0, 100)
    first = build.cpu("launch", "cudaLaunchKernel", 10, 5, correlation=1)
    second = build.cpu("launch", "cudaLaunchKernel", 25, 12, correlation=2)
    graph = build.cpu("graph_launch", "cudaGraphLaunch", 50, 4, correlation=3)
    build.cpu("sync", "cudaDeviceSynchronize", 60, 40)
    build.gpu("a", 16, 10, first)
    build.gpu("b", 36, 10, second)
    build.gpu("c", 80, 5, graph, graph=True)
    build.gpu("d", 88, 5, graph, graph=True)
    return Timeline(build.frame())


def test_idle_time_is_cut_where_the_cause_changes():
    found = gaps(known())
    rows = list(zip(found["start_us"], found["start_us"] + found["dur_us"], found["cause"]))
    assert rows == [
        (0, 10, "idle_python"),
        (10, 15, "idle_launching"),
        (15, 16, "idle_python"),
        (26, 36, "idle_launching"),
        (46, 50, "idle_python"),
        (50, 54, "idle_launching"),
        (54, 60, "idle_python"),
        (60, 80, "idle_sync"),
        (85, 88, "idle_inside_graph"),
        (93, 100, "idle_sync"),
    ]


@pytest.mark.parametrize("frame", [timelines.eager(), timelines.pieces()], ids=["eager", "pieces"])
def test_each_cause_sums_up_to_the_bills(frame):
    timeline = Timeline(frame)
    sums = gaps(timeline).groupby("cause")["dur_us"].sum()
    for part, us in timeline.bill().gpu.items():
        assert part == "busy" or sums.get(part, 0.0) == pytest.approx(us)


@pytest.mark.parametrize("name", ["qwen-eager-h100.json.gz", "vllm-decode-full-mi300.json.gz"])
def test_so_they_do_in_traces_of_somebody_else(name):
    timeline = Timeline.from_trace(trace_path(name))
    sums = gaps(timeline).groupby("cause")["dur_us"].sum()
    for part, us in whole(timeline, 0).gpu.items():
        assert part == "busy" or sums.get(part, 0.0) == pytest.approx(us, abs=0.01)


def test_without_a_gpu_there_are_none():
    frame = timelines.eager(3)
    found = gaps(Timeline(frame[frame["stream"] < 0].reset_index(drop=True)))
    assert len(found) == 0 and list(found.columns) == ["process", "device", "start_us", "dur_us", "cause"]
