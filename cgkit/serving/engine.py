"""The engine: requests come at any time, steps serve them together, tokens come out as they are made.

Stands above a runner, whose buffers, cache and graphs it uses. One step: the scheduler says who gets what
(:mod:`cgkit.serving.scheduler`), the inputs are written (:mod:`cgkit.serving.step_inputs`), the dispatcher is
asked, the model runs, tokens are sampled (:mod:`cgkit.serving.sampler`). With ``async_scheduling`` all of that
is launched for step n + 1 before the tokens of step n are read, so the host works while the GPU does. Nothing
of it leaves the one stream that the graphs' shared pool stands on: tokens go from step to step on the device,
and to the host behind an event.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import torch

from cgkit import events, marks
from cgkit.capturing import CapturedGraphs
from cgkit.capturing.dispatcher import Route
from cgkit.display import Shown
from cgkit.errors import ServingError
from cgkit.forward_context import set_forward_context
from cgkit.serving.attention import AttentionMetadata
from cgkit.serving.device_queue import DEPTH, DeviceQueue, queue_for
from cgkit.serving.request import Request
from cgkit.serving.runner import Prompt, Runner
from cgkit.serving.sampler import Project, Sampler, Work
from cgkit.serving.sampling import GREEDY, SamplingParams
from cgkit.serving.scheduler import ScheduledStep, Scheduler
from cgkit.serving.step_inputs import Put, StepInputs
from cgkit.serving.step_report import (
    FILL,
    FORWARD,
    POST,
    ROUTE,
    SAMPLE,
    SCHEDULE,
    WAIT,
    StepReport,
    steps_frame,
    tried_keys,
)


class RequestOutput(NamedTuple):
    """What is new about one request: a token, or that it ended without one (``token`` None)."""

    request_id: str
    token: int | None
    finish_reason: str  # "stop", "length", "abort", "refused", or "" while it runs
    request: Request | None
    error: str = ""  # why it was refused

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return bool(self.finish_reason)

    @property
    def token_ids(self) -> list[int]:
        """The whole answer so far."""
        return self.request.answer if self.request else []


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes ``at_s`` seconds after the start of :meth:`Engine.serve`."""

    at_s: float
    prompt: Prompt
    max_tokens: int = 32
    sampling: SamplingParams = GREEDY
    stop_at_eos: bool = True
    request_id: str | None = None
    stop_token_ids: tuple[int, ...] = ()


def _seconds(at_s: object) -> float:
    """``at_s`` as a float; NaN if it is no number that a float holds."""
    try:
        return float(at_s) if isinstance(at_s, Real) else math.nan
    except OverflowError:
        return math.nan


class _Launched(NamedTuple):
    """A step on its way."""

    step: ScheduledStep
    slot: int
    report: StepReport


