"""The pace of a step: on numbers whose outcome is known, and on a recorded step."""

import pytest

from cgkit import recordings
from cgkit.measuring.pacing import pacing, queued_us, sum_of_max_us
from tests.measuring.synthetic import Trace, eager_step


def test_where_one_side_is_always_slower_all_agree():
    cpu, gpu = [4.0, 4.0, 4.0], [1.0, 1.0, 1.0]
    assert sum_of_max_us(cpu, gpu) == 12
    assert queued_us(cpu, gpu) == 13  # the last kernel runs after the last launch


def test_launches_run_ahead_of_a_long_kernel():
    cpu, gpu = [2.0, 2.0, 2.0], [9.0, 1.0, 1.0]
    assert sum_of_max_us(cpu, gpu) == 13
    assert queued_us(cpu, gpu) == 13  # 2 until the first starts, then 9, 1, 1
    assert queued_us([1.0, 5.0], [9.0, 1.0]) == 11 and sum_of_max_us([1.0, 5.0], [9.0, 1.0]) == 14


@pytest.mark.parametrize(("mode", "launches"), [("PIECEWISE", 33), ("FULL", 1)])
def test_every_kernel_of_a_recorded_step_belongs_to_a_launch(mode, launches):
    timeline = recordings.load(f"h200-trace-llama-3.2-1b-b1-{mode}")
    paced, bill = pacing(timeline), timeline.bill()
    assert len(paced) == launches and paced["kernels"].sum() == bill.kernels
    assert (paced["cpu_us"] >= 0).all()
    assert bill.gpu["busy"] <= paced["gpu_us"].sum() <= bill.wall_us
    assert queued_us(paced["cpu_us"], paced["gpu_us"]) <= bill.wall_us


def test_launches_of_the_next_step_and_of_another_process_set_no_pace():
    trace = Trace()
    for number, start in ((1, 0), (2, 100)):  # the GPU's work of the first runs on while the second launches
        trace.step(number, start, 100)
        for i in range(2):
            trace.gpu(start + 80 + 50 * i, 50, trace.call("launch", start + 10 + 20 * i, 5))
    other = Trace(pid=200, device=1, correlation=5000)
    eager_step(other, 5, 1, number=None)
    trace.events += other.events
    paced = pacing(trace.timeline())
    assert paced.to_dict("list") == {"cpu_us": [15, 20], "gpu_us": [50, 50], "kernels": [1, 1]}
