"""Requests to serve: made up from a seed, or cut and scaled from a trace so that a model can take them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cgkit.errors import ConfigError
from cgkit.measuring.request_trace import RequestTrace


def synthetic_requests(
    count: int, rate: float, *, prompt_tokens: float = 256, output_tokens: float = 64, seed: int = 0
) -> RequestTrace:
    """``count`` requests that arrive independently of each other, ``rate`` a second on average (a Poisson process).

    Lengths are log-normal around the given means with a standard deviation of about the mean, as those of chat
    services are long-tailed; at least 1. The same seed gives the same requests.

    Raises:
        ConfigError: an argument makes no sense.
    """
    for name, value in (("rate", rate), ("prompt_tokens", prompt_tokens), ("output_tokens", output_tokens)):
        _positive(name, value)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"count={count!r}: use a positive whole number")
    random = np.random.default_rng(seed)
    gaps = random.exponential(1 / rate, count)
    sigma = math.sqrt(math.log(2))  # standard deviation = mean

    def lengths(mean: float) -> list[int]:
        drawn = random.lognormal(math.log(mean) - sigma**2 / 2, sigma, count)
        return [max(1, round(value)) for value in drawn.tolist()]

    arrivals = (gaps.cumsum() - gaps[0]).tolist()
    return RequestTrace(arrivals, lengths(prompt_tokens), lengths(output_tokens), f"synthetic, seed {seed}")


@dataclass(frozen=True)
class FittedRequests:
    """A trace that a model can take. ``cut``: how many requests were shortened because they were too long."""

    trace: RequestTrace
    cut: int
    speed: float
    scale_lengths: float


def fit_requests(
    trace: RequestTrace,
    max_model_len: int,
    *,
    limit: int | None = None,
    speed: float = 1.0,
    scale_lengths: float = 1.0,
) -> FittedRequests:
    """The first ``limit`` requests, arriving ``speed`` times as fast, lengths times ``scale_lengths``.

    What is then still longer than ``max_model_len`` is cut, answers first, and counted.

    Raises:
        ConfigError: an argument makes no sense.
    """
    _positive("speed", speed)
    _positive("scale_lengths", scale_lengths)
    if limit is not None and limit < 1:
        raise ConfigError(f"limit={limit!r}: use a positive whole number")
    if max_model_len < 2:
        raise ConfigError(
            f"max_model_len={max_model_len}: a request has a prompt and an answer, 2 tokens at least"
        )
    count = len(trace) if limit is None else min(limit, len(trace))
    prompts, outputs, cut = [], [], 0
    for prompt, output in zip(trace.prompts[:count], trace.outputs[:count]):
        prompt, output = (max(1, round(length * scale_lengths)) for length in (prompt, output))
        kept = min(prompt, max_model_len - 1)
        answer = min(output, max_model_len - kept)
        cut += (kept, answer) != (prompt, output)
        prompts.append(kept)
        outputs.append(answer)
    arrivals = [at / speed for at in trace.arrivals[:count]]
    return FittedRequests(RequestTrace(arrivals, prompts, outputs, trace.source), cut, speed, scale_lengths)


def _positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigError(f"{name}={value!r}: use a positive number")
