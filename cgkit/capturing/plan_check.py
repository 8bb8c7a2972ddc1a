"""A plan against the module path: same tensors, same bits, before it serves a step.

Both run on the recording's own dummy inputs, at the addresses of every later step. Before each, all that the
pieces and operators write is overwritten, so that a call which is missing or writes elsewhere shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from cgkit.capturing.platform import GraphPlatform
from cgkit.capturing.replay_plan import PlannedCall, Refusal, ReplayPlan
from cgkit.errors import CgkitError
from cgkit.numerics import mark_unwritten, once, same_bits
from cgkit.tensor_trees import tensor_leaves


def check_plan(
    plan: ReplayPlan,
    module: Callable[[], Any],
    inputs: Iterable[torch.Tensor],
    platform: GraphPlatform,
    pool: Any,
) -> None:
    """Runs ``module`` (the module path's step) and ``plan`` on the same ``inputs`` and compares what they return.

    Emulated, the pool's tensors hold a sentinel afterwards, as they should before the first replay.

    Raises:
        Refusal: they differ; names the first call whose prepared form does not do what the operator does.
    """
    _Check(plan, list(inputs), platform, pool).run(module)


def blame(plan: ReplayPlan, state: Iterable[torch.Tensor], platform: GraphPlatform, pool: Any) -> str:
    """Which call of a plan that gives something else than the module path is to blame. ``state``: all that a step reads
    or writes beside the pool, as it is before the step; it is left in any state."""
    return _Check(plan, list(state), platform, pool).blame()


class _Check:
    def __init__(
        self, plan: ReplayPlan, inputs: list[torch.Tensor], platform: GraphPlatform, pool: Any
    ) -> None:
        self.plan, self.emulated = plan, platform.emulated
        holds = getattr(platform, "holds", None)
        written = {id(tensor): tensor for one in plan.planned for tensor in one.writes}.values()
        self.owned = [] if holds is None else [tensor for tensor in written if holds(tensor, pool)]
        self.inputs = [(tensor, tensor.clone()) for tensor in inputs]  # a model may write into them

    def run(self, module: Callable[[], Any]) -> None:
        self.start_over()
        try:
            expected = [tensor.clone() for _, tensor in tensor_leaves(module())]
        except CgkitError as error:
            raise Refusal(f"the module path cannot serve this step either: {error}") from error
        self.start_over()
        for call in self.plan.calls:
            call()
        found = [tensor for _, tensor in tensor_leaves(self.plan.result)]
        same = len(found) == len(expected) and all(map(same_bits, found, expected))
        if not same:
            raise Refusal(self.blame())
        if self.emulated:
            self.start_over()

    def start_over(self) -> None:
        """Inputs as they were, and nothing that a step could take for a result."""
        for tensor, kept in self.inputs:
            tensor.copy_(kept)
        for tensor in self.owned:
            poison(tensor)

    def blame(self) -> str:
        """Which call of the plan gives something else than the operator that it stands for."""
        self.start_over()
        expected = [self.written_by(one, (one.plain,)) for one in self.plan.planned]
        self.start_over()
        for one, theirs in zip(self.plan.planned, expected):
            found = self.written_by(one, one.calls)
            if one.calls != (one.plain,) and not all(map(same_bits, found, theirs)):
                return (
                    f"{one.piece}: {one.what} as {one.how or 'no call at all'} gives other bits than the operator "
                    "itself (or it does not give the same bits twice)"
                )
        return (
            "two runs of this step on the same inputs give different bits, so nothing can be compared: an operator "
            "draws random numbers, keeps a state, or leaves part of its output unwritten"
        )

    def written_by(self, one: PlannedCall, calls: tuple[Callable[[], Any], ...]) -> list[torch.Tensor]:
        for call in calls:
            call()
        return [tensor.clone() for tensor in one.writes]


def poison(tensor: torch.Tensor) -> None:
    """Overwrites ``tensor``: NaN; zero where there is none (an integer may be an index)."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        mark_unwritten(tensor)
    else:
        once(tensor).zero_()
