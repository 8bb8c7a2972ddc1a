"""Norms, activations, rotary and FP8 quantisation: torch form on the CPU, Triton in the interpreter and on CUDA."""

from __future__ import annotations

import pytest
import torch

from cgkit.kernels.fused import OPERATORS
from cgkit.kernels.fused_torch import FP8
from cgkit.torch_hooks import fake_tensor_mode, mutated_arguments
from tests.kernels.fused_checks import draw, run_all, run_rotary
from tests.kernels.interpreter import run_interpreted

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (7, 48), (3, 576)])
def test_against_float64(dtype, rows, width):
    run_all(dtype, "cpu", rows, width)
    run_rotary(dtype, "cpu")


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_every_operator_is_registered_says_what_it_writes_and_has_a_fake(name):
    op = getattr(torch.ops.cgkit, name).default
    parameters = OPERATORS[name].__annotations__
    assert mutated_arguments(op) == [p for p in parameters if p in ("out", "residual_out", "scales")]
    with fake_tensor_mode():
        tensors = {p: torch.empty(4, 2, 8) for p, kind in parameters.items() if kind is torch.Tensor}
        assert op(**tensors, **({"eps": 1e-5} if "eps" in parameters else {})) is None


def test_what_is_too_large_saturates_and_a_row_of_zeros_stays_zero():
    out, scales = torch.empty(2, 4, dtype=FP8), torch.empty(2, 1)
    x = torch.tensor([[1e6, -1e6, 500.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    OPERATORS["static_fp8_quant"](out, x, torch.tensor(1.0))
    assert out[0].float().tolist() == [448.0, -448.0, 448.0, 1.0]
    OPERATORS["dynamic_per_token_fp8_quant"](out, scales, x)
    assert out[1].float().tolist() == [0.0] * 4 and scales[1] > 0
    assert out[0].float().tolist()[:2] == [448.0, -448.0]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_not_a_number_stays_that_and_infinity_saturates(device):
    # not in the interpreter: its conversion makes 384 of a NaN (Triton 3.9)
    x = torch.tensor([[1.0, torch.nan, torch.inf, -torch.inf]] * 4, device=device)
    out, scales = torch.empty(4, 4, dtype=FP8, device=device), torch.empty(4, 1, device=device)
    OPERATORS["static_fp8_quant"](out, x, torch.tensor(1.0, device=device))
    assert out[0].float().nan_to_num(7.0).tolist() == [1.0, 7.0, 448.0, -448.0]
    OPERATORS["dynamic_per_token_fp8_quant"](out, scales, x)
    assert out[:, 1].float().isnan().all()


def test_no_rows():
    out = torch.empty(0, 16, dtype=FP8)
    OPERATORS["rms_norm_static_fp8_quant"](out, torch.empty(0, 16), torch.ones(16), torch.tensor(1.0), 1e-5)


def test_in_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted("interpreted_fused.py")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (7, 576), (33, 2048), (8, 4096), (3, 14336)])
def test_against_float64_on_cuda(dtype, rows, width):
    run_all(dtype, "cuda", rows, width)
    run_rotary(dtype, "cuda")


@pytest.mark.gpu
def test_rows_with_gaps_on_cuda():
    wide = draw((6, 256), torch.bfloat16, "cuda", 0)
    out = torch.empty(6, 128, dtype=torch.bfloat16, device="cuda")
    torch.ops.cgkit.silu_and_mul(out, wide[:, :128], wide[:, 128:])
    torch.testing.assert_close(out, torch.nn.functional.silu(wide[:, :128]) * wide[:, 128:])
