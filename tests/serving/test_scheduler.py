"""The scheduler alone: who is served, in which order, and where the blocks are."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cgkit.errors import ServingError
from cgkit.serving.kv_cache import BlockAllocator
from cgkit.serving.request import Request
from cgkit.serving.scheduler import Scheduler

from .scheduler_checks import Bench, random_traffic

SHAPES = {
    "blocks": st.integers(2, 24),
    "size": st.integers(1, 8),
    "seats": st.integers(1, 7),
    "budget": st.integers(1, 30),
    "ahead": st.integers(0, 2),
    "stop_share": st.sampled_from([0.0, 0.05, 0.3]),
}


class AnyTraffic(RuleBasedStateMachine):
    """Requests come, are served and aborted in any order."""

    @initialize(seed=st.integers(0, 2**32), **SHAPES)
    def start(self, **shape):
        self.bench = Bench(**shape)

    @rule(prompt=st.integers(1, 50), answer=st.integers(1, 30))
    def add(self, prompt, answer):
        if prompt + answer <= self.bench.room:
            self.bench.add(prompt, answer)
        else:
            with pytest.raises(ServingError, match=f"reach {prompt + answer} tokens"):
                self.bench.add(prompt, answer)

    @rule(count=st.integers(1, 12))
    def steps(self, count):
        for _ in range(count):
            self.bench.step()

    @rule(index=st.integers(0, 100))
    def abort(self, index):
        self.bench.abort(index)

    @invariant()
    def blocks_are_where_they_belong(self):
        self.bench.check()

    def teardown(self):
        if hasattr(self, "bench"):
            self.bench.drain()


AnyTraffic.TestCase.settings = settings(deadline=None, max_examples=40, stateful_step_count=25)
TestAnyTraffic = AnyTraffic.TestCase


def run_many(examples, steps):
    """``examples`` schedulers, ``steps`` steps each; returns steps, preemptions and answers in all."""
    total = [0, 0, 0]

    @settings(deadline=None, max_examples=examples, database=None, suppress_health_check=list(HealthCheck))
    @given(st.fixed_dictionaries(SHAPES), st.integers(0, 2**32))
    def run(shape, seed):
        bench = Bench(**shape, seed=seed)
        random_traffic(bench, steps)
        total[0] += bench.steps
        total[1] += bench.preemptions
        total[2] += bench.finished

    run()
    return total


def test_no_block_is_lost_or_shared_over_thousands_of_steps():
    """How often blocks run out is up to the drawn shapes: more are drawn until it was often enough."""
    steps = preemptions = finished = 0
    while not (steps >= 3000 and preemptions > 50 and finished > 100):
        assert steps < 200_000, (steps, preemptions, finished)
        more = run_many(20, 150)
        steps, preemptions, finished = steps + more[0], preemptions + more[1], finished + more[2]


@pytest.mark.slow
def test_no_block_is_lost_or_shared_over_100_000_steps():
    steps = preemptions = 0
    while not (steps >= 100_000 and preemptions > 1000):
        assert steps < 1_000_000, (steps, preemptions)
        more = run_many(100, 400)
        steps, preemptions = steps + more[0], preemptions + more[1]


def scheduler_of(blocks=20, size=4, seats=4, budget=16):
    return Scheduler(BlockAllocator(blocks + 1), size, max_num_seqs=seats, max_num_batched_tokens=budget)


def add(scheduler, prompt, answer=8):
    request = Request([1] * prompt, answer)
    scheduler.add(request)
    return request


def serve(scheduler):
    step = scheduler.schedule()
    scheduler.update(step, [5] * len(step.requests))
    return step


def test_decoding_comes_first_then_the_begun_prompt_then_the_queue_in_order():
    scheduler = scheduler_of()
    old, long, last = add(scheduler, 3), add(scheduler, 30), add(scheduler, 2)
    first = serve(scheduler)
    assert (first.requests, first.counts, first.wants) == ([old, long], [3, 13], [True, False])
    second = serve(scheduler)
    assert (second.requests, second.counts, second.wants) == ([old, long], [1, 15], [True, False])
    third = serve(
        scheduler
    )  # the rest of the long prompt, and now there are tokens left for the next in the queue
    assert (third.requests, third.counts, third.admitted) == ([old, long, last], [1, 2, 2], 1)
    fourth = serve(scheduler)
    assert fourth.counts is None and fourth.uniform and fourth.same_rows


def test_a_step_in_which_everybody_happens_to_have_one_token_is_uniform_and_a_mixed_one_is_not():
    scheduler = scheduler_of()
    add(scheduler, 1), add(scheduler, 1)
    assert serve(scheduler).uniform  # two prompts of one token
    add(scheduler, 2)
    assert not serve(scheduler).uniform
    assert serve(scheduler).uniform


def test_blocks_come_as_tokens_come():
    scheduler = scheduler_of()
    request = add(scheduler, 5, answer=8)
    counts = []
    while not request.finish_reason:
        serve(scheduler)
        counts.append(len(request.blocks))
    # 5 tokens in 2 blocks, the fourth new one opens the third; the last token is never computed
    assert counts == [2, 2, 2, 2, 3, 3, 3, 0] and scheduler.allocator.num_free == 20


def test_the_youngest_gives_its_blocks_back_and_returns_to_the_front():
    scheduler = scheduler_of(blocks=5, size=4, seats=3)
    first, second, third = add(scheduler, 8, 9), add(scheduler, 4, 9), add(scheduler, 4, 9)
    late = add(scheduler, 1)
    serve(scheduler)
    assert scheduler.running == [first, second, third] and scheduler.allocator.num_free == 1
    step = scheduler.schedule()  # each of them opens a block, and there is one
    assert step.preempted == (third,) and step.requests == [first, second]
    assert list(scheduler.waiting) == [third, late] and third.num_computed == 0 and third.preemptions == 1
    assert third.token_ids == [1] * 4 + [5]  # what it had is kept, and computed again


def test_ahead_of_the_tokens_a_request_that_is_complete_is_not_served_again():
    scheduler = scheduler_of()
    short, long = add(scheduler, 2, answer=2), add(scheduler, 2, answer=5)
    first = scheduler.schedule()
    second = scheduler.schedule()
    scheduler.update(first, [5, 5])
    third = scheduler.schedule()
    assert second.requests == [short, long] and third.requests == [long] and not short.blocks
    taken = scheduler.update(second, [6, 6])
    assert short.finish_reason == "length" and short.answer == [5, 6] and taken == [(short, 6), (long, 6)]


def test_ahead_of_the_tokens_a_request_that_stopped_takes_part_once_too_often():
    scheduler = scheduler_of()
    request = Request([1, 2], 9, stop_ids=frozenset([5]))
    scheduler.add(request)
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.update(first, [5])
    assert request.finish_reason == "stop" and scheduler.allocator.num_free == 20
    assert scheduler.schedule() is None and scheduler.update(second, [7]) == [] and request.answer == [5]


@pytest.mark.parametrize(
    ("prompt", "answer", "says"), [(0, 3, "0 tokens"), (3, 0, "0 more"), (60, 21, "81 tokens.*holds 80")]
)
def test_what_could_never_be_served_is_refused(prompt, answer, says):
    scheduler = scheduler_of()
    with pytest.raises(ServingError, match=says):
        add(scheduler, prompt, answer)
    assert not scheduler.has_work


def test_a_step_must_have_a_token_for_everybody():
    with pytest.raises(ServingError, match=r"max_num_seqs=8.*max_num_batched_tokens=4"):
        scheduler_of(seats=8, budget=4)
