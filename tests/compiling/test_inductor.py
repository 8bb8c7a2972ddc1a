"""Pieces compiled by Inductor compute what eager computes, at sizes that the trace never saw."""

from __future__ import annotations

import threading

import pytest
import torch

from cgkit import torch_hooks
from cgkit.compiling import InductorStandaloneAdaptor, compile_pieces, set_inductor_config
from cgkit.config import CompilationConfig
from cgkit.counters import compilation_counter
from cgkit.errors import CompileError
from cgkit.splitting import register_op, split_graph
from cgkit.tracing import trace
from tests.compiling.toys import Llama, attend, calls, llama_inputs, model_of, split_llama, split_of

pytestmark = pytest.mark.skipif(torch_hooks.find_cpp_compiler() is None, reason="needs a C++ compiler")
SIZES = (1, 2, 7, 33)


def add_(x: torch.Tensor) -> None:
    x.add_(1)


register_op("add_", add_, ["x"], namespace="compiletoy")
touch = torch.ops.compiletoy.add_


def config(**kwargs):
    return CompilationConfig(cudagraph_mode="NONE", **kwargs)


@pytest.fixture(scope="module")
def llama():
    model, split = split_llama(4)
    with compilation_counter.expect(num_backend_compilations=5, num_inductor_compiles=3):
        return model, compile_pieces(split, config())


@pytest.mark.parametrize("tokens", SIZES)
def test_the_general_callable_is_right_at_every_size(llama, tokens):
    model, compiled = llama
    args = llama_inputs(tokens)
    result = compiled(*args)
    torch.testing.assert_close(result, model(*args), rtol=1e-4, atol=1e-5)
    assert result.stride() == model(*args).stride()
    assert torch.equal(compiled(*args), result)


def test_gradients_being_on_changes_nothing(llama):
    model, compiled = llama
    args = llama_inputs(3)
    with torch.enable_grad():
        with_gradients = compiled(*args)
    with torch.no_grad():
        assert torch.equal(with_gradients, compiled(*args))
    assert not with_gradients.requires_grad
    assert model(*args).requires_grad  # the model's own result does want one


def test_kernels_are_counted_and_shared_pieces_take_the_owners_callable(llama):
    _, compiled = llama
    table = compiled.to_frame()
    assert table["shared_with"].tolist() == ["", "", "submod_2", "submod_2", ""]
    assert (table["generated_kernels"] > 0).all()
    runnables = [backend.compiled_graph_for_general_shape for backend in compiled.backends]
    assert len(set(map(id, runnables))) == 3


@pytest.mark.slow
def test_a_static_size_is_right_and_tuned():
    options = {}
    set_inductor_config(options, None)
    assert options == {}
    set_inductor_config(options, 4)
    assert options == {"max_autotune": True, "coordinate_descent_tuning": True}

    def forward(self, x, w):
        return torch.nn.functional.silu(x @ w) * x.shape[0]

    x, w = torch.randn(8, 16), torch.randn(16, 16)
    compiled = compile_pieces(split_of(forward, x, w, ops=[], x=0), config(compile_sizes=[1, 4]))
    (backend,) = compiled.backends
    assert any("max_autotune = bool True" in line for line in backend.compiled[1].key.lines)
    assert not any("max_autotune" in line for line in backend.compiled[0].key.lines)
    for tokens in (4, 4, 1, 3):
        x = torch.randn(tokens, 16)
        torch.testing.assert_close(compiled(x, w), forward(None, x, w), rtol=1e-4, atol=1e-4)


def buffer_in_halves(self, x):
    """The splitting operator writes a view of a buffer that a later piece reads whole."""
    buffer = torch.zeros(x.shape[0], 2 * x.shape[1])
    left, right = buffer.chunk(2, -1)
    touch(right)
    left.add_(x)
    return buffer * 2


def view_is_written_after_the_cut(self, x):
    """A piece writes one of two inputs that overlap."""
    h = x * 2
    top = h[:, 1:]
    touch(h)
    top.add_(h[:, :-1].sum())
    return h + 1, top * 3


def one_is_the_other(self, x):
    """An input that only passes through, and is written later under another shape."""
    h = x * 2
    flat = h.view(-1)
    touch(h)
    flat.mul_(3)
    touch(flat)
    return h, flat.sum()


def qkv_are_views(self, x):
    """q, k, v leave a piece as views of one storage; k is written between, then q."""
    q, k, v = torch.cat([x, x + 1, x + 2], -1).chunk(3, -1)
    touch(k)
    q.add_(k)
    touch(q)
    return attend_three(q, k, v)


def attend_three(q, k, v):
    return q * 100 + k * 10 + v


def input_is_written(self, x):
    """A graph input is written in a piece and read in the next."""
    y = x + 1
    touch(y)
    x.mul_(y)
    touch(x)
    return x + y


def transposed(self, x):
    """A column-major value crosses the cut."""
    h = (x * 2).t()
    touch(h)
    return h @ h.t(), h + 1


