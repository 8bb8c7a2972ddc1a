"""The persistent buffers of a runner: where recorded graphs read a step's inputs.

Implements the runner's half of the article's "运行时包装：copy inputs 到静态缓冲区" (at run time: inputs
copied to static buffers): a recorded graph reads the addresses of its recording, so every step writes
its inputs into the same tensors. That makes the compile side's copy (``cudagraph_copy_inputs``) needless.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from cgkit.serving.attention import AttentionMetadata
from cgkit.serving.kv_cache import blocks_needed
from cgkit.serving.request import Scheduled


class PersistentBuffer:
    """One tensor at a fixed address on the device, with the host memory that it is filled from.

    ``np`` is written, then ``send`` copies the front of it to ``tensor``. On the CPU both are the
    same memory and nothing is copied. On a GPU the host side is pinned and the copy asynchronous:
    ``np`` may be written again only after the step's tokens have been read, which a runner that
    reads them every step does anyway; one that runs ahead needs two of each.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        on_host = device.type == "cpu"
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self.np: np.ndarray[Any, Any] = self._host.numpy()
        self.tensor = self._host if on_host else torch.zeros(shape, dtype=dtype, device=device)

    def send(self, count: int) -> None:
        """Copies the first ``count`` rows to the device."""
        if self.tensor is not self._host:
            self.tensor[:count].copy_(self._host[:count], non_blocking=True)


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
        self.max_model_len, self.kv_caches = max_model_len, kv_caches
        width = blocks_needed(max_model_len, block_size)
        self._input_ids = PersistentBuffer((max_tokens,), torch.int64, device)
        self._positions = PersistentBuffer((max_tokens,), torch.int64, device)
        self._token_to_req = PersistentBuffer((max_tokens,), torch.int32, device)
        self._slot_mapping = PersistentBuffer((max_tokens,), torch.int64, device)
        self._seq_lens = PersistentBuffer((max_reqs,), torch.int32, device)
        self._query_start_loc = PersistentBuffer((max_reqs + 1,), torch.int32, device)
        self._block_table = PersistentBuffer((max_reqs, width), torch.int32, device)
        self._last_token = PersistentBuffer((max_reqs,), torch.int64, device)
        self._rows: list[tuple[list[int], int]] = [([], 0)] * max_reqs  # whose blocks stand in a row
        self._steps = np.arange(max_tokens, dtype=np.int64)

    @property
    def input_ids(self) -> torch.Tensor:
        """(max_tokens,) int64, at its fixed address."""
        return self._input_ids.tensor

    @property
    def positions(self) -> torch.Tensor:
        """(max_tokens,) int64, each token's place in its request."""
        return self._positions.tensor

    def last_token_rows(self, num_reqs: int) -> torch.Tensor:
        """(num_reqs,) int64: the row of each request's last token in the stream."""
        return self._last_token.tensor[:num_reqs]

    def fill(self, batch: Sequence[Scheduled], num_padded: int, decode_only: bool) -> AttentionMetadata:
        """Writes ``batch`` into the buffers, padded to ``num_padded`` tokens.

        Tokens of padding have slot -1, so that nothing is written to the KV cache for them, and
        requests of padding have length 0. What comes out of them is never looked at.
        """
        num_reqs = len(batch)
        counts = np.fromiter((each.num_tokens for each in batch), np.int64, num_reqs)
        computed = np.fromiter((each.request.num_computed for each in batch), np.int64, num_reqs)
        ends = counts.cumsum()
        num_tokens = int(ends[-1])
        owner = np.repeat(np.arange(num_reqs), counts)
        positions = self._steps[:num_tokens] + np.repeat(computed - ends + counts, counts)
        self._fill_block_table(batch)
        tables = self._block_table.np
        slots = tables[owner, positions // self.block_size].astype(np.int64) * self.block_size
        ids = [t for r, n in batch for t in r.token_ids[r.num_computed : r.num_computed + n]]
        self._put(self._input_ids, ids, num_tokens, num_padded, 0)
        self._put(self._positions, positions, num_tokens, num_padded, 0)
        self._put(self._token_to_req, owner, num_tokens, num_padded, 0)
        self._put(self._slot_mapping, slots + positions % self.block_size, num_tokens, num_padded, -1)
        self._put(self._last_token, ends - 1, num_reqs, num_reqs, 0)
        seq_lens = computed + counts
        self._put(self._seq_lens, seq_lens, num_reqs, self.max_reqs, 0)
        self._query_start_loc.np[0] = 0
        self._query_start_loc.np[1 : num_reqs + 1] = ends
        self._query_start_loc.np[num_reqs + 1 :] = num_tokens
        self._query_start_loc.send(self.max_reqs + 1)
        return self._metadata(num_reqs, num_tokens, int(counts.max()), int(seq_lens.max()), decode_only)

    def fill_dummy(self, num_tokens: int, decode_only: bool) -> AttentionMetadata:
        """Inputs for tracing, warming up and recording at ``num_tokens``: valid everywhere, real nowhere.

        No token has a slot, so the KV cache stays as it is. A decode batch has one token a request
        (``max_query_len`` 1), which is what makes the attention take its decode kernel and what a
        FULL graph freezes; ``max_seq_len`` is the longest there can be, as it freezes with it.
        """
        num_reqs = num_tokens if decode_only else min(num_tokens, self.max_reqs)
        share = -(-num_tokens // num_reqs)
        ends = np.minimum(np.arange(1, self.max_reqs + 1) * share, num_tokens)
        for buffer in (self._input_ids, self._positions, self._token_to_req):
            self._put(buffer, 0, num_tokens, num_tokens, 0)
        self._token_to_req.np[:num_tokens] = self._steps[:num_tokens] // share
        self._token_to_req.send(num_tokens)
        self._put(self._slot_mapping, -1, num_tokens, num_tokens, -1)
        lengths = np.diff(ends, prepend=0)
        self._put(self._seq_lens, lengths, self.max_reqs, self.max_reqs, 0)
        self._query_start_loc.np[0] = 0
        self._query_start_loc.np[1:] = ends
        self._query_start_loc.send(self.max_reqs + 1)
        self._block_table.np[:] = 0
        self._block_table.send(self.max_reqs)
        self._rows = [([], 0)] * self.max_reqs
        return self._metadata(num_reqs, num_tokens, share, self.max_model_len, decode_only)

    def _fill_block_table(self, batch: Sequence[Scheduled]) -> None:
        """Only rows whose request or number of blocks changed; the table is by far the largest input."""
        changed = False
        for row, (request, _) in enumerate(batch):
            blocks, count = self._rows[row]
            if blocks is not request.blocks or count != len(request.blocks):
                self._block_table.np[row, : len(request.blocks)] = request.blocks
                self._rows[row] = (request.blocks, len(request.blocks))
                changed = True
        if changed:
            self._block_table.send(len(batch))

    @staticmethod
    def _put(buffer: PersistentBuffer, values: Any, count: int, padded: int, padding: int) -> None:
        buffer.np[:count] = values
        buffer.np[count:padded] = padding
        buffer.send(padded)

    def _metadata(
        self, num_reqs: int, num_tokens: int, max_query_len: int, max_seq_len: int, decode_only: bool
    ) -> AttentionMetadata:
        """The whole buffers, not views of their fronts: the same tensors in every step."""
        return AttentionMetadata(
            block_table=self._block_table.tensor,
            seq_lens=self._seq_lens.tensor,
            query_start_loc=self._query_start_loc.tensor,
            token_to_req=self._token_to_req.tensor,
            slot_mapping=self._slot_mapping.tensor,
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            decode_only=decode_only,
            kv_caches=self.kv_caches,
            positions=self._positions.tensor,
        )
