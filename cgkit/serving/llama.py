"""A readable Llama on a flat stream of tokens.

Re-implements, small, the model of "Llama 2" and "The Llama 3 Herd of Models" (Touvron et al. 2023,
arXiv:2307.09288; Grattafiori et al. 2024, arXiv:2407.21783): RMSNorm (Zhang and Sennrich 2019),
rotary positions (Su et al. 2021) with Llama 3's scaling, grouped-query attention (Ainslie et al.
2023) and SwiGLU (Shazeer 2020). A state dict has the names of ``transformers``, so that weights load
by name; what reads the same input is multiplied as one (:mod:`cgkit.serving.merged`). It is the
``LlamaModel`` of the article's "模型侧的接入点：support_torch_compile 装饰器"
(the model's side: the decorator).

Two things differ from a training model, and both are what makes the pipeline possible:

* There is no batch dimension. All tokens of all requests stand in one stream, dimension 0, and
  only the attention operator knows (from the forward context) which token belongs to whom.
  Everything else works token by token, so one graph with one symbolic size serves every batch.
* Attention is one opaque operator that writes into a tensor given to it.

Norm, SwiGLU and rotary have two forms, torch code and a hand-written operator (:mod:`cgkit.kernels.custom_op`); which
one is traced, ``CompilationConfig.custom_ops`` says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from cgkit.errors import ServingError
from cgkit.kernels.custom_op import RMSNorm, Rotary, SiluAndMul
from cgkit.serving.attention import attention
from cgkit.serving.merged import MergedProjections


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's way to stretch rotary positions: long wavelengths are slowed down by ``factor``,
    short ones stay, those between are blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama. Field names as in ``transformers``; immutable (see :meth:`scaled`)."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    #: A request stops at any of these.
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_key_value_heads < 1 or self.num_attention_heads % self.num_key_value_heads:
            raise ServingError(
                f"{self.name}: {self.num_attention_heads} query heads cannot be shared by "
                f"{self.num_key_value_heads} key/value heads; the first must be a multiple of the second"
            )
        if self.head_dim % 2:
            raise ServingError(f"{self.name}: head_dim={self.head_dim} is odd; rotary positions turn pairs")

    @classmethod
    def from_hf(cls, config: Any, name: str | None = None) -> LlamaConfig:
        """From a ``transformers`` ``LlamaConfig``, or the dict of a ``config.json``.

        Raises:
            ServingError: the model is not a plain Llama (another family, biases, another activation
                or another kind of rotary scaling); the message names the field.
        """
        raw: dict[str, Any] = config if isinstance(config, dict) else config.to_dict()
        _refuse_other_families(raw)
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
        eos = raw.get("eos_token_id")
        return cls(
            name=name or raw.get("_name_or_path") or "llama",
            vocab_size=raw["vocab_size"],
            hidden_size=hidden,
            intermediate_size=raw["intermediate_size"],
            num_hidden_layers=raw["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or hidden // heads,
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=rope.get("rope_theta") or raw.get("rope_theta") or 10000.0,
            rope_scaling=_rope_scaling(rope, raw),
            max_position_embeddings=raw.get("max_position_embeddings", 2048),
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,),
        )

    def to_hf(self) -> dict[str, Any]:
        """The fields as a ``config.json`` of ``transformers`` would hold them."""
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.rope_theta}
        if self.rope_scaling is not None:
            rope |= {"rope_type": "llama3", **vars(self.rope_scaling)}
        fields = {k: v for k, v in vars(self).items() if not k.startswith(("rope_", "eos_", "name"))}
        return {
            "model_type": "llama",
            "hidden_act": "silu",
            **fields,
            "rope_parameters": rope,
            "eos_token_id": list(self.eos_token_ids) or None,
        }

    def scaled(self, **changes: Any) -> LlamaConfig:
        """The same model with some fields changed, for instance ``num_hidden_layers=2``."""
        return replace(self, **changes)

    @property
    def num_parameters(self) -> int:
        """How many weights, tied ones once."""
        heads = self.num_attention_heads + self.num_key_value_heads
        layer = 2 * self.hidden_size * self.head_dim * heads
        layer += 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        tables = 1 if self.tie_word_embeddings else 2
        return self.num_hidden_layers * layer + self.hidden_size * (1 + tables * self.vocab_size)


def _refuse_other_families(raw: dict[str, Any]) -> None:
    plain = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    wrong = {field: raw[field] for field, value in plain.items() if raw.get(field) not in (value, None)}
    if wrong:
        raise ServingError(
            f"not a plain Llama: {wrong}; cgkit.serving runs model_type 'llama' with silu and no biases. "
            "Another model can go through cgkit.support_torch_compile"
        )


def _rope_scaling(rope: dict[str, Any], raw: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise ServingError(f"rotary scaling {kind!r} is not implemented; 'default' and 'llama3' are")
    original = rope.get("original_max_position_embeddings") or raw["max_position_embeddings"]
    return RopeScaling(rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"], original)


_LLAMA3_ROPE = RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)
_LLAMA3_EOS = (128001, 128008, 128009)

# fmt: off
#: Shapes by name. ``tiny-llama`` is made on the spot with random weights and reads bytes.
PRESETS: dict[str, LlamaConfig] = {
    config.name: config
    for config in [
        # name, vocabulary, width, MLP width, layers, query heads, key/value heads, head size
        LlamaConfig(
            "tiny-llama", 259, 64, 160, 4, 4, 2, 16, max_position_embeddings=1024, eos_token_ids=(257,)
        ),
        LlamaConfig(
            "smollm2-135m", 49152, 576, 1536, 30, 9, 3, 64, 1e-5, 100000.0, None, 8192, True, (2,)
        ),
        LlamaConfig(
            "llama-3.2-1b", 128256, 2048, 8192, 16, 32, 8, 64, 1e-5, 500000.0,
            replace(_LLAMA3_ROPE, factor=32.0), 131072, True, _LLAMA3_EOS
        ),
        LlamaConfig(
            "llama-3.1-8b", 128256, 4096, 14336, 32, 32, 8, 128, 1e-5, 500000.0,
            _LLAMA3_ROPE, 131072, False, _LLAMA3_EOS
        ),
    ]
}
# fmt: on


def inverse_frequencies(config: LlamaConfig) -> torch.Tensor:
    """The angle by which each pair of a head turns a position, in float32: (head_dim / 2,)."""
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.int64, device="cpu").float() / config.head_dim
    frequencies = 1.0 / config.rope_theta**steps
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    # How often a pair turns within the context that the model was first trained on: 0 = slowed
    # down in full, 1 = left as it is, between = blended.
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies


class LlamaRotaryEmbedding(nn.Module):
    """cos and sin of each position's angles, once a step for all layers."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        # Not a weight (no checkpoint holds it), and float32 whatever the type of the weights.
        self.inv_freq = nn.Buffer(inverse_frequencies(config), persistent=False)

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        if self.inv_freq.dtype is not torch.float32:  # asked once, while the model is traced
            raise ServingError(
                f"the rotary frequencies were cast to {self.inv_freq.dtype}, which turns far positions by "
                "wrong angles; give the type to cgkit.serving.build_model and do not cast after it"
            )
        angles = positions.to(torch.float32)[:, None] * self.inv_freq  # (tokens, head_dim / 2)
        angles = torch.cat((angles, angles), dim=-1)  # (tokens, head_dim)
        return angles.cos().to(dtype), angles.sin().to(dtype)


