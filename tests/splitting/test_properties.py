"""Split equals unsplit, on any graph: outputs and what is written into the inputs."""

from __future__ import annotations

import contextlib
import itertools
import operator
import re

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from cgkit.errors import SplitError
from cgkit.splitting import split_graph
from cgkit.splitting.matching import splitting_nodes
from cgkit.splitting.values import is_arithmetic
from tests.splitting.programs import WIDTH, Program, programs, splitting_sets
from tests.splitting.toys import dynamo_graph

_settings = settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],  # explaining traces every line: minutes
)


def held(graph, names):
    """``split_graph`` at those of ``names`` that ``graph`` holds."""
    kept = []
    for name in names:
        with contextlib.suppress(SplitError):
            splitting_nodes(graph.graph, [name])
            kept.append(name)
    return split_graph(graph, kept)


def inputs(rows):
    generator = torch.Generator().manual_seed(rows)
    return [
        *(torch.randn(rows, WIDTH, generator=generator) for _ in range(2)),
        torch.randn(WIDTH, generator=generator),
    ]


def run(function, args):
    """Outputs and, after them, the contents of the arguments once ``function`` has run."""
    args = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    with torch.no_grad():
        result = function(*args)
    return [*result, *args]


def assert_same(found, wanted):
    assert len(found) == len(wanted)
    for f, w in zip(found, wanted):
        if isinstance(w, torch.Tensor):
            assert torch.equal(f, w) and f.stride() == w.stride(), (f, w)
        else:
            assert f == w


def assert_well_formed(split, splitting_nodes_only=True):
    """What must hold of any split graph, whatever it computes."""
    kinds = [piece.is_splitting for piece in split.pieces]
    for left, right in itertools.pairwise(kinds):
        assert not (left and right), "splitting operators in a row share a piece"
        assert left or right or not splitting_nodes_only, "two capturable pieces side by side"
    made = set(split.inputs)
    for piece in split.pieces:
        body = [n for n in piece.graph_module.graph.nodes if n.op not in ("placeholder", "output")]
        assert body and piece.graph_module.graph.lint() is None
        assert len(set(piece.input_names)) == len(piece.input_names)
        for name, node in zip(
            piece.input_names, (n for n in piece.graph_module.graph.nodes if n.op == "placeholder")
        ):
            assert name in made or name.startswith("sym_size"), f"{name} is used before it is made"
            value = node.meta.get("example_value")
            assert not isinstance(value, (torch.Size, tuple, list)), (name, value)
            assert value is None or isinstance(value, (torch.Tensor, torch.SymInt)), (name, value)
        made.update(piece.output_names)


def assert_symbols_first(split):
    """A capturable piece takes the graph-level symbols of its inputs' shapes first, in one order."""
    order = [node.name for node in split.graph_module.graph.nodes]
    for piece in split.capturable:
        values = {
            node.name: node.meta["example_value"]
            for node in piece.graph_module.graph.nodes
            if node.op == "placeholder"
        }
        shapes = [str(v.shape) for v in values.values() if isinstance(v, torch.Tensor)]
        wanted = {symbol for shape in shapes for symbol in re.findall(r"\bs\d+", shape)}
        first = [str(values[name]) for name in piece.input_names[: len(wanted)]]
        assert set(first) == wanted
        positions = [order.index(name) for name in piece.input_names[: len(wanted)]]
        assert positions == sorted(positions)


def propagate_symbols(graph_module, args):
    """Gives each node its example under symbolic fake tensors, as Dynamo would (dimension 0 of ``x``
    and ``y`` is one symbol, and no placeholder holds it)."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    dynamic = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = mode.from_tensor(args[0], symbolic_context=dynamic, source=ConstantSource("x"))
    y = mode.from_tensor(args[1], symbolic_context=dynamic, source=ConstantSource("y"))

    class Propagate(fx.Interpreter):
        def run_node(self, n):
            n.meta["example_value"] = value = super().run_node(n)
            return value

        def fetch_attr(self, target):
            return mode.from_tensor(super().fetch_attr(target))

    with mode, torch.no_grad():
        Propagate(graph_module).run(x, y, mode.from_tensor(args[2]))


def check(split, graph_module, args):
    wanted = run(graph_module, args)
    assert_same(run(split.stitch(), args), wanted)
    assert_same(run(split.stitch(inline_splitting=False), args), wanted)
    assert_well_formed(split)


@_settings
@given(programs, splitting_sets, st.integers(1, 5))
def test_split_equals_unsplit_on_fx_graphs_without_shapes(steps, names, rows):
    graph_module = fx.symbolic_trace(Program(steps))
    split = held(graph_module, names)
    check(split, graph_module, inputs(rows))


@settings(_settings, max_examples=30)
@given(programs, splitting_sets, st.integers(2, 5))
def test_split_equals_unsplit_on_fx_graphs_with_symbolic_shapes(steps, names, rows):
    graph_module = fx.symbolic_trace(Program(steps))
    propagate_symbols(graph_module, inputs(7))
    split = held(graph_module, names)
    check(split, graph_module, inputs(rows))
    assert_symbols_first(split)


def check_on_dynamo(steps, names, rows):
    model = Program(steps)
    captured = dynamo_graph(model, *inputs(7), dynamic=(0, 1))
    split = held(captured.graph_module, names)
    x, y, state = inputs(rows)
    values = {"l_x_": x, "l_y_": y, "l_state_": state, "l_self_buffers_constant_": model.constant}
    check(split, captured.graph_module, [values.get(name, rows) for name in split.inputs])
    assert_symbols_first(split)


@settings(_settings, max_examples=10)
@given(programs, splitting_sets, st.integers(2, 5))
def test_split_equals_unsplit_on_dynamo_graphs(steps, names, rows):
    check_on_dynamo(steps, names, rows)


@pytest.mark.slow
@settings(_settings, max_examples=300)
@given(programs, splitting_sets, st.integers(2, 5))
def test_split_equals_unsplit_on_many_dynamo_graphs(steps, names, rows):
    check_on_dynamo(steps, names, rows)


@_settings
@given(programs, splitting_sets)
def test_the_order_of_nodes_is_kept_but_for_allocations_elements_and_numbers(steps, names):
    graph_module = fx.symbolic_trace(Program(steps))
    split = held(graph_module, names)
    nodes = {node.name: i for i, node in enumerate(split.graph_module.graph.nodes)}
    done = [
        node.name
        for piece in split.pieces
        for node in piece.graph_module.graph.nodes
        if node.op in ("call_function", "call_method") and not may_move(node)
    ]
    assert done == sorted(done, key=nodes.__getitem__)
    assert len(done) == len(set(done))


def may_move(node):
    if node.target is operator.getitem:
        return isinstance(node.args[1], int)
    allocates = node.target in (torch.empty, torch.empty_like, "new_empty")
    size = node.target in ("size", torch.ops.aten.sym_size.int)
    return allocates or size or is_arithmetic(node)
