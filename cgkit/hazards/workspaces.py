"""A library's workspace outside of the graphs' pool: what CUDAGraph Trees does to graphs of one's own, in small.

On a GPU :func:`cgkit.hazards.trees.replay_beside_trees` shows the thing itself, in a process that may die of it. Here
the memory that the workspace had is given to somebody else, and can still be read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cgkit.hazards.exhibit import WRONG, Exhibit, Symptom
from cgkit.hazards.road import findings, numbers, record
from cgkit.splitting import register_op


class Allocator:
    """Memory that is handed out, given back, and handed out again."""

    def __init__(self, device: str = "cpu") -> None:
        self.free = [torch.zeros(4, device=device) for _ in range(2)]

    def take(self) -> Tensor:
        """Four numbers that nobody holds; the last that were given back come first."""
        return self.free.pop()

    def give_back(self, memory: Tensor) -> None:
        """Now they may be anybody's."""
        self.free.append(memory)


#: The library's workspace: made when it first ran, and held by nobody but the library.
WORKSPACE = [torch.zeros(4)]


def sum_by_the_library(x: Tensor, out: Tensor) -> None:
    """Parts of the sum lie in the library's workspace."""
    torch.sum(x, 0, out=WORKSPACE[0])
    out.copy_(WORKSPACE[0].expand_as(out))


def sum_in_the_graph(x: Tensor, out: Tensor) -> None:
    """They lie in memory that was allocated while recording: it is the graph's own."""
    parts = torch.empty_like(x[0])
    torch.sum(x, 0, out=parts)
    out.copy_(parts.expand_as(out))


for _function in (sum_by_the_library, sum_in_the_graph):
    register_op(_function.__name__, _function, ["out"], namespace="cgkit_hazards")


class Sums(nn.Module):
    """Calls one of them inside of its only piece."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.operator = getattr(torch.ops.cgkit_hazards, name)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self.operator(x * 2, out)
        return out + 1


def _cleared(function: Any, device: str) -> Symptom:
    """The workspace is cleared between recording and replay, as Trees clears those of cuBLAS."""
    memory, x = Allocator(device), torch.ones(4, 4, device=device)
    before, WORKSPACE[0] = WORKSPACE[0], memory.take()
    try:
        out = torch.empty_like(x)
        replay, _ = record(device, lambda: function(x * 2, out))[0]
        memory.give_back(WORKSPACE[0])
        theirs = memory.take().fill_(7)  # somebody else's tensor now
        replay()
        return Symptom(
            bool((theirs != 7).any()),
            f"somebody else's tensor reads {numbers(theirs)} after the replay, and held [7, 7, 7, 7]",
        )
    finally:
        WORKSPACE[0] = before


CLEARED_WORKSPACE = Exhibit(
    "cleared-workspace",
    "A library's workspace is given to somebody else",
    (26,),
    "torch.compile(mode='reduce-overhead') in the process of hand-recorded graphs: an illegal memory access at their "
    "next replay, on torch 2.11",
    "a library keeps its workspace outside of the graphs' pool; the graph holds the address, and whoever clears the "
    "workspaces (CUDAGraph Trees does) asks no graph",
    sum_by_the_library,
    sum_in_the_graph,
    _cleared,
    lambda function, device: findings(
        "outside-pool", Sums(function.__name__), torch.ones(8, 4, device=device), compiler="eager"
    ),
    on_gpu=False,  # the symptom is the same there, but the doctor looks for outside memory by emulated recordings only
    kind=WRONG,
    tool="doctor",
)

EXHIBITS = (CLEARED_WORKSPACE,)
