"""A step's inputs when the step before it is still running: what is known is written, the rest is on the device.

A plain decode step that follows another one changes little: every position and length grows by one, every token
comes from the step before. So the buffers are moved on in place, with a few vector operations whatever the
batch. The tokens themselves never pass the host: the step before leaves them, row by row, where the next one's
input ids are read. If the rows stay as they are, nothing is left to do; else they are picked up before the new
inputs arrive and put in their places after it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from cgkit.serving.attention import AttentionMetadata
from cgkit.serving.device_queue import DEPTH, DeviceQueue
from cgkit.serving.input_batch import InputBatch, PersistentBuffers
from cgkit.serving.scheduler import ScheduledStep

Put = Callable[[], Any]


class StepInputs:
    """Fills a runner's :class:`InputBatch` for an engine that is one step ahead of the device.

    Args:
        inputs: the runner's; the addresses of its tensors stay as they are.
        queue: the device's.
        areas: staging areas on the host, in turn. Two are right with one step ahead; one shows the race.

    Attributes:
        sampled: (max_reqs,) int64, where a step leaves its tokens by its rows: the front of the model's input ids.
    """

    def __init__(self, inputs: InputBatch, queue: DeviceQueue, areas: int = DEPTH) -> None:
        self.inputs, self.queue = inputs, queue
        inputs.buffers.stage_in(areas, queue)
        inputs.writes += (
            1  # an engine before this one must not go on from what stood in the memory of its own
        )
        reqs, device = inputs.max_reqs, inputs.device
        # Which row of the step before each token on the device comes from, and which token of this step it becomes.
        self.origins = PersistentBuffers(
            {"source": ((reqs,), torch.int64), "target": ((reqs,), torch.int64)}, device
        )
        self.origins.stage_in(areas, queue)
        self.sampled = inputs.input_ids[:reqs]
        self._picked = torch.zeros(reqs, dtype=torch.int64, device=device)
        self._steady: tuple[int, int, int] | None = (
            None  # rows, padded, writes: of the plain decode step before
        )
        self._fronts: tuple[Any, ...] = ()
        self._longest = 0
        self._writes = 0

    @property
    def overwritten(self) -> bool:
        """Whether somebody else has written the buffers since the last step was: its tokens are no longer there."""
        return self._writes != self.inputs.writes

    def fill(self, step: ScheduledStep, num_padded: int) -> tuple[AttentionMetadata, Put | None]:
        """Writes ``step`` into the buffers; returns its metadata, and what puts tokens in place on the device."""
        count, inputs = len(step.requests), self.inputs
        if step.counts is None and step.same_rows and self._steady == (count, num_padded, inputs.writes):
            return self._move_on(step, count), None
        counts = np.ones(count, np.int64) if step.counts is None else np.array(step.counts)
        lengths = np.fromiter((request.num_computed for request in step.requests), np.int64, count)
        ids, sources, targets = self._origins(step)
        put = self._pick_up(sources, targets)
        metadata = inputs.fill_rows(step.requests, counts, lengths, ids, num_padded, step.uniform)
        self._steady, self._writes = None, inputs.writes
        if step.counts is None and len(sources) == count:  # the next one may be like it, one token further
            self._steady = (count, num_padded, inputs.writes)
            self._longest = metadata.max_seq_len
            self._fronts = self._fronts_of(count)
        return metadata, put

    def _fronts_of(self, count: int) -> tuple[Any, ...]:
        """The arrays that a plain decode step moves on, as far as it does."""
        host = self.inputs.buffers.host
        return host["positions"][:count], host["seq_lens"][:count], host["slot_mapping"][:count]

    def _origins(self, step: ScheduledStep) -> tuple[list[int], list[int], list[int]]:
        """The tokens that the host knows (0 for the others), and for the others where they come from and go to."""
        ids: list[int] = []
        sources, targets = [], []
        for row, request in enumerate(step.requests):
            count = 1 if step.counts is None else step.counts[row]
            end = request.num_computed
            if end > len(request.token_ids):  # its last token is still on the device
                sources.append(request.row)
                targets.append(len(ids))
                ids.append(0)
            else:
                ids += request.token_ids[end - count : end]
            request.row = row
        return ids, sources, targets

    def _pick_up(self, sources: list[int], targets: list[int]) -> Put | None:
        """Has the tokens picked up that the step before leaves, before this step's inputs are sent over them; returns
        what puts them where they belong."""
        count, host, tensors = len(sources), self.origins.host, self.origins.tensors
        if not count:
            return None
        host["source"][:count], host["target"][:count] = sources, targets
        self.origins.send()
        source, target, picked = tensors["source"][:count], tensors["target"][:count], self._picked[:count]
        self.queue.submit(partial(torch.index_select, self.sampled, 0, source, out=picked))
        return partial(self.inputs.input_ids.index_copy_, 0, target, picked)

    def _move_on(self, step: ScheduledStep, count: int) -> AttentionMetadata:
        """The same rows, one token further."""
        inputs, size = self.inputs, self.inputs.block_size
        changed = inputs.fill_block_table(step.requests)
        positions, lengths, slots = self._fronts
        positions += 1
        lengths += 1
        slots += 1  # the next slot of the same block, unless the row has got another one
        for row in changed:
            block, offset = divmod(int(positions[row]), size)
            slots[row] = step.requests[row].blocks[block] * size + offset
        inputs.send(changed, with_ids=False)
        self._longest += 1
        return inputs.metadata(count, count, 1, self._longest, True)
