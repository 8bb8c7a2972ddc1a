"""What cuts cost: the same kernels in every way, and a plain refusal without a GPU."""

import argparse

import pytest
import torch

from cgkit.errors import CaptureError, ConfigError
from cgkit.measuring import boundaries


def given(*words):
    parser = argparse.ArgumentParser()
    boundaries.add_arguments(parser)
    return parser.parse_args(list(words))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(CaptureError, match="sees no GPU"):
        boundaries.run(given())


def test_pieces_and_launches_alternate():
    assert boundaries._alternating("ABC", "xy") == ["A", "x", "B", "y", "C"]


@pytest.mark.gpu
def test_on_a_gpu_each_way_runs_the_same_kernels():
    with pytest.raises(ConfigError, match="at least 2"):
        boundaries.run(given("--pieces", "1"))
    x = torch.zeros(64, device="cuda")
    with torch.no_grad():
        ways, _graphs = boundaries.ways_to_cut(3, 2, x)
    for name in ("one graph", "graphs and launches between", "graphs and small graphs between"):
        x.zero_()
        for call in ways[name]:
            call()
        assert set(x.tolist()) == {8.0}, name
    rows = boundaries.run(given("--pieces", "4", "--rounds", "20"))["rows"]
    assert [row["launches"] for row in rows] == [1, 7, 7, 4, 4] and rows[0]["over_one_graph_us"] == 0
    assert all(row["device_us"] > 0 and row["host_us"] > 0 for row in rows)
