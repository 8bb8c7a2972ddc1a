"""The benchmarks that start processes again, on the smallest model that there is."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from cgkit import torch_hooks
from cgkit.errors import CgkitError
from cgkit.measuring import bench_adaptors, bench_startup
from cgkit.measuring.bench_dedup import toy_llama, toy_split
from cgkit.measuring.start_case import files_in, start


def parsed(bench, command):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(command.split())


@pytest.mark.slow
def test_an_eager_start_is_taken_apart(tmp_path):
    found = start("toy-llama-2", "eager", tmp_path)
    parts = [
        found[name]
        for name in found
        if name.endswith("_s") and name not in ("start_s", "first_call_s") and "cpu" not in name
    ]
    assert len(parts) == 7 and sum(parts) == pytest.approx(found["start_s"], rel=1e-6)
    assert (found["pieces"], found["compilations"], found["loaded"], found["handles"]) == (3, 3, 0, 0)
    assert len(found["answer"]) == 5
    with pytest.raises(CgkitError, match=r"(?s)nobody with eager failed.*no model 'nobody'"):
        start("nobody", "eager", tmp_path)


def test_the_toy_is_traced_where_its_weights_lie():
    traced, _ = toy_split(toy_llama(1).to("meta"))
    values = [node.meta.get("example_value") for node in traced.graph_module.graph.nodes]
    assert {value.device.type for value in values if isinstance(value, torch.Tensor)} == {"meta"}


@pytest.mark.gpu
def test_a_start_on_the_gpu_and_the_next_one(tmp_path):
    cold, warm = (start("toy-llama-2", "inductor", tmp_path, device="cuda") for _ in range(2))
    assert (cold["compilations"], warm["compilations"], warm["loaded"]) == (3, 0, 3)
    assert warm["traces_loaded"] == 1 and warm["answer"] == pytest.approx(cold["answer"], abs=2e-3)


def test_the_files_below_a_folder(tmp_path):
    assert files_in(tmp_path) == (0, 0)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"123")
    assert files_in(tmp_path) == (1, 3)


def fake_start(model, compiler, cache, timeout_s=0, device="cpu"):
    full = (cache / "piece").exists()
    (cache / "piece").write_bytes(b"12")
    kept = 0 if compiler == "eager" else 3
    return {
        "model": model,
        "compiler": compiler,
        "start_s": 2.0 if full else 10.0,
        "first_call_s": 1.0 if full else 9.0,
        "first_call_cpu_s": 1.0 if full else 8.0,
        "start_cpu_s": 3.0 if full else 6.0,
        "import_s": 0.5,
        "compiler_import_s": 0.5,
        "traces_loaded": int(full),
        "trace_s": 0.0 if full else 1.0,
        "split_s": 0.0,
        "answer_s": 0.0,
        "compile_s": 1.0 if full else 8.0,
        "compilations": 3 - kept if full else 3,
        "loaded": kept if full else 0,
        "handles": kept,
        "answer": [1, 2] if compiler != "inductor_patched" else [1, 3],
    }


def test_tables_are_made_of_what_the_starts_said(monkeypatch, tmp_path):
    for bench in (bench_adaptors, bench_startup):
        monkeypatch.setattr(bench, "start", fake_start)
    facts = bench_adaptors.run(parsed(bench_adaptors, f"--csv {tmp_path / 'a.csv'}"))
    frame = facts["frame"].set_index(["compiler", "process", "cache"])
    assert len(frame) == 9 and not facts["all_equal"]
    assert frame.loc[("inductor", "second", "full"), "loaded"] == 3
    assert frame.loc[("inductor", "second", "empty"), "loaded"] == 0
    assert frame.loc[("inductor_patched", "first", "empty"), ["files", "file_bytes"]].tolist() == [1, 2]
    assert list(facts["frame"]["same_answer"]) == [True] * 3 + [False] * 3 + [True] * 3
    assert len(pd.read_csv(tmp_path / "a.csv")) == 9
    facts = bench_startup.run(parsed(bench_startup, "--models x y --warm 1"))
    assert facts["frame"]["cache"].tolist() == ["cold", "warm"] * 2 and facts["nothing_compiled"]
    assert (facts["worst_start_share"], facts["worst_compile_share"]) == (0.2, 0.125)
    assert facts["nothing_traced"] and facts["worst_first_call_share"] == pytest.approx(1 / 9)
    assert facts["frame"]["first_call_cpu_share"].tolist() == [1.0, 0.125] * 2
    assert facts["frame"]["start_cpu_share"].tolist() == [1.0, 0.5] * 2
    assert facts["worst_call_share"] == pytest.approx(1 / 9)
    assert facts["frame"]["import_share"].tolist() == [0.1, 0.5] * 2
    eager = bench_startup.run(parsed(bench_startup, "--models x --compiler eager"))
    assert not eager["nothing_compiled"] and eager["frame"]["same_answer"].all()


@pytest.mark.slow
@pytest.mark.skipif(torch_hooks.find_cpp_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("compiler", ["inductor", "inductor_patched"])
def test_a_warm_start_compiles_nothing(compiler):
    """How long it takes is a benchmark (``cgkit bench startup``); here: that nothing is compiled."""
    command = f"--models toy-llama-2 --compiler {compiler} --warm 1"
    facts = bench_startup.run(parsed(bench_startup, command))
    cold, warm = (SimpleNamespace(**row) for row in facts["rows"])
    assert (cold.compilations, cold.loaded) == (3, 0) and (warm.compilations, warm.loaded) == (0, 3)
    assert (cold.traces_loaded, warm.traces_loaded) == (0, int(compiler == "inductor"))
    assert warm.same_answer and warm.handles == cold.handles == 3
