"""What sharing equal pieces saves: compile time of a deep model against a shallow one.

Each case runs in a process of its own with an empty Inductor cache, because what was compiled
before makes the next compilation cheaper. Dynamo's time is told apart: it grows with the layers,
while equal layers cost one compilation however many there are. The article ("split_graph 的切图算法",
the cutting algorithm) leaves the sharing to Inductor's cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cgkit import events
from cgkit.errors import CgkitError

if TYPE_CHECKING:
    import pandas as pd

#: Where the benchmark's model is cut, and which of its dimensions change.
SPLITTING_OP = "cgkit_bench::attention"
DIMS = {"tokens": 0, "positions": 0}


def run(
    layers: Sequence[int] = (4, 80), *, width: int = 64, compiler: str = "inductor", timeout_s: float = 900.0
) -> pd.DataFrame:
    """Compiles a toy Llama of each depth; a row each, in the order of ``layers``.

    Args:
        layers: numbers of layers.
        width: of the model.
        compiler: the adaptor, as in ``CompilationConfig.compiler``.
        timeout_s: the longest that one case may take.

    Returns:
        Columns ``layers``, ``pieces`` (capturable), ``requests``, ``compilations``, ``trace_s`` (Dynamo),
        ``split_s``, ``compile_s`` (all pieces), ``ratio`` (``compile_s`` over that of the first row).

    Raises:
        CgkitError: a case failed or took too long; holds the end of its output.
    """
    import pandas as pd

    depths = events.counted("depths", layers, lambda depth: f"{depth} layers")
    table = pd.DataFrame([_in_fresh_process(depth, width, compiler, timeout_s) for depth in depths])
    table["ratio"] = table["compile_s"] / table["compile_s"].iloc[0]
    return table


def measure(layers: int, width: int = 64, compiler: str = "inductor") -> dict[str, Any]:
    """One case in this process: a row of :func:`run`, without ``ratio``."""
    from cgkit.compiling import compile_pieces
    from cgkit.config import CompilationConfig
    from cgkit.counters import compilation_counter

    traced, split = toy_split(toy_llama(layers, width))
    before = compilation_counter.clone()
    compiled = compile_pieces(split, CompilationConfig(compiler=compiler))
    after = compilation_counter
    return {
        "layers": layers,
        "pieces": len(compiled.backends),
        "requests": after.num_backend_compilations - before.num_backend_compilations,
        "compilations": after.num_inductor_compiles
        + after.num_eager_compiles
        - before.num_inductor_compiles
        - before.num_eager_compiles,
        "trace_s": traced.seconds,
        "split_s": split.seconds,
        "compile_s": compiled.seconds,
    }


def toy_llama(layers: int, width: int = 64) -> nn.Module:
    """The benchmark's model: ``(tokens, positions) -> hidden``; one attention operator a layer."""
    from cgkit.splitting import register_op

    register_op("attention", _attention, ["out"], namespace="cgkit_bench")
    return _Llama(layers, width)


def toy_split(model: nn.Module) -> tuple[Any, Any]:
    """The traced graph of :func:`toy_llama`'s model, and it split at the attention."""
    from cgkit.splitting import split_graph
    from cgkit.tracing import trace

    device = next(model.parameters()).device
    traced = trace(model, *toy_example(device), dynamic_arg_dims=DIMS)
    return traced, split_graph(traced, [SPLITTING_OP])


def toy_example(device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """A call of :func:`toy_llama`'s model on ``device``."""
    return torch.arange(8, device=device), torch.arange(8, device=device).float()


def _in_fresh_process(layers: int, width: int, compiler: str, timeout_s: float) -> dict[str, Any]:
    here = str(Path(__file__).resolve().parents[2])
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "CGKIT_CACHE_DIR": cache,
            "PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH")))),
        }
        command = [sys.executable, "-m", __name__, str(layers), str(width), compiler]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise CgkitError(
                f"{layers} layers took longer than timeout_s={timeout_s}; give it more"
            ) from None
    if done.returncode:
        raise CgkitError(f"the process for {layers} layers failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(q + k + v)


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        out = torch.empty_like(q)
        torch.ops.cgkit_bench.attention(q, k, v, out)
        x = x + self.o(out)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(nn.functional.silu(gate) * up)


class _Llama(nn.Module):
    """Shaped like a Llama as far as the pieces go: embedding, layers with one attention each, norm."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.layers = nn.ModuleList(_Layer(width) for _ in range(layers))
        self.norm = nn.RMSNorm(width)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = positions[:, None].cos(), positions[:, None].sin()
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
