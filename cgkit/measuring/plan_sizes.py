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

from collections.abc import Mapping, Sequence
from typing import Any

from cgkit.config import CUDAGraphMode, whole_sizes
from cgkit.measuring.best_sizes import best_sizes
from cgkit.measuring.capture_plan import CapturePlan
from cgkit.measuring.step_cost import REPLAYED
from cgkit.measuring.workload import limits, workload_of

#: The article's trimmed list: a few sizes, and the memory of all others saved.
TRIMMED = (1, 2, 4, 8)


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
    workload = workload_of(batch_histogram, step_cost, memory, mode, splits)
    limit, most = limits(memory_budget, max_graphs, workload)
    chosen = whole_sizes("candidates", candidates) if candidates is not None else workload.candidates()
    sizes = best_sizes(workload.choice(chosen, limit, most)) if len(chosen) else ()
    return CapturePlan("plan", sizes, workload, limit, max_graphs, max(chosen, default=0))


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
    workload = workload_of(batch_histogram, step_cost, memory, mode, splits)
    return CapturePlan(name, whole_sizes("sizes", list(sizes)), workload, None, None)


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
    """The article's two ways to save memory, beside a list as it is (PIECEWISE): trim it, or record FULL graphs
    of decode steps only, for the decode half of a split deployment.

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
    columns = [
        "way",
        "mode",
        "sizes",
        "graphs",
        "expected_step_cost",
        "waste",
        "captured_steps",
        "pool_bytes",
        "saved_bytes",
    ]
    return pd.DataFrame(rows, columns=columns)


def cut_to_budget(plan: CapturePlan, memory_budget: float | None, max_graphs: int | None) -> CapturePlan:
    """``plan`` with its largest sizes left out until it fits: what an engine's option for the largest size does
    (vLLM ``max_cudagraph_capture_size``, SGLang ``--cuda-graph-max-bs``, TensorRT-LLM ``max_batch_size``)."""
    limit, most = limits(memory_budget, max_graphs, plan.workload)
    sizes = plan.sizes if most is None else plan.sizes[:most]
    memory = plan.workload.memory
    while sizes and limit is not None and memory is not None and memory.bytes(sizes) > limit:
        sizes = sizes[:-1]
    return CapturePlan(plan.name, tuple(sizes), plan.workload, limit, max_graphs)


def best_part(plan: CapturePlan, memory_budget: float | None, max_graphs: int | None) -> CapturePlan:
    """The best list within the budget that has no other sizes than ``plan``: the ladder cut as well as can be."""
    limit, most = limits(memory_budget, max_graphs, plan.workload)
    sizes = best_sizes(plan.workload.choice(plan.sizes, limit, most)) if plan.sizes else ()
    return CapturePlan(plan.name, sizes, plan.workload, limit, max_graphs)


def _of_mode(given: Any, mode: str) -> Any:
    """What ``given`` has for ``mode``, if it is a dict by mode."""
    by_mode = isinstance(given, Mapping) and {"PIECEWISE", "FULL"} <= set(given)
    return given[REPLAYED[mode]] if by_mode else given
