"""What split_graph does with the graphs that the issue names, piece by piece."""

from __future__ import annotations

import inspect
import operator
import traceback
import weakref

import pytest
import torch
from torch import fx, nn

from cgkit.errors import SplitError
from cgkit.events import GraphSplit, record
from cgkit.splitting import split_graph
from tests.splitting import toys
from tests.splitting.toys import Llama, Stub, Toy

ATTENTION = "splittoy::attention"


def kinds(split):
    return "".join("S" if piece.is_splitting else "c" for piece in split.pieces)


def graph_of(build):
    """A graph module of what ``build(graph)`` adds and returns."""
    graph = fx.Graph()
    graph.output(build(graph))
    return fx.GraphModule({}, graph)


def attend(graph, q, out):
    return graph.call_function(torch.ops.splittoy.attention.default, (q, q, q, out))


# --- the counts of the issue -------------------------------------------------------------------


def test_toy_has_5_pieces_of_which_3_are_capturable():
    x = torch.randn(5, 4)
    with record(GraphSplit) as log:
        split = split_graph(Stub(Toy(), x), [ATTENTION])
    assert kinds(split) == "cScSc"
    assert [(e.model, e.pieces, e.capturable) for e in log] == [("Toy", 5, 3)]
    before = toys.calls["attention"]
    (result,) = split.stitch()(3, x[:3])
    assert toys.calls["attention"] == before + 2
    assert torch.equal(result, Toy()(x[:3]))


@pytest.mark.parametrize("layers", [1, 4, pytest.param(80, marks=pytest.mark.slow)])
def test_a_llama_gives_2l_plus_1_pieces(layers):
    stub = Stub(Llama(layers), torch.arange(5), torch.randn(5), dynamic=(0, 1))
    split = split_graph(stub, [ATTENTION])
    assert len(split.pieces) == 2 * layers + 1 and split.num_capturable == layers + 1
    assert len(split_graph(stub, []).pieces) == 1
    batch = next(n for n, v in zip(split.inputs, split.example_inputs) if isinstance(v, torch.SymInt))
    assert all(piece.input_names[0] == batch for piece in split.capturable)
    assert split.example_inputs == stub.example_inputs


def test_the_callers_graph_is_left_as_it_was():
    stub = Stub(Toy(), torch.randn(5, 4))
    before = str(stub.graph_module.graph)
    split_graph(stub, [ATTENTION])
    assert str(stub.graph_module.graph) == before


# --- names of operators -------------------------------------------------------------------------

SPELLINGS = [
    *("splittoy::attention", "splittoy.attention", "splittoy::attention.default"),
    *("splittoy.attention.default", torch.ops.splittoy.attention, torch.ops.splittoy.attention.default),
]


@pytest.mark.parametrize("spelling", SPELLINGS, ids=str)
@pytest.mark.parametrize("target", SPELLINGS[-2:], ids=str)
def test_every_spelling_matches_every_target(spelling, target):
    def build(g):
        x, out = g.placeholder("x"), g.placeholder("out")
        g.call_function(target, (x, x, x, out))
        return out

    assert kinds(split_graph(graph_of(build), [spelling])) == "S"


def test_an_overload_matches_only_itself():
    def build(g):
        x = g.placeholder("x")
        y = g.call_function(torch.ops.aten.add.Tensor, (x, x))
        y = g.call_function(torch.ops.aten.sin.default, (y,))
        return g.call_function(torch.ops.aten.add.Scalar, (y, 1))

    module = graph_of(build)
    assert kinds(split_graph(module, ["aten::add"])) == "ScS"
    assert kinds(split_graph(module, ["aten.add.Tensor"])) == "Sc"
    assert kinds(split_graph(module, ["aten::add.Scalar"])) == "cS"
    with pytest.raises(SplitError, match=r"no operator 'aten::sin.out'"):
        split_graph(module, ["aten::sin.out"])


