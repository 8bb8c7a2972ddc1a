"""``plan_capture_sizes``: which batch sizes to record, for the least expected step time under a budget.

Answers what the article's "capture 尺寸：为什么默认不是所有 batch size" (capture sizes: why not every batch size) and
"显存账" (the memory bill) leave to a rule of thumb. The model, all of it:

- a step of ``n`` tokens up to the largest size costs ``step_cost.replayed(least size >= n)``; above it
  ``step_cost.uncaptured(n)``, also where padding costs more than going without a graph (no engine looks);
- a list of sizes takes ``PoolModel.bytes(sizes)``: the pool's high-water mark, given by the largest size, and what
  each size adds (:mod:`cgkit.measuring.pool_model`);
- PIECEWISE records one graph more than there are splitting points for each size, FULL and FULL_DECODE_ONLY one;
- under FULL_DECODE_ONLY steps with prefill (``kind`` "mixed") run without a graph whatever is recorded.

Within it the list is the best there is (:mod:`cgkit.measuring.best_sizes`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from cgkit.config import CUDAGraphMode, whole_sizes
from cgkit.display import Shown
from cgkit.errors import ConfigError
from cgkit.measuring import engine_options
from cgkit.measuring.best_sizes import Choice, best_sizes
from cgkit.measuring.padding import as_histogram
from cgkit.measuring.pool_model import PoolModel
from cgkit.measuring.step_cost import REPLAYED, StepCost

#: The article's trimmed list: a few sizes, and the memory of all others saved.
TRIMMED = (1, 2, 4, 8)


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
            sizes, replay, held, slow[-1] - slow[at], float(slow[-1]), np.array(shared), np.array(each), most_bytes, most_sizes,
        )  # fmt: skip


def plan_capture_sizes(
    batch_histogram: Any,
    step_cost: Any,
    memory_budget: float | None = None,
    max_graphs: int | None = None,
    *,
    memory: Any = None,
    mode: CUDAGraphMode | str = "FULL",
    splits: int | None = None,
    candidates: Sequence[int] | None = None,
) -> CapturePlan:
    """The list of sizes with the least expected cost of a step that stays within the budget.

    It is exact under the model that this module states, over ``candidates``. Without them it is the best of all lists
    of whole numbers if neither ``memory`` nor, given as a function, the replayed cost falls with the size; what was
    measured and is interpolated may fall. Among equally good lists it takes the one with the fewest sizes, then bytes.

    Args:
        batch_histogram: how often steps of each number of tokens come: a dict, Series, ``BatchHistogram``, a frame with
            ``batch`` and ``count`` (and perhaps ``kind``: "decode" or "mixed"), or a ``SimulatedTraffic``.
        step_cost: what :meth:`StepCost.of` takes: a function ``(num_tokens, captured) -> cost``, a mapping of sizes to
            pairs, a frame of measured rows, or a :class:`StepCost`.
        memory_budget: the most bytes that recording may take; None: no limit. Needs ``memory``.
        max_graphs: the most graphs that may be recorded; None: no limit. 0 records nothing.
        memory: what :meth:`PoolModel.of` takes: bytes that each size adds (number, function, mapping), or the result
            of ``predict_pool``; None: not modelled, and ``pool_bytes`` is None.
        mode: FULL, PIECEWISE or FULL_DECODE_ONLY.
        splits: splitting points of the model (attention layers); PIECEWISE needs it.
        candidates: the sizes to choose from; None: each batch that occurs and each that was measured.

    Raises:
        ConfigError: an argument that makes no sense, with what would.
    """
    workload = _workload(batch_histogram, step_cost, memory, mode, splits)
    limit, most = _budget(memory_budget, max_graphs, workload)
    chosen = whole_sizes("candidates", candidates) if candidates is not None else workload.candidates()
    sizes = best_sizes(workload.choice(chosen, limit, most)) if len(chosen) else ()
    return CapturePlan("plan", sizes, workload, limit, max_graphs)


def price_sizes(
    sizes: Sequence[int],
    batch_histogram: Any,
    step_cost: Any,
    *,
    memory: Any = None,
    mode: CUDAGraphMode | str = "FULL",
    splits: int | None = None,
    name: str = "given",
) -> CapturePlan:
    """What the list ``sizes`` costs and takes, as :func:`plan_capture_sizes` says it of its own.

    Raises:
        ConfigError: as :func:`plan_capture_sizes`.
    """
    workload = _workload(batch_histogram, step_cost, memory, mode, splits)
    return CapturePlan(name, whole_sizes("sizes", list(sizes)), workload, None, None)


@dataclass(frozen=True, repr=False)
class CapturePlan(Shown):
    """A list of sizes with what it costs, wastes and takes; made by :func:`plan_capture_sizes` or :func:`price_sizes`.

    Attributes:
        name: what it is called beside others.
        sizes: ascending; () records nothing.
        workload: what it was planned for.
        memory_budget, max_graphs: under which; None: no limit.
    """

    name: str
    sizes: tuple[int, ...]
    workload: Workload = field(repr=False)
    memory_budget: float | None = None
    max_graphs: int | None = None

    @property
    def mode(self) -> str:
        """FULL, PIECEWISE or FULL_DECODE_ONLY."""
        return self.workload.mode

    @property
    def graphs(self) -> int:
        """How many graphs are recorded."""
        return len(self.sizes) * self.workload.graphs_per_size

    @property
    def pool_bytes(self) -> int | None:
        """What recording takes of the device's memory, by the model; None if it was not modelled."""
        memory = self.workload.memory
        return None if memory is None else memory.bytes(self.sizes)

    @cached_property
    def expected_step_cost(self) -> float:
        """The mean cost of a step, in the unit of the step cost."""
        rows = self._rows
        return math.fsum(row["step_cost"] * row["count"] for row in rows) / self.workload.steps

    @property
    def waste(self) -> float:
        """The share of padding in the tokens that run (33 -> 40 is 17.5 %)."""
        ran = sum(row["padded_tokens"] for row in self._rows)
        return sum(row["padding_tokens"] for row in self._rows) / ran

    @property
    def waste_of_real(self) -> float:
        """Padding over the tokens that were asked for (33 -> 40 is 21 %)."""
        real = sum(row["padded_tokens"] - row["padding_tokens"] for row in self._rows)
        return sum(row["padding_tokens"] for row in self._rows) / real

    @property
    def captured_steps(self) -> float:
        """The share of steps that replay a graph."""
        return sum(row["count"] for row in self._rows if row["captured"]) / self.workload.steps

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        work, rows, low = self.workload, [], 0
        for size in self.sizes:
            inside = (work.batches > low) & (work.batches <= size)
            count = float(work.counts[inside].sum())
            real = float((work.batches[inside] * work.counts[inside]).sum())
            rows.append(_row(size, True, low + 1, size, count, real, work.cost.replayed(size)))
            low = size
        over = work.batches > low
        batches, counts = work.batches[over], work.counts[over]
        if len(batches):
            mean = float(work.uncaptured[over].sum() / counts.sum())
            tokens = float((batches * counts).sum())
            rows.append(_row(None, False, low + 1, int(batches[-1]), float(counts.sum()), tokens, mean))
        if len(work.never):
            counts, tokens = work.never_counts, float((work.never * work.never_counts).sum())
            mean = work.never_cost / float(counts.sum())
            low, high = int(work.never.min()), int(work.never.max())
            rows.append(_row(None, False, low, high, float(counts.sum()), tokens, mean, "mixed"))
        return rows

    def to_frame(self) -> Any:
        """A row a size, then one for what runs without a graph: ``size``, ``captured``, ``from_batch``, ``to_batch``,
        ``count`` (steps), ``step_cost`` (of one of them), ``padded_tokens`` and ``padding_tokens`` (of all), ``waste`` (of the
        tokens that run), ``kind`` ("mixed": steps with prefill, which FULL_DECODE_ONLY never replays)."""
        import pandas as pd

        frame = pd.DataFrame(self._rows)
        return frame.assign(size=frame["size"].astype("Int64"))

    def histogram_frame(self) -> Any:
        """A row a batch that occurs: ``batch``, ``count``, ``padded`` (what it runs as), ``captured``."""
        import pandas as pd

        work = self.workload
        to = [next((size for size in self.sizes if size >= batch), None) for batch in work.batches]
        rows = [
            (int(b), float(c), int(size or b), size is not None) for b, c, size in zip(work.batches, work.counts, to)
        ]
        rows += [(int(b), float(c), int(b), False) for b, c in zip(work.never, work.never_counts)]
        return pd.DataFrame(rows, columns=["batch", "count", "padded", "captured"])

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "sizes": list(self.sizes),
            "expected_step_cost": self.expected_step_cost,
            "waste": self.waste,
            "waste_of_real": self.waste_of_real,
            "pool_bytes": self.pool_bytes,
            "graphs": self.graphs,
            "captured_steps": self.captured_steps,
        }

    @property
    def vllm(self) -> str:
        """The option that makes vLLM record these sizes."""
        return engine_options.vllm(self.sizes, self.mode)

    @property
    def sglang(self) -> str:
        """The option that makes SGLang record these sizes for decoding."""
        return engine_options.sglang(self.sizes)

    @property
    def tensorrt_llm(self) -> str:
        """The part of TensorRT-LLM's YAML that makes it record these sizes for decoding."""
        return engine_options.tensorrt_llm(self.sizes)

    def options(self) -> dict[str, str]:
        """The options by engine."""
        return {"vllm": self.vllm, "sglang": self.sglang, "tensorrt_llm": self.tensorrt_llm}

    def plot(self, about: Any = None, *, ax: Any = None) -> Any:
        """The histogram, and what each batch is padded to."""
        from cgkit.plotting.plan_charts import plan

        return plan(self.histogram_frame(), list(self.sizes), about or self._about(), ax=ax)

    def _about(self) -> Any:
        from cgkit.plotting.style import About

        source = self.workload.cost.source
        return About(mode=self.mode, device=f"step cost: {source}" if source else "")

    def __repr__(self) -> str:
        unit, memory = self.workload.cost.unit, self.pool_bytes
        taken = "memory not modelled" if memory is None else f"{memory / 2**20:.1f} MiB"
        if self.memory_budget is not None:
            taken += f" of {self.memory_budget / 2**20:.1f} MiB"
        graphs = f"{self.graphs} graph{'s' * (self.graphs != 1)}"
        graphs += f" of {self.max_graphs}" if self.max_graphs is not None else ""
        lines = [
            f"CapturePlan {self.name!r}, {self.mode}: {len(self.sizes)} size{'s' * (len(self.sizes) != 1)}, {graphs}, {taken}",
            f"  sizes: {list(self.sizes)}" if self.sizes else f"  no sizes: {self._why_none()}",
            f"  a step costs {self.expected_step_cost:.4g} {unit} on average; {self.waste:.1%} of the tokens that run are "
            f"padding ({self.waste_of_real:.1%} of the real ones); {self.captured_steps:.1%} of the steps replay a graph",
        ]
        lines += [f"  {engine}: {' '.join(text.split())}" for engine, text in self.options().items() if "\n" not in text]
        return "\n".join(lines)

    def _why_none(self) -> str:
        if self.max_graphs is not None and self.max_graphs < self.workload.graphs_per_size:
            return f"one takes {self.workload.graphs_per_size} graphs, and {self.max_graphs} are allowed"
        limited = self.memory_budget is not None or self.max_graphs is not None
        return "none fits the budget, or none is cheaper than no graph" if limited else "no graph is cheaper"


