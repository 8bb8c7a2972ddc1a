"""Named batches for the Triton kernels, run in the interpreter and on CUDA. Imports Triton."""

from __future__ import annotations

import torch

from cgkit.kernels.triton_decode import paged_attention_decode
from cgkit.kernels.triton_prefill import paged_attention_prefill, write_kv_triton
from tests.kernels import fp8_attention
from tests.kernels.cases import arguments, assert_right, make_case

#: name -> (lengths, keyword arguments of make_case)
DECODE = {
    "one token ever": ([1], {}),
    "longer than a tile": ([130, 64, 65, 1], {"group": 4, "head_dim": 64}),
    "padded": ([20, 3], {"padded_reqs": 3, "padded_tokens": 2, "extra_blocks": 3}),
    "a context over several programs": ([900], {"kv_heads": 1, "group": 3, "head_dim": 64}),
    "a wide group": ([40], {"kv_heads": 1, "group": 20, "head_dim": 80}),
    "all padding": ([], {"padded_reqs": 2, "padded_tokens": 2}),
}
#: name -> (new tokens, lengths, keyword arguments of make_case)
PREFILL = {
    "one request": ([37], [37], {}),
    "chunked": ([5, 30], [90, 70], {"group": 4, "head_dim": 64}),
    "mixed with decode": ([1, 40, 1, 2], [70, 40, 1, 33], {"group": 3, "head_dim": 32}),
    "padded": ([9, 1], [9, 66], {"padded_reqs": 4, "padded_tokens": 30}),
    "more rows than tokens": ([2], [2], {"padded_reqs": 9}),
    "all padding": ([], [], {"padded_reqs": 2, "padded_tokens": 40}),
}


def prefill(query, key, value, key_cache, value_cache, metadata, output, scale, output_scale=None) -> None:
    """Both launches of a batch of any lengths."""
    write_kv_triton(key, value, key_cache, value_cache, metadata.slot_mapping)
    paged_attention_prefill(query, key_cache, value_cache, metadata, output, scale, output_scale)


def run_decode(name: str, dtype: torch.dtype, device: str) -> None:
    lengths, options = DECODE[name]
    case = make_case([1] * len(lengths), lengths, dtype=dtype, device=device, **options)
    paged_attention_decode(*arguments(case))
    assert_right(case)


def run_prefill(name: str, dtype: torch.dtype, device: str) -> None:
    new, lengths, options = PREFILL[name]
    case = make_case(new, lengths, dtype=dtype, device=device, **options)
    prefill(*arguments(case))
    assert_right(case)


def run_decode_fp8(
    name: str, dtype: torch.dtype, device: str, scale: float, carried=lambda got, _: got
) -> None:
    lengths, options = DECODE[name]
    case = make_case([1] * len(lengths), lengths, dtype=dtype, device=device, **options)
    fp8_attention.check(case, scale, paged_attention_decode, carried)


def run_prefill_fp8(
    name: str, dtype: torch.dtype, device: str, scale: float, carried=lambda got, _: got
) -> None:
    new, lengths, options = PREFILL[name]
    case = make_case(new, lengths, dtype=dtype, device=device, **options)
    fp8_attention.check(case, scale, prefill, carried)