def test_torch_functions_and_methods_answer_to_their_aten_name():
    model = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4))
    stub = Stub(lambda x: torch.softmax(model(x).t(), 0), torch.randn(5, 4))
    assert kinds(split_graph(stub, ["aten::silu"])) == "cSc"
    assert kinds(split_graph(stub, ["aten.t", "aten.softmax"])) == "cS"


def test_arithmetic_on_sizes_is_no_operator_to_cut_at():
    stub = Stub(lambda x: x.reshape(x.size(0) * 2, 2).sin(), torch.randn(5, 4))
    with pytest.raises(SplitError, match="aten::mul"):
        split_graph(stub, ["aten::mul"])


@pytest.mark.parametrize(
    "ops, message",
    [
        (["splittoy::atention"], r"Did you mean 'splittoy::attention'\?.*aten::empty_like"),
        ([ATTENTION, "other::op"], "other::op"),
        (["attention"], "no operator's name"),
        (["a::b.c.d"], "no operator's name"),
        ([7], "no operator's name"),
        ("splittoy::attention", "must be a list"),
    ],
)
def test_bad_operators_are_refused(ops, message):
    with pytest.raises(SplitError, match=message):
        split_graph(Stub(Toy(), torch.randn(5, 4)), ops)


def test_without_operators_the_known_ones_are_taken_as_far_as_they_occur():
    assert kinds(split_graph(Stub(Toy(), torch.randn(5, 4)))) == "c"


# --- what goes where ----------------------------------------------------------------------------


def test_splitting_operators_in_a_row_share_a_piece():
    def build(g):
        x, out = g.placeholder("x"), g.placeholder("out")
        y = g.call_function(torch.sin, (x,))
        attend(g, y, out)
        attend(g, out, out)
        return g.call_function(torch.cos, (out,))

    assert kinds(split_graph(graph_of(build), [ATTENTION])) == "cSc"


def test_an_allocation_between_splitting_operators_belongs_to_the_piece_before():
    def build(g):
        x, out = g.placeholder("x"), g.placeholder("out")
        y = g.call_function(torch.sin, (x,))
        attend(g, y, out)
        second = g.call_function(torch.empty_like, (y,))
        attend(g, y, second)
        return (second,)

    module = graph_of(build)
    split = split_graph(module, [ATTENTION])
    assert kinds(split) == "cS"
    assert split.pieces[0].ops == ("aten::sin", "aten::empty_like")
    assert split.pieces[0].output_names == ("sin", "empty_like")
    x = torch.randn(3)
    assert torch.equal(split(x, torch.empty(3))[0], 3 * x.sin())


def test_an_allocation_that_needs_a_splitting_operators_result_stays():
    def build(g):
        x = g.placeholder("x")
        y = g.call_function(torch.cos, (x,))
        s = g.call_function(torch.ops.aten.sin.default, (y,))
        out = g.call_function(torch.empty_like, (s,))
        attend(g, s, out)
        return out

    split = split_graph(graph_of(build), ["aten::sin", ATTENTION])
    assert kinds(split) == "cScS"
    x = torch.randn(3)
    assert torch.equal(split(x), 3 * x.cos().sin())


@pytest.mark.parametrize("allocate", [torch.zeros_like, torch.ones_like])
def test_a_filled_tensor_is_a_kernel_and_keeps_its_place(allocate):
    def build(g):
        x, out = g.placeholder("x"), g.placeholder("out")
        y = g.call_function(torch.sin, (x,))
        attend(g, y, out)
        second = g.call_function(allocate, (y,))
        attend(g, y, second)
        return second

    assert kinds(split_graph(graph_of(build), [ATTENTION])) == "cScS"


