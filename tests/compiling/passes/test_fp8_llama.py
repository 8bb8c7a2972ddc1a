"""The FP8 Llama, fused and not, against float64; and the forms of its layers."""

from __future__ import annotations

import pytest
import torch

import cgkit
from cgkit.compiling.passes import preview_passes
from cgkit.config import CompilationConfig
from cgkit.errors import ConfigError, ServingError
from cgkit.forward_context import set_forward_context
from cgkit.kernels.custom_op import apply_custom_ops
from cgkit.serving.llama import PRESETS
from cgkit.serving.llama_fp8 import quantize
from cgkit.serving.weights import build_model, random_weights
from tests.compiling.passes.models import FUSIONS, inputs, llama, matched, split


def float64_reference(model, shape):
    """The model with the weights that its FP8 stands for, in float64 throughout but for the norm's own float32."""
    weights = {}
    for name, value in model.state_dict().items():
        if name.endswith(("weight_scale", "quant.scale")):
            continue
        value = value.double()
        scale = model.state_dict().get(name + "_scale")
        if scale is not None:
            value = value * (scale.double().t() if scale.dim() else scale.double())
        weights[name] = value.cpu()
    return build_model(shape, weights, dtype=torch.float64)


def hidden(model, device="cpu"):
    with set_forward_context(None), torch.no_grad():
        return model(*inputs(device))


def compiled_hidden(model, device="cpu", splitting_ops=None, **fields):
    config = CompilationConfig(cudagraph_mode="NONE", splitting_ops=splitting_ops, **fields)
    pieces = cgkit.compile_pieces(split(model, config.custom_ops or ("none",), splitting_ops), config)
    return hidden(pieces, device), pieces


def errors(scheme, dtype, device):
    shape = PRESETS["tiny-llama"].scaled(num_hidden_layers=2)
    model = llama(2, scheme, dtype, device)
    reference = hidden(float64_reference(model, shape))
    unfused, _ = compiled_hidden(model, device)
    fused, pieces = compiled_hidden(model, device, passes=FUSIONS[:3])
    assert sum(matched(pieces.pass_reports).values()) > 0
    off = lambda got: (got.double().cpu() - reference).abs()  # noqa: E731
    return off(hidden(model, device)), off(unfused), off(fused), reference


def assert_within_the_rounding(scheme, dtype, device):
    eager, unfused, fused, reference = errors(scheme, dtype, device)
    # FP8 keeps three bits: each is off by some of it. The fused operators round to bfloat16 where the model says so, as
    # eager does; Inductor's own kernels leave that out. So the fused graph may be off by as much as the worse of both.
    for each in (eager, unfused, fused):
        assert each.mean() < 0.1 * reference.abs().mean()
    assert fused.mean() <= 1.1 * max(eager.mean(), unfused.mean())
    assert fused.max() <= 1.1 * max(eager.max(), unfused.max())


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["static", "per_token"])
def test_fused_is_as_near_to_float64_as_unfused(scheme, monkeypatch):
    monkeypatch.setenv("CGKIT_DISABLE_COMPILE_CACHE", "1")
    assert_within_the_rounding(scheme, torch.bfloat16, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["static", "per_token"])
