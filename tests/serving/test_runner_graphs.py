"""The runner at levels 1 to 3, on the emulated platform: the same tokens whatever is recorded."""

import logging

import pytest
import torch

from cgkit import events
from cgkit.capturing import free_all
from cgkit.config import AttentionCGSupport, CompilationConfig, CUDAGraphMode
from cgkit.counters import compilation_counter
from cgkit.errors import CaptureError, CaptureLockedError
from cgkit.forward_context import BatchDescriptor, set_forward_context
from cgkit.serving.executor import Executor
from cgkit.serving.request import Request, Scheduled
from cgkit.serving.runner import Runner

from .helpers import TOY, generate_alone, prompts_of, run_all, toy_and_reference

SIZES = (1, 2, 4, 8, 40)
LENGTHS = [9, 1, 17, 4, 5]  # 36 tokens: the prefill is padded to 40
LAYERS = TOY.num_hidden_layers


def runner_of(level=3, mode="PIECEWISE", **options):
    sizes = None if mode == "NONE" else options.pop("sizes", SIZES)
    config = CompilationConfig(
        level=level, cudagraph_mode=mode, cudagraph_capture_sizes=sizes, compiler="eager", max_num_seqs=5
    )
    options = {"max_model_len": 48, "block_size": 8} | options
    return Runner(toy_and_reference()[0], config=config, **options)


@pytest.fixture(scope="module")
def stops():
    """Greedy tokens, cut so that the requests leave at different steps: 12, 10, ..., 4 tokens."""
    reference = toy_and_reference()[1]
    answers = [generate_alone(reference, prompt, 12) for prompt in prompts_of(LENGTHS)]
    return [answer[: 12 - 2 * index] for index, answer in enumerate(answers)]


def run(runner, stops):
    """All prompts prefilled together, then decoded; each leaves when it has as many tokens as its answer."""
    requests = [Request(prompt, len(stop)) for prompt, stop in zip(prompts_of(LENGTHS), stops)]
    for request in requests:
        request.blocks = runner.kv_cache.allocator.alloc(4)
    steps = run_all(runner, requests)
    for request in requests:
        runner.kv_cache.allocator.free(request.blocks)
    return [request.answer for request in requests], steps


def caches(runner):
    return [tensor.clone() for pair in runner.kv_cache.caches.values() for tensor in pair]


N, P, F = "NONE", "PIECEWISE", "FULL"


@pytest.mark.parametrize(
    ("level", "mode", "prefill", "decode", "captured"),
    [
        (1, N, N, N, 0),
        (2, N, N, N, 0),
        (2, F, F, F, len(SIZES)),
        (3, N, N, N, 0),
        (3, P, P, P, len(SIZES) * (LAYERS + 1)),
        (3, F, F, F, len(SIZES)),
        (3, "FULL_AND_PIECEWISE", P, F, len(SIZES) * (LAYERS + 1) + 4),  # a decode batch is never 40
        (3, "FULL_DECODE_ONLY", N, F, 4),
    ],
)
def test_tokens_are_those_of_transformers_at_every_level_and_mode(
    level, mode, prefill, decode, captured, stops
):
    runner = runner_of(level, mode)
    traced, pieces = level > 1, {1: 0, 2: 1, 3: LAYERS + 1}[level]
    before = caches(runner)
    with compilation_counter.expect(
        num_graphs_seen=int(traced),
        num_piecewise_graphs_seen={1: 0, 2: 1, 3: 2 * LAYERS + 1}[level],
        num_piecewise_capturable_graphs_seen=pieces,
        num_backend_compilations=pieces,
        num_eager_compiles=min(pieces, 3),
        num_cudagraph_captured=captured,
        dynamo_as_is_count=int(level == 1),
    ):
        runner.capture_model()
        assert all(torch.equal(old, new) for old, new in zip(before, caches(runner)))
        answers, steps = run(runner, stops)
        assert run(runner, stops)[0] == stops  # and again, in the memory of the first time
    assert answers == stops
    assert [step.mode for step in steps] == [prefill] + [decode] * 11
    assert steps[0].num_padded_tokens == (36 if prefill == N else 40)
    assert [step.num_reqs for step in steps] == [5] * 4 + [4] * 2 + [3] * 2 + [2] * 2 + [1] * 2
    padded = {1: 1, 2: 2, 3: 4, 4: 4, 5: 8}
    for step in steps[1:]:
        assert step.num_padded_tokens == (step.num_reqs if decode == N else padded[step.num_reqs])


@pytest.fixture(scope="module")
def captured():
    """One runner with both kinds of graphs, for the tests that do not look at how they came about."""
    runner = runner_of(mode="FULL_AND_PIECEWISE")
    runner.capture_model()
    return runner


def test_generate_goes_through_the_graphs(captured, stops):
    with events.record(events.StepRan) as steps:
        answers = captured.generate(prompts_of(LENGTHS), max_tokens=12)
    assert [answer.token_ids[: len(stop)] for answer, stop in zip(answers, stops)] == stops
    assert [step.mode for step in steps] == [P] + [F] * 11