class LlamaAttention(MergedProjections):
    """Projections and rotary positions around the one splitting operator.

    q, k and v are one product, and the heads of q and k are turned by one kernel. What leaves the piece are views: q
    and k of the turned heads, v of the product.
    """

    def __init__(self, config: LlamaConfig, layer_name: str) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.layer_name = layer_name
        #: Query heads, key heads, value heads.
        self.heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        rows = [count * config.head_dim for count in self.heads]
        self.qkv_proj = nn.Linear(config.hidden_size, sum(rows), bias=False)
        self.o_proj = nn.Linear(rows[0], config.hidden_size, bias=False)
        self.rotate = Rotary()
        self.merge("qkv_proj", dict(zip(("q_proj", "k_proj", "v_proj"), rows)))

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return self.o_proj(self.mixed(self.qkv_proj(hidden), cos, sin))

    def mixed(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Attention over the heads in ``qkv`` (tokens, all heads' width) -> (tokens, query heads' width)."""
        queries, keys, _ = self.heads
        heads = qkv.unflatten(-1, (-1, self.head_dim))  # (tokens, queries + keys + values, head_dim)
        turned = self.rotate(heads[:, : queries + keys], cos, sin)
        query, key, value = turned[:, :queries], turned[:, queries:], heads[:, queries + keys :]
        # The layer's name is a constant in the graph, but only the attention's own piece holds
        # it, so that the pieces between stay equal to one another and are compiled once.
        return attention(query, key, value, self.layer_name).flatten(1)


class LlamaMLP(MergedProjections):
    """SwiGLU; gate and up are one product."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width = config.intermediate_size
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * width, bias=False)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.act = SiluAndMul()
        self.merge("gate_up_proj", {"gate_proj": width, "up_proj": width})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.gate_up_proj(hidden)))


