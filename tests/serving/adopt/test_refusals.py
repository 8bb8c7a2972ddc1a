"""What cannot be adopted, and that the message says the true reason and the place it comes from."""

import re
from pathlib import Path

import pytest
import torch

import cgkit
from cgkit.errors import ServingError
from cgkit.serving.adopt import AdoptError
from cgkit.serving.adopt.check import check_against_own

from .families import VOCAB, build, config_of, family, sizes, transformers

GROUPED = sizes(num_key_value_heads=2, head_dim=16)
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1}
BLOOM = {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
BART = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}
DEEPSEEK = sizes(
    num_key_value_heads=4,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=12,
    n_routed_experts=4,
    n_group=1,
    topk_group=1,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
)

#: family, sizes, the reason, a word that stands on the line that the message names.
REFUSED = {
    "softcap": ("Gemma2", GROUPED, "caps the scores", "softcap"),
    "sinks": ("GptOss", {**GROUPED, "num_local_experts": 2, "num_experts_per_tok": 1}, "sinks", "s_aux"),
    "alibi": ("Bloom", BLOOM, "ALiBi", "alibi"),
    "alibi-by-setting": ("Falcon", {**sizes(), "alibi": True}, "ALiBi", "alibi"),
    "no-interface": (
        "Falcon",
        {**sizes(), "alibi": False},
        "not through transformers' AttentionInterface",
        "scaled_dot",
    ),
    "state-space": (
        "Mamba",
        {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2},
        "recurrent state",
        "class Mamba",
    ),
    "hybrid": ("Jamba", {**GROUPED, **EXPERTS}, "recurrent state", "class JambaMamba"),
    "convolution": (
        "Lfm2",
        {**GROUPED, "layer_types": ["conv", "full_attention"]},
        "recurrent state",
        "ShortConv",
    ),
    "linear-attention": ("Qwen3Next", {**GROUPED, **EXPERTS}, "recurrent state", "GatedDeltaNet"),
    "longrope": (
        "Phi3",
        sizes(num_key_value_heads=2, original_max_position_embeddings=64, rope_parameters=LONG_ROPE),
        "'longrope'",
        "class Phi3ForCausalLM",
    ),
    "latent-attention": (
        "DeepseekV3",
        DEEPSEEK,
        "keys and values differ in shape",
        "class DeepseekV3Attention",
    ),
    "own-positions": ("Bart", BART, "takes no position_ids", "position"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_reason_is_said_with_file_and_line(case):
    name, fields, reason, word = REFUSED[case]
    model = build(getattr(transformers, f"{name}Config")(**fields))
    with pytest.raises(AdoptError, match=reason) as raised:
        cgkit.adopt(model)
    place = re.search(r"\((transformers/models/\w+/modeling_\w+\.py):(\d+)\)", str(raised.value))
    file, line = place.groups()
    text = (Path(transformers.__file__).parent.parent / file).read_text().splitlines()[int(line) - 1]
    assert word.lower() in text.lower(), text


def test_an_encoder_decoder_is_refused_for_its_cross_attention():
    config = transformers.T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    model = transformers.T5ForConditionalGeneration(config)
    with pytest.raises(AdoptError, match=r"encoder-decoder.*modeling_t5\.py:\d+"):
        cgkit.adopt(model)
    with pytest.raises(AdoptError, match="cross attention"):
        cgkit.adopt(build(config_of("GPT2", add_cross_attention=True)))


def test_a_model_that_is_none_is_refused_with_the_way_out():
    with pytest.raises(AdoptError, match=r"no causal language model .*support_torch_compile"):
        cgkit.adopt(torch.nn.Linear(2, 2))
    with pytest.raises(AdoptError, match=r"no causal language model|no output projection"):
        cgkit.adopt(transformers.AutoModel.from_config(config_of("Llama")))
    with pytest.raises(ServingError, match="got int"):
        cgkit.adopt(3)


def test_the_check_finds_what_no_rule_foresaw():
    """A layer that mixes neighbours, outside of attention, in a family that is else adopted."""
    model = build(config_of("Llama"))
    layer = model.model.layers[1]

    class Leaky(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, hidden):
            return self.inner(hidden + hidden.roll(1, dims=1))

    layer.mlp = Leaky(layer.mlp)
    with pytest.raises(AdoptError, match="logits are off by"):
        cgkit.adopt(model)
    cgkit.adopt(model, check=False)


def test_the_check_sees_a_scale_that_is_a_little_off():
    model = family("Llama")
    adopted = cgkit.adopt(model)
    adopted.body.layers[0].self_attn.scaling *= 1.05
    with pytest.raises(AdoptError, match="logits are off by"):
        check_against_own(adopted, model)


def test_weights_of_two_types_are_refused():
    model = build(config_of("Llama"))
    model.model.to(torch.bfloat16)
    with pytest.raises(AdoptError, match=r"(?i)bfloat16"):
        cgkit.adopt(model)


def test_an_output_projection_without_a_weight_is_refused():
    model = build(config_of("Llama"))
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(AdoptError, match=r"output projection \(Sequential\) has no tensor `weight`"):
        cgkit.adopt(model)

    class Packed(torch.nn.Module):  # as torch.ao's dynamically quantized layers
        def weight(self):
            return torch.zeros(1)

    model.lm_head = Packed()
    with pytest.raises(AdoptError, match=r"output projection \(Packed\) has no tensor `weight`"):
        cgkit.adopt(model)


def test_a_refused_model_still_generates():
    model = build(config_of("GPT2"))
    model.config.add_cross_attention = True
    ids = torch.tensor([[5, 6, 7]])
    before = model(ids).logits
    with pytest.raises(AdoptError):
        cgkit.adopt(model)
    assert torch.equal(model(ids).logits, before)


def test_a_layer_that_does_not_look_its_attention_up_is_named():
    model = build(config_of("Llama"))

    class OwnAttention(torch.nn.Module):
        def forward(self, hidden_states, **_):
            return hidden_states.cumsum(1), None

    model.model.layers[1].self_attn = OwnAttention()
    with pytest.raises(AdoptError, match=r"1 of 2 layers call .*test_refusals\.py:\d+"):
        cgkit.adopt(model)


def test_layers_that_share_one_attention_are_refused():
    model = build(config_of("Llama"))
    model.model.layers[1].self_attn = model.model.layers[0].self_attn
    with pytest.raises(AdoptError, match="runs more than once a step"):
        cgkit.adopt(model)


def test_layers_of_different_shapes_are_refused():
    model = build(config_of("Llama"))
    other = build(config_of("Llama", num_key_value_heads=4))
    model.model.layers[1] = other.model.layers[1]
    with pytest.raises(AdoptError, match=r"layers differ in .*\(4, 2, 12\), \(4, 4, 12\)"):
        cgkit.adopt(model)


def test_rotary_positions_that_follow_the_longest_request_are_refused():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(AdoptError, match="'dynamic'"):
        cgkit.adopt(build(config_of("Llama", rope_parameters=rope)))
