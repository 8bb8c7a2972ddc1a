"""The benchmark of modes, as a dry run: the same code, emulated, on a small model."""

from __future__ import annotations

import argparse

import pytest
import torch

from cgkit.compiling.inductor_config import check_inductor_options, inductor_options_for
from cgkit.config import CompilationConfig
from cgkit.errors import ConfigError
from cgkit.measuring import bench_modes, tuning
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


@pytest.mark.parametrize("policy", tuning.POLICIES)
def test_a_tuning_compiles_the_batches_that_are_measured(policy):
    fields = tuning.tuned_fields(policy, [32, 1])
    config = CompilationConfig(cudagraph_mode="FULL", **fields)
    assert config.compile_sizes == (1, 32)
    options = inductor_options_for(config.inductor_compile_config, 1)
    check_inductor_options(config.inductor_compile_config)
    assert options["coordinate_descent_tuning"] is policy.startswith("reductions")
    assert options["max_autotune"] is (policy in ("templates", "reductions"))
    assert options["combo_kernels"] is True
    without = tuning.tuned_fields(policy, [1], combo_kernels=False)["inductor_compile_config"]
    assert not any("combo" in name for name in without)


def test_no_tuning_and_one_that_is_none():
    assert tuning.tuned_fields(None, [1]) == {}
    with pytest.raises(ConfigError, match="use one of library, templates"):
        tuning.tuned_fields("everything", [1])
    parser = argparse.ArgumentParser()
    bench_modes.add_arguments(parser)
    assert parser.parse_args(["--tuned"]).tuned == "reductions" and parser.parse_args([]).tuned is None


@pytest.mark.slow
def test_tuned_rows_as_a_dry_run():
    parser = argparse.ArgumentParser()
    bench_modes.add_arguments(parser)
    command = (
        "--shape tiny-llama --layers 1 --device cpu --repeats 8 --batches 2 --context 16 --tuned templates"
    )
    facts = bench_modes.run(parser.parse_args(command.split()))
    assert facts["tuned"] == "templates" and facts["inductor"]["coordinate_descent_tuning"] is False
    assert [row["mode"] for row in facts["rows"]] == ["eager", "compiled", "PIECEWISE", "FULL"]
