"""The benchmark of modes, as a dry run: the same code, emulated, on a small model."""

from __future__ import annotations

import argparse

import pytest
import torch

from cgkit.measuring import bench_modes
from cgkit.splitting import registered_ops
from cgkit.splitting.register import direct_call

ATTENTION = "cgkit::unified_attention_with_output"


@pytest.mark.slow
def test_every_row_is_there_and_the_attention_is_put_back():
    parser = argparse.ArgumentParser()
    bench_modes.add_arguments(parser)
    attention = registered_ops()[ATTENTION].op_func
    command = (
        "--shape tiny-llama --layers 1 --device cpu --repeats 8 --batches 1 4 --context 16 --no-first-call"
    )
    facts = bench_modes.run(parser.parse_args(command.split()))
    assert facts["emulated"] is True
    rows = [(row["mode"], row["batch"]) for row in facts["rows"]]
    assert rows == [(m, b) for b in (1, 4) for m in ("eager", "compiled", "PIECEWISE", "FULL")]
    assert all(row["wall_ms"] > 0 and row["pieces"] == 2 for row in facts["rows"])
    assert [row["graphs"] for row in facts["recording"]] == [22, 33, 22, 33]
    known = registered_ops()[ATTENTION]
    direct = direct_call(known.overload)
    assert known.op_func is attention and direct is not None and direct.call is attention


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of machines without a GPU")
def test_without_a_gpu_it_says_so():
    parser = argparse.ArgumentParser()
    bench_modes.add_arguments(parser)
    with pytest.raises(bench_modes.CaptureError, match="measures a GPU"):
        bench_modes.run(parser.parse_args([]))
