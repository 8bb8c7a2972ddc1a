"""The block allocator and the paged cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cgkit.errors import ServingError
from cgkit.serving.kv_cache import BlockAllocator, PagedKVCache, attention_layer_name, blocks_needed


@given(st.integers(2, 20), st.lists(st.integers(0, 6), max_size=30))
def test_blocks_are_never_handed_out_twice_nor_lost(num_blocks: int, wishes: list[int]) -> None:
    allocator, held = BlockAllocator(num_blocks), []
    for wish in wishes:
        if wish <= allocator.num_free:
            held.append(allocator.alloc(wish))
        else:
            with pytest.raises(ServingError, match="full"):
                allocator.alloc(wish)
            allocator.free(held.pop(0) if held else [])
        taken = [block for blocks in held for block in blocks]
        assert len(set(taken)) == len(taken) == num_blocks - 1 - allocator.num_free
        assert all(0 < block < num_blocks for block in taken)
    for blocks in held:
        allocator.free(blocks)
    assert sorted(allocator.alloc(num_blocks - 1)) == list(range(1, num_blocks))


@pytest.mark.parametrize(
    "wrong", [lambda b: [*b, b[0]], lambda b: [0], lambda b: [*b, 9], lambda b: [b[0], 5]]
)
def test_what_is_not_handed_out_cannot_be_freed(wrong: object) -> None:
    allocator = BlockAllocator(8)
    blocks = allocator.alloc(3)
    with pytest.raises(ServingError, match="handed out"):
        allocator.free(wrong(blocks))  # type: ignore[operator]
    assert allocator.num_free == 4
    allocator.free(blocks)
    with pytest.raises(ServingError, match="handed out"):
        allocator.free(blocks)


def test_a_full_cache_says_what_was_wanted_and_takes_nothing() -> None:
    allocator = BlockAllocator(4)
    allocator.alloc(2)
    with pytest.raises(ServingError, match="2 blocks wanted, 1 of 3 free"):
        allocator.alloc(2)
    assert allocator.num_free == 1


def test_the_tensors_of_each_layer() -> None:
    cache = PagedKVCache(2, 5, 4, 3, 8, torch.bfloat16)
    assert list(cache.caches) == [attention_layer_name(0), attention_layer_name(1)]
    tensors = [t for pair in cache.caches.values() for t in pair]
    assert len({t.data_ptr() for t in tensors}) == 4
    assert all(t.shape == (5, 4, 3, 8) and t.dtype is torch.bfloat16 and not t.any() for t in tensors)
    assert cache.num_bytes == 4 * 5 * 4 * 3 * 8 * 2
    assert cache.max_tokens == 16
    assert "4 blocks free" in repr(cache)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_layers": 0},
        {"num_blocks": 1},
        {"block_size": 0},
        {"layer_names": ["a", "a"]},
        {"layer_names": ["a"]},
    ],
)
def test_bad_sizes(wrong: dict) -> None:
    sizes = {"num_layers": 2, "num_blocks": 4, "block_size": 4, "num_kv_heads": 1, "head_dim": 8}
    with pytest.raises(ServingError, match=next(iter(wrong))):
        PagedKVCache(**{**sizes, **wrong})


@given(st.integers(0, 1000), st.integers(1, 64))
def test_blocks_needed(tokens: int, block_size: int) -> None:
    blocks = blocks_needed(tokens, block_size)
    assert (blocks - 1) * block_size < tokens <= blocks * block_size or tokens == blocks == 0
