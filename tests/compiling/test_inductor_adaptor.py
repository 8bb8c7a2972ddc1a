"""The tamed Inductor: each patch alone, handles, and a second process that loads by handle."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cgkit import torch_hooks
from cgkit.compiling import (
    EagerAdaptor,
    InductorAdaptor,
    InductorHandle,
    InductorStandaloneAdaptor,
    compile_pieces,
)
from cgkit.compiling.adaptors import make_adaptor
from cgkit.compiling.inductor_adaptor import PatchedGraph
from cgkit.config import CompilationConfig
from cgkit.counters import compilation_counter
from cgkit.errors import CompileError, UnsupportedTorchError
from tests.compiling.toys import llama_inputs, split_llama, split_of

pytestmark = pytest.mark.skipif(torch_hooks.find_cpp_compiler() is None, reason="needs a C++ compiler")
ROOT = Path(__file__).parents[2]
SIZES = (1, 2, 7, 33)


def config(**kwargs):
    return CompilationConfig(cudagraph_mode="NONE", **kwargs)


def patched_names():
    """What the patches replace, as it is right now."""
    from torch._inductor import codecache, compile_fx

    cache = codecache.FxGraphCache
    return (
        vars(cache).get("_get_shape_env"),
        vars(cache).get("_check_can_cache"),
        codecache.compiled_fx_graph_hash,
        compile_fx.compile_fx_inner,
    )


# --- each patch ---


@pytest.mark.parametrize("name", torch_hooks.INDUCTOR_PATCHES)
def test_a_patch_is_undone_on_exit_and_on_an_exception(name):
    patch = torch_hooks.INDUCTOR_PATCHES[name]
    arguments = ([],) if name.endswith("_caught") else ()
    before = patched_names()
    with patch(*arguments):
        assert sum(a is not b for a, b in zip(before, patched_names())) == 1
    assert patched_names() == before
    with pytest.raises(KeyError), patch(*arguments):
        raise KeyError
    assert patched_names() == before


def test_a_patch_whose_place_is_gone_says_so(monkeypatch):
    from torch._inductor import codecache

    monkeypatch.delattr(codecache.FxGraphCache, "_check_can_cache")
    with (
        pytest.raises(UnsupportedTorchError, match="_check_can_cache"),
        torch_hooks.cacheability_unchecked(),
    ):
        pass


def test_nothing_can_be_looked_up_without_a_shape_environment(monkeypatch):
    """What the first patch is for: a look-up outside of a trace."""
    from torch._inductor.codecache import FxGraphCache

    assert FxGraphCache._get_shape_env() is None
    with torch_hooks.always_hit_shape_env():
        environment = FxGraphCache._get_shape_env()
    assert environment.evaluate_guards_expression("False", []) is True
    assert environment.get_pruned_guards([]) == [] and not environment.var_to_hint_override
    assert environment.produce_guards_expression(placeholders=[], guards=[]) == ""
    assert torch_hooks.load_from_graph_cache("f" + "a" * 51, []) is None
    with pytest.raises(AssertionError):
        FxGraphCache._lookup_graph("f" + "a" * 51, [], True, None, None)


def test_the_check_that_is_silenced_would_refuse(monkeypatch):
    """What the fourth patch is for: a pass without a uuid makes every graph uncacheable."""
    from torch._inductor import config as inductor
    from torch._inductor.codecache import BypassFxGraphCache, FxGraphCache

    graph = torch.fx.symbolic_trace(lambda x: x + 1)
    parameters = inspect.signature(FxGraphCache._check_can_cache).parameters  # on 2.11 the graph alone
    asked = [graph, [], None][: len(parameters)]
    with inductor.patch(post_grad_custom_post_pass=lambda graph: None):
        with pytest.raises(BypassFxGraphCache):
            FxGraphCache._check_can_cache(*asked)
        with torch_hooks.cacheability_unchecked():
            FxGraphCache._check_can_cache(*asked)


# --- the adaptor ---


@pytest.fixture(scope="module")
def patched():
    model, split = split_llama(4)
    before = patched_names()
    with compilation_counter.expect(num_backend_compilations=5, num_inductor_compiles=3):
        compiled = compile_pieces(split, config(compiler="inductor_patched"))
    assert patched_names() == before
    return model, compiled


@pytest.mark.parametrize("tokens", SIZES)
def test_it_computes_what_the_others_compute(patched, tokens):
    model, compiled = patched
    args = llama_inputs(tokens)
    result = compiled(*args)
    torch.testing.assert_close(result, model(*args), rtol=1e-4, atol=1e-5)
    assert result.stride() == model(*args).stride() and not result.requires_grad
    with torch.no_grad():
        assert torch.equal(compiled(*args), result)


def test_every_piece_has_a_handle_that_names_its_code(patched):
    _, compiled = patched
    table = compiled.to_frame()
    assert set(table["adaptor"]) == {"inductor_patched"} and (table["generated_kernels"] > 0).all()
    handles = {backend.general.runnable.handle for backend in compiled.backends}
    assert len(handles) == 3
    for handle in handles:
        source = Path(handle.file_path).read_text()
        assert "def call(" in source and len(handle.hash_str) > 40


def test_handles_are_loaded_from_inductors_graph_cache(patched):
    _, compiled = patched
    adaptor = compiled.manager.adaptor
    loaded = []
    for backend in compiled.backends:
        handle = backend.general.runnable.handle
        loaded.append(adaptor.load_handle(handle, backend.call.args))
        assert loaded[-1].handle.hash_str == handle.hash_str
    run = compiled.bind(compiled.split.stitch(loaded))
    for tokens in SIZES:
        assert torch.equal(run(*llama_inputs(tokens)), compiled(*llama_inputs(tokens)))
    with pytest.raises(CompileError, match="holds nothing under"):
        adaptor.load_handle(InductorHandle("f" + "b" * 51, None), [])


def returns_views(self, x):
    y = x.view(-1)
    return y[1:], x + 1


def test_what_needs_more_than_inductors_code_has_no_handle():
    compiled = compile_pieces(
        split_of(returns_views, torch.randn(8, 4), ops=[]), config(compiler="inductor_patched")
    )
    (backend,) = compiled.backends
    assert (
        backend.general.runnable.handle is None
        and compiled.manager.adaptor.save(PatchedGraph(len, None)) is None
    )
    x = torch.randn(3, 4)
    view, more = compiled(x)
    assert (
        view.data_ptr() == x.data_ptr() + 4 and torch.equal(more, x + 1) and torch.equal(view, x.view(-1)[1:])
    )


def test_static_sizes():
    def forward(self, x, w):
        return torch.nn.functional.silu(x @ w) * x.shape[0]

    w = torch.randn(16, 16)
    split = split_of(forward, torch.randn(8, 16), w, ops=[], x=0)
    compiled = compile_pieces(split, config(compiler="inductor_patched", compile_sizes=[4]))
    for tokens in (4, 4, 3):
        x = torch.randn(tokens, 16)
        torch.testing.assert_close(compiled(x, w), forward(None, x, w), rtol=1e-4, atol=1e-4)
    assert compiled.to_frame()["shape"].tolist() == ["general", "4"]


def test_which_adaptor_a_name_means():
    for name, kind in (
        ("inductor", InductorStandaloneAdaptor),
        ("inductor_patched", InductorAdaptor),
        ("eager", EagerAdaptor),
    ):
        adaptor = make_adaptor(CompilationConfig(compiler=name), [torch.device("cpu")])
        assert type(adaptor) is kind and adaptor.name == name == adaptor.settings(None)["adaptor"]
    with pytest.raises(CompileError, match="keeps nothing"):
        EagerAdaptor().load(b"", [])


# --- all three, and other processes ---


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["inductor", "inductor_patched"])
def test_the_tiny_llama_answers_the_same_through_every_adaptor(compiler):
    from cgkit.serving.llama import PRESETS
    from cgkit.serving.runner import Runner
    from tests.serving.helpers import prompts_of, toy

    model = toy(PRESETS["tiny-llama"])
    answers = []
    for name in ("eager", compiler):
        runner = Runner(model, config=config(compiler=name, max_num_seqs=4), max_model_len=48)
        answers.append([a.token_ids for a in runner.generate(prompts_of([9, 1, 17, 4]), max_tokens=8)])
        assert set(runner.executor.compiled.to_frame()["adaptor"]) == {name}
    assert answers[0] == answers[1] and len(answers[0]) == 4


def second_process(cache: Path, compiler: str) -> dict:
    environment = {
        **os.environ,
        "CGKIT_CACHE_DIR": str(cache),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.compiling.process", compiler]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_another_process_loads_by_handle(tmp_path):
    first = second_process(tmp_path, "inductor_patched")
    assert first["compiled"] == 3 and first["saved"] == 3 and first["equal"]
    (tmp_path / "moved").mkdir()
    (tmp_path / "torch_compile_cache").rename(tmp_path / "moved" / "torch_compile_cache")
    second = second_process(tmp_path / "moved", "inductor_patched")
    assert second["compiled"] == 0 and second["loaded"] == 3 and second["equal"] and not second["warnings"]
    assert second["hashes"] == first["hashes"]
    for entry in (tmp_path / "moved").rglob("fxgraph"):
        for path in [p for p in entry.rglob("*") if p.is_file()]:
            path.write_bytes(b"tampered")
    third = second_process(tmp_path / "moved", "inductor_patched")
    assert third["compiled"] == 0 and third["loaded"] == 3 and third["equal"]
