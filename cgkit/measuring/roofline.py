"""How fast this machine copies and multiplies, and what a decode step must move and compute at least."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from cgkit.serving.llama import LlamaConfig


@dataclass(frozen=True)
class Rates:
    """Measured on one device: ``copy_bytes_per_s`` counts what is read and what is written."""

    copy_bytes_per_s: float
    matmul_flop_per_s: float
    dtype: str
    device: str


@dataclass(frozen=True)
class Work:
    """What one step of ``batch`` tokens needs: fixed bytes (weights), and bytes and FLOPs a token."""

    weight_bytes: float
    bytes_per_token: float
    flop_per_token: float

    def seconds(self, batch: float, rates: Rates) -> float:
        """The roofline: the longer of moving and computing."""
        moving = (self.weight_bytes + self.bytes_per_token * batch) / rates.copy_bytes_per_s
        return max(moving, self.flop_per_token * batch / rates.matmul_flop_per_s)

    def batch_at(self, seconds: float, rates: Rates) -> float:
        """The batch from which on :meth:`seconds` is at least ``seconds``: 0 if it always is, infinity if never."""
        if self.seconds(0, rates) >= seconds:
            return 0.0
        left = seconds * rates.copy_bytes_per_s - self.weight_bytes
        candidates = []
        if self.bytes_per_token:
            candidates.append(left / self.bytes_per_token)
        if self.flop_per_token:
            candidates.append(seconds * rates.matmul_flop_per_s / self.flop_per_token)
        return min(candidates, default=float("inf"))


def llama_work(shape: LlamaConfig, context: int, itemsize: int) -> Work:
    """A decode step of a Llama from the embedding to its last norm, without the output projection.

    Bytes: every layer's weights once, and each request's keys and values of ``context`` tokens. FLOPs:
    two a weight and token, and attention's two products. Activations are left out: they stay in the cache.
    """
    tables = (1 if shape.tie_word_embeddings else 2) * shape.vocab_size * shape.hidden_size
    weights = shape.num_parameters - tables
    kv = 2 * shape.num_key_value_heads * shape.head_dim * shape.num_hidden_layers
    attention = 4 * shape.num_attention_heads * shape.head_dim * shape.num_hidden_layers * context
    return Work(weights * itemsize, kv * context * itemsize, 2 * weights + attention)


def measure_rates(device: str = "cuda", *, copy_bytes: int | None = None, side: int | None = None) -> Rates:
    """The best of many copies and matrix products.

    Args:
        device: "cuda" in bfloat16, "cpu" in float32 (the rates of a CPU, for a dry run).
        copy_bytes: how much one copy reads; by default far more than any cache on a GPU.
        side: of the square matrices.
    """
    cuda = device == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    size = copy_bytes or (2**31 if cuda else 2**25)
    side = side or (8192 if cuda else 512)
    source = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    copying = _best_seconds(partial(target.copy_, source), cuda)
    del source, target
    a, b = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    multiplying = _best_seconds(lambda: torch.mm(a, b, out=out), cuda)
    name = torch.cuda.get_device_name() if cuda else "cpu"
    return Rates(2 * size / copying, 2 * side**3 / multiplying, str(dtype).removeprefix("torch."), name)


def _best_seconds(call: Callable[[], Any], cuda: bool, repeats: int = 15) -> float:
    """The lower quartile of ``repeats`` runs, by the GPU's own clock where there is one."""
    for _ in range(3):
        call()
    return statistics.quantiles([_once(call, cuda) for _ in range(repeats)], n=4)[0]


def _once(call: Callable[[], Any], cuda: bool) -> float:
    if not cuda:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
