"""Hidden states -> the next token of every row, left on the device and on its way to the host.

Buffers that stay: logits, tokens, the parameters of drawing rows, and memory on the host where tokens arrive. A
greedy step is three operations: logits, argmax, copy. What a row draws depends on its seed and its token's
number alone (:mod:`cgkit.serving.sampling`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from cgkit.serving.device_queue import DEPTH, DeviceQueue
from cgkit.serving.input_batch import PersistentBuffers
from cgkit.serving.sampling import draw, draw_keys
from cgkit.serving.scheduler import ScheduledStep

Project = Callable[[torch.Tensor], torch.Tensor]
Work = Callable[[torch.Tensor], None]


class Sampler:
    """Samples for an engine that reads a step's tokens after the next step was launched.

    Args:
        model: has ``compute_logits(hidden)``; if that takes ``out``, logits get a place of their own for good.
        sampled: (max_reqs,) int64, where the tokens of a step stay for the next one.
        dtype: of the logits.
        areas: places on the host where tokens arrive, and staging areas.
    """

    def __init__(
        self, model: Any, sampled: torch.Tensor, dtype: torch.dtype, queue: DeviceQueue, areas: int = DEPTH
    ) -> None:
        self.model, self.sampled, self.queue = model, sampled, queue
        count, device, pinned = len(sampled), sampled.device, sampled.is_cuda
        self.places = [torch.zeros(count, dtype=torch.int64, pin_memory=pinned) for _ in range(areas)]
        self.logits: torch.Tensor | None = None
        if hasattr(model, "logits_into"):
            self.logits = torch.zeros((count, model.config.vocab_size), dtype=dtype, device=device)
        self._rows: torch.Tensor | None = None  # hidden states of the rows' last tokens
        self.params = PersistentBuffers(
            {
                "keys": ((count, 2), torch.int64),
                "top_k": ((count,), torch.int64),
                "temperature": ((count,), torch.float32),
                "top_p": ((count,), torch.float32),
            },
            device,
        )
        self.params.stage_in(areas, queue)
        self._seeds = np.zeros(count, np.uint64)
        self._prompts = np.zeros(count, np.int64)
        self._limits = (False, False)
        self._drawing = False

    def prepare(
        self, step: ScheduledStep, last_token: torch.Tensor, slot: int, num_rows: int
    ) -> tuple[Project, Work]:
        """What turns the hidden states of ``step`` into logits, and logits into tokens, on the device.

        ``last_token``: (max_reqs,) the row of each request's last token; ``num_rows``: how many rows of logits are
        computed, at least as many as there are requests.
        """
        count = len(step.requests)
        if not (step.counts is None and step.same_rows):
            self._learn(step)
        if self._drawing:
            self._send_keys(step)
        rows = None if step.uniform else last_token[:num_rows]
        limits = self._limits if self._drawing else None
        return partial(self._project, num_rows, rows), partial(self._work, count, self._place(slot), limits)

    def _place(self, slot: int) -> torch.Tensor:
        return self.places[slot % len(self.places)]

    def tokens(self, slot: int, count: int) -> list[int]:
        """The tokens that arrived; the caller has waited for them."""
        return self._place(slot)[:count].tolist()

    def _project(self, num_rows: int, rows: torch.Tensor | None, hidden: torch.Tensor) -> torch.Tensor:
        """The model's output projection of the rows that count, and of padding rows up to ``num_rows``."""
        if rows is not None:
            hidden = self._last_rows(hidden, rows)
        elif len(hidden) > num_rows:
            hidden = hidden[:num_rows]
        if self.logits is None:
            return self.model.compute_logits(hidden)
        logits = self.logits[: len(hidden)]
        self.model.logits_into(hidden, logits)
        return logits

    def _work(
        self, count: int, place: torch.Tensor, limits: tuple[bool, bool] | None, logits: torch.Tensor
    ) -> None:
        """Tokens for the next step, and a copy of them on its way to the host."""
        logits, sampled = logits[:count], self.sampled[:count]
        torch.argmax(logits, dim=-1, out=sampled)
        if limits is not None:
            self._draw(logits, sampled, limits)
        place[:count].copy_(sampled, non_blocking=True)

    def _last_rows(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if self._rows is None:
            self._rows = hidden.new_zeros((len(self.sampled), hidden.shape[-1]))
        return torch.index_select(hidden, 0, rows, out=self._rows[: len(rows)])

    # --- drawing ---------------------------------------------------------------------------------

    def _learn(self, step: ScheduledStep) -> None:
        """The parameters of the rows, as they stand now."""
        requests = step.requests
        self._drawing = not all(request.sampling.greedy for request in requests)
        if not self._drawing:
            return
        count, host = len(requests), self.params.host
        params = [request.sampling for request in requests]
        host["temperature"][:count] = [each.temperature for each in params]
        host["top_k"][:count] = [each.top_k for each in params]
        host["top_p"][:count] = [each.top_p for each in params]
        self._seeds[:count] = np.array([request.seed for request in requests], np.uint64)
        self._prompts[:count] = [len(request.prompt) for request in requests]
        drawing = [each for each in params if not each.greedy]
        self._limits = (any(each.top_k for each in drawing), any(each.top_p < 1 for each in drawing))

    def _send_keys(self, step: ScheduledStep) -> None:
        """The number of the token that each row draws: how far beyond its prompt it has been computed."""
        count = len(step.requests)
        computed = np.fromiter((request.num_computed for request in step.requests), np.int64, count)
        numbers = np.maximum(computed - self._prompts[:count], 0)  # below 0: no token is wanted
        self.params.host["keys"][:count] = draw_keys(self._seeds[:count], numbers)
        self.params.send()

    def _draw(self, logits: torch.Tensor, sampled: torch.Tensor, limits: tuple[bool, bool]) -> None:
        """Drawn tokens for the rows that want them; the others keep the most likely one."""
        count, tensors = len(logits), self.params.tensors
        temperature = tensors["temperature"][:count]
        greedy = temperature == 0
        drawn = draw(
            logits,
            torch.where(greedy, 1.0, temperature),
            tensors["top_k"][:count] if limits[0] else None,
            tensors["top_p"][:count] if limits[1] else None,
            tensors["keys"][:count],
        )
        sampled.copy_(torch.where(greedy, sampled, drawn))
