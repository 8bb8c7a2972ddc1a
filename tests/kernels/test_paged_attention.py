"""The torch form of attention over a paged cache."""

from __future__ import annotations

import sys
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from cgkit.errors import ServingError
from cgkit.kernels import attend, paged_attention, paged_attention_torch, write_kv, write_kv_torch
from tests.kernels import fp8_attention
from tests.kernels.cases import Case, arguments, assert_right, cases, make_case

MIXED = {"query_lens": [1, 7, 3, 1], "seq_lens": [20, 7, 40, 1]}


@settings(max_examples=60, deadline=None)
@given(cases())
def test_random_batches(case: Case) -> None:
    attend(*arguments(case))
    assert_right(case)


@settings(max_examples=30, deadline=None)
@given(cases(decode=True))
def test_random_decode_batches(case: Case) -> None:
    attend(*arguments(case))
    assert_right(case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    case = make_case(**MIXED, dtype=dtype, head_dim=64, kv_heads=3, group=3, padded_tokens=2)
    attend(*arguments(case))
    assert_right(case)


def test_the_two_steps_alone_give_the_same() -> None:
    case = make_case(**MIXED, padded_reqs=1, padded_tokens=3)
    write_kv(case.key, case.value, case.key_cache, case.value_cache, case.metadata.slot_mapping)
    paged_attention(case.query, case.key_cache, case.value_cache, case.metadata, case.output, case.scale)
    assert_right(case)


def test_chunks_of_tokens_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, chunked = (make_case(**MIXED, padded_tokens=3) for _ in range(2))
    attend(*arguments(whole))
    monkeypatch.setattr(sys.modules["cgkit.kernels.paged_attention"], "GATHER_NUMBERS", 1)
    attend(*arguments(chunked))
    assert torch.equal(whole.output, chunked.output)


def test_a_prompt_in_chunks_equals_the_prompt_at_once() -> None:
    whole = make_case([30], [30], seed=5)
    attend(*arguments(whole))
    key_cache, value_cache = torch.zeros_like(whole.key_cache), torch.zeros_like(whole.value_cache)
    rows = []
    for start, stop in [(0, 11), (11, 29), (29, 30)]:
        part = make_case([stop - start], [stop], seed=5)
        part.metadata.block_table = whole.metadata.block_table
        part.metadata.slot_mapping = whole.metadata.slot_mapping[start:stop]
        output = torch.empty_like(whole.query[start:stop])
        attend(
            whole.query[start:stop], whole.key[start:stop], whole.value[start:stop], key_cache,
            value_cache, part.metadata, output, whole.scale,
        )  # fmt: skip
        rows.append(output)
    torch.testing.assert_close(torch.cat(rows), whole.output)


def test_host_numbers_change_nothing() -> None:
    case, other = (make_case(**MIXED, padded_reqs=2, padded_tokens=3) for _ in range(2))
    numbers = {
        f.name: 1 for f in fields(other.metadata) if f.name.startswith("num_") or f.name.startswith("max_")
    }
    assert len(numbers) == 4
    other.metadata = replace(other.metadata, **numbers)
    attend(*arguments(case))
    attend(*arguments(other))
    assert torch.equal(case.output, other.output)


def test_one_recording_serves_every_batch_of_its_size() -> None:
    """What a recorder sees is a list of operators: those of one batch, run on another's buffers."""

    def step(*tensors: torch.Tensor) -> torch.Tensor:
        query, key, value, key_cache, value_cache, output, table, lens, starts, owner, slots = tensors
        metadata = replace(
            first.metadata,
            block_table=table,
            seq_lens=lens,
            query_start_loc=starts,
            token_to_req=owner,
            slot_mapping=slots,
        )
        attend(query, key, value, key_cache, value_cache, metadata, output, first.scale)
        return output

    def buffers(case: Case) -> list[torch.Tensor]:
        m = case.metadata
        return [
            case.query, case.key, case.value, case.key_cache, case.value_cache, case.output, m.block_table,
            m.seq_lens, m.query_start_loc, m.token_to_req, m.slot_mapping,
        ]  # fmt: skip

    same = {"block_size": 4}
    first = make_case([1, 1, 1, 1], [40, 8, 9, 30], **same, padded_reqs=0, padded_tokens=4)
    second = make_case([5, 1], [38, 27], **same, padded_reqs=2, padded_tokens=2)
    blocks = first.key_cache.shape[0]
    grow = lambda x: torch.cat([x, torch.full((blocks - len(x), *x.shape[1:]), 1000.0)])  # noqa: E731
    for name in ("key_cache", "value_cache", "expected_key_cache", "expected_value_cache"):
        setattr(second, name, grow(getattr(second, name)))
    assert [b.shape for b in buffers(first)] == [b.shape for b in buffers(second)]
    recorded = make_fx(step)(*buffers(first))
    recorded(*buffers(second))
    assert_right(second)


def test_nothing_is_read_on_the_host() -> None:
    """Under fake tensors any ``.item()`` or shape that depends on data raises."""
    case = make_case(**MIXED, padded_tokens=3)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        for f in fields(case):
            if isinstance(getattr(case, f.name), torch.Tensor):
                setattr(case, f.name, mode.from_tensor(getattr(case, f.name)))
        tensors = {
            f.name: mode.from_tensor(t)
            for f in fields(case.metadata)
            if isinstance(t := getattr(case.metadata, f.name), torch.Tensor)
        }
        case.metadata = replace(case.metadata, **tensors)
        attend(*arguments(case))


def test_heads_may_be_views_of_one_projection() -> None:
    case = make_case(**MIXED)
    heads, kv_heads = case.query.shape[1], case.key.shape[1]
    joined = torch.cat([case.query, case.key, case.value], dim=1)
    case.query, case.key, case.value = joined.split([heads, kv_heads, kv_heads], dim=1)
    assert not case.value.is_contiguous()
    attend(*arguments(case))
    assert_right(case)


def test_no_tokens() -> None:
    attend(*arguments(make_case([], [])))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: {"key": c.key[:-1]}, "num_kv_heads"),
        (lambda c: {"query": c.query[:, :-1], "output": c.output[:, :-1]}, "multiple"),
        (lambda c: {"value_cache": c.value_cache.double()}, "one dtype"),
        (lambda c: {"output": c.output[:-1]}, "cover"),
        (lambda c: {"output": c.output.transpose(1, 2).contiguous().transpose(1, 2)}, "contiguous"),
        (lambda c: {"key_cache": c.key_cache.transpose(1, 2).contiguous().transpose(1, 2)}, "contiguous"),
    ],
)
def test_what_does_not_fit_is_refused(change: object, says: str) -> None:
    case = make_case(**MIXED)
    before = case.key_cache.clone()
    with pytest.raises(ServingError, match=says):
        attend(*arguments(replace(case, **change(case))))  # type: ignore[operator]
    assert torch.equal(case.key_cache, before)


