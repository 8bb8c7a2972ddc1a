"""A readable OPT on a flat stream of tokens.

Re-implements, small, the model of "OPT: Open Pre-trained Transformer Language Models" (Zhang et al. 2022,
arXiv:2205.01068) in its pre-norm form: learned positions, LayerNorm before each half of a layer, ReLU, biases
everywhere. Parameters are named as in ``transformers``. It is the first model of the figures that the article quotes
(vLLM PR #10058: OPT-125M); beside :mod:`cgkit.serving.llama` it shows that the road knows nothing of a model but its
operators. What that module says of tokens and attention holds here too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from cgkit.errors import ServingError
from cgkit.serving.attention import attention
from cgkit.serving.llama import add

#: The table of positions begins with two rows that no token uses (its authors counted the padding in).
POSITION_OFFSET = 2


@dataclass(frozen=True)
class OPTConfig:
    """The shape of an OPT. Field names as in ``transformers``; immutable (see :meth:`scaled`)."""

    name: str
    vocab_size: int
    hidden_size: int
    ffn_dim: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int = 2048
    #: A request stops at any of these.
    eos_token_ids: tuple[int, ...] = (2,)

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ServingError(
                f"{self.name}: hidden_size={self.hidden_size} cannot be shared by {self.num_attention_heads} heads; "
                "the first must be a multiple of the second"
            )

    @property
    def head_dim(self) -> int:
        """Numbers of one head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def num_key_value_heads(self) -> int:
        """As many as query heads: OPT shares none."""
        return self.num_attention_heads

    @property
    def num_parameters(self) -> int:
        """How many weights, the tied output projection once."""
        width = self.hidden_size
        layer = 4 * (width * width + width) + 2 * width * self.ffn_dim + self.ffn_dim + width + 4 * width
        tables = self.vocab_size + self.max_position_embeddings + POSITION_OFFSET
        return self.num_hidden_layers * layer + width * (tables + 2)

    def scaled(self, **changes: Any) -> OPTConfig:
        """The same model with some fields changed, for instance ``num_hidden_layers=2``."""
        return replace(self, **changes)

    def to_hf(self) -> dict[str, Any]:
        """The fields as a ``config.json`` of ``transformers`` would hold them."""
        fields = {k: v for k, v in vars(self).items() if k not in ("name", "eos_token_ids")}
        return {
            "model_type": "opt",
            **fields,
            "word_embed_proj_dim": self.hidden_size,
            "do_layer_norm_before": True,
            "activation_function": "relu",
            "eos_token_id": self.eos_token_ids[0] if self.eos_token_ids else None,
        }


#: Shapes by name.
OPT_PRESETS: dict[str, OPTConfig] = {
    config.name: config
    for config in [
        OPTConfig("tiny-opt", 259, 64, 256, 4, 4, 1024, (257,)),
        OPTConfig("opt-125m", 50272, 768, 3072, 12, 12, 2048, (2,)),
    ]
}


class OPTAttention(nn.Module):
    """Projections around the one splitting operator."""

    def __init__(self, config: OPTConfig, layer_name: str) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.layer_name = layer_name
        width = config.hidden_size
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.out_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query = self.q_proj(hidden).unflatten(-1, (-1, self.head_dim))  # (tokens, heads, head_dim)
        key = self.k_proj(hidden).unflatten(-1, (-1, self.head_dim))
        value = self.v_proj(hidden).unflatten(-1, (-1, self.head_dim))
        return self.out_proj(attention(query, key, value, self.layer_name).flatten(1))


class OPTDecoderLayer(nn.Module):
    """Attention and MLP, each after a norm and beside a residual."""

    def __init__(self, config: OPTConfig, layer_name: str) -> None:
        super().__init__()
        self.self_attn = OPTAttention(config, f"{layer_name}.self_attn")
        self.self_attn_layer_norm = nn.LayerNorm(config.hidden_size)
        self.fc1 = nn.Linear(config.hidden_size, config.ffn_dim)
        self.fc2 = nn.Linear(config.ffn_dim, config.hidden_size)
        self.final_layer_norm = nn.LayerNorm(config.hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = add(hidden, self.self_attn(self.self_attn_layer_norm(hidden)))
        return add(hidden, self.fc2(functional.relu(self.fc1(self.final_layer_norm(hidden)))))


class OPTDecoder(nn.Module):
    """Token and position tables, layers, final norm: ``(input_ids, positions) -> hidden``, all (tokens, ...)."""

    def __init__(self, config: OPTConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = nn.Embedding(
            config.max_position_embeddings + POSITION_OFFSET, config.hidden_size
        )
        self.layers = nn.ModuleList(
            OPTDecoderLayer(config, f"model.decoder.layers.{i}") for i in range(config.num_hidden_layers)
        )
        self.final_layer_norm = nn.LayerNorm(config.hidden_size)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(input_ids) + self.embed_positions(positions + POSITION_OFFSET)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.final_layer_norm(hidden)


class OPTModel(nn.Module):
    """Holds the decoder under the name that checkpoints have for it."""

    def __init__(self, config: OPTConfig) -> None:
        super().__init__()
        self.decoder = OPTDecoder(config)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.decoder(input_ids, positions)


class OPT(nn.Module):
    """The whole model; its names are those of ``transformers``' ``OPTForCausalLM``.

    As with :class:`~cgkit.serving.llama.Llama`, ``forward`` ends at the final norm and the output projection
    (tied to the token table) stands outside of the graph.
    """

    def __init__(self, config: OPTConfig) -> None:
        super().__init__()
        self.config = config
        self.model = OPTModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Makes the output projection the token table itself."""
        self.lm_head.weight = self.model.decoder.embed_tokens.weight

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states after the final norm, (tokens, hidden_size), of a flat stream of tokens; see ``Llama``."""
        return self.model(input_ids, positions)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(rows, hidden_size) -> (rows, vocab_size). Outside of the graph."""
        return self.lm_head(hidden)

    @property
    def attention_layers(self) -> list[str]:
        """The names under which the layers ask for their KV cache, in order."""
        return [m.layer_name for m in self.modules() if isinstance(m, OPTAttention)]


def random_opt(
    config: OPTConfig, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0
) -> OPT:
    """An OPT with weights drawn so that activations neither fade nor grow, ready to serve.

    The same seed gives the same weights on every device.
    """
    with torch.device("meta"):
        model = OPT(config)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, meta in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        drawn = torch.randn(meta.shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            drawn = 1 + 0.1 * drawn
        elif name.endswith("bias"):
            drawn *= 0.1
        elif "embed" not in name:
            drawn /= meta.shape[-1] ** 0.5
        weights[name] = drawn.to(device, dtype)
    weights["lm_head.weight"] = weights["model.decoder.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    return model.requires_grad_(False).eval()
