"""``debug=True``: each check fires on a fault that is planted for it, and none on what is right."""

import copy
import dataclasses
import operator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from cgkit.capturing import CapturedGraphs, capture
from cgkit.capturing.debugging import StepOutput
from cgkit.compiling import compile_pieces
from cgkit.compiling.adaptors import EagerAdaptor
from cgkit.config import CompilationConfig, CUDAGraphMode
from cgkit.errors import (
    DamagedBufferError,
    DroppedGuardError,
    OverwrittenOutputError,
    WrongReplayError,
    WrongResultError,
)
from cgkit.forward_context import BatchDescriptor, current_forward_context, set_forward_context
from cgkit.splitting import register_op, split_graph
from cgkit.tracing import trace
from tests.capturing.models import Layers, Toy, attention, compiled, toy

MODES = ["PIECEWISE", "FULL"]


class Mlp(nn.Module):
    """Two pieces with several operators each."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = attention(torch.tanh(x) * 2)
        return self.down(torch.relu(self.up(x))) + 1


class Lowers(EagerAdaptor):
    """A compiler that takes one function for another."""

    name = "lowers"

    def __init__(self, wrong: dict) -> None:
        self.wrong = wrong

    def compile(self, graph_module, inputs, fake_mode, runtime_shape):
        own = copy.deepcopy(graph_module)
        for node in own.graph.nodes:
            if node.op == "call_function":
                node.target = self.wrong.get(node.target, node.target)
        own.recompile()
        return super().compile(own, inputs, fake_mode, runtime_shape)


def built(model, *example, adaptor=None, ops=("cgkit::toy_attention",), **config):
    settings = CompilationConfig(compiler="eager", debug=True, **config)
    return compile_pieces(split_graph(trace(model, *example), ops), settings, adaptor=adaptor)


@pytest.mark.parametrize("mode", [*MODES, "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("model", [Toy, lambda: Layers(2), Mlp])
def test_right_models_pass(mode, model, device):
    model = model().to(device)
    captured = capture(toy(device, model, debug=True), [1, 2, 4], mode=mode)
    for size in (1, 2, 3, 4, 6, 1):
        x = torch.randn(size, 8, device=device)
        torch.testing.assert_close(captured(x), model(x))
    assert captured.debugging.steps.compared and not captured.debugging.steps.not_compared
    counts = set(captured.debugging.to_frame()["compared"])  # of six calls one was above the largest size
    assert 5 in counts and counts <= {5, 10}  # an operator may occur twice


def test_nothing_of_it_is_there_without_debug():
    made = toy("cpu")
    captured = capture(made, [2])
    assert captured.debugging is None
    names = {code.co_filename for code in _codes_of(captured.run)}
    assert not any("capturing/debugging" in name for name in names)
    assert any(
        "capturing/debugging" in c.co_filename for c in _codes_of(capture(toy("cpu", debug=True), [2]).run)
    )


def _codes_of(function):
    """The code objects that a call of a step runs."""
    import sys

    seen = []
    context = set_forward_context(
        None, cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE, batch_descriptor=BatchDescriptor(2)
    )
    with context:
        before = sys.getprofile()
        sys.setprofile(lambda frame, event, arg: seen.append(frame.f_code))
        try:
            function(torch.zeros(2, 8))
        except Exception:
            pass
        finally:
            sys.setprofile(before)
    return seen


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("wrong", "piece", "named"),
    [
        ({torch.tanh: torch.sigmoid}, "submod_0", "tanh"),
        ({torch.relu: torch.abs}, "submod_2", "relu"),
        ({operator.add: operator.sub}, "submod_2", "add"),
    ],
)
def test_a_compiler_that_takes_one_operator_for_another(mode, wrong, piece, named):
    captured = capture(built(Mlp(), torch.randn(4, 8), adaptor=Lowers(wrong)), [4], mode=mode)
    with pytest.raises(WrongReplayError) as caught:
        captured(torch.randn(4, 8))
    assert (caught.value.stage, caught.value.piece) == ("compiled", piece)
    assert named in caught.value.operator and __file__ in str(caught.value)


def scaled(x: Tensor, out: Tensor) -> None:
    context = current_forward_context()
    metadata = None if context is None else context.attn_metadata
    torch.mul(x, 1.0 if metadata is None else metadata.factor, out=out)


register_op("scaled", scaled, ["out"], namespace="debugged")


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.ops.debugged.scaled(x + 1, out)
        return out * 2


def test_a_number_that_a_full_graph_froze():
    model = built(Scaled(), torch.ones(4, 2), ops=("debugged::scaled",))
    captured = capture(model, [4], mode="FULL", context=SimpleNamespace(factor=3.0))
    with set_forward_context(SimpleNamespace(factor=3.0)):
        assert torch.equal(captured(torch.ones(4, 2)), torch.full((4, 2), 12.0))
    with set_forward_context(SimpleNamespace(factor=5.0)), pytest.raises(WrongReplayError) as caught:
        captured(torch.ones(4, 2))
    assert caught.value.operator == "debugged::scaled" and caught.value.stage == "recorded"
    piecewise = capture(model, [4], mode="PIECEWISE", context=SimpleNamespace(factor=3.0))
    with set_forward_context(SimpleNamespace(factor=5.0)):  # between the pieces it is run anew
        assert torch.equal(piecewise(torch.ones(4, 2)), torch.full((4, 2), 20.0))


def test_a_recording_that_does_something_else_since(device):
    captured = capture(toy(device, debug=True), [2])
    entry = captured.pieces[1].entries[BatchDescriptor(2)]
    replay, *rest = captured.pieces[1]._replays[BatchDescriptor(2)]

    def stale():
        replay()
        entry.output[0].add_(1)

    captured.pieces[1]._replays[BatchDescriptor(2)] = (stale, *rest)
    with pytest.raises(WrongReplayError, match=r"something that has changed since") as caught:
        captured(torch.ones(2, 8, device=device))
    assert (caught.value.stage, caught.value.piece) == ("replayed", "submod_2")


class Residual(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        return attention(attention(y) * 2) + y


def test_a_replay_that_writes_what_is_still_to_be_read(device):
    captured = capture(compiled(Residual().to(device), torch.randn(4, 8, device=device), debug=True), [2])
    first, second = captured.pieces[0], captured.pieces[1]
    replay, *rest = second._replays[BatchDescriptor(2)]
    needed = first.entries[BatchDescriptor(2)].output[0]
    captured(torch.ones(2, 8, device=device))

    def clobbers():
        replay()
        needed.zero_()

    second._replays[BatchDescriptor(2)] = (clobbers, *rest)
    with pytest.raises(DamagedBufferError, match=r"'y'.*submod_0 made.*submod_2 writes"):
        captured(torch.ones(2, 8, device=device))


def doubles_its_input(x: Tensor, out: Tensor) -> None:
    out.copy_(x)
    x.mul_(2)


register_op("doubles", doubles_its_input, ["out"], namespace="debugged")


class KeepsItsInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x + 1
        out = torch.empty_like(y)
        torch.ops.debugged.doubles(y, out)
        return out + y


def test_an_operator_that_writes_an_argument_in_silence():
    captured = capture(built(KeepsItsInput(), torch.ones(4, 2), ops=("debugged::doubles",)), [2])
    with pytest.raises(DamagedBufferError, match=r"debugged::doubles in submod_1.*mutates_args"):
        captured(torch.ones(2, 2))


def overruns(x: Tensor, out: Tensor) -> None:
    out.copy_(x)
    if current_forward_context().cudagraph_runtime_mode:
        x.as_strided((x.numel() + 3,), (1,))[-3:] = 1.0


register_op("overruns", overruns, ["out"], namespace="debugged")


class Overruns(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.ops.debugged.overruns(x, out)
        return out * 2


@pytest.mark.parametrize("copying", [True, False])
def test_who_writes_beside_a_buffer(copying):
    model = built(Overruns(), torch.ones(4, 2), ops=("debugged::overruns",), cudagraph_copy_inputs=copying)
    if copying:
        captured, x = capture(model, [4]), torch.ones(4, 2)
    else:
        buffer = torch.ones(6, 2)
        captured, x = capture(model, [4], make_inputs=lambda n: (buffer[:n],)), buffer[:4]
        buffer[4:] = 7
    with pytest.raises(DamagedBufferError, match=r"bytes beside|bytes behind") as caught:
        captured(x)
    assert ("12 bytes" in str(caught.value)) is copying  # 1.0 and 7.0 have bytes in common


@pytest.mark.parametrize("mode", MODES)
def test_a_result_read_too_late(mode, device):
    captured = capture(toy(device, debug=True), [2, 4], mode=mode, clone_outputs=False)
    old = captured(torch.ones(2, 8, device=device))
    view, kept = old[:1], old.clone()
    assert type(old) is StepOutput and type(kept) is Tensor and type(old + 1) is Tensor
    new = captured(torch.zeros(4, 8, device=device))
    assert torch.equal(kept, Toy()(torch.ones(2, 8, device=device))) and torch.isfinite(new).all()
    assert view.isnan().all()
    for read in (lambda: old + 1, lambda: old.tolist(), lambda: torch.stack([old, old]), lambda: old[0]):
        with pytest.raises(OverwrittenOutputError, match=r"step 1 .* after step 2"):
            read()
    assert old.shape == (2, 8) and "nan" in repr(old)
    copied = capture(toy(device, debug=True), [2, 4], mode=mode)
    old = copied(torch.ones(2, 8, device=device))
    copied(torch.zeros(2, 8, device=device))
    assert torch.equal(old, kept)  # the caller's own


class Branches(nn.Module):
    def __init__(self, factor: float, limit: int = 4) -> None:
        super().__init__()
        self.factor, self.limit, self.scale = factor, limit, 2.0

    def forward(self, x: Tensor) -> Tensor:
        x = attention(x)
        return x * 2 if x.shape[0] >= self.limit else x * self.factor


@pytest.mark.parametrize("mode", [*MODES, "NONE"])
def test_a_guard_that_does_not_hold(mode):
    model = Branches(100.0)
    made = built(model, torch.ones(6, 2))
    if mode == "NONE":
        captured = capture(made, [8], mode="PIECEWISE")
        call = lambda x: captured.run(x)  # noqa: E731
    else:
        call = capture(made, [8], mode=mode)
    torch.testing.assert_close(call(torch.ones(8, 2)), model(torch.ones(8, 2)))
    with pytest.raises(DroppedGuardError, match=r"shape\[0\] >= 4|4 <= .*shape\[0\]"):
        call(torch.ones(3, 2))  # padded to 8 it would keep to the guard
    made = built(Branches(2.0), torch.ones(6, 2))  # both branches give the same
    right = capture(made, [8], mode="PIECEWISE" if mode == "NONE" else mode)
    assert torch.equal(right(torch.ones(3, 2)), Branches(2.0)(torch.ones(3, 2)))
    assert len(right.debugging.guards.replayed) == 1


@pytest.mark.parametrize("mode", MODES)
def test_that_a_guard_made_no_difference_for_the_zeros_of_a_recording_says_nothing(mode):
    captured = capture(built(Branches(100.0), torch.ones(6, 2)), [3, 8], mode=mode)
    captured(torch.zeros(3, 2))
    for _ in range(2):
        with pytest.raises(DroppedGuardError, match="makes a difference"):
            captured(torch.ones(3, 2))
    assert len(captured.debugging.guards.replayed) == 1


def test_a_number_of_the_model_that_changed():
    model = Branches(2.0)
    captured = capture(built(model, torch.ones(6, 2)), [2, 4])
    captured(torch.ones(4, 2))
    model.limit = 3
    captured(torch.ones(4, 2))  # no difference
    model.limit, model.factor = 5, 7.0
    with pytest.raises(DroppedGuardError, match=r"limit was 4 when the model was traced and is 5"):
        captured(torch.ones(4, 2))


def test_memory_that_nobody_wrote_is_not_compared():
    class Half(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out = torch.empty(x.shape[0], 4)
            out[:, :2] = x
            return attention(out)[:, :2]

    model = Half()
    captured = capture(built(model, torch.randn(4, 2)), [4])
    for _ in range(3):
        x = torch.randn(4, 2)
        assert torch.equal(captured(x), x * 3)


def test_random_pieces_are_said_to_be_left_out():
    class Dropping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return attention(nn.functional.dropout(x, 0.5))

    captured = capture(built(Dropping(), torch.randn(4, 2)), [4])
    torch.manual_seed(1)
    first = captured(torch.ones(4, 2))
    torch.manual_seed(1)
    assert torch.equal(first, captured(torch.ones(4, 2)))
    assert "random" in captured.debugging.steps.not_compared["submod_0"]


def prepares_too_much(coming, x: Tensor, out: Tensor):
    factor = coming.metadata.factor  # not through coming.fixed: nobody looks whether it is still so
    return lambda: torch.mul(x, factor, out=out)


def prepares_well(coming, x: Tensor, out: Tensor):
    factor = coming.fixed("factor")
    return lambda: torch.mul(x, factor, out=out)


@pytest.mark.parametrize("prepare", [prepares_too_much, prepares_well])
def test_a_replay_plan_that_took_a_number_for_given(prepare, device):
    register_op("prepared", scaled, ["out"], namespace="debugged", prepare=prepare)

    class Prepared(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out = torch.empty_like(x)
            torch.ops.debugged.prepared(x + 1, out)
            return out * 2

    was, now, x = SimpleNamespace(factor=3.0), SimpleNamespace(factor=5.0), torch.ones(4, 2, device=device)
    results = {}
    for debug in (False, True):
        made = built(Prepared(), x, ops=("debugged::prepared",))
        made.config = dataclasses.replace(made.config, debug=debug)
        captured = capture(made, [4], context=was)
        assert len(captured.plans.ready) == 1  # debug or not
        with set_forward_context(was):
            assert torch.equal(captured(x), torch.full_like(x, 12.0))
        with set_forward_context(now):
            if debug and prepare is prepares_too_much:
                with pytest.raises(
                    WrongReplayError, match=r"debugged::prepared as prepared call .*fixed"
                ) as caught:
                    captured(x)
                assert (caught.value.stage, caught.value.piece) == ("replayed", "submod_1")
                continue
            results[debug] = captured(x)[0, 0].item()
        assert sum(captured.plans.module_steps.values()) == (prepare is prepares_well)
        if debug:
            assert captured.debugging.steps.compared["the replay plan"] == 1
    # without debug the number of the recording is taken in silence
    assert results == ({False: 12.0} if prepare is prepares_too_much else {False: 20.0, True: 20.0})


class OneByOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = attention(x)
        return x * 3 if x.shape[0] == 1 else x - 1  # leaves no guard


@pytest.mark.parametrize("mode", [*MODES, "NONE"])
def test_graphs_captured_by_hand_are_compared_with_forward_as_a_whole(mode):
    model = OneByOne()
    captured = capture(built(model, torch.ones(6, 2)), [2, 4], mode=mode)
    assert torch.equal(captured(torch.ones(3, 2)), model(torch.ones(3, 2)))
    with pytest.raises(
        WrongResultError, match=r"OneByOne gives something else than its own forward .* leave no guard"
    ):
        captured(torch.ones(1, 2))
    plain = toy("cpu", model)
    assert not torch.equal(capture(plain, [2, 4], mode=mode)(torch.ones(1, 8)), model(torch.ones(1, 8)))
    assert type(capture(plain, [2])) is CapturedGraphs  # nothing of it is there without debug
