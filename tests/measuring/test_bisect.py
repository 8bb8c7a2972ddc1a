"""``cgkit.bisect``: a fault planted at each stage is found there, and right models are left alone."""

import ctypes
import operator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import cgkit
from cgkit.capturing import capture
from cgkit.compiling import compile_pieces
from cgkit.config import CompilationConfig
from cgkit.errors import CgkitError, ConfigError
from cgkit.forward_context import BatchDescriptor, set_forward_context
from cgkit.splitting import register_op, split_graph
from cgkit.tracing import trace
from tests.capturing.models import Layers, Toy, attention
from tests.capturing.test_debugging import Branches, KeepsItsInput, Lowers, Mlp, Scaled

OPS = ("cgkit::toy_attention",)
EAGER = CompilationConfig(compiler="eager", splitting_ops=OPS, cudagraph_capture_sizes=(4,))
FULL = CompilationConfig(
    compiler="eager", splitting_ops=OPS, cudagraph_capture_sizes=(4,), cudagraph_mode="FULL"
)


@pytest.mark.parametrize("config", [EAGER, FULL], ids=["piecewise", "full"])
@pytest.mark.parametrize("model", [Toy, lambda: Layers(2), Mlp])
def test_right_models(model, config):
    found = cgkit.bisect(model(), torch.randn(3, 8), config=config)
    assert found.ok and (found.stage, found.piece, found.operator) == ("", "", "")
    assert [each.verdict for each in found.stages] == ["same"] * 5
    assert "every stage gives what the model gives" in repr(found) and "float64" in found.compared_with


def test_a_trace_that_took_another_branch():
    model = Branches(100.0)
    traced = trace(model, torch.ones(6, 2))
    compiled = compile_pieces(split_graph(traced, OPS), EAGER)
    found = cgkit.bisect(compiled, torch.ones(3, 2))
    assert found.stage == "traced" and "mul" in found.operator and "Branches" not in found.piece
    assert "does not hold" in found.found.why and "self.factor" in found.found.line
    assert cgkit.bisect(compiled, torch.ones(5, 2)).ok
    model.limit = 9  # now a call of five takes the other branch in the model
    found = cgkit.bisect(compiled, torch.ones(5, 2))
    assert found.stage == "traced" and "something else now" in found.found.why


def test_a_piece_that_is_not_its_part_of_the_graph():
    split = split_graph(trace(Mlp(), torch.randn(4, 8)), OPS)
    (node,) = [n for n in split.pieces[2].graph_module.graph.nodes if n.target is torch.relu]
    node.target = torch.abs
    split.pieces[2].graph_module.recompile()
    found = cgkit.bisect(compile_pieces(split, EAGER), torch.randn(4, 8))
    assert (found.stage, found.piece) == ("split", "submod_2") and "abs" in found.operator
    assert [each.verdict for each in found.stages] == ["same", "differs", *["not reached"] * 3]


