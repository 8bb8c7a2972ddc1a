"""``Workload``: the steps that are to be served, what each costs, and what recording takes: a plan without its
sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from cgkit.config import CUDAGraphMode
from cgkit.errors import ConfigError
from cgkit.measuring.best_sizes import Choice
from cgkit.measuring.padding import as_histogram
from cgkit.measuring.pool_model import PoolModel
from cgkit.measuring.step_cost import REPLAYED, StepCost


@dataclass(frozen=True)
class Workload:
    """The steps that are to be served, what they cost, and what recording takes: all but the sizes.

    Attributes:
        batches, counts: how often steps of so many tokens come that may be replayed.
        never, never_counts: the same of steps that are never replayed (prefill under FULL_DECODE_ONLY).
        cost, memory, mode: see :func:`plan_capture_sizes`; ``memory`` None: not modelled.
        graphs_per_size: recorded graphs for each size.
    """

    batches: np.ndarray
    counts: np.ndarray
    never: np.ndarray
    never_counts: np.ndarray
    cost: StepCost
    memory: PoolModel | None
    mode: str
    graphs_per_size: int

    @property
    def steps(self) -> float:
        """How many steps there are."""
        return float(self.counts.sum() + self.never_counts.sum())

    @cached_property
    def uncaptured(self) -> np.ndarray:
        """What each of ``batches`` costs without a graph, all its steps together."""
        return np.array([self.cost.uncaptured(int(batch)) for batch in self.batches]) * self.counts

    @cached_property
    def never_cost(self) -> float:
        """What all steps cost that are never replayed."""
        return float(sum(self.cost.uncaptured(int(b)) * c for b, c in zip(self.never, self.never_counts)))

    def candidates(self) -> list[int]:
        """Sizes of which some list is the best of all: each batch that occurs, and each size that was measured
        (between two of them an interpolated cost only rises or only falls)."""
        top = int(self.batches.max()) if len(self.batches) else 0
        return sorted({*map(int, self.batches), *(point for point in self.cost.points if point <= top)})

    def choice(self, sizes: Sequence[int], most_bytes: float | None, most_sizes: int | None) -> Choice:
        """What :func:`cgkit.measuring.best_sizes.best_sizes` is asked."""
        at = np.searchsorted(self.batches, sizes, side="right")
        held = np.concatenate([[0.0], self.counts.cumsum()])[at]
        slow = np.concatenate([[0.0], self.uncaptured.cumsum()])
        shared, each = [0.0] * len(sizes), [0.0] * len(sizes)
        if self.memory is not None:
            shared = [self.memory.shared_bytes(size) for size in sizes]
            each = [self.memory.each_bytes(size) for size in sizes]
        replay = np.array([self.cost.replayed(size) for size in sizes], dtype=float)
        return Choice(
            sizes, replay, held, slow[-1] - slow[at], float(slow[-1]), np.array(shared), np.array(each),
            most_bytes, most_sizes,
        )  # fmt: skip


def _split(histogram: Any, mode: str) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Pairs (batch, count) of the steps that may be replayed, and of those that never are."""
    if (
        hasattr(histogram, "to_frame")
        and not hasattr(histogram, "columns")
        and not hasattr(histogram, "index")
    ):
        histogram = histogram.to_frame()
    mixed = None
    if mode == "FULL_DECODE_ONLY" and hasattr(histogram, "columns") and "kind" in histogram.columns:
        unknown = set(histogram["kind"]) - {"decode", "mixed"}
        if unknown:
            raise ConfigError(f"the histogram has the kind {min(map(str, unknown))!r}; use decode and mixed")
        mixed = histogram[(histogram["kind"] == "mixed") & (histogram["count"] > 0)]
        histogram = histogram[histogram["kind"] == "decode"]
    never = _pairs(mixed) if mixed is not None and len(mixed) else []
    if never and not (len(histogram) and (histogram["count"] > 0).any()):
        return [], never
    return _pairs(histogram), never


def _pairs(histogram: Any) -> list[tuple[int, float]]:
    frame = as_histogram(histogram)
    return [(int(b), float(c)) for b, c in zip(frame["batch"], frame["count"]) if c > 0]


def workload_of(histogram: Any, step_cost: Any, memory: Any, mode: Any, splits: int | None) -> Workload:
    name = CUDAGraphMode.parse(mode, "mode").name
    if name not in REPLAYED:
        raise ConfigError(
            f"mode={name}: plan for {', '.join(REPLAYED)}; of FULL_AND_PIECEWISE plan the FULL graphs (decode steps) "
            "and the PIECEWISE ones (the others) apart"
        )
    if splits is not None and (isinstance(splits, bool) or not isinstance(splits, int) or splits < 0):
        raise ConfigError(f"splits={splits!r}: the number of splitting points is 0 or more")
    if name == "PIECEWISE" and splits is None:
        raise ConfigError(
            "mode=PIECEWISE records splits + 1 graphs for each size: say splits= (the number of attention layers)"
        )
    replayable, never = _split(histogram, name)
    columns = [np.array(column, dtype=float) for column in zip(*replayable)] or [np.zeros(0), np.zeros(0)]
    others = [np.array(column, dtype=float) for column in zip(*never)] or [np.zeros(0), np.zeros(0)]
    return Workload(
        columns[0],
        columns[1],
        others[0],
        others[1],
        StepCost.of(step_cost, name),
        None if memory is None else PoolModel.of(memory),
        name,
        (splits or 0) + 1 if name == "PIECEWISE" else 1,
    )


def limits(
    memory_budget: float | None, max_graphs: int | None, workload: Workload
) -> tuple[float | None, int | None]:
    """The limits in bytes and in sizes."""
    if max_graphs is not None and (
        isinstance(max_graphs, bool) or max_graphs != max_graphs or max_graphs < 0
    ):
        raise ConfigError(f"max_graphs={max_graphs!r}: give 0 (record nothing) or more, or None for no limit")
    if memory_budget is not None:
        if isinstance(memory_budget, bool) or memory_budget != memory_budget or memory_budget < 0:
            raise ConfigError(f"memory_budget={memory_budget!r}: give bytes, 0 or more, or None for no limit")
        if workload.memory is None:
            raise ConfigError(
                f"memory_budget={memory_budget!r} without memory=: say what recording takes (bytes of each size as a "
                "number, function or mapping, or predict_pool(...)), or limit max_graphs"
            )
    most = (
        None if max_graphs is None or math.isinf(max_graphs) else int(max_graphs) // workload.graphs_per_size
    )
    return memory_budget, most
