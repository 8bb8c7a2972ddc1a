"""The Triton kernels: in the interpreter (a process of its own), and on CUDA."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cgkit.kernels.fused_torch import FP8
from tests.kernels.cases import Case, arguments, assert_right, cases, make_case
from tests.kernels.fp8_attention import SCALES, check
from tests.kernels.interpreter import run_interpreted

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
many = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.slow
def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_interpreted("interpreted.py")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_on_cuda(dtype: torch.dtype) -> None:
    from tests.kernels.checks import DECODE, run_decode

    for name in DECODE:
        run_decode(name, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prefill_on_cuda(dtype: torch.dtype) -> None:
    from tests.kernels.checks import PREFILL, run_prefill

    for name in PREFILL:
        run_prefill(name, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_into_fp8_on_cuda(dtype: torch.dtype, scale: float) -> None:
    from tests.kernels.checks import DECODE, PREFILL, run_decode_fp8, run_prefill_fp8

    for name in DECODE:
        run_decode_fp8(name, dtype, "cuda", scale)
    for name in PREFILL:
        run_prefill_fp8(name, dtype, "cuda", scale)


@pytest.mark.gpu
@many
@given(cases(device="cuda", dtype=torch.bfloat16), st.sampled_from(SCALES))
def test_random_batches_into_fp8_on_cuda(case: Case, scale: float) -> None:
    from cgkit.kernels import attend

    case.key_cache[0] = case.value_cache[0] = 0
    check(case, scale, attend)


def kernels_of(step) -> list[str]:
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        step()
        torch.cuda.synchronize()
    return [e.name for e in profiler.events() if str(e.device_type).endswith("CUDA")]


@pytest.mark.gpu
@pytest.mark.parametrize(("new", "launches"), [([1, 1, 1], 1), ([3, 1, 1], 2)])
def test_attention_into_fp8_starts_as_many_kernels_as_attention(new: list[int], launches: int) -> None:
    from cgkit.kernels import attend

    case = make_case(new, [900, 5, 300], group=4, head_dim=64, dtype=torch.bfloat16, device="cuda")
    output, scale = torch.empty_like(case.query, dtype=FP8), torch.tensor(0.01, device="cuda")
    given = [*arguments(case)[:6], output, case.scale, scale]
    assert len(kernels_of(lambda: attend(*arguments(case)))) == launches
    assert len(kernels_of(lambda: attend(*given))) == launches


@pytest.mark.gpu
def test_a_recorded_decode_into_fp8_serves_other_lengths_with_the_same_bits() -> None:
    from cgkit.kernels import attend

    case = make_case(
        [1, 1, 1], [900, 5, 300], kv_heads=1, group=4, head_dim=64, device="cuda", dtype=torch.bfloat16,
        padded_reqs=1, padded_tokens=1,
    )  # fmt: skip
    output, scale = torch.empty_like(case.query, dtype=FP8), torch.tensor(0.01, device="cuda")
    given = [*arguments(case)[:6], output, case.scale, scale]
    attend(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(*given)
    for lengths in ([900, 5, 300], [10, 1, 299]):
        case.metadata.seq_lens[:3] = torch.tensor(lengths, dtype=torch.int32)
        output.view(torch.uint8).fill_(0x7F)
        graph.replay()
        replayed = output.view(torch.uint8).clone()
        attend(*given)
        assert torch.equal(replayed, output.view(torch.uint8))
        assert not replayed[3].any()


@pytest.mark.gpu
@many
@given(cases(decode=True, max_len=700, device="cuda"))
def test_random_decode_batches_on_cuda(case: Case) -> None:
    attend_on_cuda(case)


@pytest.mark.gpu
@many
@given(cases(device="cuda"))
def test_random_batches_on_cuda(case: Case) -> None:
    attend_on_cuda(case)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim"), [(8, 4, 64), (8, 2, 128), (8, 4, 128), (3, 3, 64)]
)
@pytest.mark.parametrize("batch", [1, 2, 32])
def test_decode_of_real_shapes_on_cuda(batch: int, kv_heads: int, group: int, head_dim: int) -> None:
    lengths = [1 + 97 * i % 2000 for i in range(1, batch + 1)]
    case = make_case(
        [1] * batch, lengths, kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=torch.bfloat16,
        device="cuda", padded_reqs=3, padded_tokens=1,
    )  # fmt: skip
    attend_on_cuda(case)


@pytest.mark.gpu
def test_a_recorded_decode_serves_other_lengths_with_the_same_bits() -> None:
    case = make_case(
        [1, 1, 1], [900, 5, 300], kv_heads=1, group=4, head_dim=64, device="cuda", dtype=torch.bfloat16,
        padded_reqs=1, padded_tokens=1,
    )  # fmt: skip
    attend_on_cuda(case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        from cgkit.kernels import attend

        attend(*arguments(case))
    for lengths in ([900, 5, 300], [10, 1, 299]):
        case.metadata.seq_lens[:3] = torch.tensor(lengths, dtype=torch.int32)
        case.output.fill_(7.0)
        graph.replay()
        replayed = case.output.clone()
        attend(*arguments(case))
        assert torch.equal(replayed, case.output)
        assert not replayed[3].any()


@pytest.mark.gpu
def test_a_divided_context_gives_the_same_bits_whoever_finishes_last() -> None:
    """Batch 1 of an 8B shape: 8 KV heads, a long context and one of exactly one tile a program."""
    from cgkit.kernels import attend

    for length in (257, 2000):
        case = make_case(
            [1], [length], kv_heads=8, group=4, head_dim=128, device="cuda", dtype=torch.bfloat16
        )
        attend_on_cuda(case)
        first = case.output.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(50):
                attend(*arguments(case))
        for _ in range(20):
            case.output.fill_(7.0)
            graph.replay()
            assert torch.equal(case.output, first)


def attend_on_cuda(case: Case) -> None:
    from cgkit.kernels import attend

    case.key_cache[0] = case.value_cache[0] = 0
    attend(*arguments(case))
    assert_right(case)
