"""Random batches over a paged cache, a dense float64 reference, and checks that every form must pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from cgkit.serving.attention import AttentionMetadata, build_metadata
from cgkit.serving.kv_cache import BlockAllocator, blocks_needed

#: Largest allowed error by dtype, for standard normal inputs: a few roundings of the inputs' precision.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass
class Case:
    """One layer's step: inputs (padded with NaN), caches that hold the past, and what must come out."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_cache: Tensor
    value_cache: Tensor
    metadata: AttentionMetadata
    output: Tensor
    scale: float
    expected: Tensor  # (max_tokens, heads, head_dim) float64
    expected_key_cache: Tensor
    expected_value_cache: Tensor


def make_case(
    query_lens: list[int],
    seq_lens: list[int],
    *,
    block_size: int = 16,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 16,
    padded_reqs: int = 0,
    padded_tokens: int = 0,
    extra_blocks: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    """``padded_*``: rows and tokens on top of the real ones; ``extra_blocks``: table columns on top."""
    rng = torch.Generator().manual_seed(seed)
    tokens, reqs = sum(query_lens), len(query_lens)
    needed = [blocks_needed(n, block_size) for n in seq_lens]
    allocator = BlockAllocator(sum(needed) + 4)
    order = (torch.randperm(allocator.num_blocks - 1, generator=rng) + 1).tolist()
    blocks = [[order.pop() for _ in range(n)] for n in needed]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng).to(dtype)

    keys = [normal(n, kv_heads, head_dim) for n in seq_lens]
    values = [normal(n, kv_heads, head_dim) for n in seq_lens]
    # Whatever is not visible is garbage, and large: it must not shine through.
    shape = (allocator.num_blocks, block_size, kv_heads, head_dim)
    caches = [torch.full(shape, 1000.0, dtype=dtype) for _ in range(2)]
    for cache in caches:
        cache[0] = 0
    after = [cache.clone() for cache in caches]
    for new, total, owned, *histories in zip(query_lens, seq_lens, blocks, keys, values):
        where = torch.arange(total)
        slots = torch.tensor(owned)[where // block_size] * block_size + where % block_size
        for cache, done, history in zip(caches, after, histories):
            cache.view(-1, kv_heads, head_dim)[slots[: total - new]] = history[: total - new]
            done.view(-1, kv_heads, head_dim)[slots] = history

    query = torch.full((tokens + padded_tokens, kv_heads * group, head_dim), torch.nan, dtype=dtype)
    key = torch.full((tokens + padded_tokens, kv_heads, head_dim), torch.nan, dtype=dtype)
    value = key.clone()
    query[:tokens] = normal(tokens, kv_heads * group, head_dim)
    if tokens:
        key[:tokens] = torch.cat([k[total - new :] for k, new, total in zip(keys, query_lens, seq_lens)])
        value[:tokens] = torch.cat([v[total - new :] for v, new, total in zip(values, query_lens, seq_lens)])
    scale = 0.7 * head_dim**-0.5
    expected = torch.zeros(query.shape, dtype=torch.float64)
    start = 0
    for k, v, new in zip(keys, values, query_lens):
        expected[start : start + new] = dense_attention(query[start : start + new], k, v, scale)
        start += new
    metadata = build_metadata(
        query_lens,
        seq_lens,
        blocks,
        block_size,
        max_reqs=max(reqs + padded_reqs, 1),
        max_tokens=tokens + padded_tokens,
        max_blocks_per_req=max(needed, default=1) + extra_blocks,
        device=device,
    )
    on = lambda x: x.to(device)  # noqa: E731
    return Case(
        *map(on, (query, key, value, *caches)),
        metadata,
        torch.full_like(query, torch.nan, device=device),
        scale,
        expected,
        *after,
    )


def dense_attention(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Causal GQA in float64, one head and one query at a time; the last query is at the last key."""
    new, heads, head_dim = query.shape
    total, kv_heads, _ = keys.shape
    q, k, v = query.double(), keys.double(), values.double()
    out = torch.zeros(new, heads, head_dim, dtype=torch.float64)
    for i in range(new):
        seen = total - new + i + 1
        for head in range(heads):
            shared = head // (heads // kv_heads)
            weights = torch.softmax(scale * k[:seen, shared] @ q[i, head], dim=0)
            out[i, head] = weights @ v[:seen, shared]
    return out


def assert_right(case: Case) -> None:
    """Output and caches are as expected: close where computed, exact where copied, zeros at padding."""
    output = case.output.cpu().double()
    error = (output - case.expected).abs().max().item() if output.numel() else 0.0
    assert error <= TOLERANCE[case.output.dtype], f"error {error} in {case.output.dtype}"
    tokens = case.metadata.num_tokens
    assert torch.equal(output[tokens:], torch.zeros_like(output[tokens:]))
    assert_caches(case)


def assert_caches(case: Case) -> None:
    """The new tokens stand in their slots and nothing else has changed (the null block stays zero)."""
    assert torch.equal(case.key_cache.cpu(), case.expected_key_cache)
    assert torch.equal(case.value_cache.cpu(), case.expected_value_cache)


def arguments(case: Case) -> tuple:
    """What :func:`cgkit.kernels.attend` takes."""
    return (
        case.query, case.key, case.value, case.key_cache, case.value_cache, case.metadata, case.output,
        case.scale,
    )  # fmt: skip


@st.composite
def cases(draw: st.DrawFn, decode: bool = False, max_len: int = 40, **fixed: object) -> Case:
    """Batches of 0 to 4 requests with random lengths, blocks, groups and padding."""
    lengths = draw(st.lists(st.integers(1, max_len), min_size=1 if decode else 0, max_size=4))
    news = [1 if decode else draw(st.integers(1, length)) for length in lengths]
    padded_reqs = draw(st.integers(0, 3))
    few = 0 if lengths else 1
    return make_case(
        news,
        lengths,
        block_size=draw(st.sampled_from([1, 3, 8, 16])),
        kv_heads=draw(st.sampled_from([1, 3])),
        group=draw(st.sampled_from([1, 3, 4])),
        head_dim=draw(st.sampled_from([8, 20, 32])),
        padded_reqs=padded_reqs,
        # In a decode batch a padded token has a padded request.
        padded_tokens=padded_reqs if decode else draw(st.integers(few, 5)),
        extra_blocks=draw(st.integers(0, 2)),
        seed=draw(st.integers(0, 2**16)),
        **fixed,
    )
