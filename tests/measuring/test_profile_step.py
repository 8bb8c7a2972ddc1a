"""Profiled steps: every stage and piece is marked, and nothing of it is left behind."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch
from torch import nn

import cgkit
from cgkit import marks
from cgkit.config import CompilationConfig
from cgkit.errors import CgkitError
from cgkit.forward_context import BatchDescriptor, set_forward_context
from cgkit.measuring.profile_step import STEP, _eager_modules, trace_steps
from cgkit.serving.request import Request, Scheduled
from cgkit.serving.runner import Runner
from cgkit.serving.weights import load_model

MODES = {
    "eager": (0, "NONE"),
    "torch.compile": (1, "NONE"),
    "compiled": (3, "NONE"),
    "PIECEWISE": (3, "PIECEWISE"),
    "FULL": (3, "FULL"),
}
PIECES, ATTENTIONS = range(0, 9, 2), range(1, 9, 2)  # tiny-llama has four layers


def runner_of(mode: str, device: str = "cpu", compiler: str = "eager") -> Runner:
    level, graphs = MODES[mode]
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    loaded = load_model("tiny-llama", device=device, dtype=dtype)
    sizes = None if graphs == "NONE" else (1, 2, 4)
    config = CompilationConfig(
        level=level, cudagraph_mode=graphs, cudagraph_capture_sizes=sizes, compiler=compiler
    )
    runner = Runner(loaded.model, loaded.tokenizer, config, max_num_seqs=4, max_model_len=64)
    runner.capture_model()
    return runner


def decode_step(runner: Runner, requests: int = 2, length: int = 8):
    batch = [
        Scheduled(Request([1] * (length + 1), 2, blocks=[1 + row], num_computed=length), 1)
        for row in range(requests)
    ]
    return lambda: runner.execute(batch)


def names_of(trace) -> Counter:
    return Counter(event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation")


def inner_marks(mode: str) -> set[str]:
    between = {f"cgkit:attention:submod_{index}" for index in ATTENTIONS}
    if mode == "PIECEWISE":
        return between | {f"cgkit:replay:submod_{index}" for index in PIECES}
    if mode == "compiled":
        return between | {f"cgkit:piece:submod_{index}" for index in PIECES}
    if mode == "FULL":
        return {"cgkit:full:whole step"}
    if mode == "eager":
        parts = ("", ".input_layernorm", ".self_attn", ".post_attention_layernorm", ".mlp")
        layers = {f"cgkit:eager:model.layers.{layer}{part}" for layer in range(4) for part in parts}
        rest = {"model", "model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"}
        return layers | {f"cgkit:eager:{path}" for path in rest}
    return {"cgkit:compiled"}


def state_of(runner: Runner) -> list[object]:
    """Everything that marks swap, as it is now."""
    executor, state = runner.executor, []
    state += [
        executor.forward,
        vars(executor.model).get("forward"),
        sorted(vars(runner)),
        sorted(vars(runner.inputs)),
    ]
    state += [sorted(vars(module)) for module in executor.model.modules()]
    if executor.compiled is not None:
        state += [backend.compiled_graph_for_general_shape for backend in executor.compiled.backends]
    if (captured := executor.captured) is not None:
        state += [entry for wrapper in captured.wrappers for entry in wrapper._replays.values()]
        state += [captured._execute.__code__, sorted(vars(captured)), sorted(vars(captured.inputs))]
    return state


@pytest.mark.parametrize("mode", MODES)
def test_a_runners_step_is_marked_at_every_level_and_left_as_it_was(mode):
    runner = runner_of(mode)
    step = decode_step(runner)
    expected = step().tokens
    before = state_of(runner)
    outputs = []
    trace = trace_steps(lambda: outputs.append(step().tokens), steps=2, warmup=1)
    assert state_of(runner) == before
    assert outputs == [expected] * 5  # one warm-up without profiler, two with it, two steps
    found = names_of(trace)
    frame = {"cgkit:step", "cgkit:prepare", "cgkit:sample"}
    frame |= {"cgkit:forward"} if mode != "torch.compile" else set()
    assert {name for name in found if name.startswith("cgkit")} == {STEP} | frame | inner_marks(mode)
    assert {count for name, count in found.items() if name.startswith("cgkit")} == {2}
    about = trace["cgkit"]
    assert (about["mode"], about["model"]) == (mode, "Llama")
    assert about["emulated"] is (mode in ("PIECEWISE", "FULL"))
    assert about.get("batch") == (2 if mode in ("PIECEWISE", "FULL") else None)


def test_only_steps_are_left_and_each_lies_in_one():
    runner = runner_of("PIECEWISE")
    trace = trace_steps(decode_step(runner), steps=3, about={"batch": "two", "model": "tiny"})
    assert (trace["cgkit"]["batch"], trace["cgkit"]["model"]) == ("two", "tiny")
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    steps = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == STEP)
    assert len(steps) == 3
    assert not [e for e in events if e["name"].startswith(("ProfilerStep", "cgkit warm-up"))]
    replays = [e for e in events if e["name"].startswith("cgkit:replay")]
    assert len(replays) == 15
    for event in replays:
        inside = [a <= event["ts"] and event["ts"] + event["dur"] <= b for a, b in steps]
        assert sum(inside) == 1
    operators = {e["cat"] for e in events if e["name"].startswith("cgkit::")}
    assert operators <= {"cpu_op"}  # an operator of ours is no mark


class _StepError(Exception):
    pass


def test_an_exception_goes_through_and_leaves_nothing_behind():
    runner = runner_of("PIECEWISE")
    step, calls = decode_step(runner), []

    def fails_under_the_profiler():
        calls.append(step())
        if len(calls) > 3:
            raise _StepError

    before = state_of(runner)
    with pytest.raises(_StepError):
        trace_steps(fails_under_the_profiler)
    assert state_of(runner) == before
    assert len(names_of(trace_steps(step))) > 10  # and the next one works


def test_what_others_change_meanwhile_stays():
    runner = runner_of("PIECEWISE")
    step, new = decode_step(runner), (lambda *args: None)
    wrapper = runner.executor.captured.pieces[0]
    key = BatchDescriptor(2)
    taken, _, *rest = wrapper._replays[key]

    def swaps():
        step()
        runner.executor.forward = runner.executor.captured.run
        wrapper._replays[key] = (new, None, *rest) if not taken else (taken, _, *rest)

    trace_steps(swaps, steps=1)
    assert wrapper._replays[key][0] is taken
    assert runner.executor.forward is runner.executor.captured.run


def test_a_decorated_model_with_copied_inputs():
    @cgkit.support_torch_compile
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).relu()

    config = cgkit.CompilationConfig(
        level=3, compiler="eager", cudagraph_mode="FULL", splitting_ops=(), cudagraph_capture_sizes=(2, 4)
    )
    model, x = Model(compilation_config=config), torch.arange(12.0).reshape(3, 4) - 6
    with torch.no_grad():  # whole numbers: a product of 3 rows and one of 4 may sum in another order
        model.linear.weight.copy_(torch.arange(16.0).reshape(4, 4) - 8)
        model.linear.bias.copy_(torch.arange(4.0))
        expected = model(x)
        cgkit.capture_model(model)
        trace = trace_steps(lambda: model(x), steps=1)
        assert torch.equal(model(x), expected)
    found = names_of(trace)
    assert found["cgkit:copy_inputs"] == found["cgkit:copy_outputs"] == found["cgkit:full:whole step"] == 1
    assert trace["cgkit"]["batch"] == 4 and trace["cgkit"]["emulated"] is True


def test_plain_modules_are_found_and_marked():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    outer = nn.Module()
    outer.layers, outer.head = nn.ModuleList([model]), nn.Linear(4, 2)
    outer.forward = lambda x: outer.head(outer.layers[0](x))  # its own forward stays
    x = torch.randn(2, 4)
    with torch.no_grad():
        trace = trace_steps(lambda: outer(x), steps=1)
    assert set(names_of(trace)) == {
        STEP, "cgkit:eager", "cgkit:eager:layers.0", "cgkit:eager:layers.0.0", "cgkit:eager:layers.0.1",
        "cgkit:eager:head",
    }  # fmt: skip
    assert trace["cgkit"]["mode"] == "eager"
    assert "forward" not in vars(outer.head) and "forward" not in vars(model[0])


def test_what_a_compiler_knows_is_left_alone():
    model = nn.Linear(4, 4)
    compiled, x = torch.compile(model, backend="eager"), torch.randn(2, 4)
    assert _eager_modules(lambda: compiled(x)) == []
    assert _eager_modules(lambda: model(x)) == [model]
    in_place = nn.Linear(4, 4)
    in_place.compile(backend="eager")
    assert _eager_modules(in_place) == []
    function = torch.compile(lambda: model(x), backend="eager")
    with torch.no_grad():
        trace = trace_steps(function, steps=1)
    assert names_of(trace)["cgkit:compiled"] == 1 and trace["cgkit"]["mode"] == "torch.compile"
    # Dynamo's look-up stands in the trace by its own name: the guards' bill
    assert any("TorchDynamo Cache Lookup" in event.get("name", "") for event in trace["traceEvents"])


def test_a_kept_marked_callable_is_plain_afterwards():
    kept = []

    class Keeper:
        def work(self):
            return 7

        def put_marks(self, marker, undo):
            marks.swap_attribute(self, "work", marker.function(self.work, "keeping"), undo)

    keeper = Keeper()
    marks.register(keeper)
    trace = trace_steps(lambda: kept.append(keeper.work) or keeper.work(), steps=1)
    assert names_of(trace)["cgkit:keeping"] == 1
    assert kept[-1]() == 7 and kept[-1] != keeper.work
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        kept[-1]()
    assert not [event for event in profiler.events() if event.name.startswith("cgkit")]


def test_other_threads_may_run_meanwhile():
    runner = runner_of("FULL")
    other = runner_of("PIECEWISE")
    step, end, failed = decode_step(other), threading.Event(), []

    def serve():
        expected = step().tokens
        while not end.is_set():
            if step().tokens != expected:
                failed.append(1)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        trace_steps(decode_step(runner), steps=2)
    finally:
        end.set()
        thread.join()
    assert not failed


def test_a_profiler_that_runs_already_is_refused():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        with pytest.raises(CgkitError, match="running in this process already"):
            trace_steps(lambda: None)


def test_a_profiler_of_another_thread_is_not_ended():
    begun, end = threading.Event(), threading.Event()

    def profiles():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            begun.set()
            end.wait(30)

    other = threading.Thread(target=profiles)
    other.start()
    try:
        assert begun.wait(30)
        with pytest.raises(CgkitError, match="running in this process already"):
            trace_steps(lambda: None)
    finally:
        end.set()
        other.join()


def test_a_step_that_profiles_itself_is_refused():
    told: list[BaseException] = []

    def nested():
        try:
            trace_steps(lambda: trace_steps(lambda: None))
        except CgkitError as error:
            told.append(error)

    thread = threading.Thread(target=nested, daemon=True)  # it used to wait for itself
    thread.start()
    thread.join(30)
    assert len(told) == 1 and "only one profiler" in str(told[0])
    assert STEP in names_of(trace_steps(lambda: None, steps=1))  # nothing is left behind


def test_a_decorated_step_names_its_modules_too():
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)

    @torch.no_grad()
    def step():
        return model(x)

    assert _eager_modules(step) == [model]


def test_a_variable_without_a_value_yet_names_nothing():
    model, x = nn.Linear(4, 4), torch.randn(2, 4)

    def step():
        return model(x) if x is not None else later(x)

    assert _eager_modules(step) == [model]
    later = model


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"warmup": -1}])
def test_no_steps_are_refused(wrong):
    with pytest.raises(CgkitError, match="at least one step"):
        trace_steps(lambda: None, **wrong)


def test_without_a_forward_context_the_wrapped_piece_is_still_marked():
    """A wrapper outside of a step passes through: the piece runs compiled, and says so."""
    runner = runner_of("PIECEWISE")
    inputs, run = runner.inputs, runner.executor.captured.run
    metadata = inputs.fill(decode_batch(runner), 2, decode_only=True)

    def step():
        with set_forward_context(metadata):
            run(inputs.input_ids[:2], inputs.positions[:2])

    with torch.no_grad():
        trace = trace_steps(step, steps=1)
    assert names_of(trace)["cgkit:piece:submod_0"] == 1 and trace["cgkit"]["mode"] == "compiled"


def decode_batch(runner: Runner):
    return [Scheduled(Request([1] * 9, 2, blocks=[1 + row], num_computed=8), 1) for row in range(2)]


@pytest.mark.parametrize("mode", ["eager", "PIECEWISE"])
def test_the_timeline_knows_piece_and_stage_of_every_operator(mode):
    runner = runner_of(mode)
    timeline = cgkit.profile_step(decode_step(runner), steps=2)
    assert len(timeline.steps) == 2 and set(timeline.steps["name"]) == {STEP}
    operators = timeline.events[timeline.events["kind"] == "op"]
    assert len(operators) > 100 and (operators["stage"] != "").all()
    inner = operators[operators["stage"].isin(["eager", "attention", "replay"]) & (operators["piece"] != "")]
    assert len(inner) > 0.9 * len(operators)
    assert timeline.about["mode"] == mode and "no GPU" in timeline.about["note"]


def test_the_bill_of_a_step_without_a_gpu_adds_up():
    bill = cgkit.profile_step(decode_step(runner_of("PIECEWISE"))).bill()
    assert sum(bill.parts.values()) == pytest.approx(bill.wall_us, rel=0.01)


# --- on a GPU ----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "compiled", "PIECEWISE", "FULL"])
def test_every_kernel_of_a_decode_step_has_a_launch_a_piece_and_a_stage(mode):
    runner = runner_of(mode, device="cuda", compiler="inductor")
    timeline = cgkit.profile_step(decode_step(runner), steps=3, warmup=5)
    kernels = timeline.kernels
    assert len(kernels) >= 3 * 8 and (kernels["launched_by"] >= 0).all()
    assert (kernels["stage"] != "").all()
    marks_of_model = {"eager": ["eager"], "compiled": ["piece", "attention"], "FULL": ["full"]}
    stages = marks_of_model.get(mode, ["replay", "attention"])
    of_model = kernels[kernels["stage"].isin(stages)]
    assert (of_model["piece"] != "").all()
    expected = {name.split(":", 2)[2] for name in inner_marks(mode)}
    seen = set(of_model["piece"].astype(str))
    assert seen <= expected
    if mode in ("compiled", "PIECEWISE"):  # a layer's attention and each piece launch something
        assert seen == expected
    in_graphs = kernels["graph_launch"] >= 0
    assert in_graphs.equals(kernels["stage"].isin(["replay", "full"]))
    graph_launches = {"PIECEWISE": 3 * 5, "FULL": 3}.get(mode, 0)
    assert int((timeline.events["kind"] == "graph_launch").sum()) == graph_launches
    assert timeline.about["mode"] == mode and timeline.about["emulated"] is False


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "compiled", "PIECEWISE", "FULL"])
def test_the_bill_of_a_decode_step_adds_up_and_explains_it(mode):
    runner = runner_of(mode, device="cuda", compiler="inductor")
    bill = cgkit.profile_step(decode_step(runner), steps=5, warmup=5).bill()
    assert sum(bill.parts.values()) == pytest.approx(bill.wall_us, rel=0.01)
    assert sum(bill.gpu.values()) == pytest.approx(bill.wall_us, rel=0.01)
    assert bill.parts["unexplained"] <= 0.05 * bill.wall_us
    assert bill.kernels_tied == bill.kernels > 0
