"""The operators ``torch.ops.cgkit.*`` beside attention: norms, activations, rotary, FP8 quantisation, fusions.

Each writes its results into tensors given to it (out-parameters, first in the list) and nothing else, so
that it can stand in a recorded graph, and so that a compiler that must not know in-place writes can turn it
into a call without them (auto-functionalisation) and back. Triton on CUDA, torch elsewhere; out-parameters
must be contiguous. Shapes as in :mod:`cgkit.kernels.fused_torch`.

Source: the article's "自定义 pass" (passes of one's own) and "custom_ops" (hand-written layers); the names
follow vLLM's operators.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from types import ModuleType

from torch import Tensor
from torch.library import Library, infer_schema

from cgkit.kernels import fused_torch as plain
from cgkit.torch_hooks import register_fake_in

_library = Library("cgkit", "FRAGMENT")

#: The operators by name: what the passes and the tests go through.
OPERATORS: dict[str, Callable[..., None]] = {}


def _operator(
    *mutates: str, check: Callable[..., None] = lambda *args, **kwargs: None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes the function ``torch.ops.cgkit.<its name>``, which writes the arguments ``mutates``.

    ``check`` is all that a trace sees of it: what it compares, the trace knows to be equal from then on.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        name = function.__name__
        hints = {key: None if hint is type(None) else hint for key, hint in _hints(function).items()}
        function.__annotations__ = hints
        _library.define(name + infer_schema(function, mutates_args=list(mutates)))
        _library.impl(name, function, "CompositeExplicitAutograd")
        register_fake_in(_library, name, check)
        OPERATORS[name] = function
        return function

    return register


def _hints(function: Callable[..., None]) -> dict[str, type | None]:
    import typing

    return typing.get_type_hints(function)


@cache
def _kernels() -> ModuleType | None:
    """The Triton form, imported when the first tensor on CUDA comes; None where Triton is missing."""
    if find_spec("triton") is None:
        return None
    from cgkit.kernels import triton_rows

    return triton_rows


def _triton_for(x: Tensor) -> ModuleType | None:
    kernels = _kernels() if x.is_cuda else None
    return kernels if kernels is not None and kernels.usable(x) else None


@_operator("out")
def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """``out`` = RMSNorm of ``x``."""
    if kernels := _triton_for(x):
        kernels.norm_triton(out, x, weight, eps)
    else:
        out.copy_(plain.rms_norm_torch(x, weight, eps))


@_operator("out", "residual_out")
def fused_add_rms_norm(
    out: Tensor, residual_out: Tensor, x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> None:
    """``residual_out`` = ``residual + x``; ``out`` = RMSNorm of it."""
    if kernels := _triton_for(x):
        kernels.norm_triton(out, x, weight, eps, residual=residual, residual_out=residual_out)
    else:
        residual_out.copy_(plain.add_torch(x, residual))
        out.copy_(plain.rms_norm_torch(residual_out, weight, eps))


@_operator("out")
def static_fp8_quant(out: Tensor, x: Tensor, scale: Tensor) -> None:
    """``out`` (FP8) = ``x / scale``, saturated."""
    if kernels := _triton_for(x):
        kernels.activation_triton(out, x, scales=scale, quant=kernels.STATIC)
    else:
        out.copy_(plain.static_fp8_quant_torch(x, scale))


@_operator("out", "scales")
def dynamic_per_token_fp8_quant(out: Tensor, scales: Tensor, x: Tensor) -> None:
    """``scales`` = each row's largest magnitude / 448; ``out`` (FP8) = ``x / scales``."""
    if kernels := _triton_for(x):
        kernels.activation_triton(out, x, scales=scales, quant=kernels.DYNAMIC)
    else:
        _copy((out, scales), plain.dynamic_per_token_fp8_quant_torch(x))


@_operator("out")
def rms_norm_static_fp8_quant(out: Tensor, x: Tensor, weight: Tensor, scale: Tensor, eps: float) -> None:
    """``out`` (FP8) = RMSNorm of ``x``, over ``scale``."""
    if kernels := _triton_for(x):
        kernels.norm_triton(out, x, weight, eps, scales=scale, quant=kernels.STATIC)
    else:
        out.copy_(plain.static_fp8_quant_torch(plain.rms_norm_torch(x, weight, eps), scale))