def test_elements_stay_with_the_operator_that_made_the_tuple():
    def build(g):
        x, out = g.placeholder("x"), g.placeholder("out")
        parts = g.call_function(torch.ops.aten.split.Tensor, (x, 2, 1))
        attend(g, out, out)
        first = g.call_function(operator.getitem, (parts, 0))
        return g.call_function(torch.add, (first, out))

    split = split_graph(graph_of(build), [ATTENTION])
    assert split.pieces[0].output_names == ("getitem",)
    x, out = torch.randn(3, 4), torch.randn(3, 2)
    assert torch.equal(split(x, out.clone()), x[:, :2] + 3 * out)


def test_a_tensors_element_by_mask_is_a_copy_and_does_not_move():
    def build(g):
        x, out, mask = (g.placeholder(name) for name in ("x", "out", "mask"))
        y = g.call_function(torch.sin, (x,))
        attend(g, x, y)
        taken = g.call_function(operator.getitem, (y, mask))
        return (taken, out)

    split = split_graph(graph_of(build), [ATTENTION])
    x = torch.randn(4)
    assert torch.equal(split(x, x, x > 0)[0], 3 * x[x > 0])


def sizes(x, y):
    rows, columns = x.shape
    q = x.sin()
    out = torch.empty_like(q)
    torch.ops.splittoy.attention(q, q, q, out)
    wide = torch.empty(x.shape)
    torch.ops.splittoy.attention(q, q, q, wide)
    rest = out.view(rows, -1, columns // 2).reshape(y.size()) + wide
    return rest.reshape(rows * 2, 2), x.size(0), rows * 2 + 1


def test_no_size_and_no_plain_int_crosses_a_cut():
    stub = Stub(sizes, torch.randn(6, 4), torch.randn(6, 4), dynamic=(0, 1))
    split = split_graph(stub, [ATTENTION])
    assert kinds(split) == "cSc"  # the second buffer's size is known at the graph's head
    for piece in split.pieces:
        for node in piece.graph_module.graph.nodes:
            value = node.meta.get("example_value")
            assert not isinstance(value, torch.Size)
            if node.op == "placeholder":
                assert isinstance(value, (torch.Tensor, torch.SymInt))
    symbols = [n for n in split.inputs if n.startswith("s")]
    x = torch.randn(3, 4)
    values = iter([x, x.clone()])
    result = split.stitch()(*(3 if n in symbols else next(values) for n in split.inputs))
    assert torch.equal(result[0], (6 * x.sin()).reshape(6, 2)) and result[1:] == (3, 7)


def test_sizes_after_an_in_place_change_of_shape_are_those_of_that_moment():
    def build(g):
        x, out = g.placeholder("x"), g.placeholder("out")
        y = g.call_function(torch.sin, (x,))
        before = g.call_method("size", (y, 0))
        attend(g, out, out)
        g.call_method("t_", (y,))
        after = g.call_method("size", (y, 0))
        attend(g, out, out)
        return [g.call_method("new_full", (y, (before, after), 1.0)), before, after]

    split = split_graph(graph_of(build), [ATTENTION])
    full, before, after = split(torch.randn(2, 5), torch.randn(2))
    assert (full.shape, before, after) == ((2, 5), 2, 5)


# --- stitching ----------------------------------------------------------------------------------


def test_the_source_is_one_line_a_piece_and_deletes_what_is_dead():
    source = split_graph(Stub(Toy(), torch.randn(5, 4)), [ATTENTION]).source
    body = [line.strip() for line in source.splitlines() if not line.strip().startswith(("#", "del "))]
    assert len(body) == 1 + 5 + 1
    assert source.count("# piece") == 5
    assert "splittoy_attention.call(x_1, x_1, x_1, out)\n    del x_1\n" in source


def test_the_stitched_function_calls_what_it_is_given():
    split = split_graph(Stub(Toy(), torch.randn(5, 4)), [ATTENTION])
    seen = []

    def spy(piece):
        def call(*args):
            seen.append(piece.index)
            return list(piece.graph_module(*args))

        return call

    x = torch.randn(3, 4)
    wanted = split.stitch()(3, x)
    assert torch.equal(split.stitch([spy(p) for p in split.capturable])(3, x)[0], wanted[0])
    assert seen == [0, 2, 4]
    seen.clear()
    everything = split.stitch([spy(p) for p in split.pieces], inline_splitting=False)
    assert torch.equal(everything(3, x)[0], wanted[0])
    assert seen == [0, 1, 2, 3, 4]
    with pytest.raises(SplitError, match="2 callables for 3 capturable pieces"):
        split.stitch([len, len])


def test_a_traceback_shows_the_generated_line():
    split = split_graph(Stub(Toy(), torch.randn(5, 4)), [ATTENTION])

    def fails(*_):
        raise RuntimeError("here")

    execute = split.stitch([split.pieces[0].graph_module, fails, fails])
    with pytest.raises(RuntimeError) as caught:
        execute(3, torch.randn(3, 4))
    assert "x_3, out_1 = submod_2(s77, out)" in "".join(traceback.format_tb(caught.tb))
    assert inspect.getsource(execute) == split.source


def test_dead_values_are_freed_before_the_next_piece():
    split = split_graph(Stub(Toy(), torch.randn(5, 4)), [ATTENTION])
    dead = []

    def first(*args):
        result = split.pieces[0].graph_module(*args)
        dead.append(weakref.ref(result[0]))
        return result

    def second(*args):
        assert dead[0]() is None
        return split.pieces[2].graph_module(*args)

    split.stitch([first, second, split.pieces[4].graph_module])(3, torch.randn(3, 4))
    assert dead


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0))
        self.slices = nn.Parameter(torch.ones(4))

    def forward(self, x, scale=2.0, *, flag=None):
        y = self.inner(x) * scale + self.table
        z = torch.ops.aten.sin.default(y)
        self.table.add_(1)
        return {"z": [z + self.table, {"inf": x * float("inf")}], "same": (self.slices, 7, None)}


