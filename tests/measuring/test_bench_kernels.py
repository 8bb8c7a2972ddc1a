"""The benchmark of the kernels, as a dry run on the CPU; and which rule its rows speak for."""

from __future__ import annotations

import argparse

import pandas as pd
import pytest
import torch

from cgkit.errors import CaptureError
from cgkit.measuring import bench_kernels
from cgkit.measuring.kernel_rules import rank_rules
from cgkit.serving.llama import PRESETS


def parsed(command):
    parser = argparse.ArgumentParser()
    bench_kernels.add_arguments(parser)
    return parser.parse_args(command.split())


def test_every_row_is_there(tmp_path):
    command = "--device cpu --shapes tiny-llama --batches 1 4 --contexts 20 --repeats 3"
    facts = bench_kernels.run(parsed(f"{command} --csv {tmp_path / 'rows.csv'}"))
    rows = pd.read_csv(tmp_path / "rows.csv")
    products = ["q+k+v", "qkv", "o", "gate+up", "gate_up", "down"]
    assert rows["name"].tolist() == [*products, *products, "torch", "torch"]
    assert rows.query("name == 'gate_up'")["mb"].tolist() == [2 * 64 * 160 * 4 / 1e6] * 2
    # keys and values of 20 tokens, 2 heads of 16, float32
    assert rows.query("subject == 'attention'")["mb"].tolist() == pytest.approx(
        [b * 2 * 20 * 2 * 16 * 4 / 1e6 for b in (1, 4)]
    )
    assert (rows["us"] >= rows["low_us"]).all() and (rows["over_floor"] > 0).all()
    assert "dry run" in facts["device"] and facts["left_out"] == 0 and facts["rules"] == []
    assert set(facts["frame"]["name"]) >= {"qkv", "o", "gate_up", "down", "torch"}


def test_merged_products_have_the_weights_of_their_parts():
    for shape in (PRESETS["llama-3.1-8b"], PRESETS["llama-3.2-1b"]):
        ways = bench_kernels.products_of(shape).values()
        sizes = [{sum(k * n for k, n in widths) for widths in names.values()} for names in ways]
        assert all(len(each) == 1 for each in sizes)
        layers = sum(each.pop() for each in sizes) + 2 * shape.hidden_size
        rest = shape.hidden_size * (1 + (1 if shape.tie_word_embeddings else 2) * shape.vocab_size)
        assert shape.num_hidden_layers * layers + rest == shape.num_parameters


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of machines without a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(CaptureError, match="measures a GPU"):
        bench_kernels.run(parsed(""))


def timed(us):
    """Rows of attention at batch 1 and 16 (8 KV heads, 256 tokens): {(batch, tile, splits): us}."""
    fixed = {"subject": "attention", "shape": "s", "kv_heads": 8, "context": 256, "num_warps": 4}
    return pd.DataFrame(
        [
            {**fixed, "batch": batch, "tile": tile, "num_stages": 3, "splits": splits, "us": value}
            for (batch, tile, splits), value in us.items()
        ]
    )


def test_the_best_rule_is_the_one_with_the_least_loss_over_all_cases():
    us = {
        (1, 64, 1): 9.0,
        (1, 64, 2): 8.0,
        (1, 64, 4): 6.0,
        (16, 64, 1): 10.0,
        (16, 64, 2): 10.0,
        (16, 64, 4): 20.0,
    }
    us |= {(1, 128, 2): 5.0, (16, 128, 1): 40.0, (16, 128, 2): 40.0}
    rules = rank_rules(timed(us))
    first = rules.iloc[0]
    # batch 1 over four programs; batch 16 has 128 of its own, so 132 or 264 wanted leave it whole or halved
    assert (first["tile"], first["min_chunk"]) == (64, 64) and first["programs"] < 528
    assert first["times_best"] == pytest.approx((6.0 / 5.0 * 1.0) ** 0.5) and first["worst"] == pytest.approx(
        1.2
    )
    wide = rules[rules["tile"] == 128].iloc[0]
    assert wide["worst"] == pytest.approx(4.0) and wide["min_chunk"] >= 128


def test_rules_that_were_not_timed_are_not_ranked():
    assert rank_rules(timed({(1, 64, 4): 6.0})).shape[0] >= 1
    assert rank_rules(timed({(1, 64, 32): 6.0})).empty
    assert rank_rules(pd.DataFrame()).empty


@pytest.mark.gpu
def test_on_the_gpu(tmp_path):
    from cgkit.kernels import triton_decode

    before = dict(vars(triton_decode))
    command = "--shapes llama-3.2-1b --batches 1 8 --contexts 256 --repeats 5 --seconds 30"
    facts = bench_kernels.run(parsed(f"{command} --csv {tmp_path / 'rows.csv'}"))
    after = vars(triton_decode)
    assert all(after[name] == before[name] for name in ("TILE", "MIN_CHUNK", "num_splits", "_launch"))
    assert after["PROGRAMS_A_PROCESSOR"] == before["PROGRAMS_A_PROCESSOR"]
    rows = pd.DataFrame(facts["rows"])
    decode = rows[rows["subject"] == "attention"]
    for _, case in decode.groupby("batch"):
        assert case["now"].sum() == 1 and case["best"].sum() == 1
    assert (decode["us"] < 200).all() and facts["rules"]


def test_what_is_set_now_is_tried_first_and_nothing_overfills_the_device(monkeypatch):
    pytest.importorskip("triton")
    from types import SimpleNamespace

    from cgkit.kernels import triton_decode as kernel

    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(multi_processor_count=132)
    )
    bench = bench_kernels._Bench(parsed("--device cpu --shapes llama-3.1-8b"))
    bench.programs_a_processor = kernel.PROGRAMS_A_PROCESSOR
    shape = PRESETS["llama-3.1-8b"]
    for batch, context, splits in [(1, 256, 4), (1, 2048, 16), (8, 256, 4), (8, 2048, 4), (32, 2048, 1)]:
        now, tried = bench._candidates(shape, batch, context)
        assert tried[0] == now and now.splits == splits and now.tile == kernel.TILE
        assert len(set(tried)) == len(tried) > len(bench_kernels.SETTINGS) - 1
        assert max(each.splits for each in tried) * batch * 8 <= max(4 * 132, batch * 8)
