"""A Llama whose projections multiply FP8 by FP8: what the quantisation passes are for.

W8A8 as in "FP8-LM" and the FP8 checkpoints of vLLM: weights quantised once, activations on the way into each product
(``torch._scaled_mm``), by a scale that was calibrated (``"static"``) or by one for each token (``"per_token"``). What
a step then does between two products is norm or activation, then quantisation; that is what is fused.

Embedding, norms, attention and the output projection keep the model's type. q, k and v share their input's scale,
as gate and up do: their input is quantised once.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from cgkit import torch_hooks
from cgkit.errors import ServingError
from cgkit.forward_context import set_forward_context
from cgkit.kernels.custom_op import CustomOp, DynamicQuant, StaticQuant
from cgkit.kernels.fused_torch import FP8, FP8_MAX, LEAST_SCALE
from cgkit.serving.attention import attention
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
        self.head_dim, self.layer_name, self.rotate = source.head_dim, source.layer_name, source.rotate
        self.input_quant, self.output_quant = _quantiser(scheme), _quantiser(scheme)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, Fp8Linear(getattr(source, name), scheme))

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(tokens, hidden) -> (tokens, hidden)."""
        dtype = hidden.dtype
        quantised, scale = self.input_quant(hidden)
        query = self.q_proj(quantised, scale, dtype).unflatten(-1, (-1, self.head_dim))
        key = self.k_proj(quantised, scale, dtype).unflatten(-1, (-1, self.head_dim))
        value = self.v_proj(quantised, scale, dtype).unflatten(-1, (-1, self.head_dim))
        mixed = attention(self.rotate(query, cos, sin), self.rotate(key, cos, sin), value, self.layer_name)
        quantised, scale = self.output_quant(mixed.flatten(1))
        return self.o_proj(quantised, scale, dtype)


class Fp8MLP(LlamaMLP):
    """:class:`~cgkit.serving.llama.LlamaMLP` with FP8 projections."""

    def __init__(self, source: LlamaMLP, scheme: str) -> None:
        nn.Module.__init__(self)
        self.act = source.act
        self.input_quant, self.output_quant = _quantiser(scheme), _quantiser(scheme)
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(self, name, Fp8Linear(getattr(source, name), scheme))

    def forward(self, hidden: Tensor) -> Tensor:
        """(tokens, hidden) -> (tokens, hidden)."""
        dtype = hidden.dtype
        quantised, scale = self.input_quant(hidden)
        gate, up = self.gate_proj(quantised, scale, dtype), self.up_proj(quantised, scale, dtype)
        quantised, scale = self.output_quant(self.act(gate, up))
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
            (layer.self_attn.q_proj, new.self_attn.input_quant, 0),
            (layer.self_attn.v_proj, new.self_attn.output_quant, 1),
            (layer.mlp.gate_proj, new.mlp.input_quant, 0),
            (layer.mlp.down_proj, new.mlp.output_quant, 0),
        ]
        for linear, quant, side in pairs:

            def note(
                module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, quant=quant, side=side
            ) -> None:
                largest[quant] = (output if side else inputs[0]).detach().abs().amax()

            handles.append(linear.register_forward_hook(note))
    try:
        with set_forward_context(None):
            model(tokens, torch.arange(tokens.shape[0], device=device))
    finally:
        for handle in handles:
            handle.remove()
    for quant, value in largest.items():
        quant.scale = nn.Buffer((value.to(torch.float32) / FP8_MAX).clamp(min=LEAST_SCALE))


def _quantiser(scheme: str) -> CustomOp:
    return StaticQuant() if scheme == "static" else DynamicQuant()
