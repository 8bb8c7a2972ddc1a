"""The benchmark of static sizes, as a dry run on the CPU; and what it makes of the autotuner."""

from __future__ import annotations

import argparse

import pandas as pd
import pytest
import torch

from cgkit import torch_hooks
from cgkit.errors import CaptureError, ConfigError
from cgkit.measuring import bench_static

compiler = pytest.mark.skipif(torch_hooks.find_cpp_compiler() is None, reason="needs a C++ compiler")


def parsed(command):
    parser = argparse.ArgumentParser()
    bench_static.add_arguments(parser)
    return parser.parse_args(command.split())


@compiler
@pytest.mark.slow
def test_every_row_is_there(tmp_path):
    command = (
        "--device cpu --products 8x32x48 --shapes tiny-llama --pieces middle last --batches 4 --repeats 3"
    )
    facts = bench_static.run(parsed(f"{command} --csv {tmp_path / 'rows.csv'}"))
    frame = facts["frame"].set_index(["subject", "piece", "batch", "callable"])
    policies = [*bench_static.POLICIES, "cuBLAS"]
    assert list(frame.index) == [
        *(("product", "8x32x48", 8, policy) for policy in policies),
        *(("tiny-llama", kind, 4, policy) for kind in ("middle", "last") for policy in policies),
    ]
    assert (frame["us"] >= frame["low_us"]).all() and (frame["low_us"] > 0).all()
    compiled = frame.drop("cuBLAS", level="callable")
    assert (compiled["compile_s"] > 0).all() and "dry run" in facts["device"]
    general = frame.xs("general", level="callable")
    assert (general["times_general"] == 1).all()
    assert len(pd.read_csv(tmp_path / "rows.csv")) == 12


def test_what_is_no_product_and_a_machine_without_a_gpu():
    with pytest.raises(ConfigError, match="'8x2048' is no product"):
        bench_static.run(parsed("--device cpu --products 8x2048 --shapes"))
    if not torch.cuda.is_available():
        with pytest.raises(CaptureError, match="measures a GPU"):
            bench_static.run(parsed(""))


def test_the_products_of_a_piece_and_its_inputs():
    split = bench_static._model_split("tiny-llama", "cpu")
    from cgkit.compiling import compile_pieces
    from cgkit.config import CompilationConfig

    compiled = compile_pieces(split, CompilationConfig(compiler="eager", cudagraph_mode="NONE"))
    first, middle, last = compiled.backends
    # width 64, 4 query and 2 key/value heads of 16, MLP 160
    assert bench_static.products_of(first, 3) == [(3, 64, 64 + 2 * 32)]
    mlp = [(3, 64, 64), (3, 64, 2 * 160), (3, 160, 64)]
    assert bench_static.products_of(middle, 3) == [*mlp, *bench_static.products_of(first, 3)]
    assert bench_static.products_of(last, 3) == mlp
    for backend in compiled.backends:
        args = bench_static.real_inputs(backend, 3, "cpu")
        assert len(args) == len(backend.call.args) and 3 in args
        assert backend(*args) is not None


def test_rows_are_timed_in_turn_and_by_the_call():
    log = []
    calls = {"a": [lambda: log.append("a")], "b": [lambda: log.append("b1"), lambda: log.append("b2")]}
    seconds = bench_static.timed_in_turn(calls, 2, "cpu")
    assert log[-6:] == ["a", "b1", "b2"] * 2 and {len(times) for times in seconds.values()} == {2}


class Choice:
    def __init__(self, name, description):
        self.name, self.description = name, description


class TritonTemplateCaller(Choice):
    pass


class ExternKernelCaller(Choice):
    pass


class Node:
    def __init__(self, *size):
        self.get_size = lambda: size


def test_candidates_of_the_autotuner_are_a_table():
    from torch._inductor import select_algorithm

    cache = select_algorithm.get_algorithm_selector_cache()
    before, found = list(cache.feedback_saver_fns), []
    with pytest.raises(KeyError), torch_hooks.autotuning_caught(found):
        (listener,) = [fn for fn in cache.feedback_saver_fns if fn not in before]
        timings = {
            ExternKernelCaller("mm", None): 0.016,
            TritonTemplateCaller("triton_mm_4", "BLOCK_M=16"): 0.013,
            TritonTemplateCaller("triton_mm_5", "BLOCK_M=32"): float("inf"),
        }
        listener(timings, "mm", [Node(8, 2048), Node(2048, 3072)], list(timings), None, {})
        raise KeyError
    assert cache.feedback_saver_fns == before
    table = pd.DataFrame(found)
    assert table["backend"].tolist() == ["ATen", "Triton", "Triton"]
    assert table["chosen"].tolist() == [False, True, False]
    assert set(table["inputs"]) == {"8x2048, 2048x3072"} and table["parameters"].tolist()[1] == "BLOCK_M=16"


@compiler
@pytest.mark.slow
def test_inductor_tells_what_it_tried():
    import torch._inductor.config as inductor

    found = []
    with (
        inductor.patch(max_autotune=True, max_autotune_gemm_backends="ATEN,CPP", force_disable_caches=True),
        inductor.patch(freezing=True),
        torch.no_grad(),
        torch_hooks.autotuning_caught(found),
    ):
        layer = torch.nn.Linear(64, 96, bias=False)
        torch.compile(layer, dynamic=False)(torch.randn(8, 64))
    assert {row["backend"] for row in found} >= {"ATen", "Cpp"}
    assert sum(row["chosen"] for row in found) == 1 and all(row["ms"] > 0 for row in found)


@pytest.mark.gpu
def test_on_the_gpu():
    command = "--products 8x2048x3072 --shapes tiny-llama --pieces middle --batches 8 --repeats 10"
    facts = bench_static.run(parsed(command))
    product = facts["frame"].query("subject == 'product'").set_index("callable")
    assert product.loc["static, tuned", "us"] < 200
    tried = pd.DataFrame(facts["candidates"]).query("subject == 'product'")
    assert {"ATen", "Triton"} <= set(tried["backend"]) and tried["chosen"].sum() == 1
