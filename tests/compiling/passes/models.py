"""Small FP8 Llamas, traced and split, for the tests of the passes."""

from __future__ import annotations

import functools

import torch

import cgkit
from cgkit.config import CompilationConfig
from cgkit.forward_context import set_forward_context
from cgkit.kernels.custom_op import apply_custom_ops
from cgkit.serving.llama import PRESETS
from cgkit.serving.llama_fp8 import quantize
from cgkit.serving.weights import build_model, random_weights

FUSIONS = ["noop", "fuse_norm_quant", "fuse_act_quant", "fuse_attn_quant"]


@functools.cache
def llama(layers, scheme="static", dtype=torch.bfloat16, device="cpu"):
    shape = PRESETS["tiny-llama"].scaled(num_hidden_layers=layers)
    model = build_model(shape, random_weights(shape, dtype, device), dtype=dtype, device=device)
    return quantize(model, scheme) if scheme else model


def inputs(device="cpu"):
    return torch.arange(8, device=device), torch.arange(8, device=device)


def split(model, custom_ops=("none",), splitting_ops=None):
    """The model traced with these forms of its layers, and split (``[]``: whole)."""
    apply_custom_ops(model, CompilationConfig(custom_ops=custom_ops))
    device = model.lm_head.weight.device
    with set_forward_context(None):
        traced = cgkit.trace(model, *inputs(device), dynamic_arg_dims={"input_ids": 0, "positions": 0})
    return cgkit.split_graph(traced, splitting_ops)


def matched(reports):
    """How often each pass matched, over all pieces, equal ones as often as they are there."""
    total = {}
    for each in reports.values():
        for name, count in each.matched.items():
            total[name] = total.get(name, 0) + count
    return total
