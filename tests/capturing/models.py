"""Small models that are cut at an operator with a host counter, and the road up to the compiled graph."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cgkit.compiling import compile_pieces
from cgkit.config import CompilationConfig
from cgkit.forward_context import current_forward_context
from cgkit.splitting import register_op, split_graph
from cgkit.tracing import trace

OP = "cgkit::toy_attention"
host_calls = [0]


def toy_attention(q: Tensor, k: Tensor, v: Tensor, output: Tensor) -> None:
    """out = q + k + v; counts on the host; writes its sum into a cache if the step has one."""
    host_calls[0] += 1
    torch.add(q, k, out=output)
    output.add_(v)
    context = current_forward_context()
    if context is not None and context.attn_metadata is not None:
        cache, slot = context.attn_metadata
        cache.index_add_(0, slot, output.sum().reshape(1))


register_op("toy_attention", toy_attention, ["output"], lambda q, k, v, output: None)


def attention(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    torch.ops.cgkit.toy_attention(x, x, x, out)
    return out


class Toy(nn.Module):
    """The article's five pieces: x+1+2, attention, -2-1, attention, +1."""

    def forward(self, x: Tensor) -> Tensor:
        x = attention(x + 1 + 2)
        x = attention(x - 2 - 1)
        return x + 1


class Layers(nn.Module):
    """``depth`` layers of a matrix product and attention: depth + 1 capturable pieces."""

    def __init__(self, depth: int, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(attention(layer(x)))
        return x * 0.5


@dataclass
class Batch:
    hidden: Tensor
    residual: Tensor


class ManyArguments(nn.Module):
    """Nested arguments, a keyword, a static tensor, a dynamic last dimension, and outputs in a structure."""

    def forward(self, batch: Batch, positions: Tensor, *, scale: Tensor, flag: bool = True) -> dict[str, Any]:
        mixed = attention(batch.hidden * scale) + batch.residual
        mixed = mixed + positions.sum(0)[:, None] if flag else mixed
        return {"hidden": mixed, "pair": (positions + 1, scale * 2)}


def compiled(
    model: nn.Module, *example: Any, ops: tuple[str, ...] = (OP,), trace_options: Any = None, **config: Any
):
    """The first three stages with the eager adaptor, unless ``config`` says otherwise."""
    config = {"compiler": "eager", **config}
    traced = trace(model, *example, **(trace_options or {}))
    return compile_pieces(split_graph(traced, ops), CompilationConfig(**config))


def toy(device: str, model: nn.Module | None = None, width: int = 8, **config: Any):
    """A newly compiled toy on ``device``; rows are tokens."""
    return compiled((model or Toy()).to(device), torch.randn(4, width, device=device), **config)


@functools.cache
def shared_toy(device: str):
    """The plain toy, compiled once for all tests that only capture it."""
    return toy(device)
