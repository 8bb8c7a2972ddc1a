"""The fusions on a Dynamo-traced FP8 Llama: how often each matches, in every form of the layers."""

from __future__ import annotations

import pytest
import torch

from cgkit.compiling.passes import RMSNormQuantFusion, preview_passes, run_pass
from cgkit.compiling.passes.graphs import tensor_value
from tests.compiling.passes.models import FUSIONS, llama, matched, split

NORM, ADD_NORM = "rms_norm_static_fp8_quant", "fused_add_rms_norm_static_fp8_quant"


def fused_calls(reports, name):
    return sum(each[-1].after.count(f"cgkit.{name}.default(") for each in reports.values())


@pytest.mark.parametrize(
    ("layers", "custom_ops", "dtype"),
    [
        (2, ("none",), torch.bfloat16),
        (4, ("none",), torch.bfloat16),
        (2, ("none",), torch.float32),
        (2, ("all",), torch.bfloat16),
        (4, ("all",), torch.bfloat16),
        (2, ("all",), torch.float32),
        (2, ("none", "+rms_norm"), torch.bfloat16),
        (2, ("none", "+quant_fp8"), torch.bfloat16),
    ],
    ids=str,
)
def test_split_each_fusion_matches_as_often_as_the_layers_say(layers, custom_ops, dtype):
    reports = preview_passes(split(llama(layers, "static", dtype), custom_ops), FUSIONS)
    assert len(reports) == layers + 1
    found = matched(reports)
    assert found["fuse_norm_quant"] == 2 * layers  # before q, k, v and before the MLP; not the last norm
    assert found["fuse_act_quant"] == layers
    assert found["fuse_attn_quant"] == 0  # attention is in no piece
    assert fused_calls(reports, NORM) == 1  # the first norm has no sum before it
    assert fused_calls(reports, ADD_NORM) == 2 * layers - 1
    assert fused_calls(reports, "silu_and_mul_static_fp8_quant") == layers


@pytest.mark.parametrize("layers", [2, 4])
@pytest.mark.parametrize("custom_ops", [("none",), ("all",)], ids=str)
def test_whole_attention_is_fused_too(layers, custom_ops):
    reports = preview_passes(split(llama(layers), custom_ops, []), FUSIONS)
    found = matched(reports)
    assert (found["fuse_norm_quant"], found["fuse_act_quant"], found["fuse_attn_quant"]) == (
        2 * layers,
        layers,
        layers,
    )
    after = reports["submod_0"][-1].after  # as it is compiled: layers by number, not by name
    assert after.count("cgkit_by_number.cgkit__unified_attention_with_fp8_output.default(") == layers
    assert "unified_attention_with_output" not in after and "auto_functionalized" not in after
    assert ".self_attn" not in after


@pytest.mark.parametrize(
    ("layers", "custom_ops", "dtype"),
    [
        (2, ("none",), torch.bfloat16),
        (4, ("none",), torch.bfloat16),
        (2, ("none",), torch.float32),
        (2, ("all",), torch.bfloat16),
        (4, ("all",), torch.bfloat16),
        (2, ("none", "+quant_fp8"), torch.bfloat16),
        (2, ("none", "+silu_and_mul"), torch.bfloat16),
    ],
    ids=str,
)
def test_per_token_quantisation_is_fused_with_the_norm_and_with_the_activation(layers, custom_ops, dtype):
    reports = preview_passes(split(llama(layers, "per_token", dtype), custom_ops), FUSIONS)
    found = matched(reports)
    assert found["fuse_norm_quant"] == 2 * layers
    assert found["fuse_act_quant"] == layers
    assert found["fuse_attn_quant"] == 0
    assert fused_calls(reports, "silu_and_mul_dynamic_per_token_fp8_quant") == layers
    assert fused_calls(reports, "silu_and_mul_static_fp8_quant") == 0
    assert fused_calls(reports, "rms_norm_dynamic_per_token_fp8_quant") == 1
    assert fused_calls(reports, "fused_add_rms_norm_dynamic_per_token_fp8_quant") == 2 * layers - 1


def test_an_unquantised_llama_has_nothing_to_fuse():
    reports = preview_passes(split(llama(2, None)), FUSIONS)
    assert all(count == 0 for name, count in matched(reports).items() if name.startswith("fuse"))


# --- graphs of one norm, by hand: make_fx gives what Inductor's decompositions give --------------------------


def norm_and_quant(x, residual, weight, scale, keep_norm=False, collapsed=False):
    aten, convert = torch.ops.aten, torch.ops.prims.convert_element_type
    f32 = torch.float32
    total = aten.add(convert(x, f32), convert(residual, f32))
    narrow = convert(total, x.dtype)
    wide = total if collapsed else convert(narrow, f32)
    mean = aten.mean(aten.pow(wide, 2), [-1], True)
    normed = convert(aten.mul(wide, aten.rsqrt(aten.add(mean, 1e-5))), x.dtype)
    out = aten.mul(weight, normed)
    quantised = aten.clamp_max(aten.clamp_min(aten.div(convert(out, f32), scale), -448.0), 448.0)
    results = [convert(quantised, torch.float8_e4m3fn), narrow]
    if collapsed:  # the next sum takes the unrounded one, as torch 2.11 may leave it
        results.append(convert(aten.add(total, 1.0), x.dtype))
    return [*results, out] if keep_norm else results


def arguments(dtype=torch.bfloat16):
    torch.manual_seed(0)
    x, residual = torch.randn(3, 32).to(dtype), torch.randn(3, 32).to(dtype)
    return x, residual, torch.rand(32).to(dtype) + 0.5, torch.tensor(0.02)


