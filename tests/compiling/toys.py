"""Toy operators, models, and their graphs, for the tests of the compile stage."""

from __future__ import annotations

import functools
import inspect

import torch
from torch import nn

from cgkit.splitting import register_op, split_graph
from cgkit.tracing import trace

calls = {"attention": 0}


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    calls["attention"] += 1
    out.copy_(q + k + v)


register_op("attention", attention, ["out"], namespace="compiletoy")
OPS = ["compiletoy::attention"]


def attend(q, k, v):
    out = torch.empty_like(q)
    torch.ops.compiletoy.attention(q, k, v, out)
    return out


class Norm(nn.Module):
    def __init__(self, width, epsilon):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.epsilon = epsilon

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)


class Layer(nn.Module):
    def __init__(self, width, epsilon=1e-6):
        super().__init__()
        self.norm, self.mlp_norm = Norm(width, epsilon), Norm(width, epsilon)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x, positions):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        positions = positions[:, None]
        q, k = q * positions.cos().to(q.dtype), k * positions.sin().to(k.dtype)
        x = x + self.o(attend(q, k, v))
        return x + self.down(nn.functional.silu(self.up(self.mlp_norm(x))))


class Llama(nn.Module):
    """Shaped like a Llama: embedding, layers with one attention each, a final norm."""

    def __init__(self, layers, width=8, epsilons=None):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, width)
        self.layers = nn.ModuleList(Layer(width, e) for e in (epsilons or [1e-6] * layers))
        self.norm = Norm(width, 1e-6)

    def forward(self, tokens, positions):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, positions)
        return self.norm(x)


def llama_inputs(tokens):
    return torch.arange(tokens) % 16, torch.arange(tokens).float()


def model_of(forward):
    """A model whose forward is ``forward(self, ...)``."""
    return type("Toy", (nn.Module,), {"forward": forward})()


def split_of(forward, *args, ops=OPS, **dims):
    """The split graph of ``forward(self, ...)``; dimension 0 of every argument is dynamic unless ``dims``."""
    names = list(inspect.signature(forward).parameters)[1:]
    return split_graph(trace(model_of(forward), *args, dynamic_arg_dims=dims or dict.fromkeys(names, 0)), ops)


@functools.cache
def split_llama(layers, **kwargs):
    """A toy Llama and its split graph (traced once a test run: nothing writes into either)."""
    model = Llama(layers, **kwargs)
    traced = trace(model, *llama_inputs(8), dynamic_arg_dims={"tokens": 0, "positions": 0})
    return model, split_graph(traced, OPS)
