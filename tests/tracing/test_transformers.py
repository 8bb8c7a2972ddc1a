"""Models of many families of `transformers` in one process.

Their ``forward.__code__`` is one and the same object (a shared decorator's wrapper), so whoever tells
compilations apart by the code of the class's forward mixes them up.
"""

from __future__ import annotations

import pytest
import torch

from cgkit import compilation_counter
from cgkit.tracing import trace

transformers = pytest.importorskip("transformers")


def causal_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Attention without a mask tensor, for ``transformers``' AttentionInterface."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


@pytest.fixture(scope="module", autouse=True)
def registered():
    """One attention and a mask function that makes none: then every family is one graph."""
    transformers.AttentionInterface.register("cgkit_causal", causal_attention)
    transformers.AttentionMaskInterface.register("cgkit_causal", lambda *args, **kwargs: None)


def sizes(**more):
    common = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return {**common, **more}


GPT2 = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OPT = {
    key: value
    for key, value in sizes(ffn_dim=64, word_embed_proj_dim=32).items()
    if key != "intermediate_size"
}
FAMILIES = {
    "Llama": sizes(num_key_value_heads=2),
    "Mistral": sizes(num_key_value_heads=2, sliding_window=None),
    "Qwen2": sizes(num_key_value_heads=2),
    "Qwen3": sizes(num_key_value_heads=2, head_dim=8),
    "Gemma": sizes(num_key_value_heads=2, head_dim=8),
    "Phi": sizes(num_key_value_heads=2),
    "Olmo2": sizes(num_key_value_heads=2),
    "GPTNeoX": sizes(),
    "GPT2": GPT2,
    "OPT": OPT,
}


def build(family):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    return transformers.AutoModel.from_config(config, attn_implementation="cgkit_causal").eval()


def call(tokens):
    ids = torch.randint(0, 64, (1, tokens), generator=torch.Generator().manual_seed(tokens))
    return {"input_ids": ids, "position_ids": torch.arange(tokens)[None], "use_cache": False}


DIMS = {"input_ids": 1, "position_ids": 1}


def check(models):
    with compilation_counter.expect(num_graphs_seen=len(models)):
        traced = {name: trace(model, dynamic_arg_dims=DIMS, **call(6)) for name, model in models.items()}
        for tokens in (1, 6, 11):  # all models in turn, so that a mix-up would show
            for name, model in models.items():
                with torch.no_grad():
                    expected = model(**call(tokens)).last_hidden_state
                got = traced[name](**call(tokens)).last_hidden_state
                torch.testing.assert_close(got, expected, msg=lambda text, name=name: f"{name}: {text}")
    return traced


def test_two_families_share_their_code_and_are_told_apart():
    models = {"Qwen2": build("Qwen2"), "GPT2": build("GPT2")}
    assert type(models["Qwen2"]).forward.__code__ is type(models["GPT2"]).forward.__code__
    traced = check(models)
    assert traced["Qwen2"].original_code is not traced["GPT2"].original_code


@pytest.mark.slow
def test_ten_families_in_one_process():
    assert len(FAMILIES) == 10
    traced = check({family: build(family) for family in FAMILIES})
    for family, graph in traced.items():
        assert graph.operators.count("scaled_dot_product_attention") == 2, family
        assert any(
            f"modeling_{family.lower()}" in file.replace("_neox", "neox") for file in graph.traced_files
        ), family