class Engine(Shown):
    """Serves many requests through one :class:`Runner`, step by step.

    ::

        engine = cgkit.Engine(runner)
        engine.add_request("Why is the sky blue?", max_tokens=32)
        for output in engine.run():
            print(output.request_id, output.token, output.finish_reason)

    Answers are those that the runner gives each prompt alone, whoever else is served, whatever is preempted.
    One engine a runner, one thread; recording (``runner.capture_model()``) comes before the engine, or between two
    steps when nothing is on its way.

    Args:
        runner: its limits (``max_num_seqs``, ``max_num_batched_tokens``, the KV cache) are the engine's.
        async_scheduling: prepare a step while the one before runs. Tokens are the same either way; each is handed out
            one step later, and a request that stops at an end token takes part in one step too many.
        queue: how work reaches the device; None: as it does. For tests: :class:`~cgkit.serving.device_queue.LateQueue`.
        areas: staging areas on the host. One is not enough with ``async_scheduling``; it is there to show that.
        keep_reports: steps that :meth:`to_frame` knows, the last ones.

    Attributes:
        scheduler: who waits and who runs.
        reports: one :class:`StepReport` a step, the last ``keep_reports`` of them.
        requests: by name, until they are finished.
        num_steps, num_preemptions: since it was made.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        async_scheduling: bool = True,
        queue: DeviceQueue | None = None,
        areas: int = DEPTH,
        keep_reports: int = 100_000,
    ) -> None:
        self.runner, self.async_scheduling = runner, async_scheduling
        self.queue = queue or queue_for(runner.device)
        runner.executor.compile(runner.inputs)
        self.inputs = StepInputs(runner.inputs, self.queue, areas)
        self.sampler = Sampler(runner.model, self.inputs.sampled, runner.dtype, self.queue, areas)
        self.scheduler = Scheduler(
            runner.kv_cache.allocator,
            runner.kv_cache.block_size,
            max_num_seqs=runner.max_num_seqs,
            max_num_batched_tokens=runner.max_num_batched_tokens,
        )
        self.requests: dict[str, Request] = {}
        self.reports: deque[StepReport] = deque(maxlen=keep_reports)
        self.num_preemptions = 0
        self._last_row = runner.inputs.last_token_rows(runner.inputs.max_reqs)
        self._launched: deque[_Launched] = deque()
        self._aborted: list[Request] = []
        self._broken = ""  # the error that a step failed with
        self.num_steps = self._named = 0
        self._asked_of: CapturedGraphs | None = None
        self._tried: dict[tuple[int, bool], tuple[str, ...]] = {}
        marks.register(self)

    def put_marks(self, marker: marks.Marker, undo: ExitStack) -> None:
        """Marks what a step does beside the model, as a runner does; see :mod:`cgkit.marks`."""
        fill, prepare = self.inputs.fill, self.sampler.prepare
        marks.swap_attribute(self.inputs, "fill", marker.function(fill, "prepare"), undo)
        marks.swap_attribute(self.sampler, "prepare", marker.function(prepare, "sample"), undo)

    # --- requests --------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        max_tokens: int = 32,
        sampling: SamplingParams = GREEDY,
        *,
        stop_at_eos: bool = True,
        stop_token_ids: Iterable[int] = (),
        request_id: str | None = None,
    ) -> str:
        """Puts a request at the end of the queue; returns its name. At any time, also while others are served.

        Raises:
            ServingError: the request cannot be served, whoever else is there (see :meth:`Runner.make_request`), or its
                name is taken. Nothing has changed then: the engine goes on serving the others. Or a step failed before
                (see :meth:`step`).
        """
        self._check_whole()
        name = self._free_name() if request_id is None else request_id
        if not isinstance(name, str):
            raise ServingError(f"request_id={name!r}: give a text, or None for a number of the engine's own")
        if name in self.requests:
            raise ServingError(f"request_id={name!r} is being served: give another name, or none")
        request = self.runner.make_request(
            prompt,
            max_tokens,
            sampling,
            stop_at_eos=stop_at_eos,
            stop_token_ids=stop_token_ids,
            name=f"request {name}",
        )
        request.id = name
        self.scheduler.add(request)
        self.requests[name] = request
        return name

    def _free_name(self) -> str:
        """A number that no request has that is being served."""
        while (name := str(self._named)) in self.requests:
            self._named += 1
        self._named += 1
        return name

    def abort(self, request_id: str) -> bool:
        """Ends a request: its blocks are free at once, the next :meth:`step` says so. False: nobody has that name."""
        request = self.requests.get(request_id)
        if request is None or not self.scheduler.abort(request):
            return False
        self._aborted.append(request)
        return True

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.requests or self._launched)

    def close(self) -> None:
        """Ends everything: requests are aborted, steps on their way are waited for, blocks are free.

        After a step that failed, what was on its way is dropped.
        """
        for request_id in list(self.requests):
            self.abort(request_id)
        if self._broken:
            for pending in (self.requests, self._aborted, self._launched):
                pending.clear()
        while self.has_work:
            self.step()

    # --- many steps ------------------------------------------------------------------------------

    def run(self) -> Iterator[RequestOutput]:
        """Steps until nobody is left, handing out what is new. Requests may be added meanwhile."""
        self._check_whole()
        while self.has_work:
            yield from self.step()

    def serve(
        self,
        arrivals: Iterable[Arrival],
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Iterator[RequestOutput]:
        """Serves requests that arrive over time, in the order given, until all are answered.

        A request that cannot be served comes out at once with ``finish_reason`` "refused" and the ``error``; the others
        are served. ``clock`` and ``sleep`` are for traffic in another time than the real one.
        """
        self._check_whole()
        began, source = clock(), iter(arrivals)
        coming = next(source, None)
        while coming is not None or self.has_work:
            # What comes at no time (NaN, infinity, no number) is due at once, and refused: nobody behind it could be
            # served.
            while coming is not None and not clock() - began < _seconds(coming.at_s) < math.inf:
                yield from self._arrive(coming)
                coming = next(source, None)
            if self.has_work:
                yield from self.step()
            elif coming is not None:
                sleep(max(0.0, _seconds(coming.at_s) - (clock() - began)))

    def _arrive(self, each: Arrival) -> Iterator[RequestOutput]:
        try:
            if not math.isfinite(_seconds(each.at_s)):
                raise ServingError(f"at_s={each.at_s!r:.50}: a request arrives at a finite number of seconds")
            self.add_request(
                each.prompt,
                each.max_tokens,
                each.sampling,
                stop_at_eos=each.stop_at_eos,
                stop_token_ids=each.stop_token_ids,
                request_id=each.request_id,
            )
        except Exception as error:  # whatever is wrong with this one, the others are served
            said = str(error) if isinstance(error, ServingError) else f"{type(error).__name__}: {error}"
            yield RequestOutput(each.request_id or "", None, "refused", None, said)

    # --- steps -----------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> list[RequestOutput]:
        """Launches the next step and reads the tokens of the one before (without ``async_scheduling``: its own).

        Returns what is new, possibly nothing.

        Raises:
            ServingError: requests wait, and somebody else holds the blocks that they need. Or a step failed before: the
                scheduler moves requests on before the device has run them, so tokens after a failure would be wrong
                without a sign of it. Such an engine serves nothing more; :meth:`abort` and :meth:`close` work.
        """
        self._check_whole()
        outputs = self._tell_aborted() if self._aborted else []
        try:
            while self._launched and self.inputs.overwritten:  # by steps of the runner's own, or a recording
                outputs += self._finish(self._launched.popleft())
            started = time.perf_counter()
            step = self.scheduler.schedule()
            if step is not None:
                self._launch(step, started)
            if len(self._launched) > (1 if self.async_scheduling and step is not None else 0):
                return outputs + self._finish(self._launched.popleft())
        except BaseException as error:  # also when it is interrupted
            self._broken = f"{type(error).__name__}: {error}"
            raise
        if step is None and self.scheduler.waiting and not outputs:
            free = self.runner.kv_cache.allocator.num_free
            raise ServingError(
                f"{len(self.scheduler.waiting)} requests wait and nobody runs, but only {free} blocks of the KV cache "
                "are free: somebody else holds the others (a runner's own requests?); free them, or use another runner"
            )
        return outputs

    def _check_whole(self) -> None:
        if self._broken:
            raise ServingError(
                f"a step of this engine failed ({self._broken}), and what it would say of its requests after that "
                "could be wrong: close() it, and give them to a new Engine(runner)"
            )

    def _launch(self, step: ScheduledStep, started: float) -> None:
        clock, uniform = time.perf_counter, step.uniform
        scheduled = clock()
        route = self.runner.executor.route(step.num_tokens, uniform)
        routed = clock()
        slot = self.num_steps % DEPTH
        self.num_steps += 1
        report = StepReport(self.num_steps, route, uniform, len(step.requests), step.num_tokens)
        metadata, put = self.inputs.fill(step, route.num_tokens)
        filled = clock()
        project, sample = self.sampler.prepare(step, self._last_row, slot, self._num_rows(step, route))
        parts = report.parts
        parts[SCHEDULE], parts[ROUTE], parts[FILL] = scheduled - started, routed - scheduled, filled - routed
        parts[SAMPLE] = clock() - filled
        self.queue.submit(partial(self._work, metadata, route, put, project, sample, parts))
        before = clock()
        self.queue.mark(slot)
        self._launched.append(_Launched(step, slot, report))
        self._note(report, step)
        parts[SAMPLE] += clock() - before

    def _note(self, report: StepReport, step: ScheduledStep) -> None:
        """What there is to say of a step before its tokens are there."""
        report.admitted, report.preempted = step.admitted, len(step.preempted)
        report.num_waiting = len(self.scheduler.waiting)
        self.num_preemptions += report.preempted
        captured, asked = self.runner.executor.captured, (report.route.num_tokens, report.uniform)
        if captured is not self._asked_of:
            self._asked_of = captured
            self._tried.clear()
        tried = self._tried.get(asked)
        if tried is None:
            dispatcher = None if captured is None else captured.dispatcher
            tried = self._tried[asked] = tried_keys(dispatcher, report.descriptor)
        report.tried = tried

    def _num_rows(self, step: ScheduledStep, route: Route) -> int:
        """Rows of logits: padded as the step is, so that few shapes occur."""
        count, most = len(step.requests), len(self._last_row)
        padded = route.num_tokens if step.uniform else self.runner.executor.pad(count)
        return padded if padded <= most else count

    def _work(
        self,
        metadata: AttentionMetadata,
        route: Route,
        put: Put | None,
        project: Project,
        sample: Work,
        parts: list[float],
    ) -> None:
        """What the device does in a step, in order."""
        clock = time.perf_counter
        started = clock()
        if put is not None:
            put()
        arguments = self.runner.inputs.front(route.num_tokens)
        placed = clock()
        with set_forward_context(metadata, cudagraph_runtime_mode=route.mode, batch_descriptor=route.key):
            hidden = self.runner.executor.forward(*arguments)
            logits = project(hidden)
        forward = clock()
        sample(logits)
        parts[FILL] += placed - started
        parts[FORWARD] = forward - placed
        parts[SAMPLE] += clock() - forward

    def _finish(self, launched: _Launched) -> list[RequestOutput]:
        """Reads a step's tokens and gives them to whom they belong."""
        clock, step, report = time.perf_counter, launched.step, launched.report
        started = clock()
        self.queue.wait(launched.slot)
        waited = clock()
        tokens = self.sampler.tokens(launched.slot, len(step.requests))
        taken = self.scheduler.update(step, tokens)
        outputs = [
            RequestOutput(request.id, token, request.finish_reason, request) for request, token in taken
        ]
        for request, _ in taken:
            if request.finish_reason:
                self.requests.pop(request.id, None)
        report.parts[WAIT] = waited - started
        report.num_new = len(taken)
        report.num_dropped = (len(step.requests) if step.wants is None else sum(step.wants)) - len(taken)
        report.ended_s = waited
        self.reports.append(report)
        report.parts[POST] = clock() - waited
        self._tell(report)
        return outputs

    def _tell_aborted(self) -> list[RequestOutput]:
        ended = [RequestOutput(each.id, None, each.finish_reason, each) for each in self._aborted]
        for each in self._aborted:
            self.requests.pop(each.id, None)
        self._aborted.clear()
        return ended

    def _tell(self, report: StepReport) -> None:
        if events.has_readers(events.StepRan):
            kind, mode = "decode" if report.uniform else "prefill", report.route.mode.name
            padded = report.route.num_tokens
            events.emit(
                events.StepRan(kind, report.num_reqs, report.num_tokens, padded, mode, sum(report.parts))
            )
        if events.has_readers(events.EngineStepRan):
            events.emit(events.EngineStepRan(report))

    # --- showing ---------------------------------------------------------------------------------

    def to_frame(self) -> Any:
        """A row a step, see :func:`cgkit.serving.step_report.steps_frame`."""
        return steps_frame(self.reports)

    def __repr__(self) -> str:
        scheduler, modes = self.scheduler, Counter(report.route.mode.name for report in self.reports)
        taken = ", ".join(f"{count:,} {mode}" for mode, count in modes.most_common())
        return (
            f"Engine of {type(self.runner.model).__name__}: {len(scheduler.running)} requests running, "
            f"{len(scheduler.waiting)} waiting, {self.runner.kv_cache.allocator!r}\n"
            f"  {self.num_steps:,} steps ({taken or 'none finished'}), {self.num_preemptions:,} preemptions"
        )
