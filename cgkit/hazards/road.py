"""The shortest ways onto the road that the exhibits share: raw recordings, and capture with or without checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from cgkit.capturing import CapturedGraphs, capture, get_platform
from cgkit.capturing.platform import session
from cgkit.compiling import compile_pieces
from cgkit.config import CompilationConfig
from cgkit.hazards.exhibit import Symptom
from cgkit.measuring.doctor import CHECKS, doctor
from cgkit.splitting import split_graph
from cgkit.tracing import trace


def record(device: str, *functions: Callable[[], Any]) -> list[tuple[Callable[[], None], Any]]:
    """Records each function into one pool, as a bare CUDA graph: nobody checks anything. (replay, output) of each."""
    platform = get_platform(device=device)
    pool, made = platform.new_pool(), []
    with session(platform), torch.no_grad():
        for function in functions:
            if not platform.emulated:
                function()  # libraries make their handles
            graph, output = platform.record(function, pool)
            made.append((graph.replay, output))
    platform.synchronize()
    return made


def eager(mode: str, **config: Any) -> CompilationConfig:
    """A configuration whose pieces are not compiled; cut nowhere unless ``splitting_ops`` says so."""
    fields: dict[str, Any] = {"splitting_ops": [], **config, "compiler": "eager", "cudagraph_mode": mode}
    return CompilationConfig(**fields)


def captured(
    model: nn.Module, example: torch.Tensor, sizes: Sequence[int], *, mode: str = "FULL", **config: Any
) -> CapturedGraphs:
    """The whole road for ``model``; pieces are not compiled, so that what is seen is the graphs' doing."""
    settings = eager(mode, **config)
    split = split_graph(trace(model, example), settings.splitting_ops)
    with torch.no_grad():
        return capture(compile_pieces(split, settings), sizes)


def findings(code: str, model: nn.Module, *example: Any, severity: str = "", **config: Any) -> str:
    """What the doctor says under ``code``: its worst finding, or ""."""
    settings = CompilationConfig(**{"cudagraph_capture_sizes": [1, 2, 4, 8], "max_num_seqs": 8, **config})
    looking = [each.name for each in CHECKS.values() if code in each.codes]
    found = doctor(model, *example, config=settings, only=looking).of_code(code)
    found = [each for each in found if each.severity in ({severity} if severity else {"error", "warning"})]
    if not found:
        return ""
    first = found[0]
    where = f", line {first.line}" if first.line else ""
    return f"{first.code} ({first.severity}){where}: {first.what}"


def compared(got: torch.Tensor, right: torch.Tensor, what: str) -> Symptom:
    """Harm if ``got`` is not ``right``; ``what`` begins the sentence that shows both."""
    return Symptom(not torch.equal(got, right), f"{what} {numbers(got)}, and {numbers(right)} is right")


def numbers(tensor: torch.Tensor) -> str:
    """A few of its numbers, short."""
    values = tensor.detach().flatten()[:4].tolist()
    return "[" + ", ".join(f"{value:g}" for value in values) + ("]" if tensor.numel() <= 4 else ", ...]")
