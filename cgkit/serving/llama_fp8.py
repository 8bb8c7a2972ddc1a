"""A Llama whose projections multiply FP8 by FP8: what the quantisation passes are for.

W8A8 as in "FP8-LM" and the FP8 checkpoints of vLLM: weights quantised once, activations on the way into each product
(``torch._scaled_mm``), by a scale that was calibrated (``"static"``) or by one for each token (``"per_token"``). What
a step then does between two products is norm or activation, then quantisation; that is what is fused.

Embedding, norms, attention and the output projection keep the model's type. q, k and v are one product, as gate and
up are: their input is quantised once. With static scales the merged weight has one scale, that of its largest part:
``_scaled_mm`` takes one for the whole tensor. It costs the smaller parts little, because FP8 is a floating format:
a scale that is too large by 8 moves a weight by three of its exponents and leaves its mantissa, and only what falls
below 2**-6 of FP8 (a 28,000th of the largest weight) is rounded more coarsely. By row, each row keeps its own.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cgkit import torch_hooks
from cgkit.errors import ServingError
from cgkit.forward_context import set_forward_context
from cgkit.kernels.custom_op import CustomOp, DynamicQuant, StaticQuant
from cgkit.kernels.fused_torch import FP8, FP8_MAX, LEAST_SCALE
from cgkit.serving.llama import Llama, LlamaAttention, LlamaMLP

SCHEMES = ("static", "per_token")


class Fp8Linear(nn.Module):
    """A projection without bias: FP8 (tokens, in) and its scale -> (tokens, out) in ``dtype``.

    ``weight_scale`` is one number with static scales, (1, out) with per-token ones: ``_scaled_mm`` takes both
    scales by tensor or both by row.
    """

    def __init__(self, linear: nn.Linear, scheme: str) -> None:
        super().__init__()
        weight = linear.weight.detach().to(torch.float32)
        largest = weight.abs().amax(1, keepdim=True).t() if scheme == "per_token" else weight.abs().amax()
        scale = (largest / FP8_MAX).clamp(min=LEAST_SCALE).contiguous()
        over = scale.t() if scheme == "per_token" else scale
        self.weight = nn.Buffer((weight / over).clamp(-FP8_MAX, FP8_MAX).to(FP8))
        self.weight_scale = nn.Buffer(scale)

    def forward(self, quantised: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """The product, scaled back."""
        return torch_hooks.scaled_mm(quantised, self.weight.t(), scale, self.weight_scale, dtype)


class Fp8Attention(LlamaAttention):
    """:class:`~cgkit.serving.llama.LlamaAttention` with FP8 projections."""

    def __init__(self, source: LlamaAttention, scheme: str) -> None:
        nn.Module.__init__(self)
        self.head_dim, self.layer_name, self.heads = source.head_dim, source.layer_name, source.heads
        self.input_quant, self.output_quant = _quantiser(scheme), _quantiser(scheme)
        self.qkv_proj = Fp8Linear(source.qkv_proj, scheme)  # type: ignore[assignment]
        self.o_proj = Fp8Linear(source.o_proj, scheme)  # type: ignore[assignment]
        self.rotate = source.rotate
        rows = [count * self.head_dim for count in self.heads]
        self.merge("qkv_proj", dict(zip(("q_proj", "k_proj", "v_proj"), rows)))

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(tokens, hidden) -> (tokens, hidden)."""
        dtype = hidden.dtype
        quantised, scale = self.input_quant(hidden)
        mixed = self.mixed(self.qkv_proj(quantised, scale, dtype), cos, sin)
        quantised, scale = self.output_quant(mixed)
        return self.o_proj(quantised, scale, dtype)