def test_fused_is_as_near_to_float64_as_unfused_on_cuda(scheme, monkeypatch):
    monkeypatch.setenv("CGKIT_DISABLE_COMPILE_CACHE", "1")
    assert_within_the_rounding(scheme, torch.bfloat16, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("layers", [2, 4])
@pytest.mark.parametrize("custom_ops", [("none",), ("all",)], ids=str)
def test_matches_on_cuda(layers, custom_ops):
    reports = preview_passes(split(llama(layers, "static", torch.bfloat16, "cuda"), custom_ops), FUSIONS)
    assert matched(reports)["fuse_norm_quant"] == 2 * layers
    assert matched(reports)["fuse_act_quant"] == layers


@pytest.mark.gpu
def test_whole_and_attention_fused_on_cuda(monkeypatch):
    monkeypatch.setenv("CGKIT_DISABLE_COMPILE_CACHE", "1")
    model = llama(2, "static", torch.bfloat16, "cuda")
    unfused, _ = compiled_hidden(model, "cuda", splitting_ops=[])
    fused, pieces = compiled_hidden(model, "cuda", splitting_ops=[], passes=FUSIONS)
    assert matched(pieces.pass_reports)["fuse_attn_quant"] == 2
    assert (fused - unfused).abs().max() < 0.2 * unfused.abs().max()


def test_the_quantised_llama_says_what_it_does_not_know():
    with pytest.raises(ServingError, match="use one of static, per_token"):
        quantize(llama(2, None), "int4")


def test_static_scales_are_measured_and_shared_by_q_k_and_v():
    model = llama(2)
    attention = model.model.layers[0].self_attn
    assert 0 < float(attention.input_quant.scale) < 1
    assert attention.qkv_proj.weight.dtype is torch.float8_e4m3fn
    assert model.attention_layers == llama(2, None).attention_layers


@pytest.mark.parametrize("custom_ops", [("all",), ("none", "+rms_norm"), ("all", "-rotary")], ids=str)
def test_custom_ops_choose_the_traced_form(custom_ops):
    on = {
        name: CompilationConfig(custom_ops=custom_ops).custom_op_enabled(name)
        for name in ("rms_norm", "rotary")
    }
    text = str(split(llama(2, None), custom_ops, []).traced.graph_module.graph)
    assert ("cgkit.rms_norm" in text) == on["rms_norm"] and ("cgkit.rotary" in text) == on["rotary"]
    assert ("rsqrt" in text) != on["rms_norm"]


def test_both_forms_give_the_same():
    shape = PRESETS["tiny-llama"].scaled(num_hidden_layers=2)
    model = build_model(shape, random_weights(shape))
    apply_custom_ops(model, CompilationConfig(custom_ops=("none",)))
    native = hidden(model)
    decided = apply_custom_ops(model, CompilationConfig(custom_ops=("all",)))
    assert decided == dict.fromkeys(decided, True) and set(decided) == {"rms_norm", "silu_and_mul", "rotary"}
    assert torch.equal(hidden(model), native)


@pytest.mark.parametrize(
    ("fields", "on"),
    [
        ({}, False),
        ({"compiler": "eager"}, True),
        ({"level": 0, "cudagraph_mode": "NONE"}, True),
        ({"custom_ops": ["all"]}, True),
        ({"custom_ops": ["none"], "compiler": "eager"}, False),
        ({"custom_ops": ["+rms_norm"]}, True),
        ({"custom_ops": ["all", "-rms_norm"]}, False),
        ({"custom_ops": ["-rms_norm"], "compiler": "eager"}, False),
    ],
    ids=str,
)
def test_which_form_is_the_default(fields, on):
    assert CompilationConfig(**fields).custom_op_enabled("rms_norm") is on


def test_an_unknown_layer_is_refused():
    with pytest.raises(ConfigError, match="the names are rms_norm"):
        CompilationConfig(custom_ops=["+layer_norm"])


def test_the_runner_traces_what_its_configuration_says():
    from cgkit.serving.runner import Runner

    shape = PRESETS["tiny-llama"].scaled(num_hidden_layers=1)
    model = build_model(shape, random_weights(shape))
    for custom_ops, there in ((("all",), True), (None, False)):
        config = CompilationConfig(compiler="inductor", cudagraph_mode="NONE", custom_ops=custom_ops)
        runner = Runner(model, config=config, max_num_seqs=2, max_model_len=32, kv_cache_tokens=128)
        apply_custom_ops(model, config)
        with set_forward_context(runner.inputs.fill_dummy(4, decode_only=False)):
            traced = cgkit.trace(model, runner.inputs.input_ids[:4], runner.inputs.positions[:4])
        assert ("cgkit.silu_and_mul" in str(traced.graph_module.graph)) is there
