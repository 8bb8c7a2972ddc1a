"""Layers that differ in a name that an operator looks something up by are equal pieces, if it says so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cgkit import torch_hooks
from cgkit.compiling import compile_pieces, diff_keys
from cgkit.compiling.lifting import lift_names, number_of
from cgkit.config import CompilationConfig
from cgkit.counters import compilation_counter
from cgkit.errors import SplitError
from cgkit.measuring.explain import explain
from cgkit.splitting import register_op, split_graph
from cgkit.tracing import trace
from tests.compiling.toys import OPS, attend

LAYERS = 5
caches: dict[str, torch.Tensor] = {}


def write_kv(k: torch.Tensor, layer_name: str) -> torch.Tensor:
    """Writes into the layer's cache; returns how much is in it, to order what reads it."""
    caches[layer_name][: k.shape[0]] += k
    return caches[layer_name].sum().reshape(1)


def write_kv_fake(k: torch.Tensor, layer_name: str) -> torch.Tensor:
    return k.new_empty(1)


def scale_in_place(x: torch.Tensor, layer_name: str, by: float) -> None:
    x.mul_(by + len(layer_name) * 0)


register_op("write_kv", write_kv, [], write_kv_fake, namespace="lifttoy")
register_op("write_kv_by", write_kv, [], write_kv_fake, namespace="lifttoy", lookup_args=["layer_name"])
register_op("scale", scale_in_place, ["x"], namespace="lifttoy", lookup_args=["layer_name"])


class Layer(nn.Module):
    def __init__(self, name, width, op):
        super().__init__()
        self.name, self.op = name, op
        self.qkv, self.o = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        written = getattr(torch.ops.lifttoy, self.op)(k.contiguous(), self.name)
        return x + self.o(attend(q, k, v)) * torch.tanh(written)


class Model(nn.Module):
    def __init__(self, op, layers=LAYERS, width=8):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(f"model.layers.{i}.attn", width, op) for i in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def fresh_caches():
    caches.clear()
    caches.update({f"model.layers.{i}.attn": torch.zeros(64, 8) for i in range(LAYERS)})


def compiled_with(op, **options):
    fresh_caches()
    model = Model(op)
    split = split_graph(trace(model, torch.randn(6, 8), dynamic_arg_dims={"x": 0}), OPS)
    return model, compile_pieces(split, CompilationConfig(cudagraph_mode="NONE", **options))


def run(model, *inputs):
    fresh_caches()
    with torch.no_grad():
        results = [model(x) for x in inputs]
    return results, {name: cache.clone() for name, cache in caches.items()}


@pytest.mark.parametrize(("op", "unique"), [("write_kv", LAYERS + 1), ("write_kv_by", 3)])
def test_pieces_before_and_after_lifting(op, unique):
    with compilation_counter.expect(num_backend_compilations=LAYERS + 1, num_eager_compiles=unique):
        model, compiled = compiled_with(op, compiler="eager")
    assert len(compiled.backends) == LAYERS + 1 and compiled.num_unique == unique
    inputs = [torch.randn(n, 8) for n in (3, 1, 17)]
    results, written = run(compiled, *inputs)
    expected, really_written = run(model, *inputs)
    torch.testing.assert_close(results, expected)
    torch.testing.assert_close(written, really_written)
    assert len({cache.sum().item() for cache in written.values()}) == LAYERS


def test_without_lifting_the_difference_names_the_constant():
    _, compiled = compiled_with("write_kv", compiler="eager")
    one, other = (backend.general.key for backend in compiled.backends[1:3])
    before, after = diff_keys(one, other)
    assert before.startswith("- ") and "write_kv" in before and "'model.layers.1.attn'" in before
    assert after.startswith("+ ") and "'model.layers.2.attn'" in after
    pieces = [backend.name for backend in compiled.backends[1:3]]
    verdict = explain(compiled).why_different(*pieces).verdict()
    assert "model.layers.1.attn" in verdict and "model.layers.2.attn" in verdict and "constant" in verdict


def test_with_lifting_the_explanation_says_that_they_share():
    _, compiled = compiled_with("write_kv_by", compiler="eager")
    pieces = [backend.name for backend in compiled.backends[1:3]]
    difference = explain(compiled).why_different(*pieces)
    assert difference.equal and "one compilation serves both" in difference.verdict()
    assert compiled.backends[1].lifted.names == ("model.layers.1.attn",)


def test_static_sizes_and_ranges_share_too():
    model, compiled = compiled_with("write_kv_by", compiler="eager", compile_sizes=[4], compile_ranges=[8])
    assert len(compiled.manager) == 9
    inputs = [torch.randn(n, 8) for n in (4, 4, 6, 20)]
    results, written = run(compiled, *inputs)
    expected, really_written = run(model, *inputs)
    torch.testing.assert_close((results, written), (expected, really_written))


def graph_of(*calls):
    g = torch.fx.Graph()
    x = g.placeholder("x")
    for target, *args in calls:
        g.call_function(target, (x, *args))
    g.output((x,))
    return torch.fx.GraphModule(nn.Module(), g)


def test_names_that_are_repeated_alike_are_equal_and_others_are_not():
    op = torch.ops.lifttoy.scale.default
    twice, other = (lift_names(graph_of((op, a, 2.0), (op, b, 2.0))) for a, b in (("p", "p"), ("p", "q")))
    assert twice.numbers == (number_of("p"),) and other.numbers == (number_of("p"), number_of("q"))
    assert twice.names == ("p",) and other.names == ("p", "q")
    count = [
        len([n for n in lifted.graph_module.graph.nodes if n.op == "placeholder"])
        for lifted in (twice, other)
    ]
    assert count == [2, 3]
    graph = graph_of((op, "p", 2.0))
    code = graph.code
    lifted = lift_names(graph)
    x = torch.ones(2)
    assert lifted.bind(lifted.graph_module.forward)(x)[0] is x and x.tolist() == [2.0, 2.0]
    assert graph.code == code
    plain = graph_of((torch.relu,))
    assert lift_names(plain).graph_module is plain and lift_names(plain).bind(len) is len


def test_what_is_no_parameter_of_text_cannot_be_looked_up_by():
    for wrong in (["by"], ["nothing"]):
        with pytest.raises(SplitError, match="no parameter of type str"):
            register_op("wrong", scale_in_place, ["x"], namespace="lifttoy", lookup_args=wrong)
    with pytest.raises(SplitError, match="must be a list"):
        register_op("wrong", scale_in_place, ["x"], namespace="lifttoy", lookup_args="layer_name")


@pytest.mark.slow
@pytest.mark.skipif(torch_hooks.find_cpp_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("compiler", ["inductor", "inductor_patched"])
def test_inductor_compiles_lifted_pieces_once(compiler, compile_cache):
    for compiled_now, loaded in ((6, 0), (0, 6)):
        with compilation_counter.expect(
            num_inductor_compiles=compiled_now, num_compiled_artifacts_loaded=loaded
        ):
            model, compiled = compiled_with("write_kv_by", compiler=compiler, compile_sizes=[4])
        inputs = [torch.randn(n, 8) for n in (4, 4, 3, 1, 17)]
        results, written = run(compiled, *inputs)
        expected, really_written = run(model, *inputs)
        torch.testing.assert_close((results, written), (expected, really_written), rtol=1e-4, atol=1e-5)
