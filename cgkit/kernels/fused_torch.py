"""Norms, activations, rotary positions and FP8 quantisation in plain torch: the meaning of each operator.

The Triton form (:mod:`cgkit.kernels.triton_rows`) is held against these, and these against float64. Where a
model in plain torch would round to its own type (after the norm, after the weight), they round as well, so
that an operator put in the place of such code changes nothing but the order of a sum.

FP8 here is e4m3fn: 448 is the largest number, there is no infinity, and what is larger saturates.

Shapes: ``x``, ``residual``, ``gate``, ``up`` (..., width) of one floating type; ``weight`` (width,); a static
``scale`` is one float32 number; dynamic ``scales`` are (..., 1) float32. Source: the article's "自定义 pass"
(passes of one's own); "FP8 Formats for Deep Learning" (Micikevicius et al. 2022, arXiv:2209.05433).
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
#: The least dynamic scale: a row of zeros must not divide by zero.
LEAST_SCALE = 1e-12


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x`` over its root mean square, in float32, rounded to the type of ``x``, times ``weight``."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_torch(x: Tensor, residual: Tensor) -> Tensor:
    """``residual + x``, added in float32 and rounded to their type."""
    return (residual.to(torch.float32) + x.to(torch.float32)).to(x.dtype)


def silu_and_mul_torch(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, rounded to their type after each step."""
    return torch.nn.functional.silu(gate) * up


def static_fp8_quant_torch(x: Tensor, scale: Tensor) -> Tensor:
    """``x / scale`` in FP8, saturated."""
    return (x.to(torch.float32) / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def dynamic_per_token_fp8_quant_torch(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row over its own scale, which takes the row's largest magnitude to 448: (FP8 rows, scales)."""
    wide = x.to(torch.float32)
    scales = (wide.abs().amax(-1, keepdim=True) / FP8_MAX).clamp(min=LEAST_SCALE)
    return (wide / scales).clamp(-FP8_MAX, FP8_MAX).to(FP8), scales


def rotary_torch(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair (i, i + head_dim / 2) of ``heads`` (tokens, heads, head_dim) by its angle; cos and sin
    (tokens, head_dim)."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos[:, None, :] + torch.cat((-second, first), dim=-1) * sin[:, None, :]
