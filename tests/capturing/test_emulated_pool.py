"""The pool: bytes are lent to one owner at a time, come back, and are merged."""

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cgkit.capturing.emulated import EmulatedPlatform
from cgkit.capturing.emulated_pool import GRANULE, EmulatedPool

SENTINEL_IS_THERE = {
    torch.float32: torch.isnan,
    torch.float64: torch.isnan,
    torch.bfloat16: torch.isnan,
    torch.float16: torch.isnan,
    torch.complex64: torch.isnan,
    torch.float8_e4m3fn: lambda t: t.float().isnan(),
    torch.bool: lambda t: t,
    torch.uint8: lambda t: t == 0x5A,
    torch.int8: lambda t: t == 0x5A,
    torch.int32: lambda t: t == 0x5A5A5A5A,
    torch.int64: lambda t: t == 0x5A5A5A5A5A5A5A5A,
}


@pytest.mark.parametrize("dtype", SENTINEL_IS_THERE)
def test_new_memory_holds_the_sentinel(dtype):
    pool = EmulatedPool()
    pool.tensor((64,), (1,), torch.uint8).zero_()  # leaves zeros behind
    tensor = pool.tensor((3, 5), (5, 1), dtype)
    assert SENTINEL_IS_THERE[dtype](tensor).all()
    assert tensor.data_ptr() % 64 == 0 and tensor.dtype is dtype


def test_memory_returns_with_the_last_view():
    pool = EmulatedPool()
    tensor = pool.tensor((100, 2), (2, 1), torch.float32)
    view = tensor[50:].T
    assert pool.bytes() == (1024, 1024)
    del tensor
    gc.collect()
    assert pool.bytes() == (1024, 1024)
    del view
    gc.collect()
    assert pool.bytes() == (1024, 0) and pool.peak_allocated == 1024
    pool.reset_peak()
    assert pool.peak_allocated == 0


def test_a_weak_tensor_shows_the_bytes_and_owns_nothing():
    pool = EmulatedPool()
    tensor = pool.tensor((4, 6), (6, 1), torch.float32)
    part = tensor[1:, ::2]
    weak = pool.weak(part)
    assert weak.data_ptr() == part.data_ptr() and weak.stride() == part.stride() and weak.shape == part.shape
    tensor.fill_(3)
    assert (weak == 3).all() and pool.holds(weak)
    del tensor, part
    gc.collect()
    assert pool.bytes().allocated == 0
    again = pool.tensor((4, 6), (6, 1), torch.float32)
    again.fill_(8)
    assert (weak == 8).all()  # the memory was lent again


def test_weak_ref_keeps_foreign_tensors_and_structure():
    platform = EmulatedPlatform()
    pool, foreign = platform.new_pool(), torch.ones(3)
    inside = pool.tensor((3,), (1,), torch.float32)
    value = {"a": (inside, foreign), "b": [foreign[1:], 7, None]}
    weak = platform.weak_ref(value, pool)
    assert weak["a"][1] is foreign and weak["b"][0].data_ptr() == foreign.data_ptr() + 4
    assert weak["b"][1:] == [7, None]
    assert weak["a"][0] is not inside and weak["a"][0].data_ptr() == inside.data_ptr()
    del value, inside
    gc.collect()
    assert platform.pool_bytes(pool).allocated == 0


def test_nothing_dangles_after_the_pool_is_gone():
    pool = EmulatedPool()
    strong = pool.tensor((1000,), (1,), torch.float32)
    weak = pool.weak(strong)
    strong.fill_(4)
    pool.free()
    del pool, strong
    gc.collect()
    junk = [torch.zeros(1000) for _ in range(50)]
    assert (weak == 4).all() and len(junk) == 50


def test_large_to_small_reserves_less_than_small_to_large():
    weight = torch.ones(256, 64)

    def reserved(sizes):
        platform = EmulatedPlatform()
        pool = platform.new_pool()
        for n in sizes:
            x = torch.ones(n, 64)
            _, y = platform.record(lambda x=x: (x.repeat(1, 4).relu() @ weight).relu(), pool)
            del y
        return platform.pool_bytes(pool).reserved

    sizes = list(range(16, 129, 16))
    alone = reserved(sizes[-1:])
    assert reserved(sizes[::-1]) == alone < 0.5 * reserved(sizes)


def test_a_rollback_spares_what_was_there_before():
    pool = EmulatedPool()
    before = pool.tensor((128,), (1,), torch.float32)
    mark = pool.mark()
    after = [pool.tensor((n,), (1,), torch.float32) for n in (128, 256)]
    pool.rollback(mark)
    assert pool.bytes() == (512, 512) and pool.holds(before) and not any(map(pool.holds, after))
    del after
    gc.collect()
    assert pool.bytes() == (512, 512)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5000)), min_size=1, max_size=60))
def test_owners_never_share_bytes_and_accounts_add_up(steps):
    """Laws: each owner's bytes are its own; allocated = sum of granules; what is free is merged."""
    pool, owners = EmulatedPool(), []
    largest, total = 0, 0
    for number, (take, amount) in enumerate(steps):
        if take or not owners:
            tensor = pool.tensor((amount,), (1,), torch.int32)
            owners.append((number, tensor.fill_(number)))
            largest = max(largest, amount)
            total += 1
            del tensor
        else:
            owners.pop(amount % len(owners))
        assert all((tensor == mine).all() for mine, tensor in owners)
        bytes_now = pool.bytes()
        assert bytes_now.allocated == sum(-(-t.numel() * 4 // GRANULE) * GRANULE for _, t in owners)
        assert bytes_now.allocated <= pool.peak_allocated <= bytes_now.reserved
    owners.clear()
    reserved = pool.bytes().reserved
    assert pool.bytes().allocated == 0
    whole = pool.tensor((largest,), (1,), torch.int32)  # fits only if neighbours were merged again
    assert pool.bytes().reserved == reserved and whole.numel() == largest