def add(hidden: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    """``hidden + update``, to the bit; said so that Inductor fuses it with the norm that follows.

    A plain sum after a projection becomes an ``addmm``, which copies ``hidden`` into its output first: two
    kernels more a layer than the sum that the norm's own kernel does on the way.
    """
    return (hidden.to(torch.float32) + update.to(torch.float32)).to(hidden.dtype)


class LlamaDecoderLayer(nn.Module):
    """Attention and MLP, each after a norm and beside a residual."""

    def __init__(self, config: LlamaConfig, layer_name: str) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, f"{layer_name}.self_attn")
        self.mlp = LlamaMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        hidden = add(hidden, self.self_attn(self.input_layernorm(hidden), cos, sin))
        return add(hidden, self.mlp(self.post_attention_layernorm(hidden)))


class LlamaModel(nn.Module):
    """Embedding, layers, final norm: ``(input_ids, positions) -> hidden``, all (tokens, ...)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, f"model.layers.{i}") for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(input_ids)  # (tokens, hidden)
        cos, sin = self.rotary_emb(positions, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin)
        return self.norm(hidden)


class Llama(nn.Module):
    """The whole model; its state dict has the names of ``transformers``' ``LlamaForCausalLM``.

    ``forward`` is what gets traced, split, compiled and recorded: it ends at the final norm. The
    output projection (:meth:`compute_logits`) stands outside of the graph, as in vLLM, for two
    reasons. It needs one row a request, the last token's, and not one a token: how many rows that
    are and which ones is known to the runner and not to the graph. And its output, (rows,
    vocabulary), is the largest tensor of a step: inside it would be kept once for each recorded
    size.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Makes the output projection the embedding table itself, where the shape says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states after the final norm, (tokens, hidden_size), of a flat stream of tokens.

        Args:
            input_ids: (tokens,), whole numbers.
            positions: (tokens,), each token's place in its own request.

        Runs inside :class:`cgkit.set_forward_context` with an ``AttentionMetadata`` that says which
        token belongs to which request.
        """
        return self.model(input_ids, positions)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(rows, hidden_size) -> (rows, vocab_size). Outside of the graph, see the class."""
        return self.lm_head(hidden)

    def logits_into(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """:meth:`compute_logits` into memory that is there already."""
        torch.mm(hidden, self.lm_head.weight.t(), out=out)

    @property
    def attention_layers(self) -> list[str]:
        """The names under which the layers ask for their KV cache, in order."""
        return [m.layer_name for m in self.modules() if isinstance(m, LlamaAttention)]
