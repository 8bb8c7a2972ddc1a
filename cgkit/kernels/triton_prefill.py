"""The kernels of a batch with requests of any length: the write into the cache, and causal attention.

A flash-attention loop (Dao et al., "FlashAttention", 2022) over paged keys. Requests lie one after the
other in the batch, and which request a program works for is found on the device, by a binary search in
``query_start_loc``: the grid depends on the padded sizes alone, so a recorded launch serves any batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from cgkit.errors import ServingError
from cgkit.kernels.launch import CachedLaunch, Launch
from cgkit.kernels.paged_attention import PagedMetadata, check_shapes
from cgkit.kernels.triton_decode import (
    LOG2_E,
    as_output,
    power_of_2,
    row_stride,
    with_scale,
    with_whole_heads,
)
from cgkit.torch_hooks import LaunchStream

#: Rows of query heads a program holds, and positions of the context it reads at a time.
ROWS, TILE = 64, 64
#: The same for float32, which is multiplied without tensor cores: larger ones do not fit the registers.
ROWS_FLOAT32, TILE_FLOAT32 = 16, 32


@triton.jit
def _write_kernel(
    key, value, key_cache, value_cache, slot_mapping,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Grid (tokens,). WIDTH = num_kv_heads * head_dim."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    at = tl.arange(0, PADDED)
    inside = at < WIDTH
    tl.store(key_cache + slot * WIDTH + at, tl.load(key + token * K_STRIDE + at, mask=inside), mask=inside)
    tl.store(
        value_cache + slot * WIDTH + at, tl.load(value + token * V_STRIDE + at, mask=inside), mask=inside
    )


@triton.jit(do_not_specialize=["tokens", "requests"])
def _prefill_kernel(
    query, output, key_cache, value_cache, block_table, seq_lens, query_start_loc,
    tokens, requests,
    SCALE_LOG2: tl.constexpr, Q_STRIDE: tl.constexpr, O_STRIDE: tl.constexpr, TABLE_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, output_scale=None,
):  # fmt: skip
    """Grid (tokens // QUERIES + requests + 1, KV_HEADS). A program holds QUERIES tokens of one request,
    each with its group of heads. The padding after the last request counts as one more, of length 0."""
    QUERIES: tl.constexpr = ROWS // PADDED_GROUP
    program, head = tl.program_id(0), tl.program_id(1)
    # Request r's programs start at first_token // QUERIES + r, which leaves room for every remainder.
    low, high = requests * 0, requests
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_start_loc + middle) // QUERIES + middle <= program:
            low = middle
        else:
            high = middle - 1
    start = tl.load(query_start_loc + low)
    padding = low == requests
    end = tl.load(query_start_loc + low + 1, mask=low < requests, other=0)
    end = tl.where(padding, tokens, end)
    seq_len = tl.load(seq_lens + low, mask=low < requests, other=0)
    begin = start + (program - (start // QUERIES + low)) * QUERIES
    if begin >= end:
        return

    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIM)
    token, in_group = begin + rows // PADDED_GROUP, rows % PADDED_GROUP
    in_dim = dims < HEAD_DIM
    in_row = ((token < end) & (in_group < GROUP))[:, None] & in_dim[None, :]
    heads = (head * GROUP + in_group)[:, None] * HEAD_DIM + dims[None, :]
    out_at = output + token.to(tl.int64)[:, None] * O_STRIDE + heads
    if seq_len == 0:
        tl.store(out_at, tl.zeros([ROWS, DIM], tl.float32).to(output.dtype.element_ty), mask=in_row)
        return

    q = tl.load(query + token.to(tl.int64)[:, None] * Q_STRIDE + heads, mask=in_row, other=0.0)
    last = seq_len - end + token  # (ROWS,) each token's own position
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    stop = tl.minimum(seq_len, seq_len - end + begin + QUERIES)
    table = block_table + low.to(tl.int64) * TABLE_STRIDE
    for at in range(0, stop, TILE):
        position = at + tl.arange(0, TILE)
        inside = position < stop
        block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        slots = block * BLOCK_SIZE + position % BLOCK_SIZE
        kv_at = (slots * KV_HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
        wanted = inside[:, None] & in_dim[None, :]
        k = tl.load(key_cache + kv_at, mask=wanted, other=0.0)  # (TILE, DIM)
        v = tl.load(value_cache + kv_at, mask=wanted, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * SCALE_LOG2
        # Position 0 is seen by every row, so that no maximum stays at minus infinity.
        seen = inside[None, :] & (position[None, :] <= last[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(weights, axis=1)
        acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = higher
    tl.store(out_at, as_output(acc / total[:, None], query, output, output_scale), mask=in_row)


@triton.jit(do_not_specialize=["tokens", "requests"])
def _prefill_fp8_kernel(
    query, output, key_cache, value_cache, block_table, seq_lens, query_start_loc, output_scale,
    tokens, requests,
    SCALE_LOG2: tl.constexpr, Q_STRIDE: tl.constexpr, O_STRIDE: tl.constexpr, TABLE_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """With ``output_scale``, one float32 number; as the decode kernel has it."""
    _prefill_kernel(
        query, output, key_cache, value_cache, block_table, seq_lens, query_start_loc,
        tokens, requests,
        SCALE_LOG2, Q_STRIDE, O_STRIDE, TABLE_STRIDE, KV_HEADS, GROUP, PADDED_GROUP, HEAD_DIM,
        BLOCK_SIZE, ROWS, DIM, TILE, output_scale,
    )  # fmt: skip


_launch_write = CachedLaunch(_write_kernel, num_warps=4)
_launch_prefill = CachedLaunch(_prefill_kernel, num_warps=4, num_stages=2)
_launch_prefill_fp8 = CachedLaunch(_prefill_fp8_kernel, num_warps=4, num_stages=2)


def write_kv_triton(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """The Triton form of :func:`cgkit.kernels.write_kv`: one launch, padding writes nothing."""
    if key.shape[0]:
        key, value = with_whole_heads(key), with_whole_heads(value)
        _launch_write(*_write_of(key, value, key_cache, value_cache, slot_mapping))


def _write_of(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> Launch:
    tokens, kv_heads, head_dim = key.shape
    width = kv_heads * head_dim
    return (
        (tokens, 1, 1),
        (key, value, key_cache, value_cache, slot_mapping),
        (),
        (row_stride(key), row_stride(value), width, power_of_2(width)),
    )


def paged_attention_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: PagedMetadata,
    output: Tensor,
    scale: float,
    output_scale: Tensor | None = None,
) -> None:
    """The Triton form of :func:`cgkit.kernels.paged_attention`, for any mix of lengths; one launch.

    With ``output_scale`` (one float32 number) ``output`` is FP8.

    Raises:
        ServingError: more than 64 query heads share one KV head.
    """
    query = with_whole_heads(query)
    launch = _launch_prefill if output_scale is None else _launch_prefill_fp8
    launch(*_prefill_of(query, key_cache, value_cache, metadata, output, scale, output_scale))


def _prefill_of(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: PagedMetadata,
    output: Tensor,
    scale: float,
    output_scale: Tensor | None,
) -> Launch:
    tokens, heads, head_dim = query.shape
    block_size, kv_heads, table = key_cache.shape[1], key_cache.shape[2], metadata.block_table
    group = heads // kv_heads
    padded_group = power_of_2(group)
    if padded_group > ROWS:
        raise ServingError(f"{group} query heads for each KV head are more than the kernel's {ROWS}")
    rows, tile = (ROWS_FLOAT32, TILE_FLOAT32) if query.dtype is torch.float32 else (ROWS, TILE)
    rows = max(rows, padded_group)
    # Real requests have at least one token each, so rows beyond the number of tokens are padding.
    requests = min(metadata.seq_lens.shape[0], tokens)
    grid = (tokens * padded_group // rows + requests + 1, kv_heads, 1)
    tensors = (query, output, key_cache, value_cache, table, metadata.seq_lens, metadata.query_start_loc)
    constants = (
        scale * LOG2_E, row_stride(query), row_stride(output), table.stride(0),
        kv_heads, group, padded_group, head_dim, block_size, rows, max(16, power_of_2(head_dim)), tile,
    )  # fmt: skip
    return grid, *with_scale(tensors, (tokens, requests), constants, output_scale)


def prepared_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: PagedMetadata,
    output: Tensor,
    scale: float,
    stream: LaunchStream,
    output_scale: Tensor | None = None,
) -> tuple[Callable[[], None], ...] | None:
    """The write and the attention with these very tensors at each call; None where they cannot be prepared.

    Launches both once. What the tensors hold may change, and where they lie may not.
    """
    check_shapes(query, key, value, key_cache, value_cache, metadata, output, output_scale)
    if any(with_whole_heads(tensor) is not tensor for tensor in (query, key, value)):
        return None  # they are copied at each step
    write = _launch_write.fixed(*_write_of(key, value, key_cache, value_cache, metadata.slot_mapping), stream)
    launch = _launch_prefill if output_scale is None else _launch_prefill_fp8
    given = query, key_cache, value_cache, metadata, output, scale, output_scale
    attention = launch.fixed(*_prefill_of(*given), stream)
    return None if write is None or attention is None else (write, attention)
