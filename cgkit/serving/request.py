"""What a user asks for and what comes back, and what one step takes of each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cgkit.config import CUDAGraphMode
from cgkit.forward_context import BatchDescriptor
from cgkit.serving.sampling import GREEDY, SamplingParams


@dataclass(slots=True, eq=False)
class Request:
    """One prompt on its way: its tokens so far, how many of them are in the KV cache, its blocks.

    Whoever schedules owns it: a runner's ``execute`` only reads it, :meth:`advance` moves it on.
    """

    prompt: Sequence[int]
    max_tokens: int
    sampling: SamplingParams = GREEDY
    #: The request is finished after any of these (which still belongs to its answer).
    stop_ids: frozenset[int] = frozenset()
    #: The blocks of the KV cache that hold its tokens, in order.
    blocks: list[int] = field(default_factory=list)
    #: What its draws are made of, together with their numbers; of no use if greedy.
    seed: int = 0
    #: Its name in an engine.
    id: str = ""
    #: Tokens whose keys and values are in the cache.
    num_computed: int = 0
    #: Prompt and answer so far.
    token_ids: list[int] = field(init=False)
    #: "stop" (an end token), "length" (``max_tokens`` reached), "abort", or "" while it runs.
    finish_reason: str = ""
    #: Tokens that steps on their way will bring: they count as known, and their values lie on the device.
    num_in_flight: int = 0
    #: Its row in the last step that it took part in.
    row: int = 0
    #: How many tokens may be computed before a scheduler must look at it again.
    room: int = 0
    #: How many tokens are ever computed: all but the last one.
    end: int = field(init=False)
    #: Its number in the queue: whoever has a larger one is younger.
    arrival: int = 0
    #: How often it gave its blocks back.
    preemptions: int = 0

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt)
        self.end = len(self.token_ids) + self.max_tokens - 1

    @property
    def num_pending(self) -> int:
        """Known tokens that have not been run: the whole prompt at first, one while decoding."""
        return len(self.token_ids) + self.num_in_flight - self.num_computed

    @property
    def tokens_left(self) -> int:
        """How many more the answer may have."""
        return self.end + 1 - len(self.token_ids)

    @property
    def answer(self) -> list[int]:
        """The tokens generated so far, an end token included."""
        return self.token_ids[len(self.prompt) :]

    def advance(self, num_tokens: int, token: int | None) -> None:
        """Notes that ``num_tokens`` pending tokens were run and that ``token`` came out (None if the
        step ended within the prompt)."""
        self.num_computed += num_tokens
        if token is None:
            return
        self.token_ids.append(token)
        if token in self.stop_ids:
            self.finish_reason = "stop"
        elif self.tokens_left <= 0:
            self.finish_reason = "length"


class Scheduled(NamedTuple):
    """One request's share of a step: its next ``num_tokens`` pending tokens."""

    request: Request
    num_tokens: int

    @property
    def wants_token(self) -> bool:
        """Whether the step reaches the request's last known token, so that a new one comes out."""
        return self.num_tokens == self.request.num_pending


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step did. ``tokens`` has one entry a request: the new token, or None within a prompt."""

    tokens: list[int | None]
    kind: str  # "prefill" or "decode" (every request contributed one token)
    mode: CUDAGraphMode  # what was taken: FULL, PIECEWISE or NONE
    descriptor: BatchDescriptor | None  # the key of the replayed graph, None without one
    num_reqs: int
    num_tokens: int
    num_padded_tokens: int
    seconds: float


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt. ``token_ids`` holds the end token that finished it, ``text`` does not."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str | None  # None without a tokenizer
    finish_reason: str  # "stop", "length" or "abort"
