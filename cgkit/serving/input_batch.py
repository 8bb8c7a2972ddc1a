"""The persistent buffers of a runner: where recorded graphs read a step's inputs.

Implements the runner's half of the article's "运行时包装：copy inputs 到静态缓冲区" (at run time: inputs
copied to static buffers): a recorded graph reads the addresses of its recording, so every step writes
its inputs into the same tensors. That makes the compile side's copy (``cudagraph_copy_inputs``) needless.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from cgkit.errors import ServingError
from cgkit.serving.attention import AttentionMetadata
from cgkit.serving.device_queue import DeviceQueue
from cgkit.serving.kv_cache import NULL_BLOCK, blocks_needed
from cgkit.serving.request import Request, Scheduled

_ALIGNMENT = 256  # bytes; no two buffers share a cache line or a vector access


class PersistentBuffers:
    """Tensors at fixed addresses on the device, filled from NumPy arrays on the host.

    All lie in one block of memory on either side, so that :meth:`send` is a single copy, whatever
    their number. On the CPU both sides are the same memory and nothing is copied. On a GPU the host
    side is pinned and the copy asynchronous: ``host`` may be written again only after the step's
    tokens have been read. A runner that reads them every step does so anyway; one that runs ahead
    calls :meth:`stage_in` first.

    Args:
        shapes: name -> (shape, dtype).

    Attributes:
        host: name -> the array to write.
        tensors: name -> the tensor that is read; its address never changes.
        starts: name -> its first byte in the block.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device
    ) -> None:
        self._shapes = dict(shapes)
        size = sum(_rounded(shape, dtype) for shape, dtype in shapes.values())
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = self._host if device.type == "cpu" else torch.zeros_like(self._host, device=device)
        rooms = [_rounded(shape, dtype) for shape, dtype in shapes.values()]
        self.starts = dict(zip(shapes, accumulate([0, *rooms])))
        self.host: dict[str, np.ndarray[Any, Any]] = self._arrays()
        self.tensors: dict[str, torch.Tensor] = self._views(self._device)
        self._areas: list[torch.Tensor] = []
        self._parts: dict[tuple[int, int | None], list[tuple[Any, Any, Callable[[], Any]]]] = {}
        self._turn = 0
        self._queue: DeviceQueue | None = None

    def stage_in(self, areas: int, queue: DeviceQueue) -> None:
        """From now on ``host`` may be written at any time: :meth:`send` first copies it into one of ``areas``
        staging areas, in turn, and ``queue`` copies from there.

        An area is written again ``areas`` sends later. The caller has to know that the copy before is done by
        then: one that waits for step n before it sends step n + 2 needs two.
        """
        pinned = self._device.is_cuda
        self._host = torch.zeros_like(
            self._host, device="cpu"
        )  # no longer read by the device: not pinned, not shared
        self._host.copy_(self._device)
        self.host = self._arrays()
        self._areas = [
            torch.zeros(len(self._host), dtype=torch.uint8, pin_memory=pinned) for _ in range(areas)
        ]
        self._parts = {}
        self._queue = queue

    def send(self, stop: int | None = None, start: int = 0) -> None:
        """Copies everything, or the bytes from ``start`` to ``stop``, to the device, behind the work that is queued
        there."""
        if self._queue is not None:
            self._turn = turn = (self._turn + 1) % len(self._areas)
            found = self._parts.get((start, stop))
            if found is None:
                found = self._parts[start, stop] = [
                    self._part(area, slice(start, stop)) for area in self._areas
                ]
            source, area, copy = found[turn]
            area[:] = source
            self._queue.submit(copy)
        elif self._device is not self._host:
            self._device[start:stop].copy_(self._host[start:stop], non_blocking=True)

    def _part(self, area: torch.Tensor, part: slice) -> tuple[Any, Any, Callable[[], Any]]:
        """What is copied into a staging area, the area, and what copies from there."""
        copy = partial(self._device[part].copy_, area[part], non_blocking=True)
        return self._host[part].numpy(), area[part].numpy(), copy

    def _arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        return {name: part.numpy() for name, part in self._views(self._host).items()}

    def _views(self, block: torch.Tensor) -> dict[str, torch.Tensor]:
        views = {}
        for name, (shape, dtype) in self._shapes.items():
            start = self.starts[name]
            views[name] = block[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        return views


def _rounded(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


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
        self.width = blocks_needed(max_model_len, block_size)
        self.buffers = PersistentBuffers(
            {
                # The first one: a step whose tokens are on the device already sends what stands behind it.
                "input_ids": ((max_tokens,), torch.int64),
                "seq_lens": ((max_reqs,), torch.int32),
                "query_start_loc": ((max_reqs + 1,), torch.int32),
                "last_token": ((max_reqs,), torch.int64),
                "positions": ((max_tokens,), torch.int64),
                "slot_mapping": ((max_tokens,), torch.int64),
                "token_to_req": ((max_tokens,), torch.int32),
                # The last one, as it is by far the largest and changes little: a copy stops behind what changed.
                "block_table": ((max_reqs, self.width), torch.int32),
            },
            device,
        )
        start = self.buffers.starts["block_table"]
        self._behind_ids = self.buffers.starts["seq_lens"]
        self._stops = [start + rows * self.width * 4 for rows in range(max_reqs + 1)]
        self._rows: list[tuple[list[int], int]] = [([], 0)] * max_reqs  # whose blocks stand in a row
        self._steps = np.arange(max_tokens, dtype=np.int64)
        #: Counts what was written as a whole: whoever goes on from what it wrote sees whether it is still there.
        self.writes = 0
        self._decode_of = (0, 0)  # requests and padded tokens of the last step, if it was a decode step
        self._fronts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __repr__(self) -> str:
        return (
            f"InputBatch({self.max_tokens:,} tokens of {self.max_reqs:,} requests at most, "
            f"{len(self.buffers.tensors)} buffers on {self.device})"
        )

    @property
    def input_ids(self) -> torch.Tensor:
        """(max_tokens,) int64, at its fixed address."""
        return self.buffers.tensors["input_ids"]

    @property
    def positions(self) -> torch.Tensor:
        """(max_tokens,) int64, each token's place in its request."""
        return self.buffers.tensors["positions"]

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
        return self.buffers.tensors["last_token"][:num_reqs]

    def fill(self, batch: Sequence[Scheduled], num_padded: int, decode_only: bool) -> AttentionMetadata:
        """Writes ``batch`` into the buffers, padded to ``num_padded`` tokens.

        Tokens of padding have slot -1, so that nothing is written to the KV cache for them, and
        requests of padding have length 0. What comes out of them is never looked at.

        Raises:
            ServingError: a request has fewer blocks than its tokens need.
        """
        requests = [request for request, _ in batch]
        computed = np.fromiter([request.num_computed for request in requests], np.int64, len(batch))
        if decode_only:
            ids = [request.token_ids[request.num_computed] for request in requests]
            return self._fill_decode(requests, computed + 1, ids, num_padded)
        counts = np.fromiter([count for _, count in batch], np.int64, len(batch))
        ids = [t for r, n in batch for t in r.token_ids[r.num_computed : r.num_computed + n]]
        return self.fill_rows(requests, counts, computed + counts, ids, num_padded, decode_only)

    def fill_rows(
        self,
        requests: Sequence[Request],
        counts: np.ndarray[Any, Any],
        lengths: np.ndarray[Any, Any],
        ids: Sequence[int],
        num_padded: int,
        decode_only: bool,
    ) -> AttentionMetadata:
        """:meth:`fill`, from what is known of each row: how many tokens it runs, how long it is with them, and the
        tokens of all rows one after the other."""
        if decode_only:
            return self._fill_decode(requests, lengths, ids, num_padded)
        self.writes += 1
        self._decode_of = (0, 0)
        num_reqs, ends = len(requests), counts.cumsum()
        self._check_room(requests, lengths)
        changed = self.fill_block_table(requests)
        num_tokens = int(ends[-1])
        owner = np.repeat(self._steps[:num_reqs], counts)
        positions = self._steps[:num_tokens] + np.repeat(lengths - ends, counts)
        block = self.buffers.host["block_table"][owner, positions // self.block_size].astype(np.int64)
        self._put("input_ids", ids, num_tokens, num_padded, 0)
        self._put("positions", positions, num_tokens, num_padded, 0)
        self._put("token_to_req", owner, num_tokens, num_padded, 0)
        slots = block * self.block_size + positions % self.block_size
        self._put("slot_mapping", slots, num_tokens, num_padded, -1)
        self._put_requests(ends, lengths)
        self.send(changed)
        return self.metadata(num_reqs, num_tokens, int(counts.max()), int(lengths.max()), False)

    def _fill_decode(
        self, requests: Sequence[Request], lengths: np.ndarray[Any, Any], ids: Sequence[int], num_padded: int
    ) -> AttentionMetadata:
        """:meth:`fill_rows` where each request has one token: row i is request i, so much is the last step's already.

        A decode step's inputs stand between the batch and the first replay, so they are worth a way of their own.
        """
        self.writes += 1
        count, steps, host = len(requests), self._steps, self.buffers.host
        self._check_room(requests, lengths)
        changed = self.fill_block_table(requests)
        positions = lengths - 1
        inside = positions // self.block_size
        slots = host["block_table"][steps[:count], inside] * np.int64(self.block_size)
        slots += positions - inside * self.block_size
        host["input_ids"][:count] = ids
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
        self.send(changed)
        return self.metadata(count, count, 1, int(lengths.max()), True)

    def fill_dummy(self, num_tokens: int, decode_only: bool) -> AttentionMetadata:
        """Inputs for tracing, warming up and recording at ``num_tokens``: valid everywhere, real nowhere.

        No token has a slot, so the KV cache stays as it is. A decode batch has one token a request
        (``max_query_len`` 1), which is what makes the attention take its decode kernel and what a
        FULL graph freezes; ``max_seq_len`` is the longest there can be, as it freezes with it.
        """
        self.writes += 1
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
        self.buffers.host["block_table"][:] = NULL_BLOCK
        self.send([self.max_reqs - 1])
        self._rows = [([], 0)] * self.max_reqs
        return self.metadata(num_reqs, num_tokens, share, self.max_model_len, decode_only)

    def fill_block_table(self, requests: Sequence[Request]) -> list[int]:
        """Writes the rows whose request or number of blocks changed, and returns them."""
        table, rows, changed = self.buffers.host["block_table"], self._rows, []
        for row, request in enumerate(requests):
            blocks = request.blocks
            held, known = rows[row]
            if held is not blocks or known != len(blocks):
                first = known if held is blocks and known < len(blocks) else 0
                table[row, first : len(blocks)] = blocks[first:]
                rows[row] = (blocks, len(blocks))
                changed.append(row)
        return changed

    def send(self, changed: Sequence[int], with_ids: bool = True) -> None:
        """Copies all inputs to the device, perhaps without the tokens, and the block table as far as rows of it
        ``changed``."""
        stop = self._stops[changed[-1] + 1 if changed else 0]
        self.buffers.send(stop, 0 if with_ids else self._behind_ids)

    def _check_room(self, requests: Sequence[Request], lengths: np.ndarray[Any, Any]) -> None:
        """Too few blocks would let old entries of the table be taken for a request's own."""
        for request, length in zip(requests, lengths.tolist()):
            if len(request.blocks) * self.block_size < length:
                raise ServingError(
                    f"a request of {length} tokens has {len(request.blocks)} blocks of {self.block_size}: "
                    "give it more before the step"
                )

    def _put(self, name: str, values: Any, count: int, padded: int, padding: int) -> None:
        buffer = self.buffers.host[name]
        buffer[:count] = values
        buffer[count:padded] = padding

    def _put_requests(self, ends: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> None:
        """Where each request's tokens end, and how long it is with them; the rest is padding."""
        count, host = len(ends), self.buffers.host
        self._put("last_token", ends - 1, count, self.max_reqs, 0)
        self._put("seq_lens", lengths, count, self.max_reqs, 0)
        host["query_start_loc"][0] = 0
        host["query_start_loc"][1 : count + 1] = ends
        host["query_start_loc"][count + 1 :] = ends[-1]

    def metadata(
        self, num_reqs: int, num_tokens: int, max_query_len: int, max_seq_len: int, decode_only: bool
    ) -> AttentionMetadata:
        """The whole buffers, not views of their fronts: the same tensors in every step."""
        tensors = self.buffers.tensors
        return AttentionMetadata(
            block_table=tensors["block_table"],
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
