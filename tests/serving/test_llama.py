"""The model against ``transformers``, through the paged cache."""

import pytest
import torch

from cgkit.errors import ServingError
from cgkit.forward_context import set_forward_context
from cgkit.serving.attention import build_metadata
from cgkit.serving.kv_cache import PagedKVCache
from cgkit.serving.llama import PRESETS, LlamaConfig, RopeScaling, inverse_frequencies
from cgkit.serving.weights import build_model, random_weights

from .helpers import TOY, in_transformers, prompts_of, toy, toy_and_reference

LLAMA3 = TOY.scaled(
    rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64), tie_word_embeddings=True, head_dim=16, name="llama3-like"
)


def cache_of(config: LlamaConfig, blocks: int = 20) -> PagedKVCache:
    return PagedKVCache(config.num_hidden_layers, blocks, 4, config.num_key_value_heads, config.head_dim)


@torch.no_grad()
def step(model, cache, requests):
    """Logits of every token; ``requests``: (all tokens, computed before, blocks) each."""
    new = [tokens[done:] for tokens, done, _ in requests]
    metadata = build_metadata(
        [len(n) for n in new],
        [len(tokens) for tokens, _, _ in requests],
        [blocks for _, _, blocks in requests],
        cache.block_size,
        kv_caches=cache.caches,
    )
    with set_forward_context(metadata):
        hidden = model(torch.tensor([token for tokens in new for token in tokens]), metadata.positions)
    return model.compute_logits(hidden).split([len(n) for n in new])


@pytest.mark.parametrize("config", [TOY, LLAMA3], ids=lambda c: c.name)
def test_prefill_and_decode_equal_transformers(config):
    model = toy(config)
    reference = in_transformers(model)
    cache = cache_of(config)
    prompts = prompts_of([5, 1, 13])
    blocks = [[7, 3, 9, 2], [4, 1], [5, 11, 8, 12, 6]]
    with torch.no_grad():
        wanted = [reference(torch.tensor([p])).logits[0] for p in prompts]
    # The prompts but their last three tokens together, then the rest one by one, as a decode does.
    done = [max(len(p) - 3, 0) for p in prompts]
    got = [[] for _ in prompts]
    first = [r for r in range(3) if done[r]]
    for r, logits in zip(first, step(model, cache, [(prompts[r][: done[r]], 0, blocks[r]) for r in first])):
        got[r].append(logits)
    while rows := [r for r in range(3) if done[r] < len(prompts[r])]:
        batch = [(prompts[r][: done[r] + 1], done[r], blocks[r]) for r in rows]
        for r, logits in zip(rows, step(model, cache, batch)):
            got[r].append(logits)
            done[r] += 1
    for mine, theirs in zip(got, wanted):
        torch.testing.assert_close(torch.cat(mine), theirs, atol=2e-5, rtol=2e-5)


def test_parameter_names_are_those_of_transformers():
    model, reference = toy_and_reference()
    assert model.state_dict().keys() == reference.state_dict().keys()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_frequencies_and_fields_of_transformers(name):
    import transformers

    config = PRESETS[name]
    theirs = transformers.LlamaConfig(**{k: v for k, v in config.to_hf().items() if k != "model_type"})
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
    torch.testing.assert_close(inverse_frequencies(config), rotary.inv_freq, atol=0, rtol=1e-6)
    assert LlamaConfig.from_hf(theirs, name) == config
    assert LlamaConfig.from_hf(config.to_hf(), name) == config


@pytest.mark.parametrize(
    ("name", "billions"), [("smollm2-135m", 0.1345), ("llama-3.2-1b", 1.2358), ("llama-3.1-8b", 8.0303)]
)
def test_presets_have_the_size_that_their_name_says(name, billions):
    assert PRESETS[name].num_parameters / 1e9 == pytest.approx(billions, rel=1e-3)


def test_number_of_parameters_is_that_of_the_model():
    for config in (TOY, LLAMA3):
        assert config.num_parameters == sum(p.numel() for p in toy(config).parameters())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "mistral"}, "mistral"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "yarn"),
    ],
)
def test_other_models_are_refused_by_name(change, says):
    with pytest.raises(ServingError, match=says):
        LlamaConfig.from_hf({**TOY.to_hf(), **change})


def test_shapes_that_cannot_be_are_refused():
    with pytest.raises(ServingError, match="7 query heads"):
        TOY.scaled(num_attention_heads=7)
    with pytest.raises(ServingError, match="odd"):
        TOY.scaled(head_dim=7)


def test_a_cast_after_building_is_refused_because_it_casts_the_frequencies():
    model = toy().to(torch.bfloat16)
    with set_forward_context(None), pytest.raises(ServingError, match="build_model"):
        model(torch.tensor([1, 2]), torch.tensor([0, 1]))
    model = build_model(TOY, random_weights(TOY), dtype=torch.bfloat16)
    with set_forward_context(None):
        assert model(torch.tensor([1, 2]), torch.tensor([0, 1])).dtype is torch.bfloat16
