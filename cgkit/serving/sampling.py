"""From logits to the next token: greedy, or drawn with temperature, top-k and top-p.

Top-p is nucleus sampling (Holtzman et al. 2020, arXiv:1904.09751).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cgkit.errors import ServingError


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


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
        if not _is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise ServingError(f"temperature={self.temperature!r}: use 0 (greedy) or a positive number")
        if not _is_whole(self.top_k) or self.top_k < 0:
            raise ServingError(f"top_k={self.top_k!r}: use 0 (all tokens) or a positive whole number")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise ServingError(f"top_p={self.top_p!r}: use a number above 0 and up to 1 (all tokens)")
        if self.seed is not None and not (_is_whole(self.seed) and 0 <= self.seed < 2**63):
            raise ServingError(f"seed={self.seed!r}: use a whole number from 0 to 2**63 - 1, or None")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    def generator(self, device: torch.device | str) -> torch.Generator | None:
        """A request's own source of chance; None for a greedy one, which needs none."""
        if self.greedy:
            return None
        generator = torch.Generator(device)
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator


GREEDY = SamplingParams()


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    generators: Sequence[torch.Generator | None],
) -> torch.Tensor:
    """One token a row: (requests, vocabulary) -> (requests,) int64, on the device of ``logits``.

    ``params`` and ``generators`` (:meth:`SamplingParams.generator`) have one entry a row. Nothing is
    read back to the host.
    """
    tokens = logits.argmax(dim=-1)
    drawing = [row for row, each in enumerate(params) if not each.greedy]
    for row in drawing:
        probabilities = filtered_probabilities(logits[row], params[row])
        # argmax(p / e) with e ~ Exp(1) draws from p (the exponential race), without a sync.
        race = torch.empty_like(probabilities).exponential_(generator=generators[row])
        race.clamp_(min=torch.finfo(race.dtype).tiny)  # 0 / 0 would win the race
        tokens[row] = (probabilities / race).argmax()
    return tokens


def filtered_probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What one request draws from, (vocabulary,) float32: temperature, then top-k, then top-p.

    Top-p keeps the smallest set of most likely tokens whose probability reaches ``top_p``, at least
    one. Tokens beside the kept set get 0; the rest is left unscaled (a draw only needs ratios).
    """
    probabilities = torch.softmax(logits.float() / params.temperature, dim=-1)
    if 0 < params.top_k < len(probabilities):
        ranked, order = probabilities.topk(params.top_k)
    elif params.top_p < 1:
        ranked, order = probabilities.sort(descending=True)
    else:
        return probabilities
    before = ranked.cumsum(-1) - ranked  # what more likely tokens hold
    total = ranked.sum() if params.top_k else 1.0  # top-p counts within what top-k left
    ranked = torch.where(before < params.top_p * total, ranked, 0.0)
    return torch.zeros_like(probabilities).scatter_(-1, order, ranked)
