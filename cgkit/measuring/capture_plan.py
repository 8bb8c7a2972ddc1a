"""``CapturePlan``: a list of capture sizes with what it costs, wastes and takes, and as an engine's option."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from cgkit.display import Shown
from cgkit.measuring import engine_options
from cgkit.measuring.workload import Workload


@dataclass(frozen=True, repr=False)
class CapturePlan(Shown):
    """A list of sizes with what it costs, wastes and takes; made by :func:`plan_capture_sizes` or :func:`price_sizes`.

    Attributes:
        name: what it is called beside others.
        sizes: ascending; () records nothing.
        workload: what it was planned for.
        memory_budget, max_graphs: under which; None: no limit.
        largest_candidate: the largest size that it was chosen from; None: no choice was made.
    """

    name: str
    sizes: tuple[int, ...]
    workload: Workload = field(repr=False)
    memory_budget: float | None = None
    max_graphs: int | None = None
    largest_candidate: int | None = None

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
        """A row a size, then one for what runs without a graph: ``size``, ``captured``, ``from_batch``,
        ``to_batch``, ``count`` (steps), ``step_cost`` (of one of them), ``padded_tokens`` and
        ``padding_tokens`` (of all), ``waste`` (of the tokens that run), ``kind`` ("mixed": steps with prefill,
        which FULL_DECODE_ONLY never replays)."""
        import pandas as pd

        frame = pd.DataFrame(self._rows)
        return frame.assign(size=frame["size"].astype("Int64"))

    def histogram_frame(self) -> Any:
        """A row a batch that occurs: ``batch``, ``count``, ``padded`` (what it runs as), ``captured``."""
        import pandas as pd

        work = self.workload
        to = [next((size for size in self.sizes if size >= batch), None) for batch in work.batches]
        rows = [
            (int(b), float(c), int(size or b), size is not None)
            for b, c, size in zip(work.batches, work.counts, to)
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
    def sglang_older(self) -> str:
        """The same for releases of SGLang that know no list a phase."""
        return engine_options.sglang(self.sizes, older=True)

    @property
    def tensorrt_llm(self) -> str:
        """The part of TensorRT-LLM's YAML that makes it record these sizes for decoding."""
        return engine_options.tensorrt_llm(self.sizes)

    def options(self) -> dict[str, str]:
        """The options by engine."""
        return {
            "vllm": self.vllm,
            "sglang": self.sglang,
            "sglang_older": self.sglang_older,
            "tensorrt_llm": self.tensorrt_llm,
        }

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
        taken = "memory not modelled" if memory is None else _size(memory)
        if self.memory_budget is not None:
            taken += f" of {_size(self.memory_budget)}"
        graphs = f"{self.graphs} graph{'s' * (self.graphs != 1)}"
        graphs += f" of {self.max_graphs}" if self.max_graphs is not None else ""
        number = len(self.sizes)
        lines = [
            f"CapturePlan {self.name!r}, {self.mode}: {number} size{'s' * (number != 1)}, {graphs}, {taken}",
            f"  sizes: {list(self.sizes)}" if self.sizes else f"  no sizes: {self._why_none()}",
            f"  a step costs {self.expected_step_cost:.4g} {unit} on average; {self.waste:.1%} of the tokens that run "
            f"are padding ({self.waste_of_real:.1%} of the real ones); {self.captured_steps:.1%} of the steps replay "
            "a graph",
        ]
        lines += [
            f"  {engine}: {' '.join(text.split())}"
            for engine, text in self.options().items()
            if "\n" not in text
        ]
        return "\n".join(lines)

    def _why_none(self) -> str:
        if self.max_graphs is not None and self.max_graphs < self.workload.graphs_per_size:
            return f"one takes {self.workload.graphs_per_size} graphs, and {self.max_graphs} are allowed"
        top, batches = self.largest_candidate, self.workload.batches
        if top is not None and len(batches) and top < batches.min():
            least, choice = int(batches.min()), f"the largest of them has {top}" if top else "there are none"
            return f"the smallest step has {least} tokens, and of the sizes to choose from {choice}"
        limited = self.memory_budget is not None or self.max_graphs is not None
        return "none fits the budget, or none is cheaper than no graph" if limited else "no graph is cheaper"


def _whole(count: float) -> float:
    """Counts are whole, unless a histogram has shares in their place."""
    return int(count) if float(count).is_integer() else count


def _size(count: float) -> str:
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count:,.0f} bytes"


def _row(
    size: int | None,
    captured: bool,
    low: int,
    high: int,
    count: float,
    real: float,
    cost: float,
    kind: str = "",
) -> dict[str, Any]:
    padded = size * count if size is not None else real
    return {
        "size": size,
        "captured": captured,
        "from_batch": low,
        "to_batch": high,
        "count": _whole(count),
        "step_cost": cost,
        "padded_tokens": _whole(padded),
        "padding_tokens": _whole(padded - real),
        "waste": (padded - real) / padded if padded else 0.0,
        "kind": kind,
    }
