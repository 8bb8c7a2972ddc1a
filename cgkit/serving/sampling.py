"""From logits to the next token: greedy, or drawn with temperature, top-k and top-p.

Top-p is nucleus sampling (Holtzman et al. 2020, arXiv:1904.09751). A draw is a function of the request's seed and the
token's number alone: no state is carried from token to token, so a request draws the same tokens whoever stands
beside it, and again after its blocks were taken away (counter-based random numbers: Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011; the mixing functions are those of splitmix64 and of MurmurHash3).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cgkit.errors import ServingError

#: Bounds of a temperature, and the lower one of top-p: tokens are drawn in float32, and beyond these a logit divided by
#: the temperature, or a probability times top-p, would leave it.
_LEAST, _MOST = 1e-30, 1e30
_MOST_TOP_K = 2**31 - 1


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)  # NaN fails each comparison


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class SamplingParams:
    """How one request picks its tokens.

    ``temperature`` 0 is greedy: the most likely token, the rest is not looked at. ``top_k`` 0 keeps
    all tokens. ``seed`` belongs to the request and not to the batch: the same request with the same
    seed draws the same tokens whoever stands beside it. None takes a seed of chance.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        temperature = self.temperature
        if not _is_number(temperature) or not (temperature == 0 or _LEAST <= temperature <= _MOST):
            raise ServingError(
                f"temperature={temperature!r:.50}: use 0 (greedy) or a number from {_LEAST:.0e} to {_MOST:.0e}"
            )
        if not _is_whole(self.top_k) or not 0 <= self.top_k <= _MOST_TOP_K:
            raise ServingError(
                f"top_k={self.top_k!r:.50}: use 0 (all tokens) or a positive whole number up to 2**31 - 1"
            )
        if not _is_number(self.top_p) or not _LEAST <= self.top_p <= 1:
            raise ServingError(f"top_p={self.top_p!r:.50}: use a number from {_LEAST:.0e} to 1 (all tokens)")
        if self.seed is not None and not (_is_whole(self.seed) and 0 <= self.seed < 2**63):
            raise ServingError(f"seed={self.seed!r}: use a whole number from 0 to 2**63 - 1, or None")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    def request_seed(self) -> int:
        """The seed of one request: the one given, else one of chance."""
        return secrets.randbits(63) if self.seed is None and not self.greedy else self.seed or 0


GREEDY = SamplingParams()


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], seeds: Sequence[int], numbers: Sequence[int]
) -> torch.Tensor:
    """One token a row: (requests, vocabulary) -> (requests,) int64, on the device of ``logits``.

    ``params``, ``seeds`` (:meth:`SamplingParams.request_seed`) and ``numbers`` (which token of its answer a row draws,
    from 0) have one entry a row. Nothing is read back to the host.
    """
    tokens = logits.argmax(dim=-1)
    drawing = [row for row, each in enumerate(params) if not each.greedy]
    if drawing:
        device, chosen = logits.device, [params[row] for row in drawing]
        keys = draw_keys(
            np.array([seeds[row] for row in drawing]), np.array([numbers[row] for row in drawing])
        )
        rows = torch.tensor(drawing, device=device)
        tokens[rows] = draw(logits[rows], *_columns(chosen, device), torch.from_numpy(keys).to(device))
    return tokens


def _columns(
    params: Sequence[SamplingParams], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Temperature, top-k and top-p of all rows; None where no row has a limit."""
    top_k, top_p = [each.top_k for each in params], [each.top_p for each in params]
    return (
        torch.tensor([float(each.temperature) for each in params], device=device),
        torch.tensor(top_k, device=device) if any(top_k) else None,
        torch.tensor(top_p, device=device) if min(top_p) < 1 else None,
    )


def draw_keys(seeds: np.ndarray[Any, Any], numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What rows draw with: (rows,) seeds and token numbers -> (rows, 2) int64, each below 2**32."""
    with np.errstate(over="ignore"):
        mixed = seeds.astype(np.uint64)
        for step in (
            numbers.astype(np.uint64),
            np.uint64(0),
        ):  # the first mixing parts seeds, the second numbers
            mixed = (mixed + (step + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            mixed ^= mixed >> np.uint64(31)
    halves = [(mixed >> np.uint64(32)), mixed & np.uint64(0xFFFFFFFF)]
    return np.stack(halves, axis=-1).astype(np.int64)


def _exponential(keys: torch.Tensor, count: int) -> torch.Tensor:
    """(rows, 2) keys -> (rows, count) float32, each as if drawn from Exp(1); above 0."""
    low = 0xFFFFFFFF
    bits = torch.arange(count, device=keys.device) * 0x9E3779B1 + keys[:, :1]
    for key in (keys[:, 1:], None):
        bits &= low
        bits = (bits ^ (bits >> 16)) * 0x85EBCA6B & low
        bits = (bits ^ (bits >> 13)) * 0xC2B2AE35 & low
        bits = bits ^ (bits >> 16)
        if key is not None:
            bits = bits + key
    # Near 0, where races are won, float32 tells the 2**32 values apart; -log(u) would do so near u = 1 only.
    return -torch.log1p(-(bits.to(torch.float32) + 0.5) * 2.0**-32)


def draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    keys: torch.Tensor,
) -> torch.Tensor:
    """Draws one token a row, (rows,) int64, from (rows, vocabulary) logits.

    ``temperature`` (rows,), above 0; ``top_k`` (rows,), 0: no limit; ``top_p`` (rows,); ``keys`` (rows, 2) of
    :func:`draw_keys`. A ``top_k`` or ``top_p`` of None saves the sorting. No row looks at another.
    """
    probabilities = torch.softmax(logits.float() / temperature[:, None], dim=-1)
    if top_k is not None or top_p is not None:
        probabilities = _filtered(probabilities, top_k, top_p)
    # argmax(p / e) with e ~ Exp(1) draws from p (the exponential race), without a sync.
    return (probabilities / _exponential(keys, logits.shape[-1])).argmax(dim=-1)


def _filtered(
    probabilities: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None
) -> torch.Tensor:
    """Probabilities of what top-k, then top-p keep; 0 elsewhere. (rows, vocabulary) both."""
    ranked, order = probabilities.sort(dim=-1, descending=True)
    if top_k is not None:
        size = ranked.shape[-1]
        limit = torch.where(top_k > 0, top_k, size)
        ranked = ranked.where(torch.arange(size, device=ranked.device) < limit[:, None], 0.0)
    if top_p is not None:
        # What more likely tokens hold, of all that top-k left; a limit of 1 keeps everything.
        before = ranked.cumsum(-1) - ranked
        whole = ranked.sum(-1, keepdim=True)
        limit = torch.where(top_p < 1, top_p, 2.0)[:, None]
        ranked = ranked.where(before < limit * whole, 0.0)
    return torch.zeros_like(probabilities).scatter_(-1, order, ranked)


def filtered_probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What one request draws from, (vocabulary,) float32: temperature, then top-k, then top-p.

    Top-p keeps the smallest set of most likely tokens whose probability reaches ``top_p``, at least
    one. Tokens beside the kept set get 0; the rest is left unscaled (a draw only needs ratios).
    """
    temperature, top_k, top_p = _columns([params], logits.device)
    probabilities = torch.softmax(logits[None].float() / temperature[:, None], dim=-1)
    return _filtered(probabilities, top_k, top_p)[0]
