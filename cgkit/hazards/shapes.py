"""What a size decides: branches that the trace took once and for all, and batches that no graph serves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cgkit.capturing import CaptureSizes, CudagraphDispatcher
from cgkit.compiling import compile_pieces
from cgkit.forward_context import BatchDescriptor
from cgkit.hazards.exhibit import SLOW, STOPS, WRONG, Exhibit, Symptom
from cgkit.hazards.road import captured, compared, eager, findings
from cgkit.splitting import split_graph
from cgkit.tracing import trace

# --- a branch on the batch size, with its guard dropped ------------------------------------------------


class BranchesOnSize(nn.Module):
    """Small batches are scaled otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if len(x) >= 4 else x * 100


class ComparesInTheGraph(nn.Module):
    """The same with the size as a number that the graph computes with."""

    def forward(self, x: Tensor) -> Tensor:
        small = torch.full((), len(x), device=x.device) < 4
        return torch.where(small, x * 100, x * 2)


def _compiled(model: type[nn.Module], device: str) -> Any:
    traced = trace(model(), torch.ones(8, 4, device=device))
    return compile_pieces(split_graph(traced, []), eager("NONE"))


def _other_size(model: type[nn.Module], device: str) -> Symptom:
    x = torch.ones(2, 4, device=device)
    with torch.no_grad():
        got, right = _compiled(model, device)(x), model()(x)
    return compared(got, right, "by a trace of 8 rows, 2 rows give")


DROPPED_GUARD = Exhibit(
    "dropped-guard",
    "A branch on the batch size, with its guard dropped",
    (17,),
    "wrong results on other shapes, in silence: vLLM PR#26199, PR#27432",
    "the trace took one side of the branch; the guard that would have noticed is not evaluated",
    BranchesOnSize,
    ComparesInTheGraph,
    _other_size,
    lambda model, device: findings(
        "dropped-guard", model(), torch.ones(8, 4, device=device), severity="error", compiler="eager"
    ),
    kind=WRONG,
    tool="doctor",
)

# --- a dimension that became a number ------------------------------------------------------------------


class ReshapesByNumber(nn.Module):
    """Eight rows, written down."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(8, 2, 2).sum(-1)


class ReshapesByMinusOne(nn.Module):
    """As many rows as there are."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1, 2, 2).sum(-1)


def _exported(model: type[nn.Module], device: str) -> Symptom:
    """What torch alone says of a size that is declared dynamic."""
    x = torch.ones(8, 4, device=device)
    try:
        torch.export.export(model(), (x,), dynamic_shapes={"x": {0: torch.export.Dim("batch")}})
    except Exception as error:
        text = " ".join(str(error).split())
        return Symptom(True, f"torch.export stops, and names no line: {text[:230]}")
    return Symptom(False, "torch.export takes any number of rows")


SPECIALISED_DIM = Exhibit(
    "specialised-dim",
    "A number in the code fixes the batch size",
    (16,),
    "'inferred to be a constant (2048)': vLLM#23970, vllm-ascend#1368, pytorch#141251; pytorch#136002 asks where",
    "a reshape to a number leaves one size that fits, so the dynamic dimension becomes a constant",
    ReshapesByNumber,
    ReshapesByMinusOne,
    _exported,
    lambda model, device: findings(
        "specialised-dim", model(), torch.ones(8, 4, device=device), compiler="eager"
    ),
    kind=STOPS,
    tool="doctor",
)

# --- sizes that are not recorded -------------------------------------------------------------------------


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def coarse_sizes() -> list[int]:
    """A ladder with a hole."""
    return [1, 8]


def fine_sizes() -> list[int]:
    """The small sizes too: they are cheap, their graphs lie in the memory of the largest."""
    return [1, 2, 3, 4, 5, 6, 7, 8]


def _padding(sizes: Any, device: str) -> Symptom:
    ladder = CaptureSizes(sizes())
    padded = [ladder.pad(batch) for batch in range(1, 9)]
    share = 1 - sum(range(1, 9)) / sum(padded)
    worst = max(p / batch for batch, p in enumerate(padded, 1))
    return Symptom(
        worst >= 2,
        f"batches of 1 to 8 compute {share:.0%} padding, at worst {worst:g} times their own tokens",
    )