class Fp8MLP(LlamaMLP):
    """:class:`~cgkit.serving.llama.LlamaMLP` with FP8 projections."""

    def __init__(self, source: LlamaMLP, scheme: str) -> None:
        nn.Module.__init__(self)
        self.act = source.act
        self.input_quant, self.output_quant = _quantiser(scheme), _quantiser(scheme)
        self.gate_up_proj = Fp8Linear(source.gate_up_proj, scheme)  # type: ignore[assignment]
        self.down_proj = Fp8Linear(source.down_proj, scheme)  # type: ignore[assignment]
        width = source.down_proj.in_features
        self.merge("gate_up_proj", {"gate_proj": width, "up_proj": width})

    def forward(self, hidden: Tensor) -> Tensor:
        """(tokens, hidden) -> (tokens, hidden)."""
        dtype = hidden.dtype
        quantised, scale = self.input_quant(hidden)
        quantised, scale = self.output_quant(self.act(self.gate_up_proj(quantised, scale, dtype)))
        return self.down_proj(quantised, scale, dtype)


def quantize(model: Llama, scheme: str = "static", *, tokens: Tensor | None = None) -> Llama:
    """A copy of ``model`` with FP8 projections.

    Args:
        model: ready to serve; its projections' sizes are multiples of 16 (CUDA asks for that).
        scheme: ``"static"``: the scale of each product's input is the largest magnitude that ``tokens`` bring, over
            448. ``"per_token"``: each row's own, computed at each step (on CUDA the model must be bfloat16).
        tokens: (n,) token ids to calibrate with; default 64 ids spread over the vocabulary.

    Raises:
        ServingError: another scheme.
    """
    if scheme not in SCHEMES:
        raise ServingError(f"scheme={scheme!r} is unknown; use one of {', '.join(SCHEMES)}")
    quantised = copy.deepcopy(model)
    layers: Any = quantised.model.layers
    for layer in layers:
        layer.self_attn = Fp8Attention(layer.self_attn, scheme)
        layer.mlp = Fp8MLP(layer.mlp, scheme)
    if scheme == "static":
        _calibrate(model, quantised, tokens)
    return quantised.requires_grad_(False).eval()


@torch.no_grad()
def _calibrate(model: Llama, quantised: Llama, tokens: Tensor | None) -> None:
    """Sets each static scale to what the unquantised model's activations need (no cache: attention gives zeros,
    so the attention's own output takes the scale of v, which bounds what a weighted mean of v can be)."""
    device = model.lm_head.weight.device
    if tokens is None:
        tokens = torch.arange(64, device=device) * max(1, model.config.vocab_size // 64)
    largest: dict[nn.Module, Tensor] = {}
    handles = []
    old_layers: Any = model.model.layers
    new_layers: Any = quantised.model.layers
    for layer, new in zip(old_layers, new_layers):
        pairs = [
            (layer.self_attn.qkv_proj, new.self_attn.input_quant, _input),
            (layer.self_attn.qkv_proj, new.self_attn.output_quant, partial(_value, layer.self_attn)),
            (layer.mlp.gate_up_proj, new.mlp.input_quant, _input),
            (layer.mlp.down_proj, new.mlp.output_quant, _input),
        ]
        for linear, quant, of in pairs:

            def note(
                module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, quant=quant, of=of
            ) -> None:
                largest[quant] = of(inputs[0], output).detach().abs().amax()

            handles.append(linear.register_forward_hook(note))
    try:
        with set_forward_context(None):
            model(tokens, torch.arange(tokens.shape[0], device=device))
    finally:
        for handle in handles:
            handle.remove()
    for quant, value in largest.items():
        quant.scale = nn.Buffer((value.to(torch.float32) / FP8_MAX).clamp(min=LEAST_SCALE))


def _input(given: Tensor, product: Tensor) -> Tensor:
    return given


def _value(attention: LlamaAttention, given: Tensor, product: Tensor) -> Tensor:
    """The columns of v in the product of q, k and v."""
    return product[:, -attention.heads[2] * attention.head_dim :]


def _quantiser(scheme: str) -> CustomOp:
    return StaticQuant() if scheme == "static" else DynamicQuant()
