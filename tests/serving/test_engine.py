"""The engine on a CPU: the same tokens whoever is served beside, whatever is taken away, however late the device."""

import random
from functools import cache

import pytest
import torch

from cgkit import BatchDescriptor, Engine, compilation_counter, events
from cgkit.config import CompilationConfig
from cgkit.errors import ServingError
from cgkit.serving.device_queue import LateQueue
from cgkit.serving.engine import Arrival
from cgkit.serving.runner import Runner
from cgkit.serving.sampling import GREEDY, SamplingParams

from .helpers import TOY, generate_alone, prompts_of, toy_and_reference

SIZES = (1, 2, 4, 8, 16)
MODES = ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]
LENGTHS = [9, 1, 17, 4, 30, 6, 2, 23, 12]
ANSWERS = [12, 5, 14, 1, 9, 15, 8, 3, 11]
#: Room for the longest request (39 tokens) and little more: requests must give their blocks back.
TIGHT = {"kv_cache_tokens": 44}


@cache
def runner_of(mode="NONE", **options):
    """One runner of a kind for all tests: each leaves it as it was, which :func:`serve` checks."""
    level = {"NONE": 3, "EAGER": 0}.get(mode, 3)
    sizes = None if mode in ("NONE", "EAGER") else SIZES
    config = CompilationConfig(
        level=level,
        cudagraph_mode="NONE" if sizes is None else mode,
        cudagraph_capture_sizes=sizes,
        compiler="eager",
    )
    options = {
        "max_num_seqs": 4,
        "max_model_len": 64,
        "block_size": 4,
        "max_num_batched_tokens": 20,
    } | options
    runner = Runner(toy_and_reference()[0], config=config, **options)
    runner.capture_model()
    return runner


@pytest.fixture(scope="module")
def expected():
    """One request at a time, eagerly, by ``transformers``."""
    reference = toy_and_reference()[1]
    return [generate_alone(reference, p, n) for p, n in zip(prompts_of(LENGTHS), ANSWERS)]


def serve(engine, requests, gaps=None):
    """Adds the requests, ``gaps[i]`` steps before each; returns their answers in order."""
    answers, names = {}, []
    gaps = gaps or [0] * len(requests)

    def step():
        for output in engine.step():
            if output.token is not None:
                answers.setdefault(output.request_id, []).append(output.token)
            if output.finished:
                assert answers[output.request_id] == output.token_ids

    for gap, (prompt, count, sampling) in zip(gaps, requests):
        for _ in range(gap):
            step()
        names.append(engine.add_request(prompt, count, sampling, stop_at_eos=False))
    while engine.has_work:
        step()
    allocator = engine.runner.kv_cache.allocator
    assert allocator.num_free == allocator.num_blocks - 1
    return [answers[name] for name in names]


def requests_of(sampling=GREEDY):
    return [(prompt, count, sampling) for prompt, count in zip(prompts_of(LENGTHS), ANSWERS)]


