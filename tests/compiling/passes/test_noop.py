"""NoOpElimination: what it removes, and that nobody can tell afterwards."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from cgkit.compiling.passes import NoOpElimination, run_pass

aten = torch.ops.aten
many = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def traced(function, *examples, symbolic=False):
    return make_fx(function, tracing_mode="symbolic" if symbolic else "fake")(*examples)


def targets(graph):
    return [node.target for node in graph.nodes if node.op == "call_function"]


def reduced(function, *examples, symbolic=False):
    module = traced(function, *examples, symbolic=symbolic)
    report = run_pass(NoOpElimination(), module.graph)
    module.recompile()
    return module, report


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (lambda x: aten.view(x, [4, 6]) + 1, 0),
        (lambda x: aten.view(x, [-1, 6]) + 1, 0),
        (lambda x: aten.view(aten.view(x, [24]), [2, 12]) + 1, 1),
        (lambda x: aten.view(aten.view(aten.view(x, [24]), [2, 12]), [4, 6]) + 1, 0),
        (lambda x: aten.slice(x, 1, 0, sys.maxsize) + 1, 0),
        (lambda x: aten.slice(x, 0, 0, 4) + 1, 0),
        (lambda x: aten.slice_scatter(x * 3, x * 2, 0, 0, 4) + 1, 0),
        (lambda x: aten.slice(x, 0, 0, 3) + 1, 1),
        (lambda x: aten.slice(x, 0, 0, 4, 2) + 1, 1),
        (lambda x: aten.view(x, [6, 4]) + 1, 1),
        (lambda x: aten.slice_scatter(x * 3, x[:2] * 2, 0, 1, 3) + 1, 2),
    ],
    ids=[
        "identity", "minus one", "chain of two", "chain of three", "whole slice", "slice to the size",
        "whole scatter", "part", "step", "another shape", "part scatter",
    ],
)  # fmt: skip
def test_what_goes_and_what_stays(function, left):
    x = torch.randn(4, 6)
    module, report = reduced(function, x)
    looked_at = (aten.view.default, aten.slice.Tensor, aten.slice_scatter.default)
    assert sum(target in looked_at for target in targets(module.graph)) == left
    assert torch.equal(module(x), function(x))
    assert (report.matched > 0) == (report.before != report.after)


def test_equal_symbols_are_an_identity_and_add_no_assumption():
    def function(x):
        return aten.view(x, [x.shape[0], 6]) + 1

    module = traced(function, torch.randn(4, 6), symbolic=True)
    value = next(n.meta["val"] for n in module.graph.nodes if n.op == "placeholder")
    guards = len(value.fake_mode.shape_env.guards)
    assert run_pass(NoOpElimination(), module.graph).matched == 1
    assert aten.view.default not in targets(module.graph)
    assert len(value.fake_mode.shape_env.guards) == guards
    module.recompile()
    assert module(torch.ones(9, 6)).shape == (9, 6)


def test_a_symbol_that_is_only_equal_in_the_example_stays():
    def function(x, y):
        return aten.view(x, [y.shape[0], 6]) + 1

    module = traced(function, torch.randn(4, 6), torch.randn(4), symbolic=True)
    before = targets(module.graph)
    run_pass(NoOpElimination(), module.graph)
    kept = aten.view.default in targets(module.graph)
    # tracing itself may already have taken both for one symbol: then it is an identity, and may go
    sizes = [
        n.meta["val"].shape[0]
        for n in module.graph.nodes
        if n.op == "placeholder" and hasattr(n.meta["val"], "shape")
    ]
    assert kept == (str(sizes[0]) != str(sizes[1])) and aten.view.default in before


def test_a_scatter_that_is_an_output_stays_a_copy():
    def function(x, source):
        return aten.slice_scatter(x, source, 0, 0, 4)

    x, source = torch.randn(4, 6), torch.randn(4, 6)
    module, report = reduced(function, x, source)
    out = module(x, source)
    assert report.matched == 1 and torch.equal(out, source)
    assert out.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()


def test_two_outputs_do_not_become_one_memory():
    def function(x):
        y = x + 1
        return y, aten.view(aten.slice_scatter(x * 2, y, 0, 0, 4), [24])

    module, _ = reduced(function, torch.randn(4, 6))
    one, other = module(torch.ones(4, 6))
    assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()


def test_another_type_or_other_strides_are_no_identity():
    x = torch.randn(4, 4)
    module, _ = reduced(lambda x: aten.slice_scatter(x * 2, x.t() + 0, 0, 0, 4), x)
    assert module(x).stride() == (4, 1) and torch.equal(module(x), x.t())


@st.composite
def programs(draw):
    """A chain of reshapes, slices, scatters and sums on (4, 6); what it keeps on the way is returned as well."""
    steps = draw(
        st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.booleans()), min_size=1, max_size=7)
    )

    def function(x, source):
        value, kept = x, []
        for kind, number, keep in steps:
            shape = [[4, 6], [-1], [2, 12], [6, 4]][number]
            if kind == 0:
                value = value.reshape(shape)
            elif kind == 1:
                value = aten.slice(value, 0, 0, [sys.maxsize, value.shape[0], 3, 2][number])
                value = (
                    value if value.numel() == 24 else torch.cat([value.reshape(-1)] * 12)[:24].reshape(4, 6)
                )
            elif kind == 2:
                value = aten.slice_scatter(value, source.reshape(value.shape), 0, 0, sys.maxsize)
            elif kind == 3:
                value = value + number
            elif kind == 4:
                value = value.t().reshape(shape) if value.dim() == 2 else value.reshape(4, 6)
            elif kind == 5:
                value = aten.slice_scatter(value, value * 2, 0, 0, value.shape[0])
            elif kind == 6 and value.dim() == 2:
                value = value.t().contiguous().t()
            if keep:
                kept.append(value)
        return (value, *kept)

    return function


def layout(tensors, inputs):
    """Values apart: shapes, strides, types, and who shares memory with whom."""
    everything = [*inputs, *tensors]
    first = {}
    groups = [first.setdefault(t.untyped_storage().data_ptr(), i) for i, t in enumerate(everything)]
    return [(tuple(t.shape), t.stride(), t.dtype) for t in tensors], groups


@many
@given(programs(), st.booleans())
def test_nobody_can_tell(function, symbolic):
    inputs = torch.randn(4, 6), torch.randn(4, 6)
    plain = traced(function, *inputs, symbolic=False)
    before = plain(*inputs)
    module, _ = reduced(function, *inputs)
    after = module(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(before, after))
    shapes, memory = layout(before, inputs)
    new_shapes, new_memory = layout(after, inputs)
    assert new_shapes == shapes
    # memory of its own may not become somebody's: whoever shares now, shared before

    def pairs(groups):
        return {(i, j) for i, a in enumerate(groups) for j, b in enumerate(groups) if i < j and a == b}

    assert pairs(new_memory) <= pairs(memory)
