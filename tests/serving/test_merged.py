"""Projections that are multiplied as one: what is held, what is named, what a piece hands on."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import cgkit
from cgkit.config import CompilationConfig
from cgkit.errors import ServingError
from cgkit.forward_context import set_forward_context
from cgkit.kernels.custom_op import apply_custom_ops
from cgkit.serving.llama_fp8 import Fp8Linear, quantize
from cgkit.serving.merged import joined
from cgkit.serving.weights import build_model, random_weights

from .helpers import TOY, toy

# width 48, 6 query and 2 key/value heads of 8, MLP 112
PARTS = {"self_attn.q_proj": 48, "self_attn.k_proj": 16, "self_attn.v_proj": 16}
MLP_PARTS = {"mlp.gate_proj": 112, "mlp.up_proj": 112}


def parts_of(state, layer=0, parts=PARTS):
    return [state[f"model.layers.{layer}.{name}.weight"] for name in parts]


def test_a_state_dict_has_the_parts_and_the_parameters_are_merged():
    model = toy()
    parameters = dict(model.named_parameters())
    attention, mlp = "model.layers.1.self_attn.qkv_proj.weight", "model.layers.1.mlp.gate_up_proj.weight"
    assert parameters[attention].shape == (80, 48) and parameters[mlp].shape == (224, 48)
    state = model.state_dict()
    assert attention not in state and mlp not in state
    for merged, parts in ((attention, PARTS), (mlp, MLP_PARTS)):
        held = parts_of(state, 1, parts)
        assert [len(part) for part in held] == list(parts.values())
        assert torch.equal(torch.cat(held), parameters[merged])
        assert held[0].data_ptr() == parameters[merged].data_ptr()  # views: nothing is held twice


def test_what_lies_one_after_the_other_is_not_copied_and_what_does_not_is():
    weights = random_weights(TOY)
    model = build_model(TOY, weights)
    weight = model.model.layers[0].self_attn.qkv_proj.weight
    assert weight.data_ptr() == parts_of(weights)[0].data_ptr()
    apart = {name: tensor.clone() for name, tensor in weights.items()}
    copied = build_model(TOY, apart).model.layers[0].self_attn.qkv_proj.weight
    assert torch.equal(copied, weight) and copied.data_ptr() != parts_of(apart)[0].data_ptr()
    q, k, v = parts_of(weights)
    assert torch.equal(joined([k, q, v]), torch.cat([k, q, v]))  # another order than in memory
    assert torch.equal(joined([q, v]), torch.cat([q, v]))  # a gap


def test_a_state_dict_goes_into_a_model_that_is_there_already():
    model, other = toy(), toy(seed=5)
    kept = other.model.layers[2].mlp.gate_up_proj.weight
    other.load_state_dict(model.state_dict())
    assert other.model.layers[2].mlp.gate_up_proj.weight is kept
    assert torch.equal(kept, model.model.layers[2].mlp.gate_up_proj.weight)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        state = model.state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in copied.state_dict().items())
        assert copied.state_dict().keys() == state.keys()


def test_a_missing_part_is_named():
    weights = random_weights(TOY)
    del weights["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(ServingError, match=r"missing model\.layers\.1\.self_attn\.k_proj\.weight"):
        build_model(TOY, weights)


@pytest.mark.parametrize("custom_ops", [("none",), ("all",)], ids=str)
def test_a_layer_is_four_products_and_one_rotation(custom_ops):
    model = toy()
    apply_custom_ops(model, CompilationConfig(custom_ops=custom_ops))
    tokens = torch.arange(5)
    with set_forward_context(None):
        traced = cgkit.trace(model, tokens, tokens, dynamic_arg_dims={"input_ids": 0, "positions": 0})
    names = [str(node.target) for node in traced.graph_module.graph.nodes if node.op == "call_function"]
    layers = TOY.num_hidden_layers
    assert sum("linear" in name for name in names) == 4 * layers
    assert sum("cgkit.rotary" in name for name in names) == (layers if custom_ops == ("all",) else 0)
    pieces = [piece for piece in cgkit.split_graph(traced).pieces if not piece.is_splitting]
    assert len(pieces) == layers + 1


def test_q_and_k_leave_a_layer_as_views_of_one_tensor_and_v_of_another(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "cgkit.serving.llama.attention", lambda q, k, v, name: seen.append((q, k, v)) or torch.zeros_like(q)
    )
    model = toy()
    model(torch.arange(3), torch.arange(3))
    query, key, value = seen[0]
    assert query.untyped_storage().data_ptr() == key.untyped_storage().data_ptr()
    assert value.untyped_storage().data_ptr() != key.untyped_storage().data_ptr()
    assert query.stride() == key.stride() == (64, 8, 1) and value.stride() == (80, 8, 1)


def _dequantised(state, name):
    scale = state[f"{name}.weight_scale"]
    return state[f"{name}.weight"].float() * (scale.t() if scale.dim() else scale)


@pytest.mark.parametrize("scheme", ["static", "per_token"])
def test_merged_fp8_weights_are_as_near_as_those_of_each_part(scheme):
    """Also where one part is 30 times smaller than its neighbours."""
    weights = random_weights(TOY)
    name = "model.layers.0.self_attn.k_proj"
    weights[f"{name}.weight"] = weights[f"{name}.weight"] / 30
    model = build_model(TOY, weights)
    state = quantize(model, scheme).state_dict()
    for part in (*PARTS, *MLP_PARTS):
        name = f"model.layers.0.{part}"
        weight = weights[f"{name}.weight"]
        alone = torch.nn.Linear(*reversed(weight.shape), bias=False)
        alone.weight = torch.nn.Parameter(weight)
        own = Fp8Linear(alone, scheme)
        if scheme == "per_token":
            assert torch.equal(state[f"{name}.weight"].float(), own.weight.float())
            assert torch.equal(state[f"{name}.weight_scale"], own.weight_scale)
            continue
        merged = (_dequantised(state, name) - weight).norm() / weight.norm()
        single = (own.weight.float() * own.weight_scale - weight).norm() / weight.norm()
        assert merged < 1.25 * single < 0.05


@pytest.mark.parametrize("scheme", ["static", "per_token"])
def test_an_fp8_state_dict_goes_back_and_scales_that_differ_are_refused(scheme):
    model, other = quantize(toy(), scheme), quantize(toy(seed=5), scheme)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    other.load_state_dict(state)
    mine, theirs = other.model.layers[1].self_attn.qkv_proj, model.model.layers[1].self_attn.qkv_proj
    assert torch.equal(mine.weight.float(), theirs.weight.float())
    assert torch.equal(mine.weight_scale, theirs.weight_scale)
    if scheme == "static":
        state["model.layers.1.mlp.up_proj.weight_scale"] *= 2
        with pytest.raises(ServingError, match="cannot be merged"):
            other.load_state_dict(state)
