"""The operators beside attention against float64, in any form: on the CPU, in the interpreter, on CUDA."""

from __future__ import annotations

import torch

from cgkit.kernels.fused import OPERATORS
from cgkit.kernels.fused_torch import FP8, FP8_MAX

EPS = 1e-5
#: Roundings of the model's type that an operator may differ by, relative to the largest number of its row.
ROUNDINGS = 4
#: Half a step of e4m3fn, relative; and half its smallest step.
FP8_RELATIVE, FP8_LEAST = 2.0**-4, 2.0**-10


def draw(shape, dtype, device, seed, scale=1.0):
    rng = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=rng) * scale).to(dtype).to(device)


def precise_norm(x, weight):
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight.double()


def precise_silu(gate, up):
    return gate.double() * torch.sigmoid(gate.double()) * up.double()


def assert_near(got, expected, dtype):
    allowed = ROUNDINGS * torch.finfo(dtype).eps * expected.abs().amax(-1, keepdim=True)
    assert ((got.double() - expected).abs() <= allowed).all()


def assert_quantised(got, expected, scale, dtype):
    """``got`` is FP8 of ``expected / scale``: half a step off, and what the model's type rounds before that."""
    assert got.dtype is FP8
    wide = (expected / scale.double()).clamp(-FP8_MAX, FP8_MAX)
    slack = ROUNDINGS * torch.finfo(dtype).eps * wide.abs()
    allowed = 1.01 * (wide.abs() + slack) * FP8_RELATIVE + FP8_LEAST + slack
    assert ((got.double() - wide).abs() <= allowed).all()


def run_all(dtype, device, rows, width, call=lambda name, *args: OPERATORS[name](*args)):
    """Every operator on one shape. ``call(name, *arguments)`` says in which form."""
    x, residual = draw((rows, width), dtype, device, 0, 3.0), draw((rows, width), dtype, device, 1)
    weight = draw((width,), dtype, device, 2).abs() + 0.5
    scale = torch.tensor(0.01, device=device)
    like = lambda kind=dtype: torch.empty(rows, width, dtype=kind, device=device)  # noqa: E731
    column = lambda: torch.empty(rows, 1, device=device)  # noqa: E731
    total = (residual.float() + x.float()).to(dtype)
    norm, sum_norm, gated = precise_norm(x, weight), precise_norm(total, weight), precise_silu(x, residual)

    out, summed, quantised, scales = like(), like(), like(FP8), column()
    call("rms_norm", out, x, weight, EPS)
    assert_near(out, norm, dtype)
    call("fused_add_rms_norm", out, summed, x, residual, weight, EPS)
    assert_near(out, sum_norm, dtype)
    assert_near(summed, x.double() + residual.double(), dtype)
    call("silu_and_mul", out, x, residual)
    assert_near(out, gated, dtype)
    call("static_fp8_quant", quantised, x, scale)
    assert_quantised(quantised, x.double(), scale, dtype)
    call("dynamic_per_token_fp8_quant", quantised, scales, x)
    assert_dynamic(quantised, scales, x.double(), dtype)
    call("rms_norm_static_fp8_quant", quantised, x, weight, scale, EPS)
    assert_quantised(quantised, norm, scale, dtype)
    summed.zero_()
    call("fused_add_rms_norm_static_fp8_quant", quantised, summed, x, residual, weight, scale, EPS)
    assert_quantised(quantised, sum_norm, scale, dtype)
    assert_near(summed, x.double() + residual.double(), dtype)
    call("rms_norm_dynamic_per_token_fp8_quant", quantised, scales, x, weight, EPS)
    assert_dynamic(quantised, scales, norm, dtype)
    summed.zero_()
    call(
        "fused_add_rms_norm_dynamic_per_token_fp8_quant", quantised, summed, scales, x, residual, weight, EPS
    )
    assert_dynamic(quantised, scales, sum_norm, dtype)
    assert_near(summed, x.double() + residual.double(), dtype)
    call("silu_and_mul_static_fp8_quant", quantised, x, residual, scale)
    assert_quantised(quantised, gated, scale, dtype)
    call("silu_and_mul_dynamic_per_token_fp8_quant", quantised, scales, x, residual)
    assert_dynamic(quantised, scales, gated, dtype)


def assert_dynamic(quantised, scales, expected, dtype):
    assert_near(scales, expected.abs().amax(-1, keepdim=True) / FP8_MAX, dtype)
    assert_quantised(quantised, expected, scales, dtype)


def run_rotary(dtype, device, call=lambda name, *args: OPERATORS[name](*args)):
    heads = draw((5, 3, 2 * 12), dtype, device, 0)[:, :, :12]  # rows with gaps
    cos, sin = draw((5, 12), dtype, device, 1), draw((5, 12), dtype, device, 2)
    out = torch.empty(5, 3, 12, dtype=dtype, device=device)
    call("rotary", out, heads, cos, sin)
    first, second = heads.double().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    assert_near(out, heads.double() * cos.double()[:, None] + turned * sin.double()[:, None], dtype)
