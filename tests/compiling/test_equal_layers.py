"""cgkit's own operators in pieces that differ by a layer's name or by a constant: equal where they can be."""

from __future__ import annotations

import copy

import pytest
import torch

import cgkit
from cgkit import torch_hooks
from cgkit.compiling.lifting import by_number
from cgkit.compiling.passes import AttentionQuantFusion
from cgkit.config import CompilationConfig
from cgkit.forward_context import set_forward_context
from cgkit.measuring.explain import explain
from cgkit.serving.attention import build_metadata
from cgkit.serving.linear_attention import TinyLinearAttentionModel
from cgkit.splitting.register import registered_op_of
from tests.compiling.passes.models import FUSIONS, llama, matched, split

#: A cut in each layer's MLP: attention, told the layer's name, then stands inside the pieces.
MLP = ["cgkit::silu_and_mul"]
LAYERS = 4


def compiled_between_mlps(model, **fields):
    config = CompilationConfig(
        cudagraph_mode="NONE", custom_ops=("none", "+silu_and_mul"), splitting_ops=tuple(MLP), **fields
    )
    return cgkit.compile_pieces(split(model, config.custom_ops, MLP), config)


def step(model, device="cpu"):
    """Five prompt tokens and then a decode step, each layer with a cache of its own; what both give."""
    shape = model.config
    sizes = (4, 16, shape.num_key_value_heads, shape.head_dim)
    dtype = model.lm_head.weight.dtype
    caches = {
        name: (torch.zeros(sizes, dtype=dtype, device=device), torch.zeros(sizes, dtype=dtype, device=device))
        for name in model.attention_layers
    }

    def run(forward):
        for pair in caches.values():
            for cache in pair:
                cache.zero_()
        results = []
        for new, total in ((5, 5), (1, 6)):
            metadata = build_metadata([new], [total], [[1]], 16, kv_caches=caches, device=device)
            ids = torch.arange(total - new, total, device=device)
            with set_forward_context(metadata), torch.no_grad():
                results.append(forward(ids + 3, ids).clone())
        return results, copy.deepcopy(caches)

    return run


@pytest.mark.parametrize("scheme", [None, "static"])
def test_layers_with_attention_inside_are_equal_pieces(scheme):
    model = llama(LAYERS, scheme)
    compiled = compiled_between_mlps(model, compiler="eager")
    assert len(compiled.backends) == LAYERS + 1 and compiled.num_unique == 3
    names = [backend.lifted.names for backend in compiled.backends]
    assert names == [(name,) for name in model.attention_layers] + [()]
    diff = explain(compiled).why_different(compiled.backends[1].name, compiled.backends[2].name)
    assert diff.equal and "one compilation serves both" in diff.verdict()
    run = step(model)
    (expected, really_written), (got, written) = run(model), run(compiled)
    torch.testing.assert_close((got, written), (expected, really_written))
    assert len({float(key.float().sum()) for key, _ in written.values()}) == LAYERS  # each into its own


def test_a_layer_with_another_constant_is_another_piece_and_the_constant_is_named():
    model = copy.deepcopy(llama(LAYERS))
    model.model.layers[2].input_layernorm.eps = 0.25
    compiled = compiled_between_mlps(model, compiler="eager")
    assert compiled.num_unique == 4
    one, other = compiled.backends[1].name, compiled.backends[2].name
    diff = explain(compiled).why_different(one, other)
    assert not diff.equal and "constant" in diff.verdict() and "0.25" in diff.verdict()
    assert ".self_attn" not in diff.verdict()  # the name is no difference
    assert all("0.25" in row.what[0] for row in diff.differences)


def test_linear_attention_has_no_name_to_differ_by():
    model = TinyLinearAttentionModel(num_layers=LAYERS)
    with set_forward_context(None):
        traced = cgkit.trace(model, torch.arange(6), dynamic_arg_dims={"input_ids": 0})
    config = CompilationConfig(compiler="eager", cudagraph_mode="NONE")
    compiled = cgkit.compile_pieces(
        cgkit.split_graph(traced, ["cgkit::linear_attention_with_output"]), config
    )
    assert len(compiled.backends) == LAYERS + 1 and compiled.num_unique == 3
    whole = cgkit.compile_pieces(cgkit.split_graph(traced, []), config)
    assert whole.backends[0].lifted.numbers == ()


def test_operators_that_take_a_layers_name_say_so():
    for name, lookups in (
        ("unified_attention_with_output", ("layer_name",)),
        ("unified_attention_with_fp8_output", ("layer_name",)),
        ("linear_attention_with_output", ()),
    ):
        target = getattr(torch.ops.cgkit, name).default
        assert registered_op_of(target).lookup_args == lookups
        assert (by_number(target) is None) == (not lookups)


def test_a_process_that_only_loads_has_the_fused_operator():
    AttentionQuantFusion()  # no pass runs for what comes out of a cache
    assert hasattr(torch.ops.cgkit_by_number, "cgkit__unified_attention_with_fp8_output")


def assert_whole_graph_with_attention_fused(device):
    model = llama(2, "static", torch.bfloat16, device)
    config = CompilationConfig(cudagraph_mode="NONE", splitting_ops=(), passes=FUSIONS)
    compiled = cgkit.compile_pieces(split(model, ("none",), []), config)
    assert matched(compiled.pass_reports)["fuse_attn_quant"] == 2
    run = step(model, device)
    (expected, really_written), (got, written) = run(model), run(compiled)
    for a, b in zip(got, expected):  # three bits of FP8, over two layers
        assert (a - b).abs().mean() < 0.1 * b.abs().mean()
    for name, pair in really_written.items():
        for a, b in zip(written[name], pair):
            assert (a.float() - b.float()).abs().mean() < 0.1 * b.float().abs().mean()
            assert torch.equal(a.ne(0).any(-1), b.ne(0).any(-1))  # the same slots


@pytest.mark.slow
@pytest.mark.skipif(torch_hooks.find_cpp_compiler() is None, reason="needs a C++ compiler")
def test_whole_with_attention_fused_writes_each_layers_own_cache(monkeypatch):
    monkeypatch.setenv("CGKIT_DISABLE_COMPILE_CACHE", "1")
    assert_whole_graph_with_attention_fused("cpu")


@pytest.mark.gpu
def test_whole_with_attention_fused_writes_each_layers_own_cache_on_cuda(monkeypatch):
    monkeypatch.setenv("CGKIT_DISABLE_COMPILE_CACHE", "1")
    assert_whole_graph_with_attention_fused("cuda")