@_operator("out", "residual_out")
def fused_add_rms_norm_static_fp8_quant(
    out: Tensor, residual_out: Tensor, x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, eps: float
) -> None:
    """``residual_out`` = ``residual + x``; ``out`` (FP8) = RMSNorm of it, over ``scale``."""
    if kernels := _triton_for(x):
        kernels.norm_triton(
            out, x, weight, eps,
            residual=residual, residual_out=residual_out, scales=scale, quant=kernels.STATIC,
        )  # fmt: skip
    else:
        residual_out.copy_(plain.add_torch(x, residual))
        out.copy_(plain.static_fp8_quant_torch(plain.rms_norm_torch(residual_out, weight, eps), scale))


@_operator("out", "scales")
def rms_norm_dynamic_per_token_fp8_quant(
    out: Tensor, scales: Tensor, x: Tensor, weight: Tensor, eps: float
) -> None:
    """``out`` (FP8), ``scales`` = RMSNorm of ``x``, quantised row by row."""
    if kernels := _triton_for(x):
        kernels.norm_triton(out, x, weight, eps, scales=scales, quant=kernels.DYNAMIC)
    else:
        normed = plain.rms_norm_torch(x, weight, eps)
        _copy((out, scales), plain.dynamic_per_token_fp8_quant_torch(normed))


@_operator("out", "residual_out", "scales")
def fused_add_rms_norm_dynamic_per_token_fp8_quant(
    out: Tensor, residual_out: Tensor, scales: Tensor, x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> None:
    """``residual_out`` = ``residual + x``; ``out`` (FP8), ``scales`` = RMSNorm of it, quantised row by row."""
    if kernels := _triton_for(x):
        kernels.norm_triton(
            out, x, weight, eps,
            residual=residual, residual_out=residual_out, scales=scales, quant=kernels.DYNAMIC,
        )  # fmt: skip
    else:
        residual_out.copy_(plain.add_torch(x, residual))
        normed = plain.rms_norm_torch(residual_out, weight, eps)
        _copy((out, scales), plain.dynamic_per_token_fp8_quant_torch(normed))


@_operator("out")
def silu_and_mul(out: Tensor, gate: Tensor, up: Tensor) -> None:
    """``out`` = ``silu(gate) * up``."""
    if kernels := _triton_for(gate):
        kernels.activation_triton(out, gate, up)
    else:
        out.copy_(plain.silu_and_mul_torch(gate, up))


@_operator("out")
def silu_and_mul_static_fp8_quant(out: Tensor, gate: Tensor, up: Tensor, scale: Tensor) -> None:
    """``out`` (FP8) = ``silu(gate) * up``, over ``scale``."""
    if kernels := _triton_for(gate):
        kernels.activation_triton(out, gate, up, scales=scale, quant=kernels.STATIC)
    else:
        out.copy_(plain.static_fp8_quant_torch(plain.silu_and_mul_torch(gate, up), scale))


@_operator("out", "scales")
def silu_and_mul_dynamic_per_token_fp8_quant(out: Tensor, scales: Tensor, gate: Tensor, up: Tensor) -> None:
    """``out`` (FP8), ``scales`` = ``silu(gate) * up``, quantised row by row."""
    if kernels := _triton_for(gate):
        kernels.activation_triton(out, gate, up, scales=scales, quant=kernels.DYNAMIC)
    else:
        _copy((out, scales), plain.dynamic_per_token_fp8_quant_torch(plain.silu_and_mul_torch(gate, up)))


def _one_angle_a_token(out: Tensor, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Without it a trace would take the number of positions and that of tokens for two numbers."""
    if not heads.shape[0] == cos.shape[0] == sin.shape[0]:
        raise ValueError(
            f"rotary: {heads.shape[0]} tokens, {cos.shape[0]} and {sin.shape[0]} rows of cos and sin"
        )


@_operator("out", check=_one_angle_a_token)
def rotary(out: Tensor, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """``out`` = ``heads`` (tokens, heads, head_dim), each pair turned by its token's angle."""
    if kernels := _triton_for(heads):
        kernels.rotary_triton(out, heads, cos, sin)
    else:
        out.copy_(plain.rotary_torch(heads, cos, sin))


def _copy(targets: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> None:
    for target, value in zip(targets, values):
        target.copy_(value)
