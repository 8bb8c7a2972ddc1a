"""The pace of a step: on numbers whose outcome is known, and on a recorded step."""

import pytest

from cgkit import recordings
from cgkit.measuring.pacing import pacing, queued_us, sum_of_max_us


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