def test_modules_constants_defaults_and_nested_outputs_are_kept():
    module = fx.symbolic_trace(Holder())
    split = split_graph(module, ["aten.sin"])
    assert kinds(split) == "cSc"
    x = torch.randn(2, 4).abs()
    table = module.table.clone()
    wanted = module(x)
    module.table.copy_(table)
    for execute in (split, split.stitch(inline_splitting=False)):
        module.table.copy_(table)
        found = execute(x)
        assert torch.equal(found["z"][0], wanted["z"][0]) and found["same"] == (module.slices, 7, None)
        assert torch.equal(found["z"][1]["inf"], wanted["z"][1]["inf"])
    assert split.outputs["same"][1:] == (7, None)


def test_names_that_collide_with_generated_ones():
    graph = fx.Graph()
    x = graph.placeholder("submod_0")
    y = graph.create_node("call_function", torch.ops.aten.cos.default, (x,), name="execute")
    z = graph.create_node("call_function", torch.ops.aten.sin.default, (y,), name="aten_sin")
    graph.output(graph.create_node("call_function", torch.ops.aten.sin.default, (z,), name="list"))
    split = split_graph(fx.GraphModule({}, graph), ["aten::sin"])
    x = torch.randn(3)
    assert torch.equal(split(x), x.cos().sin().sin())


def test_a_graph_without_operators_has_no_pieces():
    split = split_graph(graph_of(lambda g: (g.placeholder("x"),)), [])
    x = torch.randn(2)
    assert split.pieces == [] and split(x) == (x,)


# --- showing ------------------------------------------------------------------------------------


def test_the_frame_has_one_row_a_piece_and_the_repr_is_short():
    split = split_graph(Stub(Llama(8), torch.arange(5), torch.randn(5), dynamic=(0, 1)), [ATTENTION])
    frame = split.to_frame()
    assert list(frame.columns) == ["piece", "kind", "nodes", "inputs", "outputs", "operators", "content"]
    assert len(frame) == 17 and (frame["kind"] == "splitting").sum() == 8
    assert "17 pieces (9 capturable)" in repr(split) and len(repr(split).splitlines()) < 15