def two_ways_to_save_memory(
    batch_histogram: Any,
    step_cost: Any,
    *,
    memory: Any,
    sizes: Sequence[int],
    splits: int,
    trimmed: Sequence[int] = TRIMMED,
    max_num_seqs: int = 256,
) -> Any:
    """The article's two ways to save memory, beside a list as it is (PIECEWISE): trim it, or record FULL graphs of decode
    steps only, for the decode half of a split deployment.

    Args:
        batch_histogram: as for :func:`plan_capture_sizes`; without a column ``kind`` all steps are decode steps.
        step_cost, memory: as there; or both a dict with one for ``"PIECEWISE"`` and one for ``"FULL"``.
        sizes: the list as it is.
        splits: splitting points of the model.
        trimmed: what it is trimmed to.
        max_num_seqs: the largest decode batch: no FULL graph is needed above the size that holds it.

    Returns:
        a DataFrame with a row a way: ``way``, ``mode``, ``sizes`` (their number), ``graphs``, ``expected_step_cost``,
        ``waste``, ``captured_steps``, ``pool_bytes``, ``saved_bytes``.
    """
    import pandas as pd

    last = min((size for size in sizes if size >= max_num_seqs), default=max(sizes))
    ways = [
        ("as it is", "PIECEWISE", sizes),
        (f"trimmed to {list(trimmed)}", "PIECEWISE", trimmed),
        ("decode steps only", "FULL_DECODE_ONLY", [size for size in sizes if size <= last]),
    ]
    rows: list[dict[str, Any]] = []
    for way, mode, chosen in ways:
        cost, room = _of_mode(step_cost, mode), _of_mode(memory, mode)
        priced = price_sizes(chosen, batch_histogram, cost, memory=room, mode=mode, splits=splits)
        facts = priced.facts() | {"sizes": len(priced.sizes)}
        saved = (rows[0]["pool_bytes"] if rows else facts["pool_bytes"]) - facts["pool_bytes"]
        rows.append({"way": way, "mode": mode, **facts, "saved_bytes": saved})
    columns = ["way", "mode", "sizes", "graphs", "expected_step_cost", "waste", "captured_steps", "pool_bytes", "saved_bytes"]
    return pd.DataFrame(rows, columns=columns)


