"""A scheduler without a model: a pretended device that notes whose token lies where, and what must always hold."""

from __future__ import annotations

from collections import deque
from random import Random

from cgkit.serving.kv_cache import BlockAllocator
from cgkit.serving.request import Request
from cgkit.serving.scheduler import ScheduledStep, Scheduler

STOP = 10**9


def token_of(request: Request, number: int) -> int:
    """The token that the pretended model gives: of a request and how many it has."""
    return request.arrival * 1000 + number


class Bench:
    """Drives a scheduler like an engine that is ``ahead`` steps before the tokens, and checks every step.

    The device runs steps in the order in which they were scheduled, each with the blocks of that moment, as one stream
    does. ``slots`` says which request's token, at which position, was last written where.
    """

    def __init__(
        self, blocks: int, size: int, seats: int, budget: int, ahead: int, stop_share: float, seed: int
    ) -> None:
        self.allocator = BlockAllocator(blocks + 1)
        self.scheduler = Scheduler(
            self.allocator, size, max_num_seqs=seats, max_num_batched_tokens=max(seats, budget)
        )
        self.size, self.ahead, self.stop_share, self.random = size, ahead, stop_share, Random(seed)
        self.room = blocks * size
        self.slots: dict[int, tuple[Request, int]] = {}
        self.launched: deque[ScheduledStep] = deque()
        self.alive: list[Request] = []
        self.steps = self.preemptions = self.finished = 0

    def add(self, prompt: int, answer: int) -> None:
        request = Request([7] * prompt, answer, stop_ids=frozenset([STOP]))
        self.scheduler.add(request)
        self.alive.append(request)

    def abort(self, index: int) -> None:
        if self.alive:
            request = self.alive[index % len(self.alive)]
            assert self.scheduler.abort(request)
            self.check()
            self._forget(request)

    def step(self) -> bool:
        """One step of the loop; False if there was nothing to do."""
        before = {request: request.num_computed for request in self.scheduler.running}
        step = self.scheduler.schedule()
        if step is not None:
            self._launch(step, before)
        self.check()
        if len(self.launched) > (self.ahead if step is not None else 0):
            self._finish(self.launched.popleft())
            self.check()
        elif step is None:
            assert not self.scheduler.waiting and not self.scheduler.running, "somebody waits for ever"
            return False
        return True

    def _launch(self, step: ScheduledStep, before: dict[Request, int]) -> None:
        self.steps += 1
        self.preemptions += len(step.preempted)
        scheduler, counts = self.scheduler, step.counts or [1] * len(step.requests)
        assert step.requests == scheduler.running and len(set(map(id, step.requests))) == len(counts)
        assert 0 < len(counts) <= scheduler.max_num_seqs
        assert step.num_tokens == sum(counts) <= scheduler.max_num_batched_tokens and min(counts) > 0
        assert step.uniform == all(count == 1 for count in counts)
        wants = step.wants or [True] * len(counts)
        assert wants.count(False) <= 1  # one prompt is begun at most
        for request, count, want in zip(step.requests, counts, wants):
            end = request.num_computed
            assert end == before.get(request, 0) + count
            known = len(request.token_ids) + request.num_in_flight - want
            assert want == (end == known) and request.num_in_flight - want <= self.ahead
            for position in range(end - count, end):
                self.slots[self._slot(request, position)] = (request, position)
        for request in step.requests:  # what the attention reads is its own, to the last token
            for position in range(request.num_computed):
                assert self.slots[self._slot(request, position)] == (request, position)
        self.launched.append(step)

    def _slot(self, request: Request, position: int) -> int:
        return request.blocks[position // self.size] * self.size + position % self.size

    def _finish(self, step: ScheduledStep) -> None:
        tokens = [token_of(request, len(request.token_ids)) for request in step.requests]
        tokens = [STOP if self.random.random() < self.stop_share else token for token in tokens]
        for request, token in self.scheduler.update(step, tokens):
            assert request.token_ids[-1] == token and token in (
                STOP,
                token_of(request, len(request.token_ids) - 1),
            )
            if request.finish_reason:
                self.finished += 1
                assert (request.finish_reason == "stop") == (token == STOP)
                assert request.finish_reason == "stop" or len(request.answer) == request.max_tokens
                self._forget(request)
            else:
                assert len(request.answer) < request.max_tokens and token != STOP

    def _forget(self, request: Request) -> None:
        assert not request.blocks and request.finish_reason
        self.alive.remove(request)

    def check(self) -> None:
        """No block is lost, none has two owners, and only who runs owns any."""
        scheduler = self.scheduler
        owned = [block for request in scheduler.running for block in request.blocks]
        assert len(set(owned)) == len(owned) and 0 not in owned
        assert len(owned) + self.allocator.num_free == self.allocator.num_blocks - 1
        assert not any(request.blocks or request.num_computed for request in scheduler.waiting)
        arrivals = [request.arrival for request in scheduler.waiting]
        assert arrivals == sorted(arrivals)
        assert not any(request.finish_reason for request in [*scheduler.running, *scheduler.waiting])

    def drain(self) -> None:
        """Everybody who is there is served to the end, and then every block is free."""
        tokens = sum(len(request.prompt) + request.max_tokens for request in self.alive)
        for _ in range(tokens * (len(self.alive) + 2) + 5):
            if not self.step():
                break
        else:
            raise AssertionError("the requests never come to their end")
        assert not self.alive and self.allocator.num_free == self.allocator.num_blocks - 1


def random_traffic(bench: Bench, steps: int) -> None:
    """``steps`` steps of requests that come, end and are aborted at random; then the rest is served."""
    random, most = bench.random, min(bench.room, 60)
    target = bench.steps + steps
    while bench.steps < target:
        if random.random() < 0.35 and len(bench.alive) < 40:
            prompt = random.randint(1, most - 1)
            bench.add(prompt, random.randint(1, most - prompt))
        if random.random() < 0.02:
            bench.abort(random.randrange(1000))
        bench.step()
    bench.drain()