def test_a_slot_beyond_the_cache_raises() -> None:
    case = make_case([1], [1])
    with pytest.raises(IndexError):
        write_kv_torch(case.key, case.value, case.key_cache, case.value_cache, torch.tensor([10**6]))


def test_padding_of_all_rows_gives_zeros_whatever_the_null_block_is_read_for() -> None:
    case = make_case([], [], padded_reqs=3, padded_tokens=4)
    paged_attention_torch(
        case.query, case.key_cache, case.value_cache, case.metadata, case.output, case.scale
    )
    assert torch.equal(case.output, torch.zeros_like(case.output))


@settings(max_examples=30, deadline=None)
@given(cases(), st.sampled_from(fp8_attention.SCALES))
def test_random_batches_into_fp8(case: Case, scale: float) -> None:
    fp8_attention.check(case, scale, attend)


@pytest.mark.parametrize("scale", fp8_attention.SCALES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_into_fp8(dtype: torch.dtype, scale: float) -> None:
    case = make_case(**MIXED, dtype=dtype, head_dim=64, kv_heads=3, group=3, padded_tokens=2)
    fp8_attention.check(case, scale, attend)


def test_what_does_not_fit_fp8_is_refused() -> None:
    fp8_attention.check_refusals(make_case(**MIXED))
