"""The persistent buffers of a runner: where recorded graphs read a step's inputs.

Implements the runner's half of the article's "运行时包装：copy inputs 到静态缓冲区" (at run time: inputs
copied to static buffers): a recorded graph reads the addresses of its recording, so every step writes
its inputs into the same tensors. That makes the compile side's copy (``cudagraph_copy_inputs``) needless.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from cgkit.errors import ServingError
from cgkit.serving.attention import AttentionMetadata
from cgkit.serving.kv_cache import NULL_BLOCK, blocks_needed
from cgkit.serving.request import Scheduled

_ALIGNMENT = 256  # bytes; no two buffers share a cache line or a vector access


class PersistentBuffers:
    """Tensors at fixed addresses on the device, filled from NumPy arrays on the host.

    All lie in one block of memory on either side, so that :meth:`send` is a single copy, whatever
    their number. On the CPU both sides are the same memory and nothing is copied. On a GPU the host
    side is pinned and the copy asynchronous: ``host`` may be written again only after the step's
    tokens have been read. A runner that reads them every step does so anyway; one that runs ahead
    needs two of these.

    Args:
        shapes: name -> (shape, dtype).
    """

    def __init__(
        self, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device
    ) -> None:
        sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in shapes.items()}
        rounded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes.values()]
        self._host = torch.zeros(sum(rounded), dtype=torch.uint8, pin_memory=device.type == "cuda")
        on_host = device.type == "cpu"
        self._device = self._host if on_host else torch.zeros_like(self._host, device=device)
        self.host: dict[str, np.ndarray[Any, Any]] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        start = 0
        for (name, (shape, dtype)), room in zip(shapes.items(), rounded):
            part = slice(start, start + sizes[name])
            self.host[name] = self._host[part].view(dtype).view(shape).numpy()
            self.tensors[name] = self._device[part].view(dtype).view(shape)
            start += room

    def send(self) -> None:
        """Copies everything to the device, behind the work that is queued there."""
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)


class InputBatch:
    """Every input of a step in persistent buffers, and the attention metadata made of them.

    Sizes: ``max_tokens`` and ``max_reqs`` after padding. Numbers are prepared with NumPy on the host:
    a handful of vector operations a step, whatever the batch.
    """

    def __init__(
        self,
        max_reqs: int,
        max_tokens: int,
        max_model_len: int,
        block_size: int,
        kv_caches: Any,
        device: torch.device,
    ) -> None:
        self.max_reqs, self.max_tokens, self.block_size = max_reqs, max_tokens, block_size
        self.max_model_len, self.kv_caches, self.device = max_model_len, kv_caches, device
        self._buffers = PersistentBuffers(
            {
                "seq_lens": ((max_reqs,), torch.int32),
                "query_start_loc": ((max_reqs + 1,), torch.int32),
                "last_token": ((max_reqs,), torch.int64),
                "input_ids": ((max_tokens,), torch.int64),
                "positions": ((max_tokens,), torch.int64),
                "slot_mapping": ((max_tokens,), torch.int64),
                "token_to_req": ((max_tokens,), torch.int32),
            },
            device,
        )
        # Apart from the rest: by far the largest, and seldom changed.
        width = blocks_needed(max_model_len, block_size)
        self._table = PersistentBuffers({"block_table": ((max_reqs, width), torch.int32)}, device)
        self._rows: list[tuple[list[int], int]] = [([], 0)] * max_reqs  # whose blocks stand in a row
        self._steps = np.arange(max_tokens, dtype=np.int64)
        self._decode_of = (0, 0)  # requests and padded tokens of the last step, if it was a decode step
        self._fronts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def input_ids(self) -> torch.Tensor:
        """(max_tokens,) int64, at its fixed address."""
        return self._buffers.tensors["input_ids"]

    @property
    def positions(self) -> torch.Tensor:
        """(max_tokens,) int64, each token's place in its request."""
        return self._buffers.tensors["positions"]

    def front(self, num_tokens: int, keep: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """``(input_ids, positions)`` of the first ``num_tokens`` tokens: a model's arguments.

        With ``keep``, and for sizes that were once asked for so, the same two tensors each time: who compares objects
        need not look at addresses and shapes.
        """
        found = self._fronts.get(num_tokens)
        if found is None:
            found = self.input_ids[:num_tokens], self.positions[:num_tokens]
            if keep:
                self._fronts[num_tokens] = found
        return found

    def last_token_rows(self, num_reqs: int) -> torch.Tensor:
        """(num_reqs,) int64: the row of each request's last token in the stream."""
        return self._buffers.tensors["last_token"][:num_reqs]

    def fill(self, batch: Sequence[Scheduled], num_padded: int, decode_only: bool) -> AttentionMetadata:
        """Writes ``batch`` into the buffers, padded to ``num_padded`` tokens.

        Tokens of padding have slot -1, so that nothing is written to the KV cache for them, and
        requests of padding have length 0. What comes out of them is never looked at.

        Raises:
            ServingError: a request has fewer blocks than its tokens need.
        """
        if decode_only:
            return self._fill_decode(batch, num_padded)
        self._decode_of = (0, 0)
        num_reqs = len(batch)
        counts = np.fromiter((each.num_tokens for each in batch), np.int64, num_reqs)
        computed = np.fromiter((each.request.num_computed for each in batch), np.int64, num_reqs)
        ends, lengths = counts.cumsum(), computed + counts
        self._fill_block_table(batch, lengths)
        num_tokens = int(ends[-1])
        owner = np.repeat(np.arange(num_reqs), counts)
        positions = self._steps[:num_tokens] + np.repeat(lengths - ends, counts)
        block = self._table.host["block_table"][owner, positions // self.block_size].astype(np.int64)
        ids = [t for r, n in batch for t in r.token_ids[r.num_computed : r.num_computed + n]]
        self._put("input_ids", ids, num_tokens, num_padded, 0)
        self._put("positions", positions, num_tokens, num_padded, 0)
        self._put("token_to_req", owner, num_tokens, num_padded, 0)
        slots = block * self.block_size + positions % self.block_size
        self._put("slot_mapping", slots, num_tokens, num_padded, -1)
        self._put_requests(ends, lengths)
        self._buffers.send()
        return self._metadata(num_reqs, num_tokens, int(counts.max()), int(lengths.max()), decode_only)

    def _fill_decode(self, batch: Sequence[Scheduled], num_padded: int) -> AttentionMetadata:
        """:meth:`fill` where each request has one token: row i is request i, so much of it is the last step's already.

        A decode step's inputs stand between the batch and the first replay, so they are worth a way of their own.
        """
        count, steps, host = len(batch), self._steps, self._buffers.host
        positions = np.fromiter([request.num_computed for request, _ in batch], np.int64, count)
        lengths = positions + 1
        self._fill_block_table(batch, lengths)
        inside = positions // self.block_size
        slots = self._table.host["block_table"][steps[:count], inside] * np.int64(self.block_size)
        slots += positions - inside * self.block_size
        host["input_ids"][:count] = [request.token_ids[request.num_computed] for request, _ in batch]
        host["positions"][:count] = positions
        host["slot_mapping"][:count] = slots
        host["seq_lens"][:count] = lengths
        if self._decode_of != (count, num_padded):
            self._put("input_ids", host["input_ids"][:count], count, num_padded, 0)
            self._put("positions", positions, count, num_padded, 0)
            self._put("slot_mapping", slots, count, num_padded, -1)
            self._put("token_to_req", steps[:count], count, num_padded, 0)
            self._put_requests(steps[:count] + 1, lengths)
            self._decode_of = (count, num_padded)
        self._buffers.send()
        return self._metadata(count, count, 1, int(lengths.max()), True)

    def fill_dummy(self, num_tokens: int, decode_only: bool) -> AttentionMetadata:
        """Inputs for tracing, warming up and recording at ``num_tokens``: valid everywhere, real nowhere.

        No token has a slot, so the KV cache stays as it is. A decode batch has one token a request
        (``max_query_len`` 1), which is what makes the attention take its decode kernel and what a
        FULL graph freezes; ``max_seq_len`` is the longest there can be, as it freezes with it.
        """
        if self.device.type == "cuda":  # no result is read here, which would say that the last copy is done
            torch.cuda.synchronize(self.device)
        self._decode_of = (0, 0)
        num_reqs = num_tokens if decode_only else min(num_tokens, self.max_reqs)
        share = -(-num_tokens // num_reqs)
        num_reqs = -(-num_tokens // share)
        ends = np.minimum(np.arange(1, num_reqs + 1) * share, num_tokens)
        self._put("input_ids", 0, num_tokens, num_tokens, 0)
        self._put("positions", 0, num_tokens, num_tokens, 0)
        self._put("token_to_req", self._steps[:num_tokens] // share, num_tokens, num_tokens, 0)
        self._put("slot_mapping", -1, num_tokens, num_tokens, -1)
        self._put_requests(ends, np.diff(ends, prepend=0))
        self._buffers.send()
        self._table.host["block_table"][:] = NULL_BLOCK
        self._table.send()
        self._rows = [([], 0)] * self.max_reqs
        return self._metadata(num_reqs, num_tokens, share, self.max_model_len, decode_only)

    def _fill_block_table(self, batch: Sequence[Scheduled], lengths: np.ndarray[Any, Any]) -> None:
        """Only rows whose request or number of blocks changed."""
        table, changed = self._table.host["block_table"], False
        for row, (request, _) in enumerate(batch):
            blocks = request.blocks
            if len(blocks) * self.block_size < lengths[row]:  # else old entries would be taken for its own
                raise ServingError(
                    f"a request of {lengths[row]} tokens has {len(blocks)} blocks of {self.block_size}: "
                    "give it more before the step"
                )
            held, count = self._rows[row]
            if held is not blocks or count != len(blocks):
                table[row, : len(blocks)] = blocks
                self._rows[row] = (blocks, len(blocks))
                changed = True
        if changed:
            self._table.send()

    def _put(self, name: str, values: Any, count: int, padded: int, padding: int) -> None:
        buffer = self._buffers.host[name]
        buffer[:count] = values
        buffer[count:padded] = padding

    def _put_requests(self, ends: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> None:
        """Where each request's tokens end, and how long it is with them; the rest is padding."""
        count, host = len(ends), self._buffers.host
        self._put("last_token", ends - 1, count, count, 0)
        self._put("seq_lens", lengths, count, self.max_reqs, 0)
        host["query_start_loc"][0] = 0
        host["query_start_loc"][1 : count + 1] = ends
        host["query_start_loc"][count + 1 :] = ends[-1]

    def _metadata(
        self, num_reqs: int, num_tokens: int, max_query_len: int, max_seq_len: int, decode_only: bool
    ) -> AttentionMetadata:
        """The whole buffers, not views of their fronts: the same tensors in every step."""
        tensors = self._buffers.tensors
        return AttentionMetadata(
            block_table=self._table.tensors["block_table"],
            seq_lens=tensors["seq_lens"],
            query_start_loc=tensors["query_start_loc"],
            token_to_req=tensors["token_to_req"],
            slot_mapping=tensors["slot_mapping"],
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            decode_only=decode_only,
            kv_caches=self.kv_caches,
            positions=tensors["positions"],
        )
