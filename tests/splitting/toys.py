"""Toy operators, models and ways to get their graphs, for the tests of the splitting stage."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import torch
from torch import nn

from cgkit.splitting import register_op

calls = {"attention": 0}


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    calls["attention"] += 1
    out.copy_(q + k + v)


def mixer(x: torch.Tensor, state: torch.Tensor, out: torch.Tensor, decay: float) -> None:
    """A linear attention in small: a state that decays and gathers, read out for each token."""
    for token in range(x.shape[0]):
        state.mul_(decay).add_(x[token])
        out[token] = state


ATTENTION = register_op("attention", attention, ["out"], namespace="splittoy")
MIXER = register_op("mixer", mixer, ["state", "out"], namespace="splittoy")


class Toy(nn.Module):
    """``x+1+2, attention, -2-1, attention, +1``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        x = x + 2
        out = torch.empty_like(x)
        torch.ops.splittoy.attention(x, x, x, out)
        x = out
        x = x - 2
        x = x - 1
        out = torch.empty_like(x)
        torch.ops.splittoy.attention(x, x, x, out)
        return out + 1


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        tokens = x.size(0)
        q, k, v = self.qkv(self.norm(x)).split(x.shape[-1], dim=-1)
        q, k = q * positions[:, None].cos(), k * positions[:, None].sin()
        q, k, v = (t.view(tokens, 2, -1) for t in (q, k, v))
        out = torch.empty_like(q)
        torch.ops.splittoy.attention(q, k, v, out)
        x = x + self.o(out.view(tokens, -1))
        return x + self.down(nn.functional.silu(self.up(x)))


class Llama(nn.Module):
    """Shaped like a Llama: embedding, layers with one attention each, a final norm."""

    def __init__(self, layers: int, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm = nn.RMSNorm(width)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, positions)
        return self.norm(x)


class _Captured(Exception):  # noqa: N818 - not an error: it carries the graph out of Dynamo
    pass


def dynamo_graph(function, *args, dynamic=(0,)):
    """What Dynamo makes of ``function``: graph module and example inputs. ``dynamic``: positions of
    the arguments whose dimension 0 is dynamic. Nothing is run."""
    torch._dynamo.reset()
    seen = []

    def backend(graph_module, example_inputs):
        seen.append(SimpleNamespace(graph_module=graph_module, example_inputs=example_inputs))

        def run(*_):
            raise _Captured

        return run

    for index in dynamic:
        torch._dynamo.mark_dynamic(args[index], 0)
    with torch.no_grad():
        with contextlib.suppress(_Captured):
            torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*args)
    (graph,) = seen
    return graph


class Stub:
    """As much of a TracedGraph as the splitting stage needs."""

    def __init__(self, function, *args, dynamic=(0,)) -> None:
        captured = dynamo_graph(function, *args, dynamic=dynamic)
        self.graph_module = captured.graph_module
        self.example_inputs = list(captured.example_inputs)
        self.inputs = []
        self.model_name = getattr(function, "__name__", type(function).__name__)

    def bind(self, execute):
        return execute
