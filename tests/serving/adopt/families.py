"""Small random models of each family, with greedy answers that are no ties."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

VOCAB = 97


def sizes(**more: Any) -> dict[str, Any]:
    common = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return {**common, **more}


GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OPT = {name: size for name, size in sizes(ffn_dim=80, word_embed_proj_dim=48).items() if name[0] != "i"}

#: The families that the project promises, each as its common checkpoints are: grouped heads, biases, tied or not.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": sizes(num_key_value_heads=2),
    "Qwen2": sizes(num_key_value_heads=2, tie_word_embeddings=True),
    "Qwen3": sizes(num_key_value_heads=2, head_dim=16),
    "Mistral": sizes(num_key_value_heads=2, sliding_window=64),
    "Gemma": sizes(num_key_value_heads=1, head_dim=16),
    "OPT": OPT,
    "GPT2": GPT2,
    "Phi": sizes(partial_rotary_factor=0.5),
}

#: How large embeddings are: tied ones that outweigh the layers answer each token with itself. Gemma scales its own.
TABLE = {"GemmaForCausalLM": 0.03, "OPTForCausalLM": 0.1}


def config_of(family: str, **more: Any) -> Any:
    return getattr(transformers, f"{family}Config")(**{**FAMILIES.get(family, {}), **more})


def build(config: Any, seed: int = 0) -> Any:
    """A model whose weights are large enough that the best token leads clearly."""
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None  # answers go on to their full length
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:  # norms (in Gemma 1 + weight) and biases
                ones = "weight" in name and type(model).__name__ != "GemmaForCausalLM"
                parameter.copy_(float(ones) + 0.1 * drawn)
            else:
                is_table = "embed" in name or "wte" in name or "wpe" in name
                parameter.copy_(drawn * (TABLE.get(type(model).__name__, 0.3) if is_table else 2 / 48**0.5))
    return model


@cache
def family(name: str) -> Any:
    return build(config_of(name))


def alone(model: Any, prompt: list[int], count: int) -> list[int]:
    """What ``transformers`` itself generates greedily for one prompt, stopping at nothing."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def least_gap(model: Any, prompt: list[int], answer: list[int]) -> float:
    """How far the best token led the second, in the closest of the answer's steps."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    best = logits.topk(2).values
    return float((best[:, 0] - best[:, 1]).min())
