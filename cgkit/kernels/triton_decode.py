"""The decode kernel: one launch a layer writes the new keys and values and attends.

One program serves one request and one KV head, so that each key is read once for the whole group of
query heads. The new token's key and value come from the arguments, not from the cache, so nobody waits
for the write. Where batch and KV heads alone would leave the GPU empty, a request's context is divided
over several programs ("split-K", Dao et al., "Flash-Decoding", 2023), and the last of them to finish
combines their results: still one launch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cgkit.errors import ServingError
from cgkit.kernels.launch import CachedLaunch, Launch
from cgkit.kernels.paged_attention import PagedMetadata, check_shapes
from cgkit.kernels.splits import splits_for
from cgkit.torch_hooks import LaunchStream, current_raw_stream

# What is tuned; `cgkit bench kernels` measures the alternatives beside these.
#: Positions of the context read at a time, and the least that a divided context gives one program. One tile: a tile
#: waits for its keys about as long as combining the parts takes in all, so it pays to have each wait by itself.
TILE, MIN_CHUNK = 64, 64
#: The most programs for one request and KV head, and how many programs a multiprocessor should get before a context
#: is no longer divided.
MAX_SPLITS, PROGRAMS_A_PROCESSOR = 16, 2
NUM_WARPS, NUM_STAGES = 2, 3

#: The kernels raise 2 to a power, as the hardware does, so scores are scaled by this as well.
LOG2_E = 1.4426950408889634
#: Without a GPU (Triton's interpreter) as many programs as this count as a full device.
_INTERPRETER_PROGRAMS = 32


@triton.jit
def as_output(value, query, output, output_scale, FP8_MAX: tl.constexpr = 448.0):
    """``value`` (float32) in the type of ``output``. With an ``output_scale`` that is FP8: rounded to the type of
    ``query`` first, as attention without a quantisation is, then over the scale, saturated. NaN stays NaN."""
    if output_scale is not None:
        value = value.to(query.dtype.element_ty).to(tl.float32) / tl.load(output_scale)
        value = tl.clamp(value, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return value.to(output.dtype.element_ty)


@triton.jit
def _decode_kernel(
    query, key, value, output, key_cache, value_cache, block_table, seq_lens, slot_mapping,
    partial, stats, counters,
    SCALE_LOG2: tl.constexpr, Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr,
    O_STRIDE: tl.constexpr, TABLE_STRIDE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    TILE: tl.constexpr, MIN_CHUNK: tl.constexpr, SPLITS: tl.constexpr, output_scale=None,
):  # fmt: skip
    """Grid (padded batch, KV_HEADS, SPLITS). ROWS: the group's heads, padded to what ``tl.dot`` takes."""
    request = tl.program_id(0).to(tl.int64)
    head, split = tl.program_id(1), tl.program_id(2)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIM)
    in_dim = dims < HEAD_DIM
    in_row = (rows < GROUP)[:, None] & in_dim[None, :]
    q_at = (head * GROUP + rows)[:, None] * HEAD_DIM + dims[None, :]
    # What needs no length is asked for together with the length, and nobody returns early: a load is not moved above
    # a branch, and each that waits for another one costs this kernel a tenth of its time at batch 1.
    seq_len = tl.load(seq_lens + request)
    q = tl.load(query + request * Q_STRIDE + q_at, mask=in_row, other=0.0)
    new_key = tl.load(key + request * K_STRIDE + head * HEAD_DIM + dims, mask=in_dim, other=0.0)
    new_value = tl.load(value + request * V_STRIDE + head * HEAD_DIM + dims, mask=in_dim, other=0.0)
    slot = tl.load(slot_mapping + request)
    out_at = output + request * O_STRIDE + q_at
    past = tl.maximum(seq_len - 1, 0)  # positions in the cache; the new token comes on top
    # Whole tiles for each program, and none that gets less than MIN_CHUNK while another has more. Programs beyond
    # the active ones find no position, and padding (length 0) is nobody's.
    chunk = tl.maximum(tl.cdiv(tl.cdiv(past, SPLITS), TILE) * TILE, MIN_CHUNK)
    active = tl.maximum(tl.cdiv(past, chunk), 1)

    top = tl.full([ROWS], float("-inf"), tl.float32)  # running maximum
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    stop = tl.minimum(past, (split + 1) * chunk)
    for start in range(split * chunk, stop, TILE):
        position = start + tl.arange(0, TILE)
        inside = position < stop
        block = tl.load(
            block_table + request * TABLE_STRIDE + position // BLOCK_SIZE, mask=inside, other=0
        ).to(tl.int64)
        slots = block * BLOCK_SIZE + position % BLOCK_SIZE
        at = (slots * KV_HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
        wanted = inside[:, None] & in_dim[None, :]
        k = tl.load(key_cache + at, mask=wanted, other=0.0)  # (TILE, DIM)
        v = tl.load(value_cache + at, mask=wanted, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * SCALE_LOG2
        scores = tl.where(inside[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(weights, axis=1)
        acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = higher

    if split == 0:  # the new token, and its place in the cache
        own = tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], axis=1) * SCALE_LOG2
        own = tl.where(seq_len > 0, own, 0.0)  # padding's own query may be NaN
        higher = tl.maximum(top, own)
        fade, own = tl.exp2(top - higher), tl.exp2(own - higher)
        total = total * fade + own
        acc = acc * fade[:, None] + own[:, None] * new_value.to(tl.float32)[None, :]
        top = higher
        if slot >= 0:
            kv_at = (slot * KV_HEADS + head) * HEAD_DIM + dims
            tl.store(key_cache + kv_at, new_key, mask=in_dim)
            tl.store(value_cache + kv_at, new_value, mask=in_dim)

    if SPLITS == 1 or ((active == 1) & (split == 0)):
        mixed = tl.where(seq_len > 0, acc / total[:, None], 0.0)
        tl.store(out_at, as_output(mixed, query, output, output_scale), mask=in_row)
    if SPLITS > 1 and ((active > 1) & (split < active)):
        pair = request * KV_HEADS + head
        at = rows[:, None] * DIM + dims[None, :]
        mine = pair * SPLITS + split
        tl.store(partial + mine * ROWS * DIM + at, acc)
        tl.store(stats + mine * 2 * ROWS + rows, top)
        tl.store(stats + mine * 2 * ROWS + ROWS + rows, total)
        tl.debug_barrier()  # all threads' stores come before the release below
        finished = tl.atomic_add(counters + pair, 1, sem="acq_rel")
        if finished == active - 1:
            tl.store(counters + pair, 0)  # ready for the next launch
            top = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, DIM], tl.float32)
            # In order, whoever came last: the same bits each time. Unrolled: the loads are under way together.
            for other in tl.static_range(SPLITS):
                there, theirs = tl.zeros([ROWS], tl.int32) + other < active, pair * SPLITS + other
                stat = stats + theirs * 2 * ROWS + rows
                part = tl.load(
                    partial + theirs * ROWS * DIM + at, mask=there[:, None], other=0.0, cache_modifier=".cg"
                )
                part_top = tl.load(stat, mask=there, other=float("-inf"), cache_modifier=".cg")
                part_total = tl.load(stat + ROWS, mask=there, other=0.0, cache_modifier=".cg")
                higher = tl.maximum(top, part_top)
                fade, part_fade = tl.exp2(top - higher), tl.exp2(part_top - higher)
                total = total * fade + part_total * part_fade
                acc = acc * fade[:, None] + part * part_fade[:, None]
                top = higher
            tl.store(out_at, as_output(acc / total[:, None], query, output, output_scale), mask=in_row)


