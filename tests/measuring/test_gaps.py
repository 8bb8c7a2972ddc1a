"""Idle times of the GPU and their cause, on a synthetic timeline whose answer is known."""

import pytest

from cgkit.measuring.gaps import gaps
from cgkit.measuring.timeline import Timeline
from tests.plotting import timelines


def known() -> Timeline:
    build = timelines.Builder()
    build.cpu("annotation", "cgkit step", 0, 100)
    first = build.cpu("launch", "cudaLaunchKernel", 10, 5, correlation=1)
    second = build.cpu("launch", "cudaLaunchKernel", 25, 12, correlation=2)
    graph = build.cpu("graph_launch", "cudaGraphLaunch", 50, 4, correlation=3)
    build.cpu("sync", "cudaDeviceSynchronize", 60, 40)
    build.gpu("a", 16, 10, first)  # 0-16 before it: mostly Python
    build.gpu("b", 36, 10, second)  # 26-36: the CPU was launching
    build.gpu("c", 80, 5, graph, graph=True)  # 46-80: mostly in the sync
    build.gpu("d", 88, 5, graph, graph=True)  # 85-88: between nodes of a graph
    return Timeline(build.frame())


def test_each_gap_is_named_after_what_fills_most_of_it():
    found = gaps(known())
    rows = list(zip(found["start_us"], found["dur_us"], found["cause"]))
    assert rows == [
        (0, 16, "idle_python"),
        (26, 10, "idle_launching"),
        (46, 34, "idle_sync"),
        (85, 3, "idle_inside_graph"),
        (93, 7, "idle_sync"),
    ]


@pytest.mark.parametrize("frame", [timelines.eager(), timelines.pieces()], ids=["eager", "pieces"])
def test_gaps_and_busy_time_add_up_to_the_bills_wall_time(frame):
    timeline = Timeline(frame)
    bill = timeline.bill()
    idle = sum(us for part, us in bill.gpu.items() if part != "busy")
    assert gaps(timeline)["dur_us"].sum() == pytest.approx(idle)


def test_without_a_gpu_there_are_none():
    frame = timelines.eager(3)
    found = gaps(Timeline(frame[frame["stream"] < 0].reset_index(drop=True)))
    assert len(found) == 0 and list(found.columns) == ["process", "device", "start_us", "dur_us", "cause"]
