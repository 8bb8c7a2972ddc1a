"""Kernels that work row by row: norms, activations and rotary positions, with FP8 quantisation on the way out.

One program a row (a token). What comes out of memory once is normed, multiplied and quantised while it is in
registers, which is all that "fusing" means here: unfused, each step reads and writes the row again.

Rounding follows the torch forms (:mod:`cgkit.kernels.fused_torch`), so that both differ in the order of a sum
and the last bit of a division, no more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cgkit.kernels.fused_torch import FP8_MAX, LEAST_SCALE

NONE, STATIC, DYNAMIC = 0, 1, 2


@triton.jit
def _leave(
    value, out, scales, row, at, inside,
    WIDTH: tl.constexpr, QUANT: tl.constexpr, FP8_MAX: tl.constexpr, LEAST_SCALE: tl.constexpr,
):  # fmt: skip
    """Writes a row (float32, rounded to the model's type already): as it is, or in FP8."""
    if QUANT == 1:
        value = value / tl.load(scales)
    if QUANT == 2:
        scale = tl.maximum(tl.max(tl.where(inside, tl.abs(value), 0.0), axis=0) / FP8_MAX, LEAST_SCALE)
        tl.store(scales + row, scale)
        value = value / scale
    if QUANT != 0:
        # A NaN stays one: minimum and maximum alone would make a large number of it.
        value = tl.clamp(value, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + row * WIDTH + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_kernel(
    x, residual, weight, out, residual_out, scales, X_STRIDE, RESIDUAL_STRIDE, EPS,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ADD: tl.constexpr, QUANT: tl.constexpr,
    FP8_MAX: tl.constexpr, LEAST_SCALE: tl.constexpr,
):  # fmt: skip
    """Grid (rows,). ADD: the norm is of ``residual + x``, which is written to ``residual_out`` as well."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    inside = at < WIDTH
    value = tl.load(x + row * X_STRIDE + at, mask=inside, other=0.0)
    dtype: tl.constexpr = x.dtype.element_ty
    wide = value.to(tl.float32)
    if ADD:
        old = tl.load(residual + row * RESIDUAL_STRIDE + at, mask=inside, other=0.0).to(tl.float32)
        rounded = (old + wide).to(dtype)
        tl.store(residual_out + row * WIDTH + at, rounded, mask=inside)
        wide = rounded.to(tl.float32)
    mean = tl.sum(wide * wide, axis=0) / WIDTH
    normed = (wide * (1.0 / tl.sqrt(mean + EPS))).to(dtype).to(tl.float32)
    scaled = normed * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    _leave(scaled.to(dtype).to(tl.float32), out, scales, row, at, inside, WIDTH, QUANT, FP8_MAX, LEAST_SCALE)


@triton.jit
def _activation_kernel(
    gate, up, out, scales, GATE_STRIDE, UP_STRIDE,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, GATED: tl.constexpr, QUANT: tl.constexpr,
    FP8_MAX: tl.constexpr, LEAST_SCALE: tl.constexpr,
):  # fmt: skip
    """Grid (rows,). GATED: ``silu(gate) * up``, else ``gate`` as it is (then there is only the quantisation)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    inside = at < WIDTH
    value = tl.load(gate + row * GATE_STRIDE + at, mask=inside, other=0.0)
    dtype: tl.constexpr = gate.dtype.element_ty
    wide = value.to(tl.float32)
    if GATED:
        wide = (wide / (1.0 + tl.exp(-wide))).to(dtype).to(tl.float32)
        wide = wide * tl.load(up + row * UP_STRIDE + at, mask=inside, other=0.0).to(tl.float32)
        wide = wide.to(dtype).to(tl.float32)
    _leave(wide, out, scales, row, at, inside, WIDTH, QUANT, FP8_MAX, LEAST_SCALE)


@triton.jit
def _rotary_kernel(
    heads, cos, sin, out, TOKEN_STRIDE, HEAD_STRIDE,
    HEADS: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, HEADS). ``out`` is contiguous; cos and sin are (tokens, 2 * HALF), contiguous."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, PADDED)
    inside = at < HALF
    source = heads + token * TOKEN_STRIDE + head * HEAD_STRIDE
    dtype: tl.constexpr = heads.dtype.element_ty
    first = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + at, mask=inside, other=0.0).to(tl.float32)
    angles = token * 2 * HALF + at
    cos_1 = tl.load(cos + angles, mask=inside, other=0.0).to(tl.float32)
    cos_2 = tl.load(cos + angles + HALF, mask=inside, other=0.0).to(tl.float32)
    sin_1 = tl.load(sin + angles, mask=inside, other=0.0).to(tl.float32)
    sin_2 = tl.load(sin + angles + HALF, mask=inside, other=0.0).to(tl.float32)
    target = out + (token * HEADS + head) * 2 * HALF
    turned = (first * cos_1).to(dtype).to(tl.float32) - (second * sin_1).to(dtype).to(tl.float32)
    tl.store(target + at, turned.to(dtype), mask=inside)
    turned = (second * cos_2).to(dtype).to(tl.float32) + (first * sin_2).to(dtype).to(tl.float32)
    tl.store(target + HALF + at, turned.to(dtype), mask=inside)


def _warps(padded: int) -> int:
    return 4 if padded <= 2048 else 8 if padded <= 8192 else 16


def _rows(tensor: Tensor) -> tuple[Tensor, int]:
    """``tensor`` (..., width) as rows, and the distance between two; copied only if its rows are not whole."""
    flat = tensor.reshape(-1, tensor.shape[-1])
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    return flat, flat.stride(0)


def norm_triton(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    residual_out: Tensor | None = None,
    scales: Tensor | None = None,
    quant: int = NONE,
) -> None:
    """RMSNorm of ``x`` (of ``residual + x``, if given) into ``out``; ``quant`` says how ``out`` is quantised."""
    rows, x_stride = _rows(x)
    if rows.shape[0] == 0:
        return
    old, old_stride = (rows, x_stride) if residual is None else _rows(residual)
    width = rows.shape[1]
    padded = triton.next_power_of_2(width)
    _norm_kernel[(rows.shape[0],)](
        rows, old, weight, out,
        rows if residual_out is None else residual_out, rows if scales is None else scales,
        x_stride, old_stride, eps,
        WIDTH=width, PADDED=padded, ADD=residual is not None, QUANT=quant,
        FP8_MAX=FP8_MAX, LEAST_SCALE=LEAST_SCALE, num_warps=_warps(padded),
    )  # fmt: skip


def activation_triton(
    out: Tensor, gate: Tensor, up: Tensor | None = None, *, scales: Tensor | None = None, quant: int = NONE
) -> None:
    """``silu(gate) * up`` (``gate`` itself without ``up``) into ``out``, quantised as ``quant`` says."""
    rows, stride = _rows(gate)
    if rows.shape[0] == 0:
        return
    other, other_stride = (rows, stride) if up is None else _rows(up)
    width = rows.shape[1]
    padded = triton.next_power_of_2(width)
    _activation_kernel[(rows.shape[0],)](
        rows, other, out, rows if scales is None else scales, stride, other_stride,
        WIDTH=width, PADDED=padded, GATED=up is not None, QUANT=quant,
        FP8_MAX=FP8_MAX, LEAST_SCALE=LEAST_SCALE, num_warps=_warps(padded),
    )  # fmt: skip


def rotary_triton(out: Tensor, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """``heads`` (tokens, heads, head_dim), turned by each token's angles, into ``out`` (contiguous)."""
    tokens, number, head_dim = heads.shape
    if tokens == 0:
        return
    if heads.stride(2) != 1:
        heads = heads.contiguous()
    half = head_dim // 2
    _rotary_kernel[(tokens, number)](
        heads, cos.contiguous(), sin.contiguous(), out, heads.stride(0), heads.stride(1),
        HEADS=number, HALF=half, PADDED=triton.next_power_of_2(half), num_warps=1,
    )  # fmt: skip


def usable(x: Tensor) -> bool:
    """Whether these kernels take a row of ``x``: a whole one must fit the registers of a program."""
    return x.shape[-1] <= 65536 and x.dtype in (torch.float16, torch.bfloat16, torch.float32)
