"""Small models for the trace cache, each with a fact that a trace bakes in; and an adaptor that is quick."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import torch
from torch import nn

import cgkit
from cgkit.compiling.adaptors import EagerAdaptor

SCALE = 2.0


def helper(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


@dataclass
class Config:
    width: int = 8
    eps: float = 1e-5
    residual: bool = True


class Base(nn.Module):
    """Two layers around a splitting operator, and what a subclass says."""

    bias = 0.25  # of the class

    def __init__(self, layers: int = 2, tied: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = Config()
        self.factor = 1.5
        self.names = ["a", "b"]
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=dtype) for _ in range(layers))
        self.head = nn.Linear(8, 8, bias=False, dtype=dtype)
        if tied:
            self.head.weight = self.layers[0].weight
        self.shift = nn.Buffer(torch.ones(8, dtype=dtype))

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * self.factor + self.bias
        x = self.middle(helper(x)) / (1 + self.config.eps)
        out = torch.empty_like(x)
        torch.ops.warm_toys.cut(x, out)
        y = self.head(out) + self.shift * len(self.names)
        return y + x if self.config.residual else y


class Decorated(Base):
    """The same through the decorator."""


cgkit.support_torch_compile(Decorated)


class Subclass(Base):
    """Another class with equal weights."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x)


class SoftMax(Base):
    """Has an operator of torch's that no replay plan can bind."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return x.softmax(-1)


class Mode(Base):
    """Asks for its mode, and writes an attribute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.factor = 3.0
        return super().forward(x) * (2.0 if self.training else 1.0)


def cut(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x + 1)


def register() -> None:
    cgkit.register_op("cut", cut, mutates_args=["out"], namespace="warm_toys")


class PickledAdaptor(EagerAdaptor):
    """Keeps a piece as its pickled graph: what a compiler does, without its time."""

    name = "pickled"
    saves = loads_alone = True

    def compile(self, graph_module, inputs, fake_mode, runtime_shape):
        run = super().compile(graph_module, inputs, fake_mode, runtime_shape)
        own = torch.fx.GraphModule(graph_module, torch.fx.Graph())
        own.graph.output(own.graph.graph_copy(graph_module.graph, {}))
        for node in own.graph.nodes:
            node.meta.clear()
        own.recompile()
        run.kept = pickle.dumps(own)
        return run

    def save(self, runnable):
        return runnable.kept

    def load(self, content, inputs):
        return super().compile(pickle.loads(content), inputs, None, None)
