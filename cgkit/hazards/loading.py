"""A load path that leaves something out: pieces that are compiled, correct, and never recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from cgkit import compilation_counter
from cgkit.capturing import CapturedGraphs, capture
from cgkit.compiling import PiecewiseBackend, compile_pieces
from cgkit.hazards.addresses import ATTENTION_INTO
from cgkit.hazards.exhibit import SLOW, Exhibit, Symptom
from cgkit.hazards.road import eager
from cgkit.measuring.expected_counters import counters_table
from cgkit.splitting import split_graph
from cgkit.tracing import trace

WrapPiece = Callable[[CapturedGraphs, PiecewiseBackend], Callable[..., Any]]


class TwoLayers(nn.Module):
    """Three pieces around two calls of attention."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            out = torch.empty_like(x)
            torch.ops.cgkit_hazards.attention_into(x * 2, out)
            x = out + 1
        return x


def load_the_code_alone(captured: CapturedGraphs, backend: PiecewiseBackend) -> Callable[..., Any]:
    """What came out of the cache is the compiled code: call it."""
    return backend


def load_and_wrap(captured: CapturedGraphs, backend: PiecewiseBackend) -> Callable[..., Any]:
    """What the cold path does too: the code inside of a wrapper that records and replays it."""
    return _wrap_piece(captured, backend)


_wrap_piece = CapturedGraphs._wrap_piece


def _loaded(wrap: WrapPiece, device: str) -> tuple[CapturedGraphs, Any]:
    """Two sizes recorded by a model whose pieces were put in place by ``wrap``; and the counters of that."""
    settings = eager("PIECEWISE", splitting_ops=[ATTENTION_INTO])
    before = compilation_counter.clone()
    traced = trace(TwoLayers(), torch.ones(4, 4, device=device))
    compiled = compile_pieces(split_graph(traced, settings.splitting_ops), settings)
    with patch.object(CapturedGraphs, "_wrap_piece", wrap), torch.no_grad():
        captured = capture(compiled, [2, 4])
    after, was = compilation_counter.as_dict(), before.as_dict()
    return captured, counters_table(captured, {name: after[name] - was[name] for name in after})


def _right_and_slow(wrap: WrapPiece, device: str) -> Symptom:
    """The result is right, which is why nobody sees it; the pieces run operator by operator."""
    captured, _ = _loaded(wrap, device)
    x = torch.ones(4, 4, device=device)
    with torch.no_grad():
        same = torch.equal(captured(x), TwoLayers()(x))
    graphs = captured.num_graphs
    captured.free()
    return Symptom(
        graphs == 0,
        f"the result is {'right' if same else 'wrong'}, from {graphs} recorded graphs for 3 pieces at 2 sizes",
    )


def _counted(wrap: WrapPiece, device: str) -> str:
    captured, table = _loaded(wrap, device)
    captured.free()
    return "; ".join(
        f"{name} is {table.seen[name]}, expected {table.laws[name].expected} ({table.laws[name].why})"
        for name in table.wrong
    )


UNWRAPPED_LOAD = Exhibit(
    "unwrapped-load",
    "After a warm start nothing is recorded",
    (19,),
    "twice the latency after a warm start (5 s -> 2 s once fixed): vLLM#31439",
    "the path that loads compiled code does not put the wrapper around it that the cold path does; results stay right",
    load_the_code_alone,
    load_and_wrap,
    _right_and_slow,
    _counted,
    kind=SLOW,
    tool="counters_table",
)

EXHIBITS = (UNWRAPPED_LOAD,)