def graph_of(**options):
    from torch.fx.experimental.proxy_tensor import make_fx

    def function(x, residual, weight, scale):
        return norm_and_quant(x, residual, weight, scale, **options)

    return make_fx(function, tracing_mode="fake")(*arguments())


def test_a_norm_that_is_used_unquantised_too_is_left_alone_and_said_so():
    module = graph_of(keep_norm=True)
    report = run_pass(RMSNormQuantFusion(), module.graph)
    assert report.matched == 0 and "unquantised as well" in report.notes[0]


@pytest.mark.parametrize("collapsed", [False, True])
def test_rounded_and_unrounded_sums(collapsed):
    module = graph_of(collapsed=collapsed)
    expected = norm_and_quant(*arguments(), collapsed=collapsed)
    report = run_pass(RMSNormQuantFusion(), module.graph)
    module.recompile()
    assert report.matched == 1 and report.nodes_after < report.nodes_before
    got = module(*arguments())
    assert torch.equal(got[1], expected[1])
    steps = (got[0].to(torch.float32) - expected[0].to(torch.float32)).abs()
    assert (steps <= expected[0].to(torch.float32).abs() / 8 + 2**-9).all()  # one step of FP8 at most
    if not collapsed:
        assert torch.equal(got[0].view(torch.uint8), expected[0].view(torch.uint8))
    for a, b in zip(got[2:], expected[2:]):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-7)


def test_a_scale_that_is_not_one_number_is_no_static_quantisation():
    from torch.fx.experimental.proxy_tensor import make_fx

    x, residual, weight, _ = arguments()

    def function(x, residual, weight, scale):
        return norm_and_quant(x, residual, weight, scale)

    module = make_fx(function, tracing_mode="fake")(x, residual, weight, torch.rand(32))
    assert run_pass(RMSNormQuantFusion(), module.graph).matched == 0


@pytest.mark.parametrize(("divisor", "matches"), [(32, 1), (3, 0)])
def test_a_sum_of_squares_over_another_number_is_no_mean(divisor, matches):
    from torch.fx.experimental.proxy_tensor import make_fx

    aten = torch.ops.aten

    def function(x, weight, scale):
        mean = aten.div(aten.sum(aten.pow(x, 2), [-1], True), divisor)
        out = aten.mul(aten.mul(x, aten.rsqrt(aten.add(mean, 1e-5))), weight)
        clamped = aten.clamp_max(aten.clamp_min(aten.div(out, scale), -448.0), 448.0)
        return torch.ops.prims.convert_element_type(clamped, torch.float8_e4m3fn)

    x, _, weight, scale = arguments(torch.float32)
    module = make_fx(function, tracing_mode="fake")(x, weight, scale)
    assert run_pass(RMSNormQuantFusion(), module.graph).matched == matches
    module.recompile()
    got, expected = module(x, weight, scale), function(x, weight, scale)
    assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def test_a_sum_that_the_model_hands_on_unrounded_is_not_rounded():
    from torch.fx.experimental.proxy_tensor import make_fx

    aten, convert = torch.ops.aten, torch.ops.prims.convert_element_type

    def function(x, residual, weight, scale):
        total = aten.add(convert(x, torch.float32), convert(residual, torch.float32))
        mean = aten.mean(aten.pow(total, 2), [-1], True)
        out = aten.mul(weight, convert(aten.mul(total, aten.rsqrt(aten.add(mean, 1e-5))), x.dtype))
        wide = aten.div(convert(out, torch.float32), scale)
        clamped = aten.clamp_max(aten.clamp_min(wide, -448.0), 448.0)
        return convert(clamped, torch.float8_e4m3fn), total

    module = make_fx(function, tracing_mode="fake")(*arguments())
    run_pass(RMSNormQuantFusion(), module.graph)
    module.recompile()
    assert torch.equal(module(*arguments())[1], function(*arguments())[1])


def test_every_node_that_is_put_in_has_its_value():
    module = graph_of()
    run_pass(RMSNormQuantFusion(), module.graph)
    calls = [n for n in module.graph.nodes if n.op == "call_function"]
    assert calls and all("val" in n.meta for n in calls)
    assert all(tensor_value(n) is not None for n in calls if getattr(n.target, "__name__", "") == "getitem")


def test_a_reshape_that_does_nothing_hides_the_norm_and_noop_uncovers_it():
    from torch.fx.experimental.proxy_tensor import make_fx

    from cgkit.compiling.passes import NoOpElimination

    aten, convert = torch.ops.aten, torch.ops.prims.convert_element_type

    def function(x, weight, scale):
        wide = convert(x, torch.float32)
        mean = aten.mean(aten.pow(wide, 2), [-1], True)
        out = aten.mul(weight, convert(aten.mul(wide, aten.rsqrt(aten.add(mean, 1e-5))), x.dtype))
        out = aten.view(aten.view(out, [-1]), [3, 32])
        clamped = aten.clamp_max(aten.clamp_min(aten.div(convert(out, torch.float32), scale), -448.0), 448.0)
        return convert(clamped, torch.float8_e4m3fn)

    x, _, weight, scale = arguments()
    module = make_fx(function, tracing_mode="fake")(x, weight, scale)
    assert run_pass(RMSNormQuantFusion(), module.graph).matched == 0
    assert run_pass(NoOpElimination(), module.graph).matched > 0
    assert run_pass(RMSNormQuantFusion(), module.graph).matched == 1
    module.recompile()
    expected = function(x, weight, scale)
    assert torch.equal(module(x, weight, scale).view(torch.uint8), expected.view(torch.uint8))
