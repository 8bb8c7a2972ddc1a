"""``explain``: nodes, kernels, code and bytecode of what was compiled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import cgkit
from cgkit import torch_hooks
from cgkit.compiling import compile_pieces
from cgkit.config import CompilationConfig
from cgkit.errors import CgkitError, SplitError
from cgkit.measuring.explain import Bytecode, explain
from tests.compiling.toys import split_llama, split_of

needs_compiler = pytest.mark.skipif(torch_hooks.find_cpp_compiler() is None, reason="needs a C++ compiler")


def config(compiler="eager", **more):
    return CompilationConfig(compiler=compiler, cudagraph_mode="NONE", **more)


@pytest.fixture(scope="module")
def eager():
    return explain(compile_pieces(split_llama(3)[1], config()))


@pytest.fixture(scope="module")
def inductor():
    return explain(compile_pieces(split_llama(3)[1], config("inductor")))


def test_the_eager_adaptor_generates_nothing_and_says_so(eager):
    assert "runs its 20 calls one by one" in repr(eager)
    frame = eager.to_frame()
    assert frame["kernels"].isna().all() and frame["calls_after"].isna().all()
    assert list(frame["shared_with"]) == ["", "", "submod_2", ""]
    assert "def forward" in eager["submod_0"].code


@needs_compiler
def test_inductor_fuses_calls_into_kernels_and_leaves_products_to_a_library(inductor):
    frame = inductor.to_frame().set_index("piece")
    own = frame[frame["shared_with"] == ""]
    assert (own["kernels"] < own["calls_before"]).all()
    assert (own["own_kernels"] >= 1).all()
    assert (own["kernels"] == own["own_kernels"] + own["extern_kernels"] + own["operators"]).all()
    # four products in a middle piece: o, up, down, and the next layer's qkv
    assert frame.loc["submod_2", "extern_kernels"] + frame.loc["submod_2", "operators"] >= 4
    assert (own["calls_after"] > 0).all()
    assert "kernels a run" in repr(inductor)


@needs_compiler
def test_the_code_is_what_runs(inductor):
    piece = inductor["submod_2"]
    for kernel in piece.kernels:
        assert kernel.name in piece.code
    assert {"c++"} <= {kernel.kind for kernel in piece.kernels} <= {"c++", "extern", "operator"}
    assert piece.generated.path and Path(piece.generated.path).read_text() == piece.code
    assert inductor["submod_4"].code == piece.code  # shared


@needs_compiler
def test_a_second_compilation_reads_the_code_from_the_cache():
    split = split_of(lambda self, x: (x * 3).sin() + 7, torch.ones(8, 4), ops=[])
    first, second = (explain(compile_pieces(split, config("inductor"))) for _ in range(2))
    assert first[0].kernels == second[0].kernels != ()
    assert second[0].calls_after == first[0].calls_after


def test_it_shows_itself(eager):
    html = eager._repr_mimebundle_()["text/html"]
    assert "submod_0: eager" in html and "Dynamo&#x27;s bytecode" in html.replace("Dynamo's", "Dynamo&#x27;s")
    assert "def forward" in html
    assert "<svg" in eager.draw(engine="own").svg()


def test_the_bytecode_before_and_after(eager):
    assert isinstance(eager.bytecode, Bytecode)
    assert {eager.bytecode.how_before, eager.bytecode.how_after} <= {"depyf", "dis"}
    assert "__compiled_fn" in eager.bytecode.after and "__compiled_fn" not in eager.bytecode.before
    assert "layers" in eager.bytecode.before
    html = eager.bytecode._repr_mimebundle_()["text/html"]
    assert "before Dynamo" in html and "after Dynamo" in html


def test_without_depyf_it_is_a_listing(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "depyf", None)
    explained = explain(compile_pieces(split_llama(1)[1], config()))
    assert (explained.bytecode.how_before, explained.bytecode.how_after) == ("dis", "dis")
    assert "LOAD_" in explained.bytecode.after


def test_what_holds_a_compiled_graph_is_explained_too():
    captured = cgkit.capture(compile_pieces(split_llama(1)[1], CompilationConfig(compiler="eager")), [2])
    assert len(cgkit.explain(captured)) == 2


def test_what_holds_none_is_refused():
    with pytest.raises(CgkitError, match="was given int, which holds no compiled pieces"):
        explain(3)


def test_a_splitting_piece_is_not_compiled_and_an_unknown_one_is_not_there(eager):
    with pytest.raises(
        CgkitError, match=r"submod_1 is not compiled.*compiletoy::attention.*submod_0, submod_2"
    ):
        eager["submod_1"]
    with pytest.raises(SplitError, match="no piece 'nothing'"):
        eager["nothing"]
    assert not eager.why_different(1, 0).equal


def test_static_shapes_are_rows_of_their_own():
    explained = explain(compile_pieces(split_llama(1)[1], config(compile_sizes=[4])))
    assert list(explained.to_frame()["shape"]) == ["general", "4"] * 2
    assert "at 4 tokens" in repr(explained)