@triton.jit
def _decode_fp8_kernel(
    query, key, value, output, key_cache, value_cache, block_table, seq_lens, slot_mapping,
    partial, stats, counters, output_scale,
    SCALE_LOG2: tl.constexpr, Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr,
    O_STRIDE: tl.constexpr, TABLE_STRIDE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    TILE: tl.constexpr, MIN_CHUNK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """With ``output_scale``, one float32 number. A kernel of its own: the ordinary launch is given nothing more."""
    _decode_kernel(
        query, key, value, output, key_cache, value_cache, block_table, seq_lens, slot_mapping,
        partial, stats, counters,
        SCALE_LOG2, Q_STRIDE, K_STRIDE, V_STRIDE, O_STRIDE, TABLE_STRIDE, KV_HEADS, GROUP,
        HEAD_DIM, BLOCK_SIZE, ROWS, DIM, TILE, MIN_CHUNK, SPLITS, output_scale,
    )  # fmt: skip


_launch = CachedLaunch(_decode_kernel, num_warps=NUM_WARPS, num_stages=NUM_STAGES)
_launch_fp8 = CachedLaunch(_decode_fp8_kernel, num_warps=NUM_WARPS, num_stages=NUM_STAGES)


def paged_attention_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: PagedMetadata,
    output: Tensor,
    scale: float,
    output_scale: Tensor | None = None,
) -> None:
    """Writes the new keys and values and attends, for a batch with one new token a request.

    Token i belongs to row i of ``seq_lens``, ``block_table`` and ``slot_mapping``. ``output`` must have
    contiguous heads; it is FP8 where there is an ``output_scale``. Accumulates in float32; float32 inputs
    are multiplied in float32, not TF32. Launches on one stream at a time: a divided context is combined
    through a workspace that all launches share.

    Raises:
        ServingError: the first launch of a kind that needs a workspace stands inside a recording.
    """
    if output_scale is not None:
        check_shapes(query, key, value, key_cache, value_cache, metadata, output, output_scale)
        whole = with_whole_heads(query), with_whole_heads(key), with_whole_heads(value)
        _launch_fp8(*_launch_of(*whole, key_cache, value_cache, metadata, output, scale, output_scale))
        return
    table, slots = metadata.block_table, metadata.slot_mapping
    layout = (
        query.shape, query.stride(), query.dtype, key.shape, key.stride(), key.dtype, value.shape,
        value.stride(), value.dtype, output.shape, output.stride(), output.dtype, key_cache.shape,
        key_cache.dtype, value_cache.shape, value_cache.dtype, table.shape, slots.shape, scale,
        query.get_device(),
    )  # fmt: skip
    plan = _plans.get(layout)
    if plan is not None:
        grid, launch, workspace, constants = plan
        pointers = (
            query.data_ptr(), key.data_ptr(), value.data_ptr(), output.data_ptr(), key_cache.data_ptr(),
            value_cache.data_ptr(), table.data_ptr(), metadata.seq_lens.data_ptr(), slots.data_ptr(),
        )  # fmt: skip
        a, b, c, d, e, f, g, h, i = pointers
        if not (a | b | c | d | e | f | g | h | i) & 15:
            launch(grid, current_raw_stream(layout[-1]), (*pointers, *(workspace or (d, d, d)), *constants))
            return
    check_shapes(query, key, value, key_cache, value_cache, metadata, output)
    _plans[layout] = _launch_and_plan(query, key, value, key_cache, value_cache, metadata, output, scale)


