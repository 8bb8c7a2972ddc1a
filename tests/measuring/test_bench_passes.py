"""The benchmarks of passes and of custom ops, as dry runs on a small model."""

from __future__ import annotations

import argparse

import pytest
import torch

from cgkit.measuring import bench_custom_ops, bench_passes


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
