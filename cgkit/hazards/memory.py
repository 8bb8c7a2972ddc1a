"""Memory that recording takes and that nobody had counted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cgkit.capturing import capture
from cgkit.capturing.emulated import EmulatedPlatform
from cgkit.compiling import CompiledGraph, compile_pieces
from cgkit.hazards.exhibit import STOPS, Exhibit, Symptom, said_by
from cgkit.hazards.road import eager
from cgkit.measuring.predict_pool import predict_pool
from cgkit.splitting import split_graph
from cgkit.tracing import trace

_SIZES = (1, 8, 64, 4096)
#: What the exhibit's device holds, and its weights: small figures for a small model.
TOTAL_BYTES, WEIGHT_BYTES = 64 << 20, 8 << 20


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 512, bias=False), nn.Linear(512, 256, bias=False)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def _compiled(device: str) -> CompiledGraph:
    return compile_pieces(
        split_graph(trace(Mlp().to(device), torch.ones(8, 256, device=device)), []), eager("FULL")
    )


# --- a pool that is in no budget -------------------------------------------------------------------------


def kv_takes_the_rest(total: int, weights: int, pool: int) -> int:
    """The KV cache gets what the weights leave."""
    return total - weights


def kv_leaves_room(total: int, weights: int, pool: int) -> int:
    """The KV cache gets what the weights and the graphs' pool leave."""
    return total - weights - pool


def _left_for_graphs(budget: Any, device: str) -> int:
    pool = predict_pool(_compiled(device), _SIZES).reserved_bytes
    return TOTAL_BYTES - WEIGHT_BYTES - budget(TOTAL_BYTES, WEIGHT_BYTES, pool)


def _record_with(budget: Any, device: str) -> str:
    left = _left_for_graphs(budget, device)
    platform = EmulatedPlatform(limit_bytes=left)
    return said_by(lambda: capture(_compiled(device), _SIZES, platform=platform))


def _capture_runs_out(budget: Any, device: str) -> Symptom:
    left = _left_for_graphs(budget, device)
    failed = bool(_record_with(budget, device))
    text = "recording runs out of memory, after everything was loaded" if failed else "recording fits"
    return Symptom(failed, f"{left / 2**20:.0f} MiB are left for the graphs: {text}")


NO_BUDGET = Exhibit(
    "no-budget",
    "The graphs' pool is in no memory budget",
    (1,),
    "out of memory in capture_end after loading succeeded: vLLM#19186, #11251",
    "recording comes last, and the KV cache was given all that was left",
    kv_takes_the_rest,
    kv_leaves_room,
    _capture_runs_out,
    _record_with,
    on_gpu=False,
    kind=STOPS,
    tool="the recording itself",
)

# --- an estimate that is too low ------------------------------------------------------------------------


def from_two_samples(compiled: CompiledGraph) -> int:
    """What the two smallest graphs take, and as much as the second for each further one, bytes."""
    one, both = (capture(compiled, _SIZES[:count]).pool_bytes.reserved for count in (1, 2))
    return one + (len(_SIZES) - 1) * (both - one)


def from_every_recording(compiled: CompiledGraph) -> int:
    """Each recording gone through without a device, bytes."""
    return predict_pool(compiled, _SIZES).reserved_bytes


def _against_the_pool(estimate: Any, device: str) -> Symptom:
    guessed, taken = estimate(_compiled(device)), capture(_compiled(device), _SIZES).pool_bytes.reserved
    return Symptom(
        guessed < taken, f"estimated {guessed / 2**20:.1f} MiB, and the pool takes {taken / 2**20:.1f} MiB"
    )


def _against_the_prediction(estimate: Any, device: str) -> str:
    predicted = predict_pool(_compiled(device), _SIZES)
    low = estimate(_compiled(device)) < predicted.reserved_bytes
    return "; ".join(line.strip() for line in repr(predicted).splitlines()[:2]) if low else ""


LOW_ESTIMATE = Exhibit(
    "low-estimate",
    "The pool is estimated from two samples, or not at all",
    (2, 3),
    "crashes at 0.98 of the memory, fine at 0.97: vLLM#57475; an estimate of 0: vLLM#49224",
    "what a graph takes follows its tokens and what is alive at once, not the number of graphs",
    from_two_samples,
    from_every_recording,
    _against_the_pool,
    _against_the_prediction,
    kind=STOPS,
    tool="predict_pool",
)

EXHIBITS = (NO_BUDGET, LOW_ESTIMATE)
