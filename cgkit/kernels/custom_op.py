"""``CustomOp``: a layer with two forms, torch code for a compiler and a hand-written operator.

Implements the article's "custom_ops" (hand-written layers): an operator is fast by itself and a wall for a
compiler, which can fuse nothing across it; torch code is slow by itself and fuses. So with Inductor the operators
are off (``custom_ops`` in :class:`~cgkit.config.CompilationConfig` says otherwise).

Which form a layer takes is decided before a model is traced (:func:`apply_custom_ops`) and is then part of the
graph. A layer nobody decided about takes the torch form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cgkit.config import CompilationConfig
from cgkit.kernels import fused, fused_torch

assert fused.OPERATORS  # importing it registers them


class CustomOp(nn.Module):
    """A layer with ``forward_native`` (torch) and ``forward_custom`` (an operator of :mod:`cgkit.kernels.fused`).

    Attributes:
        op_name: the name in ``custom_ops``.
        enabled: whether ``forward`` takes the operator.
    """

    op_name: str = ""
    enabled: bool = False

    def forward(self, *args: Any) -> Any:
        """One of the two forms."""
        return self.forward_custom(*args) if self.enabled else self.forward_native(*args)

    forward_native: Callable[..., Any]
    forward_custom: Callable[..., Any]


def apply_custom_ops(model: nn.Module, config: CompilationConfig) -> dict[str, bool]:
    """Sets each :class:`CustomOp` in ``model`` as ``config.custom_ops`` says, and leaves it so; which names are on.

    To be called before ``model`` is traced. For a model that others hold too there is :func:`custom_ops_as`.
    """
    forms = _forms(model, config)
    for layer, enabled in forms:
        layer.enabled = enabled
    return {layer.op_name: enabled for layer, enabled in forms}


def _forms(model: nn.Module, config: CompilationConfig) -> list[tuple[CustomOp, bool]]:
    """Each layer with two forms, and whether ``config`` turns its operator on."""
    layers = [module for module in model.modules() if isinstance(module, CustomOp)]
    return [(layer, config.custom_op_enabled(layer.op_name)) for layer in layers]


@contextmanager
def custom_ops_as(model: nn.Module, config: CompilationConfig) -> Iterator[None]:
    """In the block each :class:`CustomOp` in ``model`` is as ``config.custom_ops`` says; after it as it was before.

    Not for two threads that run one model in two forms at once: a layer has one form at a time.
    """
    others = _take(_forms(model, config))
    try:
        yield
    finally:
        _take(others)


def _take(forms: list[tuple[CustomOp, bool]]) -> list[tuple[CustomOp, bool]]:
    """Gives these layers these forms; the layers whose form was another one, with it."""
    others = [(layer, not enabled) for layer, enabled in forms if layer.enabled is not enabled]
    for layer, before in others:
        vars(layer)["enabled"] = not before  # Module's own way to set an attribute takes ten times as long
    return others


def with_custom_ops(
    run: Callable[..., Any], model: nn.Module, config: CompilationConfig
) -> Callable[..., Any]:
    """``run``, each call of it as inside of :func:`custom_ops_as`; ``run`` itself where ``model`` has no such layer.

    The layers are looked up once, here: a step of an eager model is what others are compared with.
    """
    forms = _forms(model, config)
    if not forms:
        return run

    def in_form(*args: Any, **kwargs: Any) -> Any:
        others = _take(forms)
        try:
            return run(*args, **kwargs)
        finally:
            _take(others)

    return in_form


def _like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the first and the second half of each row (as slices, which the graph passes know as views)."""
    width = x.shape[-1] // 2
    return x[..., :width], x[..., width:]


class RMSNorm(CustomOp):
    """Divides by the root mean square, in float32 whatever the input's type: (..., width) -> (..., width)."""

    op_name = "rms_norm"

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward_native(self, hidden: Tensor) -> Tensor:
        """As torch code."""
        return fused_torch.rms_norm_torch(hidden, self.weight, self.eps)

    def forward_custom(self, hidden: Tensor) -> Tensor:
        """As ``cgkit::rms_norm``."""
        out = _like(hidden)
        torch.ops.cgkit.rms_norm(out, hidden, self.weight, self.eps)
        return out


class SiluAndMul(CustomOp):
    """SwiGLU's middle: gate and up side by side, (..., 2 * width) -> ``silu(gate) * up``, (..., width)."""

    op_name = "silu_and_mul"

    def forward_native(self, gate_up: Tensor) -> Tensor:
        """As torch code."""
        return fused_torch.silu_and_mul_torch(*_halves(gate_up))

    def forward_custom(self, gate_up: Tensor) -> Tensor:
        """As ``cgkit::silu_and_mul``, on two views."""
        gate, up = _halves(gate_up)
        out = _like(gate)
        torch.ops.cgkit.silu_and_mul(out, gate, up)
        return out


class Rotary(CustomOp):
    """Turns each pair (i, i + head_dim / 2) of (tokens, heads, head_dim) by its token's angle."""

    op_name = "rotary"

    def forward_native(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """As torch code."""
        return fused_torch.rotary_torch(heads, cos, sin)

    def forward_custom(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """As ``cgkit::rotary``."""
        out = _like(heads)
        torch.ops.cgkit.rotary(out, heads, cos, sin)
        return out


class StaticQuant(CustomOp):
    """FP8 by a scale that was measured beforehand: (..., width) -> (the same in FP8, the scale)."""

    op_name = "quant_fp8"

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Buffer(torch.ones((), dtype=torch.float32))

    def forward_native(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """As torch code."""
        return fused_torch.static_fp8_quant_torch(x, self.scale), self.scale

    def forward_custom(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """As ``cgkit::static_fp8_quant``."""
        out = _like(x, fused_torch.FP8)
        torch.ops.cgkit.static_fp8_quant(out, x, self.scale)
        return out, self.scale


class DynamicQuant(CustomOp):
    """FP8, each row by a scale of its own: (..., width) -> (the same in FP8, (..., 1) scales)."""

    op_name = "quant_fp8"

    def forward_native(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """As torch code."""
        return fused_torch.dynamic_per_token_fp8_quant_torch(x)

    def forward_custom(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """As ``cgkit::dynamic_per_token_fp8_quant``."""
        out = _like(x, fused_torch.FP8)
        scales = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        torch.ops.cgkit.dynamic_per_token_fp8_quant(out, scales, x)
        return out, scales