# --- inside ----------------------------------------------------------------------------------------------


def _row(
    size: int | None, captured: bool, low: int, high: int, count: float, real: float, cost: float, kind: str = ""
) -> dict[str, Any]:
    padded = size * count if size is not None else real
    return {
        "size": size,
        "captured": captured,
        "from_batch": low,
        "to_batch": high,
        "count": count,
        "step_cost": cost,
        "padded_tokens": padded,
        "padding_tokens": padded - real,
        "waste": (padded - real) / padded if padded else 0.0,
        "kind": kind,
    }


def _of_mode(given: Any, mode: str) -> Any:
    """What ``given`` has for ``mode``, if it is a dict by mode."""
    by_mode = isinstance(given, Mapping) and {"PIECEWISE", "FULL"} <= set(given)
    return given[REPLAYED[mode]] if by_mode else given


def _split(histogram: Any, mode: str) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Pairs (batch, count) of the steps that may be replayed, and of those that never are."""
    if hasattr(histogram, "to_frame") and not hasattr(histogram, "columns") and not hasattr(histogram, "index"):
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


def _workload(histogram: Any, step_cost: Any, memory: Any, mode: Any, splits: int | None) -> Workload:
    name = CUDAGraphMode.parse(mode, "mode").name
    if name not in REPLAYED:
        raise ConfigError(
            f"mode={name}: plan for {', '.join(REPLAYED)}; of FULL_AND_PIECEWISE plan the FULL graphs (decode steps) and "
            "the PIECEWISE ones (the others) apart"
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


def _budget(
    memory_budget: float | None, max_graphs: int | None, workload: Workload
) -> tuple[float | None, int | None]:
    """The limits in bytes and in sizes."""
    if max_graphs is not None and (isinstance(max_graphs, bool) or max_graphs != max_graphs or max_graphs < 0):
        raise ConfigError(f"max_graphs={max_graphs!r}: give 0 (record nothing) or more, or None for no limit")
    if memory_budget is not None:
        if isinstance(memory_budget, bool) or memory_budget != memory_budget or memory_budget < 0:
            raise ConfigError(f"memory_budget={memory_budget!r}: give bytes, 0 or more, or None for no limit")
        if workload.memory is None:
            raise ConfigError(
                f"memory_budget={memory_budget!r} without memory=: say what recording takes (bytes of each size as a "
                "number, function or mapping, or predict_pool(...)), or limit max_graphs"
            )
    most = None if max_graphs is None or math.isinf(max_graphs) else int(max_graphs) // workload.graphs_per_size
    return memory_budget, most


def cut_to_budget(plan: CapturePlan, memory_budget: float | None, max_graphs: int | None) -> CapturePlan:
    """``plan`` with its largest sizes left out until it fits: what an engine's option for the largest size does
    (vLLM ``max_cudagraph_capture_size``, SGLang ``--cuda-graph-max-bs``, TensorRT-LLM ``max_batch_size``)."""
    limit, most = _budget(memory_budget, max_graphs, plan.workload)
    sizes = plan.sizes if most is None else plan.sizes[:most]
    memory = plan.workload.memory
    while sizes and limit is not None and memory is not None and memory.bytes(sizes) > limit:
        sizes = sizes[:-1]
    return CapturePlan(plan.name, tuple(sizes), plan.workload, limit, max_graphs)


def best_part(plan: CapturePlan, memory_budget: float | None, max_graphs: int | None) -> CapturePlan:
    """The best list within the budget that has no other sizes than ``plan``: the ladder cut as well as can be."""
    limit, most = _budget(memory_budget, max_graphs, plan.workload)
    sizes = best_sizes(plan.workload.choice(plan.sizes, limit, most)) if plan.sizes else ()
    return CapturePlan(plan.name, sizes, plan.workload, limit, max_graphs)


def plan_facts(plans: Mapping[str, CapturePlan]) -> dict[str, dict[str, Any]]:
    """:meth:`CapturePlan.facts` by name."""
    return {name: one.facts() for name, one in plans.items()}
