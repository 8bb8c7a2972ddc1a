"""Replay plans of toy models: the same bits as the module path, and a reason where there is none."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from cgkit import events
from cgkit.capturing import capture, free_all
from cgkit.config import CompilationConfig, CUDAGraphMode
from cgkit.counters import compilation_counter
from cgkit.errors import CaptureLockedError, ConfigError, MovedInputError, ReplayError, TraceError
from cgkit.forward_context import BatchDescriptor, get_forward_context, set_forward_context
from cgkit.measuring.profile_step import trace_steps
from cgkit.splitting import register_op, unregister_op
from tests.capturing.models import Batch, Layers, ManyArguments, Toy, compiled, host_calls, toy

PIECEWISE = CUDAGraphMode.PIECEWISE
OTHER = "not the step that a plan was laid out for:"


def on_both_paths(captured, *args, **kwargs):
    """The outputs of a call by its plan, and piece by piece."""
    by_plan = captured(*args, **kwargs)
    run, captured.run = captured.run, captured.run_module
    try:
        return by_plan, captured(*args, **kwargs)
    finally:
        captured.run = run


def step(tokens, metadata=None):
    key = BatchDescriptor(tokens)
    return set_forward_context(metadata, cudagraph_runtime_mode=PIECEWISE, batch_descriptor=key)


def reason(captured):
    assert captured.plans.ready == {}
    (found,) = captured.plans.refused
    return found


@pytest.mark.parametrize("model", [Toy, partial(Layers, 3)], ids=["toy", "layers"])
def test_a_plan_gives_the_bits_of_the_module_path(device, model):
    with compilation_counter.expect(num_replay_plans_built=2, num_replay_plans_refused=0):
        captured = capture(toy(device, model()), [2, 4])
    with compilation_counter.expect(num_module_path_steps=0):
        for tokens in (4, 1, 3, 2):
            by_plan, by_module = on_both_paths(captured, torch.randn(tokens, 8, device=device))
            assert torch.equal(by_plan, by_module) and by_plan.isfinite().all()


def test_a_step_is_replays_and_operators_in_a_row(device):
    captured = capture(toy(device), [2])
    frame = captured.plans.calls_frame(2)
    assert list(frame["stage"]) == ["replay", "attention", "replay", "attention", "replay"]
    assert list(frame["what"].unique()) == ["graph", "cgkit::toy_attention"]
    (row,) = captured.plans.to_frame().to_dict("records")
    follow = str(device) != "cpu"  # on a GPU the plan first looks which stream is the current one
    assert (row["calls"], row["replays"], row["laid_out"], row["refused"]) == (5 + follow, 3, True, "")
    assert "1 of 1 laid out" in repr(captured)
    before = host_calls[0]
    captured(torch.randn(2, 8, device=device))
    assert host_calls[0] - before == 2


def test_several_and_nested_and_keyword_inputs(device):
    def inputs(n):
        batch = Batch(torch.randn(n, 3, device=device), torch.randn(n, 3, device=device))
        return (batch, torch.randn(2, n, device=device)), {"scale": torch.randn(3, device=device)}

    args, kwargs = inputs(4)
    made = compiled(
        ManyArguments(),
        *args,
        trace_options={"dynamic_arg_dims": {"batch": 0, "positions": 1}, **kwargs},
    )
    from cgkit.capturing.static_inputs import Call

    captured = capture(made, [2, 4], make_inputs=lambda n: Call(*inputs(n)))
    assert len(captured.plans.ready) == 2 and not captured.plans.refused
    with compilation_counter.expect(num_module_path_steps=0):
        for tokens in (3, 4, 1):
            args, kwargs = inputs(tokens)
            ours, theirs = on_both_paths(captured, *args, **kwargs)
            assert torch.equal(ours["hidden"], theirs["hidden"])
            assert all(map(torch.equal, ours["pair"], theirs["pair"]))


def test_the_module_path_by_configuration(device):
    with compilation_counter.expect(num_replay_plans_built=0, num_module_path_steps=0):
        captured = capture(toy(device, replay_path="module"), [2])
        x = torch.randn(2, 8, device=device)
        assert torch.equal(captured(x), Toy()(x))
    assert captured.plans.to_frame().empty
    with pytest.raises(ConfigError, match="replay_path"):
        CompilationConfig(replay_path="quick")


# --- refused -------------------------------------------------------------------------------------


def returning(x: Tensor) -> Tensor:
    return x * 2


class Returns(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.cgkit.plan_returns(x + 1) - 1


class SoftMax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x + 1).softmax(-1) - 1


@pytest.fixture
def returns():
    register_op("plan_returns", returning, [], torch.empty_like)
    yield
    unregister_op("cgkit::plan_returns")


def test_an_operator_that_makes_a_new_tensor(device, returns):
    with (
        compilation_counter.expect(num_replay_plans_refused=1, num_module_path_steps=3),
        events.record(events.PlanRefused, events.PlanPassedOver) as log,
    ):
        made = compiled(Returns().to(device), torch.randn(4, 8, device=device), ops=("cgkit::plan_returns",))
        # its result is another tensor each time: the piece behind it could not even be replayed
        captured = capture(made, [4])
        for _ in range(3):
            with pytest.raises(MovedInputError) if device == "cpu" else suppress_moved():
                kept = captured(torch.randn(4, 8, device=device))
                del kept
    assert "submod_1 calls cgkit::plan_returns, which makes a new tensor at each step" in reason(captured)
    assert captured.plans.module_steps == {reason(captured): 3}
    assert {type(event).__name__ for event in log} == {"PlanRefused", "PlanPassedOver"}
    assert "3 steps took the module path" in repr(captured.plans)


class suppress_moved:  # noqa: N801 - a context manager
    """On a GPU the allocator may well give the same memory again."""

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        return kind is None or issubclass(kind, MovedInputError)


def test_a_function_of_torch_cannot_be_bound(device):
    made = compiled(SoftMax().to(device), torch.randn(4, 8, device=device), ops=("aten::softmax",))
    captured = capture(made, [4])
    assert "register_op" in reason(captured) and "softmax" in reason(captured)


def test_a_piece_that_was_not_captured_or_reads_elsewhere(device):
    captured = capture(toy(device), [2])
    key, piece = BatchDescriptor(2), captured.pieces[1]
    entry = piece.entries.pop(key)
    captured.plans.clear()
    captured.plans.lay_out([key], lambda key: None, None)
    assert reason(captured) == "submod_2 was not captured at (2, False)"
    entry.addresses = tuple(address + 64 for address in entry.addresses)
    piece.entries[key] = entry
    captured.plans.clear()
    captured.plans.lay_out([key], lambda key: None, None)
    assert "submod_2 at (2, False): input" in reason(captured) and "recorded at address" in reason(captured)


def test_a_key_that_was_never_captured_and_an_input_that_moved(device):
    buffer = torch.randn(4, 8, device=device)
    made = toy(device, cudagraph_copy_inputs=False)
    captured = capture(made, [2, 4], make_inputs=lambda n: (buffer[:n],))
    expected = Toy()(buffer[:2])
    with compilation_counter.expect(num_module_path_steps=0), step(2):
        assert torch.equal(captured.run(buffer[:2]), expected)  # another object, the same memory
    with compilation_counter.expect(num_module_path_steps=1), step(2), pytest.raises(MovedInputError):
        captured.run(buffer[2:])
    with compilation_counter.expect(num_module_path_steps=1), step(3), pytest.raises(CaptureLockedError):
        captured.run(buffer[:3])
    moved, unseen = captured.plans.module_steps
    assert moved == f"{OTHER} args[0]"
    assert unseen == "the key was not captured"


def test_another_shape_at_the_same_address_is_no_step_of_the_plan(device):
    buffer = torch.randn(4, 8, device=device)
    captured = capture(toy(device, cudagraph_copy_inputs=False), [2, 4], make_inputs=lambda n: (buffer[:n],))
    with step(4):
        captured.run(buffer[:2])
    assert captured.plans.module_steps == {f"{OTHER} the arguments": 1}


# --- prepared calls ------------------------------------------------------------------------------


def scaled(x: Tensor, output: Tensor) -> None:
    metadata = get_forward_context().attn_metadata
    output.copy_(x if metadata is None else x * metadata.factor * (2 if metadata.doubled else 1))


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x + 1
        out = torch.empty_like(y)
        torch.ops.cgkit.plan_scaled(y, out)
        return out - 1


def prepare_scaled(coming, x, output):
    factor, twice = coming.metadata.factor, 2 if coming.fixed("doubled") else 1
    return lambda: torch.mul(x * factor, twice, out=output)


def metadata_of(device, doubled=False, factor=3.0):
    return SimpleNamespace(factor=torch.tensor(factor, device=device), doubled=doubled)


@pytest.fixture
def scaled_toy(device):
    def make(prepare, **options):
        register_op("plan_scaled", scaled, ["output"], prepare=prepare)
        made = compiled(Scaled().to(device), torch.randn(4, 8, device=device), ops=("cgkit::plan_scaled",))
        return capture(made, [4], **options)

    yield make
    unregister_op("cgkit::plan_scaled")


def test_a_prepared_call_serves_the_metadata_that_it_was_prepared_for(device, scaled_toy):
    plain, doubled = metadata_of(device), metadata_of(device, doubled=True)
    captured = scaled_toy(prepare_scaled, context=plain)
    replay = "graph replay" if captured.platform.emulated else "cuGraphLaunch"
    assert list(captured.plans.calls_frame(4)["how"]) == [replay, "prepared call", replay]
    x = torch.randn(4, 8, device=device)
    with compilation_counter.expect(num_module_path_steps=0), set_forward_context(plain):
        assert torch.equal(captured(x), (x + 1) * 3 - 1)
        plain.factor.fill_(5.0)  # refilled in place
        assert torch.equal(captured(x), (x + 1) * 5 - 1)
    for other in (doubled, metadata_of(device, factor=5.0), None):
        with compilation_counter.expect(num_module_path_steps=1), set_forward_context(other):
            factor = 1 if other is None else float(other.factor) * (1 + other.doubled)
            assert torch.equal(captured(x), (x + 1) * factor - 1)
    assert list(captured.plans.module_steps) == [
        f"{OTHER} metadata.doubled",
        f"{OTHER} metadata.factor",
        "the step's arguments or metadata are built otherwise than at capture",
    ]


def test_a_key_has_a_plan_for_each_kind_of_batch(device, scaled_toy):
    held = metadata_of(device)

    def context(key):
        return SimpleNamespace(factor=held.factor, doubled=key.uniform_decode)

    captured = scaled_toy(prepare_scaled, context=context)
    assert list(captured.plans.to_frame()["kind"]) == ["any batch", "decode"]
    x = torch.randn(4, 8, device=device)
    with compilation_counter.expect(num_module_path_steps=0):
        for uniform in (False, True, False):
            with set_forward_context(context(BatchDescriptor(4, uniform))):
                assert torch.equal(captured(x), (x + 1) * (6 if uniform else 3) - 1)


def wrong_values(coming, x, output):
    return lambda: torch.mul(x, 7, out=output)


def wrong_place(coming, x, output):
    mine = torch.empty_like(output)
    return lambda: torch.mul(x, coming.metadata.factor, out=mine)


def too_little(coming, x, output):
    return ()


@pytest.mark.parametrize("prepare", [wrong_values, wrong_place, too_little])
def test_a_prepared_call_that_does_something_else_is_found_at_capture(device, scaled_toy, prepare):
    metadata = metadata_of(device)
    captured = scaled_toy(prepare, context=metadata, make_inputs=lambda n: torch.ones(n, 8, device=device))
    assert reason(captured).startswith("submod_1: cgkit::plan_scaled as")
    x = torch.randn(4, 8, device=device)
    with set_forward_context(metadata):
        assert torch.equal(captured(x), (x + 1) * 3 - 1)


def test_nothing_to_prepare_is_a_bound_call(device, scaled_toy):
    captured = scaled_toy(lambda coming, x, output: None)
    assert "bound call" in captured.plans.to_frame()["between"][0]
    x = torch.randn(4, 8, device=device)
    for factor in (None, 2.0, 4.0):  # it reads each step's own metadata
        metadata = None if factor is None else metadata_of(device, factor=factor)
        with compilation_counter.expect(num_module_path_steps=0), set_forward_context(metadata):
            assert torch.equal(captured(x), (x + 1) * (factor or 1) - 1)


def test_an_operator_that_is_registered_again_ends_the_plan(device, scaled_toy):
    captured = scaled_toy(None)
    x = torch.randn(4, 8, device=device)

    def other(x: Tensor, output: Tensor) -> None:
        output.copy_(x * 100)

    assert captured.plans.ready
    register_op("plan_scaled", other, ["output"])
    with compilation_counter.expect(num_module_path_steps=1):
        assert torch.equal(captured(x), (x + 1) * 100 - 1)
    assert "registered again" in reason(captured)


# --- gradients, marks, ends ----------------------------------------------------------------------


def test_a_bound_call_leaves_no_gradient_on_static_tensors(device, scaled_toy):
    buffer = torch.randn(4, 8, device=device)
    register_op("plan_scaled", scaled, ["output"])
    made = compiled(Scaled().to(device), buffer, ops=("cgkit::plan_scaled",), cudagraph_copy_inputs=False)
    captured = capture(made, [4], make_inputs=lambda n: (buffer[:n],))
    buffer.requires_grad_()
    with torch.enable_grad(), step(4):
        assert not captured.run(buffer[:4]).requires_grad


def test_in_another_mode_the_module_path_says_so(device):
    captured, x = capture(toy(device), [4]), torch.randn(4, 8, device=device)
    captured(x)
    with torch.autocast(device, dtype=torch.bfloat16), pytest.raises(TraceError, match="autocast"):
        run_at_4(captured)
    assert captured.plans.module_steps == {f"{OTHER} the model's mode": 1}


def run_at_4(captured):
    """A step as a runner takes it: on the recording's own arguments."""
    with step(4):
        return captured.run(*captured.inputs.at(4).args)


