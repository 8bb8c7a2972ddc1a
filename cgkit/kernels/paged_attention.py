"""Attention over a paged KV cache: the contract, the choice of form, and the torch form.

The operator behind the article's "切分算子：splitting_ops 与「铰链」" (splitting operators): the part of
a decode step whose work depends on lengths that no shape tells. The paged cache is that of Kwon et al.,
"Efficient Memory Management for Large Language Model Serving with PagedAttention" (SOSP 2023).

Shapes (``tokens`` counts all requests' new tokens, padding included, one request after the other):

    query, output   (tokens, num_heads, head_dim)
    key, value      (tokens, num_kv_heads, head_dim); num_heads is a multiple of num_kv_heads (GQA)
    caches          (num_blocks, block_size, num_kv_heads, head_dim), contiguous, one pair a layer
    slot            block * block_size + offset in the block; -1 for a token that is padding

Block 0 is the null block: no request owns it. The torch form sends writes of padding there, as zeros,
so that everything stays an index operation on tensors.

Every form is safe to record: launch sizes and shapes follow from the sizes of the buffers alone, and
lengths and block tables are read on the device. Nothing here reads ``num_reqs`` and its like.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from cgkit.errors import ServingError
from cgkit.kernels.fused_torch import FP8, static_fp8_quant_torch
from cgkit.torch_hooks import LaunchStream

#: The torch form gathers this many numbers of keys at a time (2 MiB in float32), and as many of values:
#: the best of 2**16 to 2**21 when it was measured, in prefill; more falls out of the CPU caches.
GATHER_NUMBERS = 1 << 19

_TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class PagedMetadata(Protocol):
    """What a kernel reads of :class:`cgkit.serving.AttentionMetadata` (which says what each holds)."""

    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    token_to_req: Tensor
    slot_mapping: Tensor
    decode_only: bool


def attend(
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
    """Writes the new keys and values into the cache and attends over it; ``output`` is filled.

    On CUDA: one launch if ``metadata.decode_only`` (and each token has a row in ``seq_lens``, which
    then is its request's), else two. Rows of padding become zeros.

    With ``output_scale`` (one float32 number on its device) ``output`` is float8_e4m3fn: what is computed otherwise,
    over the scale, saturated at +-448 (the article's "AttnFusionPass"). As many launches as without: a row is
    quantised where it is computed, written once, in 8 bits, and not read again. On a GPU without FP8 (before 8.9)
    the torch form serves.

    Raises:
        ServingError: shapes, dtypes or devices do not fit together.
    """
    if query.shape[0] == 0:
        return
    if not _use_triton(query, key_cache, output_scale):
        check_shapes(query, key, value, key_cache, value_cache, metadata, output, output_scale)
        write_kv_torch(key, value, key_cache, value_cache, metadata.slot_mapping)
        paged_attention_torch(query, key_cache, value_cache, metadata, output, scale, output_scale)
        return
    if metadata.decode_only and query.shape[0] <= metadata.seq_lens.shape[0]:
        _decode()(query, key, value, key_cache, value_cache, metadata, output, scale, output_scale)
    else:
        from cgkit.kernels.triton_prefill import paged_attention_prefill, write_kv_triton

        check_shapes(query, key, value, key_cache, value_cache, metadata, output, output_scale)
        write_kv_triton(key, value, key_cache, value_cache, metadata.slot_mapping)
        paged_attention_prefill(query, key_cache, value_cache, metadata, output, scale, output_scale)


def prepare_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: PagedMetadata,
    output: Tensor,
    scale: float,
    stream: LaunchStream | None,
    output_scale: Tensor | None = None,
) -> tuple[Callable[[], None], ...] | None:
    """:func:`attend` with these very arguments at each call, as callables without arguments, to be called in order.

    Tensors are read anew at each call and must stay where they are, those of ``metadata`` too; ``decode_only`` is
    taken for given. On CUDA each is one launch, kernel and parameters in place (and all kernels are launched once
    here, with what the tensors hold now). None where nothing can be prepared: a Triton of another version, heads that
    must be copied first.

    Raises:
        ServingError: as :func:`attend`.
    """
    if query.shape[0] == 0:
        return None
    if not _use_triton(query, key_cache, output_scale):
        kept = copy.copy(metadata)
        call = partial(attend, query, key, value, key_cache, value_cache, kept, output, scale, output_scale)
        call.how = "torch form, arguments bound"  # type: ignore[attr-defined]
        return (call,)
    if stream is None:
        return None
    given = query, key, value, key_cache, value_cache, metadata, output, scale, stream, output_scale
    if metadata.decode_only and query.shape[0] <= metadata.seq_lens.shape[0]:
        from cgkit.kernels.triton_decode import prepared_decode

        one = prepared_decode(*given)
        return None if one is None else (one,)
    from cgkit.kernels.triton_prefill import prepared_prefill

    return prepared_prefill(*given)


def write_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Writes row i of ``key`` and ``value`` into slot ``slot_mapping[i]``; -1 writes to no request's slot.

    ``slot_mapping`` (at least tokens,) int64. A slot beyond the cache raises IndexError on the CPU
    and is undefined on CUDA.
    """
    if _use_triton(key, key_cache):
        from cgkit.kernels.triton_prefill import write_kv_triton

        write_kv_triton(key, value, key_cache, value_cache, slot_mapping)
    else:
        write_kv_torch(key, value, key_cache, value_cache, slot_mapping)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: PagedMetadata,
    output: Tensor,
    scale: float,
) -> None:
    """Causal attention of every token over its request's cached tokens, its own included.

    The new keys and values are in the cache already (:func:`write_kv`). Token j of a request with q
    new tokens sees the first ``seq_len - q + j + 1`` positions. Padding gives zeros.
    """
    if query.shape[0] == 0:
        return
    if _use_triton(query, key_cache):
        from cgkit.kernels.triton_prefill import paged_attention_prefill

        paged_attention_prefill(query, key_cache, value_cache, metadata, output, scale)
    else:
        paged_attention_torch(query, key_cache, value_cache, metadata, output, scale)


@torch.no_grad()
def write_kv_torch(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """The torch form of :func:`write_kv`. Needs block 0 to be the null block.

    Padding writes zeros into slot 0 and not its own values: those may be NaN (a recorded piece that
    has not been replayed yet), and a NaN in the cache would come back through ``0 * NaN``.
    """
    tokens, kv_heads, head_dim = key.shape
    slots = slot_mapping[:tokens]
    real = (slots >= 0)[:, None, None]
    slots = slots.clamp(min=0)
    zero = key.new_zeros(())
    key_cache.view(-1, kv_heads, head_dim).index_copy_(0, slots, torch.where(real, key, zero))
    value_cache.view(-1, kv_heads, head_dim).index_copy_(0, slots, torch.where(real, value, zero))


@torch.no_grad()
def paged_attention_torch(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: PagedMetadata,
    output: Tensor,
    scale: float,
    output_scale: Tensor | None = None,
) -> None:
    """The torch form of :func:`paged_attention`: a gather per token over the block table's full width.

    With ``output_scale`` (one float32 number) ``output`` is FP8: each chunk is quantised as it is computed.

    One code for decode and prefill, recorded or not, hence equal bits. What a token may not see is
    gathered from slot 0 (one cached row, so short contexts cost little) and masked. The cost grows
    with ``tokens * max_blocks_per_req * block_size``: keep the block table no wider than needed.
    """
    tokens, heads, head_dim = query.shape
    _, block_size, kv_heads, _ = key_cache.shape
    keys = key_cache.view(-1, kv_heads * head_dim)
    values = value_cache.view(-1, kv_heads * head_dim)
    width = metadata.block_table.shape[1] * block_size
    grouped = query.reshape(tokens, kv_heads, heads // kv_heads, head_dim)
    zero, hidden = query.new_zeros(()), query.new_full((), -torch.inf)
    chunk = max(1, GATHER_NUMBERS // (width * kv_heads * head_dim))
    for start in range(0, tokens, chunk):
        stop = min(start + chunk, tokens)
        slots, seen = _visible_slots(metadata, start, stop, block_size)  # (chunk, width) each
        shape = (stop - start, width, kv_heads, head_dim)
        # The group's heads take the place of query positions: keys are never copied per head.
        attended = functional.scaled_dot_product_attention(
            grouped[start:stop],  # (chunk, kv_heads, group, head_dim)
            keys.index_select(0, slots.view(-1)).view(shape).transpose(1, 2),
            values.index_select(0, slots.view(-1)).view(shape).transpose(1, 2),
            attn_mask=torch.where(seen, zero, hidden)[:, None, None, :],
            scale=scale,
        )
        attended = attended.reshape(stop - start, heads, head_dim)
        # A row that sees nothing is padding; its query may be NaN.
        attended = torch.where(seen[:, :1, None], attended, zero)
        if output_scale is not None:
            attended = static_fp8_quant_torch(attended, output_scale)
        output[start:stop].copy_(attended)


def _visible_slots(metadata: PagedMetadata, start: int, stop: int, block_size: int) -> tuple[Tensor, Tensor]:
    """For tokens ``start..stop``: the slot of each position of the request (0 where the token may not
    look), and whether it may. Both (tokens, width), int32 and bool."""
    table, ends = metadata.block_table, metadata.query_start_loc
    device = table.device
    token = torch.arange(start, stop, dtype=torch.int32, device=device)
    request = metadata.token_to_req[start:stop]
    length = metadata.seq_lens.index_select(0, request)
    last = length - ends[1:].index_select(0, request) + token  # the token's own position
    last = torch.minimum(last, length - 1)  # a request of length 0 sees nothing
    last = torch.where(token < ends[-1], last, -1)  # nor does padding, whatever its request
    position = torch.arange(table.shape[1] * block_size, dtype=torch.int32, device=device)
    seen = position <= last[:, None]
    offsets = position[:block_size]
    slots = table.index_select(0, request)[:, :, None] * block_size + offsets
    return torch.where(seen, slots.view(seen.shape), 0), seen


def check_shapes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: PagedMetadata,
    output: Tensor,
    output_scale: Tensor | None = None,
) -> None:
    """Raises ServingError if the arguments of :func:`attend` do not fit together. Reads no values."""
    tokens, heads, head_dim = query.shape
    kv_heads = key_cache.shape[2]
    if key.shape != (tokens, kv_heads, head_dim) or value.shape != key.shape:
        raise ServingError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} must both be (tokens, num_kv_heads, "
            f"head_dim) = {(tokens, kv_heads, head_dim)}, from query {tuple(query.shape)} and the cache"
        )
    if heads % kv_heads or value_cache.shape != key_cache.shape or key_cache.shape[3] != head_dim:
        raise ServingError(
            f"query {tuple(query.shape)} does not fit caches {tuple(key_cache.shape)}, "
            f"{tuple(value_cache.shape)}: head sizes must be equal and heads a multiple of KV heads"
        )
    if output_scale is not None:
        _check_fp8(output, output_scale)
    written = output.dtype if output_scale is None else query.dtype
    if not query.dtype == key.dtype == value.dtype == written == key_cache.dtype == value_cache.dtype:
        raise ServingError(
            f"query {query.dtype}, key {key.dtype}, value {value.dtype}, output {output.dtype} and the KV "
            f"cache {key_cache.dtype}, {value_cache.dtype} must have one dtype: make the cache in the model's"
        )
    inner = output.stride()[1:]
    if inner != (head_dim, 1) or not (key_cache.is_contiguous() and value_cache.is_contiguous()):
        raise ServingError(
            f"output's heads (strides {output.stride()}) and the KV cache (strides {key_cache.stride()}, "
            f"{value_cache.stride()}) must be contiguous"
        )
    if output.shape != query.shape or metadata.slot_mapping.shape[0] < tokens:
        raise ServingError(
            f"output {tuple(output.shape)} and slot_mapping {tuple(metadata.slot_mapping.shape)} must cover "
            f"the {tokens} tokens of query {tuple(query.shape)}"
        )


def _check_fp8(output: Tensor, output_scale: Tensor) -> None:
    if output.dtype is not FP8:
        raise ServingError(f"output is {output.dtype}; with an output_scale it must be {FP8}")
    if (
        output_scale.dtype is not torch.float32
        or output_scale.numel() != 1
        or output_scale.device != output.device
    ):
        raise ServingError(
            f"output_scale ({output_scale.dtype}, {tuple(output_scale.shape)}, {output_scale.device}) must be one "
            f"float32 number on {output.device}, where the output is"
        )


@cache
def _has_fp8(device_index: int) -> bool:
    return torch.cuda.get_device_capability(device_index) >= (8, 9)


def _use_triton(query: Tensor, cache_tensor: Tensor, output_scale: Tensor | None = None) -> bool:
    """Triton on CUDA where it is installed and has the dtypes; the torch form everywhere else."""
    return (
        query.is_cuda
        and query.dtype in _TRITON_DTYPES
        and cache_tensor.shape[3] <= 256
        and _triton_installed()
        and (output_scale is None or _has_fp8(query.get_device()))
    )


@cache
def _decode() -> Callable[..., None]:
    """Triton is imported when the first kernel is needed; an import statement costs a look-up each time."""
    from cgkit.kernels.triton_decode import paged_attention_decode

    return paged_attention_decode


@cache
def _triton_installed() -> bool:
    return find_spec("triton") is not None