#: By layout: grid, direct launch, addresses of the workspace, constants. None where there is no
#: direct launch. Looking this up is all that the host does for a layer, besides launching.
_plans: dict[tuple[Any, ...], tuple[Any, ...] | None] = {}


def _launch_and_plan(
    query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor,
    metadata: PagedMetadata, output: Tensor, scale: float,
) -> tuple[Any, ...] | None:  # fmt: skip
    whole = with_whole_heads(query), with_whole_heads(key), with_whole_heads(value)
    grid, tensors, numbers, constants = _launch_of(*whole, key_cache, value_cache, metadata, output, scale)
    _launch(grid, tensors, numbers, constants)
    workspace = tensors[-3:] if grid[2] > 1 else ()
    direct = _launch.prepared(tensors, constants)
    if direct is None or whole[0] is not query or whole[1] is not key or whole[2] is not value:
        return None
    return grid, direct, tuple(tensor.data_ptr() for tensor in workspace), constants


def _launch_of(
    query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor,
    metadata: PagedMetadata, output: Tensor, scale: float, output_scale: Tensor | None = None,
) -> Launch:  # fmt: skip
    """The launch of ``_launch``, or with ``output_scale`` of ``_launch_fp8``; heads lie one after the other."""
    batch, heads, head_dim = query.shape
    kv_heads, block_size, table = key_cache.shape[2], key_cache.shape[1], metadata.block_table
    group = heads // kv_heads
    rows, dim = max(16, power_of_2(group)), max(16, power_of_2(head_dim))
    splits = num_splits(batch * kv_heads, table.shape[1] * block_size, query.get_device())
    workspace = _workspace(query.device, rows, dim) if splits > 1 else (output, output, output)
    tensors = (
        query, key, value, output, key_cache, value_cache, table, metadata.seq_lens, metadata.slot_mapping,
        *workspace,
    )  # fmt: skip
    constants = (
        scale * LOG2_E, *map(row_stride, (query, key, value)), row_stride(output), table.stride(0), kv_heads,
        group, head_dim, block_size, rows, dim, TILE, MIN_CHUNK, splits,
    )  # fmt: skip
    return (batch, kv_heads, splits), *with_scale(tensors, (), constants, output_scale)