def test_a_profiler_sees_each_piece_and_the_plan_is_as_before_after_it(device):
    captured = capture(toy(device), [4])
    x, before = torch.randn(4, 8, device=device), dict(captured.plans.ready)
    trace = trace_steps(lambda: captured(x), steps=1, warmup=0)
    names = [e["name"] for e in trace["traceEvents"] if str(e.get("name", "")).startswith("cgkit:")]
    for wanted in ("replay:submod_0", "attention:submod_1", "replay:submod_2", "replay:submod_4"):
        assert f"cgkit:{wanted}" in names
    assert (trace["cgkit"]["mode"], trace["cgkit"]["batch"]) == ("PIECEWISE", 4)
    assert captured.plans.ready == before


def test_after_the_end_the_plan_is_gone(device):
    made = toy(device)
    captured, x = capture(made, [4]), torch.randn(4, 8, device=device)
    run = captured.run
    captured.free()
    assert captured.plans.ready == {} and captured.plans.rows == []
    with step(4), pytest.raises(ReplayError):
        captured.run(x)
    with step(4), pytest.raises(CaptureLockedError):
        run(x)  # somebody kept the old one: nothing of the plan is in it
    again = capture(made, [4])
    assert torch.equal(again(x), Toy().to(device)(x))
    free_all()
    assert again.plans.ready == {}
