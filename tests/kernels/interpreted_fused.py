"""The row kernels in Triton's interpreter; run by test_fused.py in a process of its own.

The interpreter's conversion to a narrower float does not carry: a number that rounds up to a power of two comes out
as half of it (Triton 3.9; a GPU does not). Such numbers are left out of what is compared, and only they.
"""

from __future__ import annotations

import pytest
import torch
import triton

from cgkit.kernels import triton_rows
from cgkit.kernels.fused_torch import FP8
from tests.kernels import fused_checks

assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1"


def call(name, *args):
    """The Triton form of an operator on CPU tensors."""
    kinds = {"static": triton_rows.STATIC, "dynamic": triton_rows.DYNAMIC}
    quant = next((value for kind, value in kinds.items() if kind in name), triton_rows.NONE)
    if name == "rotary":
        triton_rows.rotary_triton(*args)
    elif "rms_norm" in name:
        args = list(args)
        out = args.pop(0)
        residual_out = args.pop(0) if "add" in name else None
        scales = args.pop(0) if "dynamic" in name else None
        x = args.pop(0)
        residual = args.pop(0) if "add" in name else None
        weight, eps = args.pop(0), args.pop()
        triton_rows.norm_triton(
            out, x, weight, eps,
            residual=residual, residual_out=residual_out, scales=args.pop() if args else scales, quant=quant,
        )  # fmt: skip
    elif name == "silu_and_mul":
        triton_rows.activation_triton(*args)
    elif name == "silu_and_mul_static_fp8_quant":
        out, gate, up, scale = args
        triton_rows.activation_triton(out, gate, up, scales=scale, quant=quant)
    elif name == "silu_and_mul_dynamic_per_token_fp8_quant":
        out, scales, gate, up = args
        triton_rows.activation_triton(out, gate, up, scales=scales, quant=quant)
    elif name == "static_fp8_quant":
        triton_rows.activation_triton(args[0], args[1], scales=args[2], quant=quant)
    else:
        triton_rows.activation_triton(args[0], args[2], scales=args[1], quant=quant)


@pytest.fixture(autouse=True)
def carried(monkeypatch):
    strict = fused_checks.assert_quantised

    def check(got, expected, scale, dtype):
        wide = (expected / scale.double()).clamp(-448, 448)
        right = wide.float().to(FP8).double()
        lost = (right.abs().log2() % 1 == 0) & (got.double() * 2 == right)
        assert lost.float().mean() < 0.2
        strict(torch.where(lost, right, got.double()).to(FP8), expected, scale, dtype)

    monkeypatch.setattr(fused_checks, "assert_quantised", check)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (5, 48)])
def test_all(dtype, rows, width):
    fused_checks.run_all(dtype, "cpu", rows, width, call)
    fused_checks.run_rotary(dtype, "cpu", call)