def with_scale(
    tensors: tuple[Tensor, ...],
    numbers: tuple[int, ...],
    constants: tuple[Any, ...],
    output_scale: Tensor | None,
) -> tuple[tuple[Tensor, ...], tuple[int, ...], tuple[Any, ...]]:
    """Arguments of a kernel that takes the scale among its tensors, or of one that has None behind its constants."""
    if output_scale is None:
        return tensors, numbers, (*constants, None)
    return (*tensors, output_scale), numbers, constants


def prepared_decode(
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
) -> Callable[[], None] | None:
    """:func:`paged_attention_decode` with these very tensors at each call; None where it cannot be prepared.

    Launches once. What the tensors hold may change, and where they lie may not.
    """
    check_shapes(query, key, value, key_cache, value_cache, metadata, output, output_scale)
    if any(with_whole_heads(tensor) is not tensor for tensor in (query, key, value)):
        return None  # they are copied at each step
    launch = _launch if output_scale is None else _launch_fp8
    given = query, key, value, key_cache, value_cache, metadata, output, scale, output_scale
    return launch.fixed(*_launch_of(*given), stream)


def num_splits(programs: int, max_context: int, device_index: int) -> int:
    """Over how many programs a request's context may be divided: 1 when the batch fills the device."""
    wanted = _programs_wanted(device_index)
    return splits_for(programs, max_context, chunk=MIN_CHUNK, most=MAX_SPLITS, wanted=wanted)


@cache
def _programs_wanted(device_index: int) -> int:
    if device_index < 0:
        return _INTERPRETER_PROGRAMS
    return PROGRAMS_A_PROCESSOR * torch.cuda.get_device_properties(device_index).multi_processor_count


@cache
def _workspace(device: torch.device, rows: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Partial sums, their maxima and totals, and counters that each launch leaves at zero.

    Allocated once and kept: recorded graphs hold the addresses. Its size covers every batch, since
    ``num_splits`` keeps the number of programs below that of a full device.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ServingError(
            "the decode kernel's first launch stands inside a CUDA graph capture, where its workspace cannot "
            "be zeroed; run the model once before (cudagraph_num_of_warmups=1 or more)"
        )
    programs = _programs_wanted(device.index if device.index is not None else -1)
    return (
        torch.empty(programs * rows * dim, dtype=torch.float32, device=device),
        torch.empty(programs * 2 * rows, dtype=torch.float32, device=device),
        torch.zeros(programs, dtype=torch.int32, device=device),
    )


@cache
def power_of_2(number: int) -> int:
    return triton.next_power_of_2(number)


def row_stride(x: Tensor) -> int:
    """Numbers between two tokens' rows; of one row alone the stride means nothing and is made up."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1] * x.shape[2]


def with_whole_heads(x: Tensor) -> Tensor:
    """``x`` (tokens, heads, head_dim) itself if its heads lie one after the other, else a copy."""
    _, inner, last = x.stride()
    return x if last == 1 and (inner == x.shape[2] or x.shape[1] == 1) else x.contiguous()
