"""``cgkit bench ledgers``: the parts are really out while they are swapped out, and back afterwards."""

import argparse

import pytest
import torch

from cgkit.errors import CaptureError
from cgkit.forward_context import BatchDescriptor
from cgkit.measuring import bench_ledgers
from cgkit.measuring.bench_ledgers import PARTS, routed_step, row_of, swapped_out
from cgkit.measuring.decode_bench import DecodeBench, any_shape


@pytest.fixture(scope="module")
def bench():
    with torch.no_grad():
        made = DecodeBench(any_shape("tiny-llama", 1), [2], device="cpu", context=16, compiler="eager")
        made.capture()
    return made


@pytest.mark.parametrize("path", ["plan", "module"])
def test_what_is_swapped_out_does_nothing_and_comes_back(bench, path):
    captured = bench.executor.captured
    metadata, inputs = bench.prepared(2), bench.front(2)
    step = routed_step(captured, path, 2, metadata, inputs)
    with torch.no_grad():
        expected = step().clone()
        before = captured.ledgers.modes["PIECEWISE"]
        with swapped_out(captured, path, 2, metadata, inputs, PARTS["all ledgers"]):
            assert torch.equal(step(), expected)
            moved = routed_step(captured, path, 2, metadata, tuple(t.clone() for t in inputs))
            moved()  # nobody looks where the inputs lie
        assert captured.ledgers.modes["PIECEWISE"] == before
        step()
        assert captured.ledgers.modes["PIECEWISE"] == before + 1
        assert "route" not in vars(captured.dispatcher)
        if path == "plan":
            passed_over = sum(captured.plans.module_steps.values())
            moved = routed_step(captured, path, 2, metadata, tuple(t.clone() for t in inputs))
            with pytest.raises(Exception, match="address"):
                moved()
            assert sum(captured.plans.module_steps.values()) == passed_over + 1


def test_ratios_are_of_pairs():
    row = row_of([((1.0, 0.5), (0.5, 0.25)), ((9.0, 0.5), (3.0, 0.25)), ((4.0, 0.5), (1.0, 0.25))])
    assert (row["ratio"], row["with_us"], row["host_difference_us"]) == (3.0, 4e6, 0.25e6)
    assert row["within_goal"] is False and row["rounds"] == 3


@pytest.mark.slow
def test_the_command(tmp_path, monkeypatch):
    parser = argparse.ArgumentParser()
    bench_ledgers.add_arguments(parser)
    csv = tmp_path / "ledgers.csv"
    words = ["--shape", "tiny-llama", "--layers", "1", "--rounds", "2", "--context", "16"]
    words += ["--compiler", "eager", "--device", "cpu"]
    found = bench_ledgers.run(parser.parse_args([*words, "--csv", str(csv)]))
    assert [(row["path"], row["part"]) for row in found["rows"]] == [
        (p, q) for p in ("plan", "module") for q in PARTS
    ]
    assert found["emulated"] is True and len(csv.read_text().splitlines()) == 7
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CaptureError, match="dry run"):
        bench_ledgers.run(parser.parse_args([]))


def test_a_key_without_a_plan(bench):
    captured = bench.executor.captured
    with pytest.raises(CaptureError, match="no replay plan"):
        with swapped_out(captured, "plan", 3, bench.prepared(2), bench.front(2), ("addresses",)):
            pass
    assert BatchDescriptor(2) in captured.plans.ready
