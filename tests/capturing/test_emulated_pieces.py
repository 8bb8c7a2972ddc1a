"""A compiled piece is one opaque call: what its outputs are, and what replay does with them."""

import operator

import pytest
import torch
from torch import fx, nn

from cgkit import recording
from cgkit.capturing import emulated_layouts
from cgkit.capturing.emulated import EmulatedPlatform
from cgkit.errors import HostReadError, ReplayError


def traced(function, *names):
    """An FX graph of ``function``, with placeholders called ``names``."""

    class Piece(nn.Module):
        forward = function

    return fx.GraphModule(nn.Module(), fx.Tracer().trace(Piece()))


class Compiled:
    """Stands for compiled code: counts its runs, and shows the dispatcher nothing but its results."""

    def __init__(self, graph):
        self.graph, self.runs = graph, 0

    def __call__(self, *args):
        recorder = recording.active.recorder
        return self.run(*args) if recorder is None else recorder.opaque_call(self.run, self.graph, args)

    def run(self, *args):
        self.runs += 1
        return self.graph(*args)


@pytest.fixture
def platform():
    return EmulatedPlatform()


@pytest.fixture
def pool(platform):
    return platform.new_pool()


def qkv(self, n, x, w):
    q, k, v = (x @ w).split([4, 2, 2], -1)
    return q, k.view(n, 1, 2), v, x[0], x


def test_outputs_share_memory_as_the_compiled_code_would_make_them(platform, pool):
    piece, x, w = Compiled(traced(qkv)), torch.randn(3, 8), nn.Parameter(torch.randn(8, 8))
    graph, (q, k, v, row, same) = platform.record(lambda: piece(3, x, w), pool)
    assert piece.runs == 0 and graph.num_nodes() == 1
    assert q.stride() == (8, 1) and k.shape == (3, 1, 2)
    assert k.data_ptr() - q.data_ptr() == 16 and v.data_ptr() - q.data_ptr() == 24
    assert same is x and row.data_ptr() == x.data_ptr() and q.isnan().all() and v.isnan().all()
    assert platform.pool_bytes(pool).allocated == 512  # one storage for the three
    graph.replay()
    expected = piece.graph(3, x, w)
    assert piece.runs == 1 and all(torch.equal(a, b) for a, b in zip((q, k, v, row), expected))
    del k, v
    assert platform.pool_bytes(pool).allocated == 512  # q still holds the storage


def test_a_mutated_input_is_mutated_at_replay_only(platform, pool):
    piece = Compiled(traced(lambda self, x, y: (x.add_(y), x * 2)))
    x, y = torch.zeros(3), torch.ones(3)
    graph, (same, doubled) = platform.record(lambda: piece(x, y), pool)
    assert same is x and (x == 0).all()
    for count in (1, 2):
        graph.replay()
        assert (x == count).all() and (doubled == 2 * count).all()


def test_an_expanded_output(platform, pool):
    piece, x = Compiled(traced(lambda self, x: (x.sum(0).expand(5, 4),))), torch.randn(3, 4)
    graph, (y,) = platform.record(lambda: piece(x), pool)
    graph.replay()
    assert y.stride() == (0, 1) and torch.equal(y, x.sum(0).expand(5, 4))


def test_pieces_in_a_row_and_operators_between_them(platform, pool):
    """Two graphs and an eager operator between them: the piecewise road of one step."""
    first, second = Compiled(traced(qkv)), Compiled(traced(lambda self, o, x: (o.relu() + x[:, :4],)))
    x, w = torch.randn(3, 8), torch.randn(8, 8)
    one, outputs = platform.record(lambda: first(3, x, w), pool)
    attended = torch.zeros(3, 4)
    two, (y,) = platform.record(lambda: second(attended, outputs[4]), pool)
    outputs, y = platform.weak_ref((outputs, y), pool)
    for _ in range(3):
        x.normal_()
        one.replay()
        attended.copy_(outputs[0] + outputs[2].repeat(1, 2))
        two.replay()
        q, _, v, _, _ = first.graph(3, x, w)
        assert torch.equal(y, (q + v.repeat(1, 2)).relu() + x[:, :4])


def test_layouts_are_found_once_for_equal_pieces(platform, pool, monkeypatch):
    runs = []
    real = emulated_layouts._run_piece
    monkeypatch.setattr(emulated_layouts, "_run_piece", lambda *a: (runs.append(1), real(*a))[1])
    pieces = []
    for layer in range(31):
        graph = traced(qkv)
        for node in graph.graph.nodes:  # as Dynamo does: each layer's weight has a name of its own
            if node.op == "placeholder":
                node.target = f"layer_{layer}_{node.target}"
                node._rename(node.target)
        graph.recompile()
        pieces.append(Compiled(graph))
    assert pieces[0].graph.code != pieces[1].graph.code
    w = torch.randn(8, 8)
    for n in (4, 2):
        x = torch.randn(n, 8)
        platform.record(lambda n=n, x=x: [piece(n, x, w)[0] for piece in pieces], pool)
    assert len(runs) == 2  # sizes, not pieces
    for factor in (2, 2.0, 3):  # these differ in a constant only
        other = Compiled(traced(lambda self, n, x, w, f=factor: (x @ w * f,)))
        platform.record(lambda other=other: other(2, torch.randn(2, 8), w), pool)
    assert len(runs) == 5


def test_pieces_that_only_look_equal_are_kept_apart(platform, pool):
    def piece(dtype):
        graph = fx.Graph()
        x, made = graph.placeholder("x"), nn.Module()
        made.constant = torch.ones(2, dtype=dtype)
        graph.output((graph.call_function(operator.add, (x, graph.get_attr("constant"))),))
        return Compiled(fx.GraphModule(made, graph))

    x = torch.ones(2, dtype=torch.float16)
    single, double = piece(torch.float32), piece(torch.float64)
    assert single.graph.code == double.graph.code
    _, outputs = platform.record(lambda: (*single(x), *double(x)), pool)
    assert [y.dtype for y in outputs] == [torch.float32, torch.float64]


def test_which_inputs_share_memory_is_part_of_the_layout(platform, pool):
    piece = Compiled(traced(lambda self, x, y: (x[1:], y[1:])))
    base = torch.arange(8.0)
    for x, y in [(base[:4], base[4:]), (base[:4], torch.zeros(4)), (base[2:6], base[2:6])]:
        _, (a, b) = platform.record(lambda x=x, y=y: piece(x, y), pool)
        assert a.data_ptr() == x.data_ptr() + 4 and b.data_ptr() == y.data_ptr() + 4


def test_a_host_read_inside_a_piece(platform, pool):
    piece = Compiled(traced(lambda self, x: (x[x > 0],)))
    with pytest.raises(HostReadError, match=r"test_emulated_pieces\.py"):
        platform.record(lambda: piece(torch.ones(3)), pool)
    assert recording.active.recorder is None and piece.runs == 0


def test_a_piece_that_no_longer_gives_what_was_recorded(platform, pool):
    piece = Compiled(traced(lambda self, x: (x + 1,)))
    graph, _ = platform.record(lambda: piece(torch.ones(3)), pool)
    piece.graph = traced(lambda self, x: (x.sum(),))
    with pytest.raises(ReplayError, match=r"\[\], but torch\.float32\[3\] was recorded"):
        graph.replay()
