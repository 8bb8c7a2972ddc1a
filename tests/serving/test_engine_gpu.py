"""The engine on a GPU: tokens, and what 10,000 steps leave alone."""

import random
from itertools import pairwise

import pytest
import torch

from cgkit import Engine, compilation_counter, events
from cgkit.config import CompilationConfig
from cgkit.serving.runner import Runner
from cgkit.serving.sampling import GREEDY, SamplingParams
from cgkit.serving.weights import load_model

from .helpers import prompts_of

pytestmark = pytest.mark.gpu

SIZES = (1, 2, 4, 8, 16, 32)
LENGTHS, ANSWERS = [9, 1, 17, 4, 30, 6, 2, 23, 12], [12, 5, 14, 1, 9, 15, 8, 3, 11]


def runner_of(mode="FULL_AND_PIECEWISE", device="cuda", dtype=torch.float32, **options):
    loaded = load_model("tiny-llama", device=device, dtype=dtype)
    sizes = None if mode == "NONE" else SIZES
    config = CompilationConfig(level=3, cudagraph_mode=mode, cudagraph_capture_sizes=sizes)
    options = {
        "max_num_seqs": 8,
        "max_model_len": 64,
        "block_size": 4,
        "max_num_batched_tokens": 48,
    } | options
    runner = Runner(loaded.model, loaded.tokenizer, config, **options)
    runner.capture_model()
    return runner


def serve(engine, chance, sampling=GREEDY):
    names, answers = [], {}

    def step():
        for output in engine.step():
            answers[output.request_id] = output.token_ids

    for prompt, count in zip(prompts_of(LENGTHS), ANSWERS):
        names.append(engine.add_request(prompt, count, sampling, stop_at_eos=False))
        for _ in range(chance.choice([0, 0, 1, 3])):
            step()
    while engine.has_work:
        step()
    return [answers[name] for name in names]


@pytest.mark.parametrize("ahead", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_tokens_are_those_of_one_request_at_a_time_on_the_cpu(mode, ahead):
    alone = Runner(
        load_model("tiny-llama").model, config=CompilationConfig(level=0), max_num_seqs=1, max_model_len=64
    )
    expected = [
        alone.generate([p], n, stop_at_eos=False)[0].token_ids for p, n in zip(prompts_of(LENGTHS), ANSWERS)
    ]
    engine = Engine(runner_of(mode, kv_cache_tokens=60), async_scheduling=ahead)
    for seed in range(3):
        assert serve(engine, random.Random(seed)) == expected
    assert engine.num_preemptions > 0


def test_a_seed_draws_the_same_tokens_ahead_or_not_and_after_preemption():
    hot = SamplingParams(1.3, top_k=50, top_p=0.9, seed=5)
    runs = [
        serve(Engine(runner_of(kv_cache_tokens=tokens), async_scheduling=ahead), random.Random(1), hot)
        for tokens in (None, 60)
        for ahead in (True, False)
    ]
    assert runs[1:] == runs[:-1]


def device_memory():
    stats = torch.cuda.memory_stats()
    return {
        "segments": stats["segment.all.allocated"],
        "reserved": stats["reserved_bytes.all.current"],
        "driver_calls": stats.get("num_device_alloc", 0) + stats.get("num_device_free", 0),
        "retries": stats["num_alloc_retries"],
        "allocated": stats["allocated_bytes.all.current"],
    }


def test_nothing_compiles_records_or_allocates_over_10_000_steps_of_mixed_traffic():
    """Compiled and recorded: from the first step on. Memory: after a first thousand, in which libraries load and the
    allocator's cache meets every size of step."""
    engine = Engine(runner_of(kv_cache_tokens=240))
    chance = random.Random(11)

    def steps(count):
        target = engine.num_steps + count
        while engine.num_steps < target:
            if len(engine.requests) < 14:
                prompt = [chance.randrange(250) for _ in range(chance.randint(1, 50))]
                hot = (
                    SamplingParams(1.0, top_p=0.9, seed=chance.randrange(99))
                    if chance.random() < 0.1
                    else GREEDY
                )
                engine.add_request(prompt, chance.randint(1, 63 - len(prompt)), hot, stop_at_eos=False)
            engine.step()
        engine.close()
        torch.cuda.synchronize()

    with compilation_counter.expect(), events.record(events.CompileRequested, events.GraphCaptured) as log:
        steps(1000)
        before = device_memory()
        steps(10_000)
    assert not log
    assert device_memory() == before
    frame = engine.to_frame()
    assert set(frame["mode"]) == {"FULL", "PIECEWISE", "NONE"} and engine.num_preemptions > 10


def test_a_plain_decode_step_allocates_no_device_memory_at_all():
    """Not even from the allocator's cache: logits, tokens and inputs have places of their own."""
    engine = Engine(runner_of())
    for number in range(8):
        engine.add_request([1 + number] * 4, 50, stop_at_eos=False)
    for _ in range(8):
        engine.step()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(30):
        engine.step()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()["allocation.all.allocated"]
    engine.close()
    assert after == before


@pytest.mark.parametrize("ahead", [True, False], ids=["async", "sync"])
def test_the_host_prepares_a_step_while_the_gpu_runs_the_one_before(ahead):
    """Ahead, a step is handed over before the tokens of the one before are waited for; and mostly while that is still
    under way on the device (another process on the same device can hold the host up for longer than a step takes)."""
    engine = Engine(runner_of(), async_scheduling=ahead)
    forward, queue = engine.runner.executor.forward, engine.queue
    mark, wait = queue.mark, queue.wait
    order, last, under_way = [], [], []

    def slow(*args):
        torch.cuda._sleep(60_000_000)  # some thirty milliseconds of the device's time
        return forward(*args)

    def mark_and_look(slot):  # a step was handed over
        order.append("handed over")
        under_way.extend(not event.query() for event in last)
        mark(slot)
        last[:] = [torch.cuda.Event()]
        last[0].record()

    def wait_and_tell(slot):
        order.append("wait")
        wait(slot)

    engine.runner.executor.forward = slow
    queue.mark, queue.wait = mark_and_look, wait_and_tell
    try:
        for number in range(8):
            engine.add_request([1 + number] * 4, 20, stop_at_eos=False)
        list(engine.run())
    finally:
        engine.runner.executor.forward = forward
    decode = order[6:-6]
    assert len(decode) > 20 and all(one != other for one, other in pairwise(decode))
    waits = [at for at, what in enumerate(order) if what == "wait"][3:-3]
    assert {order[:at].count("handed over") - order[:at].count("wait") for at in waits} == {1 + ahead}
    if ahead:
        assert sum(under_way) > len(under_way) / 2
