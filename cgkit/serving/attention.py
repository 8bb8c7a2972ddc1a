"""Attention as a splitting operator, and what a step must tell it.

Implements the article's "切分算子：splitting_ops 与「铰链」" (splitting operators): the operator takes its
output as a parameter, so that the buffer is allocated in the recorded piece before it and keeps its
address, and it takes a layer's *name*, so that neither the KV cache nor lengths are in the graph: both
come from the forward context of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cgkit.errors import ServingError
from cgkit.forward_context import get_forward_context
from cgkit.kernels import attend
from cgkit.kernels.paged_attention import prepare_attend
from cgkit.serving.kv_cache import NULL_BLOCK, blocks_needed
from cgkit.splitting import register_op
from cgkit.splitting.prepare import ComingStep

KVCaches = Mapping[str, tuple[Tensor, Tensor]]


@dataclass(slots=True)
class AttentionMetadata:
    """What a step tells its attention operators: who owns which token, and where its keys lie.

    Tensors are read on the device; on a recorded path they are persistent buffers (or views of them)
    that are refilled in place, never replaced. They may be longer than the batch. Rows from
    ``num_reqs`` on are padding and must be filled as said here. The numbers are for the host only;
    on a recorded path they are frozen, and of them the kernels use ``decode_only`` alone.
    """

    block_table: Tensor  # (max_reqs, max_blocks_per_req) int32; unused entries: any block, e.g. 0
    seq_lens: Tensor  # (max_reqs,) int32, the new tokens included; padding: 0
    query_start_loc: Tensor  # (max_reqs + 1,) int32, first token of each; padding: the real tokens' number
    token_to_req: Tensor  # (max_tokens,) int32; padding: any row
    slot_mapping: Tensor  # (max_tokens,) int64, block * block_size + offset; padding: -1
    num_reqs: int
    num_tokens: int  # real ones
    max_query_len: int
    max_seq_len: int
    decode_only: bool  # every request has one new token, so token i is request i's
    kv_caches: KVCaches = field(default_factory=dict, repr=False)  # layer name -> (key, value) cache
    positions: Tensor | None = None  # (max_tokens,) of each token in its request; for rotary, not read here


def unified_attention_with_output(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, scale: float, layer_name: str
) -> None:
    """Writes ``key`` and ``value`` into the layer's cache and fills ``output`` with causal attention.

    ``query`` and ``output`` (tokens, num_heads, head_dim), ``key`` and ``value`` (tokens, num_kv_heads,
    head_dim). Without attention metadata (a run for tracing, warming up or measuring memory) the output
    is zeros and no cache is touched.

    Raises:
        ServingError: the metadata has no cache for ``layer_name``, or shapes do not fit.
        CgkitError: no forward context is set.
    """
    _attend(query, key, value, output, scale, layer_name)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    scale: float,
    layer_name: str,
    output_scale: Tensor | None = None,
) -> None:
    metadata = get_forward_context().attn_metadata
    if metadata is None:
        output.zero_()
        return
    try:
        key_cache, value_cache = metadata.kv_caches[layer_name]
    except KeyError:
        raise ServingError(
            f"no KV cache for layer {layer_name!r}; there are caches for {list(metadata.kv_caches)}: "
            "build PagedKVCache with layer_names=[...] as in the model"
        ) from None
    attend(query, key, value, key_cache, value_cache, metadata, output, scale, output_scale)


def _prepare_attention(
    coming: ComingStep,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    scale: float,
    layer_name: str,
    output_scale: Tensor | None = None,
) -> Sequence[Callable[[], None]] | None:
    """Either operator for a replay plan: the layer's cache and the step's buffers in place."""
    metadata = coming.metadata
    caches = getattr(metadata, "kv_caches", None)
    if type(caches) is not dict or layer_name not in caches:
        return None  # the operator says what is wrong; and nobody looks into another mapping for a cache made anew
    coming.fixed("decode_only")
    key_cache, value_cache = caches[layer_name]
    return prepare_attend(
        query, key, value, key_cache, value_cache, metadata, output, scale, coming.stream, output_scale
    )


register_op(
    "unified_attention_with_output",
    unified_attention_with_output,
    mutates_args=["output"],
    lookup_args=["layer_name"],
    prepare=_prepare_attention,
)


def unified_attention_with_fp8_output(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    scale: float,
    layer_name: str,
    output_scale: Tensor,
) -> None:
    """:func:`unified_attention_with_output` whose ``output`` is FP8: what it computes, over ``output_scale`` (one
    float32 number), saturated. A graph pass puts it in the place of attention and quantisation.

    As many launches as attention alone, and no buffer in the model's type: :func:`cgkit.kernels.attend` with its
    ``output_scale``.

    Raises:
        ServingError: as there; or shapes, types or devices do not fit.
    """
    _attend(query, key, value, output, scale, layer_name, output_scale)


register_op(
    "unified_attention_with_fp8_output",
    unified_attention_with_fp8_output,
    mutates_args=["output"],
    lookup_args=["layer_name"],
    prepare=_prepare_attention,
)


def attention(
    query: Tensor, key: Tensor, value: Tensor, layer_name: str, scale: float | None = None
) -> Tensor:
    """Attention for a model's forward: allocates the output and calls the splitting operator.

    ``scale`` is ``head_dim ** -0.5`` by default.
    """
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    torch.ops.cgkit.unified_attention_with_output(query, key, value, output, scale, layer_name)
    return output


def build_metadata(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    blocks: Sequence[Sequence[int]],
    block_size: int,
    *,
    max_reqs: int | None = None,
    max_tokens: int | None = None,
    max_blocks_per_req: int | None = None,
    kv_caches: KVCaches | None = None,
    device: torch.device | str = "cpu",
) -> AttentionMetadata:
    """Fresh metadata of one batch, padded to the given sizes: for notebooks and tests.

    ``blocks[r]`` are request r's blocks in order. (The runner fills persistent buffers instead.)

    Raises:
        ServingError: a request has more new tokens than tokens, or too few blocks.
    """
    num_reqs, num_tokens = len(query_lens), sum(query_lens)
    max_reqs, max_tokens = max_reqs or max(num_reqs, 1), max_tokens or num_tokens
    width = max_blocks_per_req or max(map(len, blocks), default=1)
    table = torch.full((max_reqs, width), NULL_BLOCK, dtype=torch.int32)
    lengths = torch.zeros(max_reqs, dtype=torch.int32)
    starts = torch.full((max_reqs + 1,), num_tokens, dtype=torch.int32)
    token_to_req = torch.zeros(max_tokens, dtype=torch.int32)
    positions = torch.zeros(max_tokens, dtype=torch.int64)
    slots = torch.full((max_tokens,), -1, dtype=torch.int64)
    start = 0
    for row, (new, total, owned) in enumerate(zip(query_lens, seq_lens, blocks)):
        if not 0 < new <= total or blocks_needed(total, block_size) > len(owned):
            raise ServingError(
                f"request {row}: {new} new tokens of {total} in {len(owned)} blocks of {block_size}: needs "
                f"one new token or more, no more than tokens, and {blocks_needed(total, block_size)} blocks"
            )
        span = slice(start, start + new)
        table[row, : len(owned)] = torch.tensor(owned, dtype=torch.int32)
        lengths[row], starts[row], token_to_req[span] = total, start, row
        where = torch.arange(total - new, total)
        positions[span] = where
        slots[span] = torch.tensor(owned)[where // block_size] * block_size + where % block_size
        start += new
    return AttentionMetadata(
        block_table=table.to(device),
        seq_lens=lengths.to(device),
        query_start_loc=starts.to(device),
        token_to_req=token_to_req.to(device),
        slot_mapping=slots.to(device),
        num_reqs=num_reqs,
        num_tokens=num_tokens,
        max_query_len=max(query_lens, default=0),
        max_seq_len=max(seq_lens, default=0),
        decode_only=all(new == 1 for new in query_lens),
        kv_caches=kv_caches or {},
        positions=positions.to(device),
    )