@pytest.mark.parametrize("mode", [P, F])
def test_a_replay_equals_the_same_padded_step_without_a_graph_bit_for_bit(captured, mode):
    batch = [
        Scheduled(Request(prompt, 4, blocks=[1 + 3 * row, 2 + 3 * row, 3 + 3 * row]), len(prompt))
        for row, prompt in enumerate(prompts_of([9, 1, 17] if mode == P else [1, 1, 1]))
    ]
    padded, uniform = (40, False) if mode == P else (4, True)
    executor, inputs = captured.executor, captured.inputs
    hidden = {}
    for taken in (CUDAGraphMode.NONE, CUDAGraphMode.parse(mode, "mode")):
        metadata = inputs.fill(batch, padded, decode_only=uniform)
        with set_forward_context(
            metadata, cudagraph_runtime_mode=taken, batch_descriptor=BatchDescriptor(padded, uniform)
        ):
            out = executor.forward(inputs.input_ids[:padded], inputs.positions[:padded])
            hidden[taken] = out[: metadata.num_tokens].clone()
    without, replayed = hidden.values()
    assert torch.equal(without, replayed) and replayed.isfinite().all()


def test_nothing_is_recorded_after_the_lock(captured):
    metadata = captured.inputs.fill_dummy(3, decode_only=False)
    unseen = set_forward_context(
        metadata, cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE, batch_descriptor=BatchDescriptor(3)
    )
    with unseen, pytest.raises(CaptureLockedError, match="cudagraph_capture_sizes"):
        captured.executor.forward(captured.inputs.input_ids[:3], captured.inputs.positions[:3])


def test_above_the_largest_size_a_step_runs_compiled_without_a_graph(stops):
    runner = runner_of(sizes=(1, 2, 4))
    runner.capture_model()
    answers, steps = run(runner, stops)
    assert answers == stops
    assert {(step.num_reqs, step.num_padded_tokens, step.mode) for step in steps} == {
        (5, 36, N), (5, 5, N), (4, 4, P), (3, 4, P), (2, 2, P), (1, 1, P)
    }  # fmt: skip


def test_capturing_again_releasing_and_being_interrupted(stops, caplog, monkeypatch):
    """A notebook's cell is run again, stopped in the middle, and the graphs are given back."""
    runner = runner_of(mode="FULL", sizes=(4, 8))
    with caplog.at_level(logging.INFO, logger="cgkit.serving"):
        runner.capture_model()
    assert "2 emulated graphs of 2 sizes" in caplog.text and "MiB reserved, peak" in caplog.text
    first = runner.executor.captured
    with compilation_counter.expect(num_graphs_seen=0, num_backend_compilations=0, num_cudagraph_captured=2):
        runner.capture_model()
    assert runner.executor.captured is not first and runner.executor.captured.num_graphs == 2
    fill = runner.inputs.fill_dummy

    def dies_at_4(num_tokens, decode_only):
        if num_tokens == 4:
            raise KeyboardInterrupt
        return fill(num_tokens, decode_only)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(runner.inputs, "fill_dummy", dies_at_4)
        runner.capture_model()
    answers, steps = run(runner, stops)
    assert answers == stops and {step.mode for step in steps} == {N}
    runner.capture_model()
    answers, steps = run(runner, stops)
    assert answers == stops and {step.mode for step in steps[1:]} == {F}
    runner.executor.release()
    answers, steps = run(runner, stops)
    assert answers == stops and {step.mode for step in steps} == {N}


def test_an_attention_for_decode_only_keeps_mixed_batches_piecewise(caplog):
    model = toy_and_reference()[0]
    config = CompilationConfig(level=3, cudagraph_mode="FULL", cudagraph_capture_sizes=(2,), compiler="eager")
    with caplog.at_level(logging.WARNING):
        executor = Executor(model, config, AttentionCGSupport.UNIFORM_BATCH)
    assert executor.mode is CUDAGraphMode.FULL_AND_PIECEWISE
    assert "asked for FULL, given FULL_AND_PIECEWISE" in caplog.text
    assert Executor(model, config).mode is CUDAGraphMode.FULL


def test_when_every_graph_was_freed_steps_run_compiled_without_one(stops):
    """What ``cgkit.reset()`` does to a runner that somebody still holds."""
    runner = runner_of(mode="FULL", sizes=(8,))
    runner.capture_model()
    free_all()
    answers, steps = run(runner, stops)
    assert answers == stops and {step.mode for step in steps} == {N}
    runner.capture_model()
    answers, steps = run(runner, stops)
    assert answers == stops and {step.mode for step in steps} == {N, F}


def test_recordings_of_several_modes_live_side_by_side():
    model = toy_and_reference()[0]
    config = CompilationConfig(cudagraph_mode="FULL", cudagraph_capture_sizes=(1, 2), compiler="eager")
    runner = Runner(model, config=config, max_num_seqs=2, max_model_len=32)
    executor, prompts = runner.executor, prompts_of([3, 5])
    without = [each.token_ids for each in runner.generate(prompts, 4, stop_at_eos=False)]
    recorded = {
        mode: executor.record(runner.inputs, mode=CUDAGraphMode[mode]) for mode in ("PIECEWISE", "FULL")
    }
    assert executor.captured is None  # recording alone sends no step through it
    for captured in (*recorded.values(), None, *recorded.values()):
        executor.use(captured)
        assert executor.captured is captured
        assert [each.token_ids for each in runner.generate(prompts, 4, stop_at_eos=False)] == without
    executor.release()
    assert not recorded["FULL"].num_graphs and recorded["PIECEWISE"].num_graphs
    with pytest.raises(CaptureError, match="cudagraph_mode=NONE"):
        executor.record(runner.inputs, mode=CUDAGraphMode.NONE)
