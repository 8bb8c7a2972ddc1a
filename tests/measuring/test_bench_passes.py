"""The benchmarks of passes and of custom ops, as dry runs on a small model."""

from __future__ import annotations

import argparse
import contextlib

import pandas as pd
import pytest
import torch

from cgkit import compile_pieces, events, torch_hooks
from cgkit.config import CompilationConfig
from cgkit.measuring import bench_custom_ops, bench_passes, decode_bench
from tests.compiling.toys import split_llama


def arguments(bench, extra=""):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    small = "--shape tiny-llama --layers 1 --device cpu --repeats 8 --batches 2 --context 16"
    return parser.parse_args(f"{small} {extra}".split())


@pytest.mark.slow
def test_passes_off_and_on(tmp_path):
    csv = tmp_path / "passes.csv"
    facts = bench_passes.run(arguments(bench_passes, f"--csv {csv}"))
    frame = facts["frame"].set_index("variant")
    assert facts["emulated"] and csv.exists()
    assert list(frame.index) == [*bench_passes.VARIANTS, *bench_passes.WHOLE]
    assert frame.loc["norm", "matched_fuse_norm_quant"] == 2
    assert frame.loc["norm + act", "matched_fuse_act_quant"] == 1
    assert frame.loc["whole, all", "matched_fuse_attn_quant"] == 1
    assert frame.loc["norm + act", "generated_kernels"] < frame.loc["off", "generated_kernels"]
    assert (frame["step_bytes_at_16_tokens"] > 0).all()
    assert [row["variant"] for row in facts["noop"]] == ["norm + act", "whole, all"]
    assert [row["fusions_with"] for row in facts["noop"]] == [3, 4]
    assert all("wall_ratio" not in row for row in facts["noop"])  # a time of emulated graphs says nothing
    assert list(facts["tables"]) == ["Without the no-op pass"]


@pytest.mark.slow
def test_custom_ops_both_ways():
    frame = bench_custom_ops.run(arguments(bench_custom_ops))["frame"].set_index("variant")
    assert list(frame.index) == list(bench_custom_ops.VARIANTS)
    assert frame.loc["all", "generated_kernels"] < frame.loc["none", "generated_kernels"]
    assert (frame["max_difference"] < 1e-4).all() and (frame["compile_s"] > 0).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of machines without a GPU")
@pytest.mark.parametrize("bench", [bench_passes, bench_custom_ops])
def test_without_a_gpu_it_says_so(bench):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    with pytest.raises(bench_passes.CaptureError, match="measures a GPU"):
        bench.run(parser.parse_args([]))


def row(variant, norms, acts, noop, kernels, **more):
    counts = {"matched_fuse_norm_quant": norms, "matched_fuse_act_quant": acts, "matched_noop": noop}
    return {"variant": variant, "batch": 2, **counts, "generated_kernels": kernels, "wall_ms": 1.0, **more}


def test_the_pair_without_the_noop_pass():
    nothing = float("nan")
    rows = [
        row("off", nothing, nothing, nothing, 40),
        row("norm + act", 8, 4, 3, 30, gpu_busy_ms=2.0),
        row("norm + act, no noop", 6, 4, nothing, 33, gpu_busy_ms=3.0),
        row("whole, all", 8, 4, 3, 30),  # its partner was not measured
    ]
    (found,) = bench_passes.noop_rows(pd.DataFrame(rows))
    assert (found["fusions_with"], found["fusions_without"], found["noop_matched"]) == (12, 10, 3)
    assert (found["kernels_with"], found["kernels_without"]) == (30, 33)
    assert (found["wall_ratio"], found["busy_ratio"]) == (1.0, 1.5)
    for pair in bench_passes.NOOP_PAIRS:
        on, off = ({**bench_passes.VARIANTS, **bench_passes.WHOLE}[name] for name in pair)
        assert on == ("noop", *off)


def test_a_profile_is_read_as_kernels_of_one_step():
    class Happened:
        def __init__(self, device, us):
            self.device_type, self.us = f"DeviceType.{device}", us
            self.time_range = self

        def elapsed_us(self):
            return self.us

    events = [Happened("CUDA", 500.0), Happened("CUDA", 1500.0), Happened("CPU", 9e9)] * decode_bench.PROFILED
    assert decode_bench._busy_in(events) == (2.0, 2.0)


def test_each_piece_counts_for_itself_and_the_general_shape_alone(monkeypatch):
    count = 0

    @contextlib.contextmanager
    def counter():
        yield lambda: count

    monkeypatch.setattr(torch_hooks, "bytes_accessed", counter)
    with bench_passes.bytes_by_piece() as moved:
        for piece, shape, reads in (("a", None, 100), ("a", 4, 7), ("b", None, 30)):
            count += reads
            events.emit(events.PieceCompiled(piece, shape, "inductor", "key", 0.1))
    assert moved == {"a": 100, "b": 30}


@pytest.mark.slow
@pytest.mark.skipif(torch_hooks.find_cpp_compiler() is None, reason="needs a C++ compiler")
def test_a_deeper_model_moves_more_bytes_although_it_compiles_as_few_pieces(monkeypatch):
    monkeypatch.setenv("CGKIT_DISABLE_COMPILE_CACHE", "1")
    totals = []
    for layers in (3, 5):
        with bench_passes.bytes_by_piece() as moved:
            compiled = compile_pieces(
                split_llama(layers)[1], CompilationConfig(cudagraph_mode="NONE", compiler="inductor")
            )
        assert len(moved) == 3 and all(moved.values())
        totals.append(bench_passes.step_bytes(compiled, moved))
    one_layer = moved[compiled.backends[1].general.owner]
    assert totals[1] - totals[0] == 2 * one_layer