ALIASING = [
    buffer_in_halves,
    view_is_written_after_the_cut,
    one_is_the_other,
    qkv_are_views,
    input_is_written,
    transposed,
]


WRITTEN_TOGETHER = [buffer_in_halves, view_is_written_after_the_cut, qkv_are_views]


@pytest.mark.slow
@pytest.mark.parametrize("forward", ALIASING, ids=lambda f: f.__name__)
def test_writes_through_shared_memory_arrive(forward):
    split = split_of(forward, torch.randn(8, 6), ops=["compiletoy::add_"])
    if forward in WRITTEN_TOGETHER:
        with pytest.warns(UserWarning, match=r"piece submod_2 writes one of .* they share memory"):
            compiled = compile_pieces(split, config())
        assert "eager" in compiled.to_frame()["adaptor"].tolist()
    else:
        compiled = compile_pieces(split, config())
        assert set(compiled.to_frame()["adaptor"]) == {"inductor"}
    model = model_of(forward)
    for tokens in SIZES:
        x, x2 = (torch.arange(tokens * 6).float().view(tokens, 6) for _ in range(2))
        results, expected = compiled(x), model(x2)
        torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(x, x2)
        results = results if isinstance(results, tuple) else (results,)
        expected = expected if isinstance(expected, tuple) else (expected,)
        assert [r.stride() for r in results if r.numel() > 6] == [
            e.stride() for e in expected if e.numel() > 6
        ]


@pytest.mark.slow
def test_a_whole_graph_with_its_attention_inside_is_one_piece():
    model = Llama(2)
    traced = trace(model, *llama_inputs(8), dynamic_arg_dims={"tokens": 0, "positions": 0})
    with compilation_counter.expect(num_backend_compilations=1, num_inductor_compiles=1):
        compiled = compile_pieces(split_graph(traced, []), config(splitting_ops=[]))
    before = calls["attention"]
    for number, tokens in enumerate(SIZES, 1):
        args = llama_inputs(tokens)
        result = compiled(*args)
        assert calls["attention"] == before + 2 * (2 * number - 1)
        torch.testing.assert_close(result, model(*args), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_general_and_static_callables_on_the_gpu():
    model = Llama(3, width=64).cuda().bfloat16()
    args = [a.cuda() for a in llama_inputs(8)]
    traced = trace(model, *args, dynamic_arg_dims={"tokens": 0, "positions": 0})
    split = split_graph(traced, ["compiletoy::attention"])
    with compilation_counter.expect(num_backend_compilations=12, num_inductor_compiles=9):
        compiled = compile_pieces(split, config(compile_sizes=[1, 4]))
    compiled(*args)  # the first run takes the general callable
    for tokens in (4, *SIZES):
        args = [a.cuda() for a in llama_inputs(tokens)]
        result = compiled(*args)
        torch.testing.assert_close(result, model(*args), rtol=5e-2, atol=5e-2)
        assert torch.equal(compiled(*args), result)


@pytest.mark.slow
def test_two_threads_compile_two_models():
    results = {}

    def build(index):
        try:
            model = Llama(1, width=8 + 8 * index)
            traced = trace(model, *llama_inputs(8), dynamic_arg_dims={"tokens": 0, "positions": 0})
            compiled = compile_pieces(split_graph(traced, ["compiletoy::attention"]), config())
            args = llama_inputs(5)
            torch.testing.assert_close(compiled(*args), model(*args), rtol=1e-4, atol=1e-5)
            results[index] = compiled.num_unique
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=build, args=(index,)) for index in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert results == {0: 2, 1: 2}


def test_an_inductor_error_names_piece_operators_and_way_out_and_leaves_the_process_usable(monkeypatch):
    split = split_of(lambda self, x: attend(x, x, x).relu() + 41, torch.randn(8, 4))

    def broken(*args, **kwargs):
        raise RuntimeError("scheduler is out of order")

    from torch._inductor.graph import GraphLowering

    with monkeypatch.context() as patch, torch_hooks_without_cache():
        patch.setattr(GraphLowering, "run", broken)
        says = (
            r"(?s)inductor could not compile piece submod_\d.*scheduler is out.*operators.*compiler='eager'"
        )
        with pytest.raises(CompileError, match=says):
            compile_pieces(split, config())
    compiled = compile_pieces(split, config())
    x = torch.randn(3, 4)
    torch.testing.assert_close(compiled(x), (x * 3).relu() + 41)


def torch_hooks_without_cache():
    import torch._inductor.config as inductor

    return inductor.patch(force_disable_caches=True)


def test_the_artefact_keeps_its_own_copy_of_the_graph(llama):
    _, compiled = llama
    codes = [backend.graph.code for backend in compiled.backends]
    adaptor = InductorStandaloneAdaptor()
    call = compiled.backends[0].call
    adaptor.compile(compiled.backends[0].graph, call.args, compiled._fake_mode, None)
    assert [backend.graph.code for backend in compiled.backends] == codes
