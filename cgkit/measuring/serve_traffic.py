"""Serves a trace of requests through an engine, in real time, and says what each request waited for.

Times of a request, on the clock of the run: it *arrives* when the trace says so, whether or not the engine is
free to notice; its *first token* and its *end* are when the engine handed them out. So queueing counts. TTFT is
first token less arrival; TPOT is (end less first token) / (tokens - 1), of answers of two tokens or more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cgkit import events
from cgkit.display import Shown
from cgkit.errors import ConfigError
from cgkit.measuring.request_trace import RequestTrace
from cgkit.serving.engine import Arrival, Engine

QUANTILES = (50, 90, 99)


@dataclass(repr=False)
class ServedTraffic(Shown):
    """What became of each request and each step; made by :func:`serve_traffic`.

    Attributes:
        label: of this run (a mode, say).
        requests: a row a request: ``request``, ``prompt_tokens``, ``output_tokens``, ``arrival_s``, ``first_token_s``,
            ``end_s``, ``ttft_ms``, ``tpot_ms`` (missing for one token), ``total_ms``, ``refused``.
        steps: a row a step, see :meth:`Engine.to_frame`; ``ended_s`` on the same clock.
        wall_s: from the first arrival to the last token.
        about: settings.
    """

    label: str
    requests: Any
    steps: Any
    wall_s: float
    about: dict[str, Any] = field(default_factory=dict)

    def to_frame(self) -> Any:
        """The requests."""
        return self.requests

    def histogram(self) -> Any:
        """A row a kind of step and size: ``kind``, ``batch_size`` (tokens before padding), ``count``: what
        ``cgkit plan --histogram`` reads."""
        counted = self.steps.groupby(["kind", "num_tokens"]).size().reset_index(name="count")
        return counted.rename(columns={"num_tokens": "batch_size"})

    def plot(self, about: Any = None, *, what: str = "ttft_ms", ax: Any = None) -> Any:
        """Median, p90 and p99 of ``what``: ``ttft_ms``, ``tpot_ms`` or ``total_ms``."""
        from cgkit.plotting.serve_charts import latencies

        return latencies(self.requests.assign(mode=self.label), what, about, ax=ax)

    def summary(self) -> dict[str, Any]:
        """One row: latencies by quantile, throughput, steps by mode, padding (of all tokens that were computed)."""
        served, steps = self.requests[~self.requests["refused"]], self.steps
        row: dict[str, Any] = {"label": self.label, "requests": len(served)}
        for name in ("ttft_ms", "tpot_ms", "total_ms"):
            values = served[name].dropna()
            for quantile in QUANTILES:
                value = float(np.percentile(values, quantile)) if len(values) else float("nan")
                row[f"{name[:-3]}_p{quantile}_ms"] = value
        tokens = int(served["output_tokens"].sum())
        computed = int(steps["num_padded_tokens"].sum())
        row |= {
            "tokens_per_second": tokens / self.wall_s if self.wall_s else float("nan"),
            "wall_s": self.wall_s,
            "steps": len(steps),
            "full_steps": int((steps["mode"] == "FULL").sum()),
            "piecewise_steps": int((steps["mode"] == "PIECEWISE").sum()),
            "uncaptured_steps": int((steps["mode"] == "NONE").sum()),
            "padding_of_computed": (computed - int(steps["num_tokens"].sum())) / max(computed, 1),
            "mean_decode_batch": float(steps.loc[steps["kind"] == "decode", "num_reqs"].mean()),
            "preemptions": int(steps["preempted"].sum()),
            "dropped_tokens": int(steps["dropped_tokens"].sum()),
            "host_outside_model_us": float(steps["host_outside_model_us"].median()),
            "refused": int(self.requests["refused"].sum()),
        }
        return row

    def __repr__(self) -> str:
        row = self.summary()
        return (
            f"ServedTraffic {self.label}: {row['requests']:,} requests in {row['wall_s']:.2f} s, "
            f"{row['tokens_per_second']:,.0f} tokens a second\n"
            f"  TTFT p50 {row['ttft_p50_ms']:.1f} ms, p99 {row['ttft_p99_ms']:.1f}; TPOT p50 "
            f"{row['tpot_p50_ms']:.2f} ms, p99 {row['tpot_p99_ms']:.2f}\n"
            f"  {row['steps']:,} steps: {row['full_steps']:,} FULL, {row['piecewise_steps']:,} PIECEWISE, "
            f"{row['uncaptured_steps']:,} uncaptured; padding is {row['padding_of_computed']:.1%} of what was computed"
        )


def serve_traffic(
    engine: Engine,
    trace: RequestTrace,
    *,
    label: str = "",
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> ServedTraffic:
    """Serves all of ``trace``; prompts are random tokens of ``seed``, answers exactly as long as the trace says.

    Raises:
        ConfigError: the engine is serving already, keeps reports of too few steps, or refuses every request.
    """
    if engine.has_work:
        raise ConfigError("the engine is serving requests: let them finish (or close() it) before a trace")
    engine.reports.clear()
    total, part = len(trace), max(len(trace) // 100, 1)
    first, last = [float("nan")] * total, [float("nan")] * total
    refused, counts, done, why = [False] * total, [0] * total, 0, ""
    before = engine.num_steps
    began = clock()
    for output in engine.serve(_arrivals(engine, trace, seed), clock=clock, sleep=sleep):
        now, number = clock() - began, int(output.request_id)
        if output.token is not None:
            counts[number] += 1
            if counts[number] == 1:
                first[number] = now
        if output.finished:
            last[number], refused[number] = now, output.finish_reason == "refused"
            why, done = why or output.error, done + 1
            if done % part == 0 and done < total:
                events.emit(
                    events.Progress(f"serving {label}", done, total, f"{engine.num_steps - before:,} steps")
                )
    wall = clock() - began
    if all(refused):
        raise ConfigError(f"none of the {total:,} requests can be served. The first: {why}")
    events.emit(events.Progress(f"serving {label}", total, total, f"{engine.num_steps - before:,} steps"))
    if len(engine.reports) < engine.num_steps - before:
        raise ConfigError(
            f"the engine took {engine.num_steps - before:,} steps and keeps reports of {len(engine.reports):,}: "
            "make it with a larger keep_reports"
        )
    steps = engine.to_frame()
    steps["ended_s"] -= began
    return ServedTraffic(label, _requests(trace, first, last, counts, refused), steps, wall)


def _arrivals(engine: Engine, trace: RequestTrace, seed: int) -> Iterator[Arrival]:
    random = np.random.default_rng(seed)
    size = engine.runner.model.config.vocab_size
    rows = zip(trace.arrivals, trace.prompts, trace.outputs)
    for number, (at, prompt, output) in enumerate(rows):
        tokens = random.integers(0, size, prompt).tolist()
        yield Arrival(at, tokens, output, stop_at_eos=False, request_id=str(number))


def _requests(
    trace: RequestTrace, first: list[float], last: list[float], counts: list[int], refused: list[bool]
) -> Any:
    import pandas as pd

    frame = pd.DataFrame(
        {
            "request": range(len(trace)),
            "prompt_tokens": trace.prompts,
            "output_tokens": counts,
            "arrival_s": trace.arrivals,
            "first_token_s": first,
            "end_s": last,
            "refused": refused,
        }
    )
    frame["ttft_ms"] = (frame["first_token_s"] - frame["arrival_s"]) * 1e3
    many = frame["output_tokens"] > 1
    gaps = (frame["end_s"] - frame["first_token_s"]) / (frame["output_tokens"] - 1).where(many)
    frame["tpot_ms"] = gaps * 1e3
    frame["total_ms"] = (frame["end_s"] - frame["arrival_s"]) * 1e3
    return frame
