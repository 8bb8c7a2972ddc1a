"""Toy operators, models, and their graphs, for the tests of the compile stage."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from cgkit.splitting import register_op, split_graph

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
        q, k = q * positions[:, None].cos(), k * positions[:, None].sin()
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


class _Captured(Exception):  # noqa: N818 - carries the graph out of Dynamo, which then runs nothing
    pass


def captured(function, *args, dynamic=(0,)):
    """Dynamo's graph of ``function`` and ``inputs(*args)``, which gives the graph's real inputs."""
    torch._dynamo.reset()
    seen = []

    def backend(graph_module, example_inputs):
        seen.append((graph_module, list(example_inputs)))

        def run(*_):
            raise _Captured

        return run

    for index in dynamic:
        torch._dynamo.mark_dynamic(args[index], 0)
    with torch.no_grad():
        try:
            torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*args)
        except _Captured:
            pass
    ((graph_module, examples),) = seen
    where = {id(arg): index for index, arg in enumerate(args)}

    def inputs(*real):
        result = []
        for example in examples:
            if isinstance(example, torch.SymInt):
                result.append(real[dynamic[0]].shape[0])
            else:
                result.append(real[where[id(example)]] if id(example) in where else example)
        return result

    return SimpleNamespace(graph_module=graph_module, inputs=inputs)


def split_of(function, *args, dynamic=(0,), ops=OPS):
    """The split graph of ``function``, and ``inputs`` as of :func:`captured`."""
    graph = captured(function, *args, dynamic=dynamic)
    return split_graph(graph.graph_module, ops), graph.inputs


def split_llama(layers, **kwargs):
    """A toy Llama, its split graph and its ``inputs``."""
    model = Llama(layers, **kwargs)
    return (model, *split_of(model, *llama_inputs(8), dynamic=(0, 1)))
