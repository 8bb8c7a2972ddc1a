"""Attention that leaves as FP8: the kernels of any batch with a scale for their output, and no launch more.

The same kernels as without the scale (:mod:`cgkit.kernels.triton_decode`, :mod:`cgkit.kernels.triton_prefill`), called
from one that takes the scale: an ordinary launch is given nothing more for it. What a row of attention needs to be
quantised is in registers when it is done, so the row is written once, in 8 bits instead of 16, and not read again.

Source: the article's "AttnFusionPass".
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cgkit.errors import ServingError
from cgkit.kernels.launch import CachedLaunch
from cgkit.kernels.paged_attention import PagedMetadata
from cgkit.kernels.triton_decode import (
    LOG2_E,
    MIN_CHUNK,
    TILE,
    _decode_kernel,
    _workspace,
    num_splits,
    power_of_2,
    row_stride,
    with_whole_heads,
)
from cgkit.kernels.triton_prefill import ROWS, ROWS_FLOAT32, TILE_FLOAT32, _prefill_kernel
from cgkit.kernels.triton_prefill import TILE as PREFILL_TILE


@triton.jit
def _decode_fp8_kernel(
    query, key, value, output, key_cache, value_cache, block_table, seq_lens, slot_mapping,
    partial, stats, counters, output_scale,
    SCALE_LOG2: tl.constexpr, Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr,
    O_STRIDE: tl.constexpr, TABLE_STRIDE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    TILE: tl.constexpr, MIN_CHUNK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The decode kernel, with ``output_scale``: one float32 number."""
    _decode_kernel(
        query, key, value, output, key_cache, value_cache, block_table, seq_lens, slot_mapping,
        partial, stats, counters,
        SCALE_LOG2, Q_STRIDE, K_STRIDE, V_STRIDE, O_STRIDE, TABLE_STRIDE, KV_HEADS, GROUP,
        HEAD_DIM, BLOCK_SIZE, ROWS, DIM, TILE, MIN_CHUNK, SPLITS, output_scale,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "requests"])
def _prefill_fp8_kernel(
    query, output, key_cache, value_cache, block_table, seq_lens, query_start_loc, output_scale,
    tokens, requests,
    SCALE_LOG2: tl.constexpr, Q_STRIDE: tl.constexpr, O_STRIDE: tl.constexpr, TABLE_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The prefill kernel, with ``output_scale``: one float32 number."""
    _prefill_kernel(
        query, output, key_cache, value_cache, block_table, seq_lens, query_start_loc,
        tokens, requests,
        SCALE_LOG2, Q_STRIDE, O_STRIDE, TABLE_STRIDE, KV_HEADS, GROUP, PADDED_GROUP, HEAD_DIM,
        BLOCK_SIZE, ROWS, DIM, TILE, output_scale,
    )  # fmt: skip


launch_decode = CachedLaunch(_decode_fp8_kernel, num_warps=4, num_stages=3)
launch_prefill = CachedLaunch(_prefill_fp8_kernel, num_warps=4, num_stages=2)


def paged_attention_decode_fp8(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: PagedMetadata,
    output: Tensor,
    scale: float,
    output_scale: Tensor,
) -> None:
    """:func:`~cgkit.kernels.triton_decode.paged_attention_decode` into an FP8 ``output``, over ``output_scale``.

    Raises:
        ServingError: the first launch of a kind that needs a workspace stands inside a recording.
    """
    batch, heads, head_dim = query.shape
    kv_heads, block_size, table = key_cache.shape[2], key_cache.shape[1], metadata.block_table
    group = heads // kv_heads
    rows, dim = max(16, power_of_2(group)), max(16, power_of_2(head_dim))
    splits = num_splits(batch * kv_heads, table.shape[1] * block_size, query.get_device())
    workspace = _workspace(query.device, rows, dim) if splits > 1 else (output, output, output)
    whole = with_whole_heads(query), with_whole_heads(key), with_whole_heads(value)
    launch_decode(
        (batch, kv_heads, splits),
        (
            *whole, output, key_cache, value_cache, table, metadata.seq_lens, metadata.slot_mapping,
            *workspace, output_scale,
        ),
        (),
        (
            scale * LOG2_E, *map(row_stride, whole), row_stride(output), table.stride(0), kv_heads,
            group, head_dim, block_size, rows, dim, TILE, MIN_CHUNK, splits,
        ),
    )  # fmt: skip


def paged_attention_prefill_fp8(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: PagedMetadata,
    output: Tensor,
    scale: float,
    output_scale: Tensor,
) -> None:
    """:func:`~cgkit.kernels.triton_prefill.paged_attention_prefill` into an FP8 ``output``, over ``output_scale``.

    Raises:
        ServingError: more than 64 query heads share one KV head.
    """
    tokens, heads, head_dim = query.shape
    block_size, kv_heads, table = key_cache.shape[1], key_cache.shape[2], metadata.block_table
    group = heads // kv_heads
    padded_group = power_of_2(group)
    if padded_group > ROWS:
        raise ServingError(f"{group} query heads for each KV head are more than the kernel's {ROWS}")
    rows, tile = (ROWS_FLOAT32, TILE_FLOAT32) if query.dtype is torch.float32 else (ROWS, PREFILL_TILE)
    rows = max(rows, padded_group)
    requests = min(metadata.seq_lens.shape[0], tokens)
    query = with_whole_heads(query)
    launch_prefill(
        (tokens * padded_group // rows + requests + 1, kv_heads, 1),
        (
            query, output, key_cache, value_cache, table, metadata.seq_lens, metadata.query_start_loc,
            output_scale,
        ),
        (tokens, requests),
        (
            scale * LOG2_E, row_stride(query), row_stride(output), table.stride(0),
            kv_heads, group, padded_group, head_dim, block_size, rows, max(16, power_of_2(head_dim)), tile,
        ),
    )  # fmt: skip
