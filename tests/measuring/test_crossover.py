"""The crossover: its arithmetic on made-up curves, and a dry run."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest
import torch
from torch import nn

from cgkit.config import CompilationConfig
from cgkit.errors import ConfigError
from cgkit.measuring import Crossover, crossover
from cgkit.measuring.crossover import measured_crossing
from cgkit.measuring.decode_bench import shape_from_json
from cgkit.measuring.roofline import Rates, Work, llama_work, measure_rates
from cgkit.serving.llama import PRESETS
from cgkit.serving.weights import build_model, random_weights
from cgkit.splitting import register_op


def rows(*points):
    return [{"batch": batch, "cpu_ms": cpu, "gpu_busy_ms": busy} for batch, cpu, busy in points]


def test_the_measured_crossing():
    assert measured_crossing(rows((1, 4, 1), (4, 4, 2), (16, 4, 8))) == pytest.approx(
        8
    )  # halfway, by the logarithm
    assert measured_crossing(rows((1, 4, 4), (16, 4, 8))) == 0
    assert measured_crossing(rows((1, 4, 1), (16, 4, 2))) == math.inf
    assert measured_crossing(rows((1, 4, None), (16, 4, 2))) is None
    # back and forth: from the last crossing on it stays so
    assert measured_crossing(rows((1, 4, 1), (2, 4, 5), (4, 4, 1), (8, 4, 16))) == pytest.approx(4 * 2**0.5)


def test_the_roofline_and_its_inverse():
    rates = Rates(1e12, 1e14, "bfloat16", "made up")
    work = Work(weight_bytes=1e9, bytes_per_token=1e6, flop_per_token=1e9)
    assert work.seconds(0, rates) == pytest.approx(1e-3)
    assert work.seconds(1000, rates) == pytest.approx(10e-3)  # bound by FLOPs
    for seconds in (1.05e-3, 2e-3, 0.5):
        assert work.seconds(work.batch_at(seconds, rates), rates) == pytest.approx(seconds)
    assert work.batch_at(0.5e-3, rates) == 0
    assert Work(1e9, 0, 0).batch_at(1, rates) == math.inf


def test_the_work_of_a_llama_counts_its_weights():
    shape = PRESETS["tiny-llama"]
    model = build_model(shape, random_weights(shape))
    layers = sum(
        p.numel() for name, p in model.named_parameters() if "layers" in name or "model.norm" in name
    )
    work = llama_work(shape, context=10, itemsize=2)
    assert work.weight_bytes == 2 * layers
    assert (
        work.bytes_per_token == 2 * 10 * 2 * 2 * 16 * 4
    )  # bytes, context, key and value, heads, size, layers


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_shape_reaches_the_profiling_child_whole(name):
    assert shape_from_json(json.dumps(asdict(PRESETS[name]))) == PRESETS[name]


def test_rates_are_of_this_machine():
    rates = measure_rates("cpu", copy_bytes=2**22, side=128)
    assert 1e8 < rates.copy_bytes_per_s < 1e13 and 1e7 < rates.matmul_flop_per_s < 1e15
    assert rates.dtype == "float32" and rates.device == "cpu"


@pytest.fixture(scope="module")
def dry_run() -> Crossover:
    return crossover("tiny-llama", [4, 1], device="cpu", context=16, layers=1, repeats=8)


def test_a_dry_run_says_that_it_is_one(dry_run):
    frame = dry_run.to_frame()
    assert [(m, b) for b, m in zip(frame["batch"], frame["mode"])] == [
        (mode, batch) for batch in (1, 4) for mode in ("eager", "compiled", "PIECEWISE", "FULL")
    ]
    assert (
        frame["emulated"].all() and frame["gpu_busy_ms"].isna().all() and frame["launch_bound"].isna().all()
    )
    assert (frame["predicted_ms"] >= frame["roofline_ms"]).all()
    crossings = dry_run.crossings()
    assert crossings["measured_batch"].isna().all() and crossings["emulated"].all()
    assert (crossings["predicted_batch"] > 0).all()
    assert "dry run" in repr(dry_run)
    title = dry_run.plot().get_figure().get_suptitle()
    assert "emulated graphs: CPU figures, not a GPU's" in " ".join(title.split())


def test_the_prediction_takes_the_hosts_time_from_the_smallest_batch(dry_run):
    frame = dry_run.to_frame()
    for _, one in frame.groupby("mode"):
        host = one.loc[one["batch"] == 1, "cpu_ms"].iloc[0]
        for row in one.to_dict("records"):
            assert row["predicted_ms"] == pytest.approx(max(host, row["roofline_ms"]))


def test_facts_come_back(dry_run):
    again = Crossover.from_facts(json.loads(json.dumps(dry_run.facts())))
    assert again.to_frame().equals(dry_run.to_frame()) and again.batches == [1, 4]
    assert again.crossings().equals(dry_run.crossings())


@pytest.mark.parametrize(
    "wrong", [("no-shape", [1]), ("tiny-llama", []), ("tiny-llama", [0, 1]), (object(), [1])]
)
def test_what_makes_no_sense_is_refused(wrong):
    with pytest.raises(ConfigError):
        crossover(*wrong, device="cpu")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.empty(x.shape[0], 16, dtype=x.dtype, device=x.device)
        torch.ops.cgkit_crossover.relu_into(self.one(x), hidden)
        return self.two(hidden)


def relu_into(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x.relu())


@pytest.mark.parametrize("ops", [("cgkit_crossover::relu_into",), ()], ids=["cut", "whole"])
def test_anybodys_model(ops):
    register_op("relu_into", relu_into, ["out"], namespace="cgkit_crossover")
    model = Model()
    config = CompilationConfig(splitting_ops=ops, compiler="eager")
    found = crossover(model, [1, 4], make_inputs=lambda n: torch.ones(n, 8), config=config, repeats=8)
    frame = found.to_frame()
    modes = {"eager", "compiled", "FULL"} | ({"PIECEWISE"} if ops else set())
    assert set(frame["mode"]) == modes and (frame["wall_ms"] > 0).all() and frame["emulated"].all()
    assert found.work.weight_bytes == 4 * (8 * 16 + 16 + 16 * 8 + 8)
    assert found.work.flop_per_token == 2 * (8 * 16 + 16 * 8)
    assert found.about["model"] == "Model" and not any(vars(m).get("forward") for m in model.modules())


@pytest.mark.gpu
def test_on_a_gpu_both_curves_are_measured():
    found = crossover("tiny-llama", [1, 8], context=32, repeats=16)
    frame = found.to_frame()
    assert (
        not frame["emulated"].any() and (frame["gpu_busy_ms"] > 0).all() and (frame["gpu_nodes"] >= 8).all()
    )
    host = frame[frame["batch"] == 1].set_index("mode")["cpu_ms"]
    assert host["eager"] > host["PIECEWISE"] > host["FULL"]
    eager = found.crossings().set_index("mode").loc["eager"]
    assert eager["measured_batch"] == math.inf  # so small a model is launch-bound at any batch here