def _size_finding(code: str) -> Any:
    def says(sizes: Any, device: str) -> str:
        x = torch.ones(4, 4, device=device)
        return findings(
            code, Doubles(), x, cudagraph_capture_sizes=sizes(), compiler="eager", cudagraph_mode="FULL"
        )

    return says


SIZE_GAP = Exhibit(
    "size-gap",
    "A ladder with gaps pads a batch to a multiple of itself",
    (4, 23),
    "batches of 5 and 9 slow, 55 -> 44 ms a token with more sizes: vLLM PR#12920; TensorRT-LLM PR#12895",
    "a batch is padded to the next recorded size, and the padding is computed like the rest",
    coarse_sizes,
    fine_sizes,
    _padding,
    _size_finding("size-gap"),
    kind=SLOW,
    tool="doctor",
)


def powers_of_two() -> list[int]:
    """Ends below the largest batch that the scheduler makes (8)."""
    return [1, 2, 4]


def up_to_the_largest() -> list[int]:
    """The same, and the largest batch."""
    return [1, 2, 4, 8]


def _runs_uncaptured(sizes: Any, device: str) -> Symptom:
    graphs = captured(Doubles(), torch.ones(4, 4, device=device), sizes())
    without = [batch for batch in range(1, 9) if graphs.dispatcher.route_of(batch, False).key is None]
    return Symptom(bool(without), f"batches without a graph: {without or 'none'}")


ABOVE_LARGEST = Exhibit(
    "above-largest",
    "Batches above the largest recorded size run without a graph",
    (5, 6, 25),
    "4 times slower a token in silence: sglang PR#33900, vLLM PR#51509, PR#40734, #54933, vllm-ascend#16049",
    "above the largest size the dispatcher has no key, and the step launches every kernel by itself",
    powers_of_two,
    up_to_the_largest,
    _runs_uncaptured,
    _size_finding("above-largest"),
    kind=SLOW,
    tool="doctor",
)

# --- a key that is asked for and not held --------------------------------------------------------------


def decode_keys_only(mode: str = "FULL_DECODE_ONLY") -> CudagraphDispatcher:
    """Graphs for decode batches, and none for mixed ones."""
    dispatcher = CudagraphDispatcher(mode, CaptureSizes([1, 2, 4, 8]))
    dispatcher.initialize_cudagraph_keys()
    return dispatcher


def keys_for_any_batch() -> CudagraphDispatcher:
    """Piecewise graphs for whatever else comes."""
    return decode_keys_only("FULL_AND_PIECEWISE")


ASKED = [BatchDescriptor(4, uniform) for uniform in (True, False)]


def _eager_batches(make: Any, device: str) -> Symptom:
    dispatcher = make()
    misses = [f"{key.num_tokens} tokens, mixed" for key in ASKED if dispatcher.dispatch(key)[1] is None]
    return Symptom(bool(misses), f"without a graph: {', '.join(misses) or 'none'}")


def _explained(make: Any, device: str) -> str:
    dispatcher, said = make(), []
    for key in ASKED:
        tried = dispatcher.explain(key)
        if tried.iloc[-1]["mode"] == "NONE":
            said += [f"{row.mode}, {row.rule}: {row.outcome}" for row in tried.itertuples()]
    return "; ".join(said)


KEY_MISS = Exhibit(
    "key-miss",
    "The key that is asked for is not the key that was recorded",
    (7,),
    "half of the speculative decode batches ran attention eagerly: vLLM PR#53407, #36165",
    "a graph is found by its whole key (tokens, and whether all requests decode), not by its size alone",
    decode_keys_only,
    keys_for_any_batch,
    _eager_batches,
    _explained,
    kind=SLOW,
    tool="dispatcher.explain",
)

EXHIBITS = (DROPPED_GUARD, SPECIALISED_DIM, SIZE_GAP, ABOVE_LARGEST, KEY_MISS)
