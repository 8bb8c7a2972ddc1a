"""Split equals unsplit, on any graph: outputs and what is written into the inputs."""

from __future__ import annotations

import itertools

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import fx

from cgkit.errors import SplitError
from cgkit.splitting import split_graph
from tests.splitting.programs import WIDTH, Program, programs, splitting_sets
from tests.splitting.toys import dynamo_graph

_settings = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],  # explaining traces every line: minutes
)


def held(graph, names):
    """``split_graph`` at those of ``names`` that ``graph`` holds."""
    kept = []
    for name in names:
        try:
            split_graph(graph, [name])
        except SplitError:
            continue
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


@settings(_settings, max_examples=40)
@given(programs, splitting_sets, st.integers(2, 5))
def test_split_equals_unsplit_on_dynamo_graphs(steps, names, rows):
    graph_module = dynamo_graph(Program(steps), *inputs(7), dynamic=(0, 1)).graph_module
    split = held(graph_module, names)
    names_of = {node.name: node for node in graph_module.graph.nodes if node.op == "placeholder"}
    model = Program(steps)
    args = dict(zip("xy", inputs(rows))) | {"state": inputs(rows)[2]}
    bound = [
        rows if name.startswith("s") and isinstance(node.meta["example_value"], torch.SymInt)
        else model.constant if "constant" in name else args[name.removeprefix("l_").strip("_")]
        for name, node in names_of.items()
    ]
    check(split, graph_module, bound)
    for piece in split.capturable:
        placeholders = [n for n in piece.graph_module.graph.nodes if n.op == "placeholder"]
        if any(n.meta["example_value"].shape[:1] == (split.example_inputs[0],) for n in placeholders
               if isinstance(n.meta["example_value"], torch.Tensor)
               and isinstance(split.example_inputs[0], torch.SymInt)):
            assert piece.input_names[0] == split.inputs[0]


@_settings
@given(programs, splitting_sets)
def test_the_order_of_nodes_is_kept_but_for_allocations_and_elements(steps, names):
    graph_module = fx.symbolic_trace(Program(steps))
    split = held(graph_module, names)
    order = {node.name: i for i, node in enumerate(split.graph_module.graph.nodes)}
    moving = ("empty", "getitem", "sym_size", "split", "chunk")
    done = [
        node.name
        for piece in split.pieces
        for node in piece.graph_module.graph.nodes
        if node.op not in ("placeholder", "output", "get_attr") and not any(m in node.name for m in moving)
    ]
    assert done == sorted(done, key=order.__getitem__)
    assert len(done) == len(set(done))
