import pytest

from cgkit.measuring.launches import idle_by_stream, launch_statistics
from tests.measuring.synthetic import Trace, eager_step, graph_step


def test_a_row_for_each_kernel_with_its_launch():
    trace = Trace()
    eager_step(trace, 0, kernels=4, run=3)
    table = launch_statistics(trace.timeline())
    assert table[["launch_us", "run_us", "delay_us"]].values.tolist() == [[4, 3, 2]] * 4
    assert set(table["kind"]) == {"launch"}


def test_what_hta_does_not_list():
    trace = Trace()
    graph_step(trace, 0, nodes=6)
    trace.gpu(300, 5, trace.call("cuLaunchKernelEx", 290, 5))
    trace.gpu(310, 5, trace.call("launch", 296, 5))
    assert len(launch_statistics(trace.timeline())) == 8
    assert launch_statistics(trace.timeline(), like_hta=True)["call"].tolist() == ["cudaLaunchKernel"]


def test_gaps_by_what_they_wait_for():
    trace = Trace()
    a, b, c = trace.call("launch", 0, 2), trace.call("launch", 4, 2), trace.call("launch", 30, 2)
    trace.gpu(10, 10, a)
    trace.gpu(25, 2, b)  # queued in time: 5 us of the GPU's own
    trace.gpu(40, 5, c)  # launched after the one before had ended: 13 us
    trace.gpu(100, 5, b, stream=9)
    one, other = idle_by_stream(trace.timeline()).to_dict("records")
    assert (one["kernel_wait_us"], one["host_wait_us"], one["other_us"], one["busy_us"]) == (5, 13, 0, 17)
    assert other["works"] == 1 and other["busy_us"] == pytest.approx(5)
