"""``simulate_traffic``: which batches an engine with continuous batching would have run for a trace of requests.

A queue in discrete time, of what decides the batch size and nothing else:

- A step serves every decoding request with one token, then prompts with what is left of
  ``max_num_batched_tokens``: first the one that was begun, then waiting requests in the order of their arrival,
  as long as fewer than ``max_num_seqs`` are running. A prompt that does not fit is cut (chunked prefill).
- The step that ends a prompt gives the request's first token; a request with ``n`` tokens to generate decodes in the
  ``n - 1`` steps that follow and leaves.
- A step of ``n`` tokens takes as long as a graph recorded for ``n`` does. Whoever arrives meanwhile waits for
  the next one.
- ``split``: the decode instance of a split deployment. Prompts and first tokens are made elsewhere in no time, and
  ``n - 1`` tokens are left to do here.

Left out: the KV cache's size and preemption, prefix caching, sampling and scheduling time, what a long context
costs. Nothing is random. Steps between two events are counted, not run one by one: a day of traffic takes seconds.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cgkit import events
from cgkit.display import Shown
from cgkit.errors import ConfigError
from cgkit.measuring.request_trace import RequestTrace
from cgkit.measuring.step_cost import StepCost

#: Of traffic: some ten thousand years. Far beyond it a float tells no step from the next.
_LONGEST_S = 1e12


@dataclass(repr=False)
class SimulatedTraffic(Shown):
    """How often each batch was run; made by :func:`simulate_traffic`.

    Attributes:
        counts: (kind, tokens) -> steps; kind "decode", or "mixed" where a prompt was part of the step.
        requests, prompt_tokens, generated_tokens: that were served (here; under ``split`` without first tokens).
        busy_s, end_s: time in steps, and when the last one ended, in simulated seconds after the first arrival.
        most_running, most_waiting: requests at once.
        about: the arguments.
    """

    counts: dict[tuple[str, int], int]
    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    busy_s: float = 0.0
    end_s: float = 0.0
    most_running: int = 0
    most_waiting: int = 0
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """All of them."""
        return sum(self.counts.values())

    def to_frame(self) -> Any:
        """A row a kind and batch: ``kind``, ``batch`` (tokens), ``count`` (steps)."""
        import pandas as pd

        rows = [(kind, batch, count) for (kind, batch), count in sorted(self.counts.items())]
        return pd.DataFrame(rows, columns=["kind", "batch", "count"])

    def facts(self) -> dict[str, Any]:
        """For JSON: all but the counts."""
        return {
            **self.about,
            "requests": self.requests,
            "steps": self.steps,
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "busy_s": self.busy_s,
            "end_s": self.end_s,
            "most_running": self.most_running,
            "most_waiting": self.most_waiting,
        }

    def plot(self, about: Any = None, *, ax: Any = None) -> Any:
        """The batches by how often they were run."""
        from cgkit.plotting.plan_charts import plan

        frame = self.to_frame()
        frame = frame.assign(padded=frame["batch"], captured=False)
        return plan(frame, None, about, ax=ax)

    def __repr__(self) -> str:
        mixed = sum(count for (kind, _), count in self.counts.items() if kind == "mixed")
        busy = self.busy_s / self.end_s if self.end_s else 0.0
        span = (
            f"{self.end_s / 3600:.2f} simulated hours"
            if self.end_s >= 360
            else f"{self.end_s:.1f} simulated s"
        )
        return (
            f"SimulatedTraffic: {self.requests:,} requests in {self.steps:,} steps ({mixed:,} with prefill), "
            f"{self.generated_tokens:,} tokens generated\n"
            f"  {span}, {busy:.0%} of them in a step; at most "
            f"{self.most_running} running and {self.most_waiting:,} waiting"
        )


def simulate_traffic(
    trace: RequestTrace,
    step_cost: StepCost | Callable[[int], float],
    *,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 2048,
    speed: float = 1.0,
    split: bool = False,
) -> SimulatedTraffic:
    """Serves ``trace``; see the module for the rules.

    Args:
        trace: the requests.
        step_cost: what a step of so many tokens takes, **in milliseconds**: a function, or a :class:`StepCost`, whose
            replayed cost counts.
        max_num_seqs: the most requests that run at once.
        max_num_batched_tokens: the most tokens in a step; at least ``max_num_seqs``.
        speed: 2 makes requests arrive twice as fast.
        split: prompts are computed elsewhere.

    Raises:
        ConfigError: a limit or the speed makes no sense, or a step's cost is not positive.
    """
    for name, value in (("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}={value!r}: give a positive whole number")
    if max_num_batched_tokens < max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens={max_num_batched_tokens} is below max_num_seqs={max_num_seqs}: a step could not "
            "serve every decoding request"
        )
    if not (isinstance(speed, (int, float)) and 0 < speed < math.inf):
        raise ConfigError(f"speed={speed!r}: give a positive number")
    if trace.arrivals and trace.arrivals[-1] / speed > _LONGEST_S:
        raise ConfigError(f"speed={speed!r}: the last request would come after more than {_LONGEST_S:.0e} s")
    milliseconds = step_cost.replayed if isinstance(step_cost, StepCost) else step_cost
    queue = _Queue(trace, milliseconds, max_num_seqs, max_num_batched_tokens, float(speed), split)
    return queue.run()


class _Queue:
    """The simulation's state. ``step`` counts steps: a request that has ``n`` tokens left leaves ``n`` steps later."""

    def __init__(
        self,
        trace: RequestTrace,
        cost: Callable[[int], float],
        seats: int,
        tokens: int,
        speed: float,
        split: bool,
    ) -> None:
        self.arrivals = [float(time) / speed for time in trace.arrivals]
        self.prompts, self.outputs = trace.prompts, trace.outputs
        self.cost, self.seats, self.tokens, self.split = cost, seats, tokens, split
        self.seconds: dict[int, float] = {}
        self.now, self.step, self.arrived = 0.0, 0, 0
        self.waiting: deque[int] = deque()
        self.begun: deque[list[int]] = deque()  # [prompt tokens left, request]
        self.leaves: list[int] = []  # a heap: after which step each decoding request leaves
        self.counts: Counter[tuple[str, int]] = Counter()
        about = {"max_num_seqs": seats, "max_num_batched_tokens": tokens, "speed": speed, "split": split}
        self.result = SimulatedTraffic(self.counts, about=about)

    def run(self) -> SimulatedTraffic:
        total, result = len(self.arrivals), self.result
        part = max(total // 100, 1)
        told = 0
        while self.arrived < total or self.waiting or self.begun or self.leaves:
            self._admit_arrivals()
            if not (self.waiting or self.begun or self.leaves):
                if self.arrived < total:
                    self.now = self.arrivals[self.arrived]
                continue
            if self.split:
                self._seat_decoding()
            if not self._serve_prompts():
                self._decode()
            while self.leaves and self.leaves[0] <= self.step:
                heapq.heappop(self.leaves)
                result.requests += 1
            if result.requests - told >= part and result.requests < total:
                told = result.requests
                events.emit(events.Progress("simulating", told, total, f"{result.steps:,} steps"))
        events.emit(events.Progress("simulating", max(total, 1), max(total, 1), f"{result.steps:,} steps"))
        return result

    def _admit_arrivals(self) -> None:
        while self.arrived < len(self.arrivals) and self.arrivals[self.arrived] <= self.now:
            if self.split and self.outputs[self.arrived] == 1:  # all of it was made elsewhere
                self.result.requests += 1
            else:
                self.waiting.append(self.arrived)
            self.arrived += 1
        self.result.most_waiting = max(self.result.most_waiting, len(self.waiting))

    def _seat_decoding(self) -> None:
        while self.waiting and len(self.leaves) < self.seats:
            heapq.heappush(self.leaves, self.step + self.outputs[self.waiting.popleft()] - 1)

    def _serve_prompts(self) -> bool:
        """One step with prefill; False if there is none to be done."""
        decoding = len(self.leaves)
        left = self.tokens - decoding
        if self.split or left < 1 or not (self.begun or (self.waiting and decoding < self.seats)):
            return False
        ended: list[int] = []
        while left:
            if not self.begun or len(ended) == len(self.begun):
                if not self.waiting or decoding + len(self.begun) >= self.seats:
                    break
                request = self.waiting.popleft()
                self.begun.append([self.prompts[request], request])
            prompt = self.begun[len(ended)]
            served = min(prompt[0], left)
            prompt[0] -= served
            left -= served
            if prompt[0]:
                break
            ended.append(prompt[1])
        self.result.most_running = max(self.result.most_running, decoding + len(self.begun))
        used = self.tokens - left
        self._pass("mixed", used, 1)
        self.result.prompt_tokens += used - decoding
        self.result.generated_tokens += decoding + len(ended)
        for request in ended:
            self.begun.popleft()
            heapq.heappush(self.leaves, self.step + self.outputs[request] - 1)
        return True

    def _decode(self) -> None:
        """Steps with decoding requests alone, up to the next that leaves, or the next arrival that finds a seat."""
        decoding = len(self.leaves)
        steps = self.leaves[0] - self.step
        if self.arrived < len(self.arrivals) and decoding < self.seats:
            ahead = self.arrivals[self.arrived] - self.now
            steps = min(steps, max(math.ceil(ahead / self._seconds(decoding)), 1))
        self.result.most_running = max(self.result.most_running, decoding)
        self._pass("decode", decoding, steps)
        self.result.generated_tokens += decoding * steps

    def _pass(self, kind: str, tokens: int, steps: int) -> None:
        self.counts[kind, tokens] += steps
        self.step += steps
        took = steps * self._seconds(tokens)
        self.now += took
        self.result.busy_s += took
        self.result.end_s = self.now

    def _seconds(self, tokens: int) -> float:
        if tokens not in self.seconds:
            cost = self.cost(tokens)
            if not 0 < cost < math.inf:
                raise ConfigError(
                    f"a step of {tokens} tokens costs {cost!r} ms: a cost is a positive, finite number"
                )
            self.seconds[tokens] = cost / 1e3
        return self.seconds[tokens]