@pytest.mark.parametrize("ahead", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_one_request_at_a_time_in_every_mode(mode, ahead, expected):
    engine = Engine(runner_of(mode, **TIGHT), async_scheduling=ahead)
    chance = random.Random(f"{mode} {ahead}")
    gaps = [chance.choice([0, 0, 1, 2, 5]) for _ in LENGTHS]
    order = chance.sample(range(len(LENGTHS)), len(LENGTHS))
    answers = serve(engine, [requests_of()[i] for i in order], gaps)
    assert answers == [expected[i] for i in order]
    assert engine.num_preemptions > 0
    frame = engine.to_frame()
    taken = {kind: set(part["mode"]) for kind, part in frame.groupby("kind")}
    decode = {"NONE": "NONE", "PIECEWISE": "PIECEWISE"}.get(mode, "FULL")
    mixed = {"FULL": "FULL", "FULL_AND_PIECEWISE": "PIECEWISE", "PIECEWISE": "PIECEWISE"}.get(mode, "NONE")
    assert taken["decode"] == {decode}
    assert mixed in taken["mixed"] and taken["mixed"] <= {
        mixed,
        "NONE",
    }  # above 16 tokens nothing is recorded


@pytest.mark.parametrize("level", ["EAGER", "FULL_AND_PIECEWISE"])
def test_the_device_may_be_as_late_as_it_likes(level, expected):
    queue = LateQueue()
    engine = Engine(runner_of(level, **TIGHT), queue=queue)
    assert serve(engine, requests_of(), [0, 3, 0, 1, 0, 0, 2, 0, 0]) == expected
    assert engine.num_preemptions > 0 and queue.done == queue.submitted > 100


def test_one_staging_area_is_a_race_that_a_late_device_loses(expected):
    """What a GPU would do now and then: the next step's inputs are written while this one's are still to be read."""
    runner = runner_of.__wrapped__("EAGER")
    try:
        answers = serve(Engine(runner, queue=LateQueue(), areas=1), requests_of())
    except IndexError:  # a row of the next step that this one does not have
        answers = []
    assert answers != expected
    assert serve(Engine(runner_of("EAGER"), queue=LateQueue(), areas=2), requests_of()) == expected
    # one is enough for who waits for each step before preparing the next
    single = Engine(runner_of("EAGER"), queue=LateQueue(), areas=1, async_scheduling=False)
    assert serve(single, requests_of()) == expected


def test_a_late_device_has_one_step_to_do_while_the_next_is_prepared():
    queue = LateQueue()
    engine = Engine(runner_of("EAGER"), queue=queue)
    engine.add_request([1, 2, 3], 6, stop_at_eos=False)
    waiting = []
    for _ in range(4):
        engine.step()
        waiting.append(queue.submitted - queue.done)
    assert min(waiting) > 0  # something is always on its way
    engine.close()
    assert queue.submitted == queue.done


@pytest.mark.parametrize("ahead", [True, False], ids=["async", "sync"])
def test_end_tokens_stop_requests_at_once(ahead, expected):
    engine = Engine(runner_of("FULL_AND_PIECEWISE", **TIGHT), async_scheduling=ahead)
    names, wanted = [], []
    for prompt, count, answer in zip(prompts_of(LENGTHS), ANSWERS, expected):
        stop = answer[len(answer) // 2]
        names.append(engine.add_request(prompt, count, stop_at_eos=False, stop_token_ids=[stop]))
        wanted.append(answer[: answer.index(stop) + 1])
    last = {output.request_id: output for output in engine.run()}
    assert [last[name].token_ids for name in names] == wanted
    assert {last[name].finish_reason for name in names} == {"stop"}
    dropped = engine.to_frame()["dropped_tokens"].sum()
    assert (dropped > 0) == ahead  # a step ahead, a request that stopped took part once too often


def test_end_of_sequence_is_an_end_token_unless_told_otherwise(expected):
    from dataclasses import replace

    runner = runner_of("EAGER")
    answer, config = expected[0], runner.model.config
    runner.model.config = replace(config, eos_token_ids=(answer[3],))
    try:
        engine = Engine(runner)
        engine.add_request(prompts_of(LENGTHS)[0], 12, request_id="ends")
        engine.add_request(prompts_of(LENGTHS)[0], 12, request_id="goes on", stop_at_eos=False)
        last = {output.request_id: output for output in engine.run()}
    finally:
        runner.model.config = config
    assert last["ends"].token_ids == answer[: answer.index(answer[3]) + 1]
    assert last["goes on"].token_ids == answer


HOT = [SamplingParams(1.5, 20, 0.9, seed=s) for s in range(4)] + [
    SamplingParams(0.8, seed=4),
    GREEDY,
    SamplingParams(2.0, top_k=5, seed=6),
    SamplingParams(1.0, top_p=0.7, seed=7),
    SamplingParams(1.0, seed=2**62),
]


@pytest.mark.parametrize("ahead", [True, False], ids=["async", "sync"])
def test_a_seed_draws_the_same_tokens_alone_in_a_batch_and_after_preemption(ahead):
    runner, tight = runner_of("EAGER"), runner_of("EAGER", **TIGHT)
    prompts = prompts_of(LENGTHS)
    alone = [runner.generate([p], n, s)[0].token_ids for p, n, s in zip(prompts, ANSWERS, HOT)]
    requests = list(zip(prompts, ANSWERS, HOT))
    roomy = Engine(runner, async_scheduling=ahead)
    assert serve(roomy, requests, [0, 2, 0, 0, 1, 0, 0, 3, 0]) == alone and roomy.num_preemptions == 0
    engine = Engine(tight, async_scheduling=ahead)
    assert serve(engine, requests) == alone and engine.num_preemptions > 0
    others = [SamplingParams(each.temperature, each.top_k, each.top_p, 99) for each in HOT]
    assert serve(engine, list(zip(prompts, ANSWERS, others))) != alone


@pytest.mark.parametrize(
    ("least", "greedy"),
    [
        (SamplingParams(1e-30, seed=1), True),
        (SamplingParams(1.0, top_p=1e-30, seed=1), True),
        (SamplingParams(1.0, top_k=2, top_p=1e-30, seed=1), True),
        (SamplingParams(10**30, seed=1), False),
        (SamplingParams(1e30, 2**31 - 1, seed=1), False),
    ],
)
def test_the_ends_of_what_may_be_asked_for_draw_the_same_in_engine_and_runner(least, greedy, expected):
    runner, (prompt, count, _) = runner_of("EAGER"), requests_of()[0]
    answer = runner.generate([prompt], count, least, stop_at_eos=False)[0].token_ids
    assert serve(Engine(runner), [(prompt, count, least), requests_of()[1]]) == [answer, expected[1]]
    assert (answer == expected[0]) == greedy and len(set(answer)) > 1


def test_requests_without_a_seed_draw_by_chance():
    engine = Engine(runner_of("EAGER"))
    one, other = serve(engine, [([1, 2, 3], 20, SamplingParams(3.0))] * 2)
    assert one != other


def test_aborted_requests_end_and_the_others_do_not_notice(expected):
    engine = Engine(runner_of("FULL_AND_PIECEWISE", **TIGHT))
    names = [engine.add_request(p, n, stop_at_eos=False) for p, n, _ in requests_of()]
    answers = {name: [] for name in names}
    ended = []
    for number in range(1000):
        if number in (2, 9) and engine.has_work:
            running = engine.scheduler.running[0].id
            assert engine.abort(running) and not engine.abort(running)
            ended.append(running)
        if number == 4:
            ended.append(engine.scheduler.waiting[-1].id)
            assert engine.abort(ended[-1])
        for output in engine.step():
            assert (output.finish_reason == "abort") == (output.request_id in ended)
            if output.token is not None:
                answers[output.request_id].append(output.token)
        if not engine.has_work:
            break
    assert not engine.abort("nobody") and len(set(ended)) == 3
    for name, answer in zip(names, expected):
        if name in ended:
            assert answers[name] == answer[: len(answers[name])]
        else:
            assert answers[name] == answer
    assert engine.runner.kv_cache.allocator.num_free == 11


class Unreadable:
    def __iter__(self):
        raise ValueError("unreadable")


BAD = [
    pytest.param(([],), {}, "request bad is empty", id="empty"),
    pytest.param(([1, TOY.vocab_size],), {}, "token 97.*ends at 96", id="unknown-token"),
    pytest.param(([1, -1],), {}, "token -1", id="negative-token"),
    pytest.param(([1.5],), {}, "neither text nor", id="no-token"),
    pytest.param((3,), {}, "neither text nor", id="no-list"),
    pytest.param((Unreadable(),), {}, "neither text nor.*ValueError: unreadable", id="unreadable"),
    pytest.param(("text",), {}, "no tokenizer", id="text"),
    pytest.param(([1] * 70,), {}, "70 tokens.*the KV cache holds 44", id="beyond-the-cache"),
    pytest.param(([1] * 40, 5), {}, "40 tokens.*5 more.*holds 44.*to 4", id="answer-beyond-the-cache"),
    pytest.param(([1], 0), {}, "max_tokens=0", id="no-tokens"),
    pytest.param(([1], 2.5), {}, "max_tokens=2.5", id="half-tokens"),
    pytest.param(([1], 3, "hot"), {}, "sampling='hot'", id="sampling"),
    pytest.param(([1],), {"stop_token_ids": [400]}, "stop_token_ids.*token 400", id="stop-token"),
]


@pytest.mark.parametrize(("arguments", "options", "says"), BAD)
def test_bad_requests_are_refused_and_the_others_are_served(arguments, options, says, expected):
    engine = Engine(runner_of("EAGER", **TIGHT))
    names = [engine.add_request(p, n, stop_at_eos=False) for p, n, _ in requests_of()[:3]]
    last = {}
    for _ in range(5):
        with pytest.raises(ServingError, match=says):
            engine.add_request(*arguments, request_id="bad", **options)
        last.update({output.request_id: output for output in engine.step()})
    last.update({output.request_id: output for output in engine.run()})
    assert [last[name].token_ids for name in names] == expected[:3]


def test_a_name_is_taken_until_its_request_has_ended():
    engine = Engine(runner_of("EAGER"))
    with pytest.raises(ServingError, match=r"request_id=\['me'\]: give a text"):
        engine.add_request([1], 2, request_id=["me"])
    engine.add_request([1], 2, request_id="me")
    with pytest.raises(ServingError, match="'me' is being served"):
        engine.add_request([1], 2, request_id="me")
    list(engine.run())
    assert engine.add_request([1], 2, request_id="me") == "me"
    engine.close()


class Clock:
    """A time that passes only when somebody sleeps, and a little with each look."""

    def __init__(self):
        self.now, self.slept = 100.0, 0.0

    def __call__(self):
        self.now += 0.001
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.slept += seconds


def test_requests_that_arrive_over_time_are_served_as_they_come(expected):
    clock = Clock()
    arrivals = [
        Arrival(0.5 * number, p, n, stop_at_eos=False, request_id=f"r{number}")
        for number, (p, n, _) in enumerate(requests_of())
    ]
    arrivals.insert(3, Arrival(1.2, [], 3, request_id="empty"))
    engine = Engine(runner_of("FULL_AND_PIECEWISE"))
    first, last = {}, {}
    for output in engine.serve(arrivals, clock=clock, sleep=clock.sleep):
        first.setdefault(output.request_id, clock.now - 100)
        last[output.request_id] = output
    assert last.pop("empty").finish_reason == "refused"
    assert [last[f"r{number}"].token_ids for number in range(len(LENGTHS))] == expected
    assert all(first[each.request_id] >= each.at_s for each in arrivals) and clock.slept > 2


@pytest.mark.parametrize(
    "at_s", [float("nan"), float("inf"), float("-inf"), "1", None, pytest.param(10**400, id="10**400")]
)
def test_an_arrival_at_no_time_is_refused_and_the_others_are_served(at_s, expected):
    clock = Clock()
    arrivals = [
        Arrival(0.5 * number, p, n, stop_at_eos=False) for number, (p, n, _) in enumerate(requests_of()[:3])
    ]
    arrivals.insert(1, Arrival(at_s, [1], 3, request_id="never"))
    last = {}
    for output in Engine(runner_of("EAGER")).serve(arrivals, clock=clock, sleep=clock.sleep):
        last[output.request_id] = output
        assert clock.now < 200, "it waits for ever"
    assert last.pop("never").error.startswith(f"at_s={at_s!r:.50}: a request arrives at")
    assert [last[str(number)].token_ids for number in range(3)] == expected[:3]


def test_an_arrival_that_nobody_foresaw_is_refused_and_the_others_are_served(expected):
    (prompt, count, _), *_ = requests_of()
    odd = [Arrival(0, Unreadable(), 3, request_id="odd"), Arrival(0, [1], 10**5000, request_id="long")]
    last = {}
    for output in Engine(runner_of("EAGER")).serve([*odd, Arrival(0, prompt, count, stop_at_eos=False)]):
        last[output.request_id] = output
    assert "unreadable" in last.pop("odd").error and last.pop("long").error.startswith("ValueError: ")
    assert [each.token_ids for each in last.values()] == expected[:1]


def test_an_arrival_has_end_tokens_of_its_own(expected):
    stop = expected[0][5]
    prompt = prompts_of(LENGTHS)[0]
    engine = Engine(runner_of("EAGER"))
    *_, last = engine.serve([Arrival(0, prompt, 12, stop_at_eos=False, stop_token_ids=(stop,))])
    assert last.finish_reason == "stop" and last.token_ids == expected[0][: expected[0].index(stop) + 1]


def test_every_step_says_what_it_was():
    engine = Engine(runner_of("FULL_AND_PIECEWISE", **TIGHT))
    with events.record(events.EngineStepRan, events.StepRan) as log:
        serve(engine, requests_of())
    frame = engine.to_frame()
    for each in engine.reports:
        assert each.descriptor == BatchDescriptor(each.route.num_tokens, each.uniform)
        if each.route.key is None:
            assert each.route.mode.name == "NONE" and not each.tried[-1].endswith("taken")
        else:
            kind = "decode" if each.route.key.uniform_decode else "any"
            assert each.tried[-1] == f"{each.route.mode.name}({each.route.num_tokens}, {kind}): taken"
    assert len(frame) == len(engine.reports) and len(log) == 2 * len(frame)
    assert frame["step"].is_monotonic_increasing and frame["new_tokens"].sum() == sum(ANSWERS)
    assert frame["admitted"].sum() == len(LENGTHS) + engine.num_preemptions
    assert frame["preempted"].sum() == engine.num_preemptions > 0
    decode = frame[frame["kind"] == "decode"]
    assert set(decode["mode"]) == {"FULL"} and (decode["num_tokens"] == decode["num_reqs"]).all()
    assert decode["keys_tried"].iloc[0] == f"FULL({decode['num_padded_tokens'].iloc[0]}, decode): taken"
    mixed = frame[(frame["kind"] == "mixed") & (frame["mode"] == "PIECEWISE")]
    assert mixed["keys_tried"].str.contains(r"FULL\(\d+, any\): .*; PIECEWISE\(\d+, any\): taken").all()
    assert (frame["num_padded_tokens"] >= frame["num_tokens"]).all()
    parts = frame[["schedule_us", "fill_us", "route_us", "sample_us", "post_us"]]
    assert (parts > 0).all().all()
    assert frame["host_outside_model_us"].to_list() == pytest.approx(parts.sum(axis=1).to_list())
    assert "preemptions" in repr(engine)


def test_a_mixed_batch_takes_the_path_for_any_batch_and_a_decode_batch_that_for_decode():
    """Whether a step is uniform decides which attention kernel a graph holds: asked of what it is told."""
    runner = runner_of("FULL_AND_PIECEWISE")
    engine = Engine(runner)
    seen = []
    fill = engine.inputs.fill

    def watched(step, padded):
        metadata, fetch = fill(step, padded)
        seen.append((step.counts, metadata.decode_only, metadata.max_query_len))
        return metadata, fetch

    engine.inputs.fill = watched
    serve(engine, requests_of(), [0, 0, 2, 2, 0, 1, 0, 0, 0])
    for counts, decode_only, longest in seen:
        assert decode_only == (counts is None or set(counts) == {1})
        assert longest == max(counts or [1])
    assert {decode for _, decode, _ in seen} == {True, False}


def test_nothing_compiles_or_records_after_capture_and_no_buffer_moves():
    """500 steps of mixed traffic; on a GPU the allocator is asked as well (test_engine_gpu.py)."""
    runner = runner_of("FULL_AND_PIECEWISE", **TIGHT)
    engine = Engine(runner)
    held = [
        *runner.inputs.buffers.tensors.values(), engine.inputs.sampled,
        *engine.sampler.places, engine.sampler.logits, *engine.sampler.params.tensors.values(),
    ]  # fmt: skip
    addresses = [tensor.data_ptr() for tensor in held]
    chance = random.Random(3)
    with compilation_counter.expect(), events.record(events.CompileRequested, events.GraphCaptured) as log:
        while len(engine.reports) < 500:
            if len(engine.requests) < 8:
                length = chance.randint(1, 30)
                hot = SamplingParams(1.0, seed=5) if chance.random() < 0.2 else GREEDY
                engine.add_request([1] * length, chance.randint(1, 14), hot)
            engine.step()
        engine.close()
    assert not log and [tensor.data_ptr() for tensor in held] == addresses
    assert set(engine.to_frame()["mode"]) == {"FULL", "PIECEWISE", "NONE"}


@pytest.mark.parametrize("ahead", [True, False], ids=["async", "sync"])
def test_an_engine_and_its_runner_take_turns(ahead, expected):
    """The runner writes the same buffers: a step that goes on from what stood there would be wrong after it."""
    runner = runner_of("FULL_AND_PIECEWISE")
    engine = Engine(runner, async_scheduling=ahead)
    name = engine.add_request(prompts_of(LENGTHS)[2], 14, stop_at_eos=False)
    answer = []
    for number in range(40):
        answer += [output.token for output in engine.step()]
        if number in (4, 5, 9):
            assert runner.generate([prompts_of(LENGTHS)[0]], 12)[0].token_ids == expected[0]
    assert answer == expected[2] and name not in engine.requests


@pytest.mark.parametrize("ahead", [True, False], ids=["async", "sync"])
def test_a_second_engine_of_a_runner_does_not_spoil_the_first_ones_steps(ahead, expected):
    """It exchanges the memory that the first one goes on from; a notebook's cell that runs twice does so."""
    runner = runner_of("FULL_AND_PIECEWISE")
    first = Engine(runner, async_scheduling=ahead)
    names = [first.add_request(p, n, stop_at_eos=False) for p, n, _ in requests_of()[:3]]
    last = {output.request_id: output for _ in range(6) for output in first.step()}
    second = Engine(runner, async_scheduling=ahead)
    last.update({output.request_id: output for _ in range(2) for output in first.step()})
    other = second.add_request(prompts_of(LENGTHS)[5], 15, stop_at_eos=False)
    answer = []
    while first.has_work or second.has_work:
        last.update({output.request_id: output for output in first.step()})
        answer += [output.token for output in second.step() if output.request_id == other]
    assert [last[name].token_ids for name in names] == expected[:3] and answer == expected[5]


def test_blocks_that_somebody_else_holds_are_an_error_and_not_a_loop():
    runner = runner_of("EAGER", **TIGHT)
    engine = Engine(runner)
    taken = runner.kv_cache.allocator.alloc(11)
    engine.add_request([1, 2], 3)
    with pytest.raises(ServingError, match="only 0 blocks"):
        list(engine.run())
    runner.kv_cache.allocator.free(taken)
    assert len(list(engine.run())) == 3


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("where", ["fill", "prepare", "forward"])
def test_an_engine_whose_step_failed_says_so_and_ends(where, late, ahead, expected, monkeypatch):
    """The scheduler has moved requests on by then, so another step would give wrong tokens."""
    engine = Engine(runner := runner_of("EAGER"), queue=LateQueue() if late else None, async_scheduling=ahead)
    names = [engine.add_request(p, n, stop_at_eos=False) for p, n, _ in requests_of()[:6]]
    got = {name: [] for name in names}

    def take():
        for output in engine.step():
            got[output.request_id].append(output.token)

    for _ in range(3):
        take()
    owner = {"fill": engine.inputs, "prepare": engine.sampler, "forward": runner.executor}[where]

    def fail(*_):
        raise OverflowError("too large")

    with monkeypatch.context() as patched:
        patched.setattr(owner, where, fail)
        with pytest.raises(OverflowError):
            for _ in range(3):  # a late device fails when it is waited for
                take()
    says = r"step of this engine failed \(OverflowError: too large\).*new Engine"
    for call in (
        engine.step,
        lambda: list(engine.run()),
        lambda: engine.add_request([1], 2),
        lambda: list(engine.serve([])),
    ):
        with pytest.raises(ServingError, match=says):
            call()
    assert all(got[name] == answer[: len(got[name])] for name, answer in zip(names, expected))
    assert engine.abort(names[2])
    engine.close()
    assert not engine.has_work
    assert serve(Engine(runner), requests_of()) == expected  # all blocks are free again


def test_logits_that_have_no_place_of_their_own_give_the_same_tokens(expected):
    """A model that brings only ``compute_logits``."""
    engine = Engine(runner_of("EAGER"))
    engine.sampler.logits = None
    assert serve(engine, requests_of()) == expected
    assert torch.is_grad_enabled()