@pytest.mark.parametrize(
    ("wrong", "piece", "named"),
    [
        ({torch.tanh: torch.sigmoid}, "submod_0", "tanh"),
        ({operator.mul: operator.add}, "submod_0", "mul"),
        ({torch.relu: torch.abs}, "submod_2", "relu"),
    ],
)
def test_a_wrong_lowering(wrong, piece, named):
    found = cgkit.bisect(Mlp(), torch.randn(4, 8), config=EAGER, adaptor=Lowers(wrong))
    assert (found.stage, found.piece) == ("compiled", piece) and named in found.operator
    assert "test_debugging.py" in found.found.line
    frame = found.to_frame()
    assert list(frame["verdict"]) == ["same", "same", "differs", "not reached", "not reached"]
    assert piece in found._repr_mimebundle_()["text/html"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_what_is_rounding_depends_on_the_type(dtype):
    """Half a unit of the last place is none of bisect's business, whatever the type; a hundred of them are."""
    model, x = Mlp().to(dtype), torch.randn(4, 8, dtype=dtype)
    eps = torch.finfo(dtype).eps

    def off_by(units):
        return Lowers({torch.relu: lambda t: (t.double().relu() * (1 + units * eps)).to(dtype)})

    assert cgkit.bisect(model, x, config=EAGER, adaptor=off_by(0.5)).ok
    found = cgkit.bisect(model, x, config=EAGER, adaptor=off_by(100))
    assert (found.stage, found.piece) == ("compiled", "submod_2") and "relu" in found.operator
    assert "float64" in found.compared_with and "is rounding" in found.found.difference


@pytest.mark.slow
def test_a_wrong_pass():
    def relu_to_neg(graph):
        matched = 0
        for node in graph.nodes:
            if node.target is torch.ops.aten.relu.default:
                node.target, matched = torch.ops.aten.neg.default, matched + 1
        return matched

    class Small(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(attention(x + 1) * 2) + 3

    config = CompilationConfig(splitting_ops=OPS, cudagraph_mode="NONE", passes=(relu_to_neg,))
    found = cgkit.bisect(Small(), torch.randn(4, 8), config=config)
    assert (found.stage, found.piece) == ("compiled", "submod_2") and "relu" in found.operator
    right = cgkit.bisect(
        Small(), torch.randn(4, 8), config=CompilationConfig(splitting_ops=OPS, cudagraph_mode="NONE")
    )
    assert right.ok


def test_a_number_that_a_recording_froze():
    config = CompilationConfig(
        compiler="eager",
        splitting_ops=("debugged::scaled",),
        cudagraph_capture_sizes=(4,),
        cudagraph_mode="FULL",
    )
    compiled = compile_pieces(split_graph(trace(Scaled(), torch.ones(4, 2)), ("debugged::scaled",)), config)
    captured = capture(compiled, context=SimpleNamespace(factor=3.0))
    with set_forward_context(SimpleNamespace(factor=3.0)):
        assert cgkit.bisect(captured, torch.ones(4, 2)).ok
    with set_forward_context(SimpleNamespace(factor=5.0)):
        found = cgkit.bisect(captured, torch.ones(4, 2))
    assert (found.stage, found.piece, found.operator) == ("recorded", "submod_1", "debugged::scaled")
    assert "the number 3.0" in found.found.why and "holds 5.0" in found.found.why
    assert [each.verdict for each in found.stages] == [*["same"] * 3, "differs", "not reached"]


TABLE = {0: torch.full((2,), 3.0)}


def _by_table(x: Tensor, out: Tensor) -> None:
    torch.mul(x, TABLE[0], out=out)


def _by_hand(x: Tensor, out: Tensor) -> None:
    ctypes.memmove(out.data_ptr(), x.data_ptr(), x.numel() * x.itemsize)


for function in (_by_table, _by_hand):
    register_op(function.__name__[1:], function, ["out"], namespace="bisected")


class Between(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.op = getattr(torch.ops.bisected, name)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self.op(x + 1, out)
        return out * 2


def in_one_graph(model):
    ops = (f"bisected::{model.op.__name__}",)
    config = replace(FULL, splitting_ops=ops)
    return capture(compile_pieces(split_graph(trace(model, torch.ones(4, 2)), ops), config))


def test_an_address_that_a_recording_took_and_that_is_stale(monkeypatch):
    captured = in_one_graph(Between("by_table"))
    x = torch.ones(4, 2)
    assert cgkit.bisect(captured, x).ok
    monkeypatch.setitem(TABLE, 0, torch.full((2,), 7.0))
    found = cgkit.bisect(captured, x)
    assert (found.stage, found.piece, found.operator) == ("recorded", "submod_1", "bisected::by_table")
    assert "the tensor was replaced" in found.found.why
    again = in_one_graph(Between("by_table"))
    assert cgkit.bisect(again, x).ok


def test_what_no_recording_can_hold():
    """Right without a graph, and wrong in any recording, this one and one made now."""
    captured = in_one_graph(Between("by_hand"))
    found = cgkit.bisect(captured, torch.randn(4, 2))
    assert (found.stage, found.piece, found.operator) == ("recorded", "submod_1", "bisected::by_hand")


def test_memory_that_a_replay_reads_and_that_was_written_since(monkeypatch):
    """The recording is what one made now would be; a piece's weight is overwritten after each step by somebody else."""
    captured = capture(compile_pieces(split_graph(trace(Mlp(), torch.randn(4, 8)), OPS), FULL))
    entry = captured.full.entries[BatchDescriptor(4)]
    replay, *rest = captured.full._replays[BatchDescriptor(4)]

    def spoilt():
        replay()
        entry.output.mul_(3)

    captured.full._replays[BatchDescriptor(4)] = (spoilt, *rest)
    found = cgkit.bisect(captured, torch.randn(4, 8))
    assert found.stage == "replayed" and "somebody else" in found.found.why


def test_a_weight_that_moved_after_capture():
    model = cgkit.support_torch_compile(type("Mine", (Mlp,), {"forward": Mlp.forward}))(
        compilation_config=EAGER
    )
    x = torch.randn(4, 8)
    model(x)
    cgkit.capture_model(model)
    assert cgkit.bisect(model, x).ok
    model.up.weight.data = model.up.weight.data * 3
    found = cgkit.bisect(model, x)
    assert (found.stage, found.piece) == ("recorded", "submod_2") and "linear" in found.operator
    assert "up" in found.found.why and "captured at" in found.found.why
    cgkit.reset()


def test_an_address_that_is_refused():
    buffer = torch.randn(4, 8)
    config = CompilationConfig(
        compiler="eager", splitting_ops=OPS, cudagraph_capture_sizes=(4,), cudagraph_copy_inputs=False
    )
    compiled = compile_pieces(split_graph(trace(Mlp(), buffer), OPS), config)
    captured = capture(compiled, make_inputs=lambda n: buffer[:n])
    assert cgkit.bisect(captured, buffer).ok
    found = cgkit.bisect(captured, buffer.clone())
    assert (found.stage, found.found.verdict) == ("replayed", "refused")
    assert "MovedInputError" in found.found.difference


def test_a_replay_that_was_tampered_with():
    compiled = compile_pieces(split_graph(trace(Mlp(), torch.randn(4, 8)), OPS), EAGER)
    compiled.config = CompilationConfig(
        compiler="eager", splitting_ops=OPS, cudagraph_capture_sizes=(4,), replay_path="module"
    )
    captured = capture(compiled)
    wrapper = captured.pieces[1]
    replay, output, *rest = wrapper._replays[BatchDescriptor(4)]

    def other():
        replay()
        output[0].mul_(2)

    wrapper._replays[BatchDescriptor(4)] = (other, output, *rest)
    found = cgkit.bisect(captured, torch.randn(4, 8))
    assert (found.stage, found.piece) == ("replayed", "submod_2") and "add" in found.operator


def test_an_operator_that_writes_an_argument_in_silence():
    config = CompilationConfig(
        compiler="eager", splitting_ops=("debugged::doubles",), cudagraph_capture_sizes=(2,)
    )
    model = KeepsItsInput()
    compiled = compile_pieces(split_graph(trace(model, torch.ones(4, 2)), ("debugged::doubles",)), config)
    captured = capture(compiled)
    # eagerly and piecewise the write happens alike: nothing to find
    assert cgkit.bisect(captured, torch.ones(2, 2)).ok


def test_what_cannot_be_searched():
    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no such row")

    class Random(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return attention(x + torch.rand_like(x))

    with pytest.raises(CgkitError, match=r"Raises itself cannot run this call \(ValueError: no such row\)"):
        cgkit.bisect(Raises(), torch.ones(2, 2), config=EAGER)
    with pytest.raises(CgkitError, match="random"):
        cgkit.bisect(Random(), torch.ones(2, 2), config=EAGER)
    compiled = compile_pieces(split_graph(trace(Toy(), torch.ones(4, 8)), OPS), EAGER)
    with pytest.raises(ConfigError, match="its own"):
        cgkit.bisect(compiled, torch.ones(4, 8), config=EAGER)
    with pytest.raises(ConfigError, match="level=0"):
        cgkit.bisect(Toy(), torch.ones(4, 8), config=CompilationConfig(level=0))
    with pytest.raises(ConfigError, match="not int"):
        cgkit.bisect(3)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_on_a_gpu_with_inductor_in_bfloat16(mode):
    model = Layers(2, width=64).to("cuda", torch.bfloat16)
    x = torch.randn(4, 64, device="cuda", dtype=torch.bfloat16)
    config = CompilationConfig(splitting_ops=OPS, cudagraph_capture_sizes=(4,), cudagraph_mode=mode)
    found = cgkit.bisect(model, x, config=config)
    assert found.ok and found.emulated is False, found


@pytest.mark.gpu
def test_a_number_that_a_recording_on_a_gpu_froze():
    ops, x = ("debugged::scaled",), torch.ones(4, 2, device="cuda")
    config = replace(FULL, splitting_ops=ops)
    compiled = compile_pieces(split_graph(trace(Scaled(), x), ops), config)
    captured = capture(compiled, context=SimpleNamespace(factor=3.0))
    with set_forward_context(SimpleNamespace(factor=5.0)):
        found = cgkit.bisect(captured, x)
    assert (found.stage, found.piece, found.operator) == ("recorded", "submod_1", "debugged::scaled")
    assert found.emulated is False
