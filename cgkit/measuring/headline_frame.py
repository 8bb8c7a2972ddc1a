"""The headline table's arithmetic: floors and ratios of rows that were measured elsewhere.

A row is a model, a case ("decode": one step; "generate": a whole answer), a mode and a batch size. What was not
measured is missing, never zero and never filled in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

#: The rows, in the order of the road. ``level 1``: ``torch.compile`` with its guards and automatic dynamic sizes, as
#: the level of that number does it. ``torch.compile`` and ``reduce-overhead``: one static compilation a size.
MODES = (
    "eager",
    "level 1",
    "compiled",
    "PIECEWISE",
    "FULL",
    "FULL_AND_PIECEWISE",
    "torch.compile",
    "reduce-overhead",
)
#: Those that the road's own compiled pieces serve.
ROAD = ("compiled", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE")
GRAPHS = ROAD[1:]

COLUMNS: tuple[str, ...] = (
    "model",
    "layers",
    "case",
    "mode",
    "batch",
    "wall_ms",
    "wall_p10_ms",
    "wall_p90_ms",
    "cpu_ms",
    "gpu_busy_ms",
    "kernels",
    "copies",
    "kernel_launches",
    "graph_launches",
    "tokens_s",
    "first_call_s",
    "first_call_warm_s",
    "first_call_how",
    "capture_s",
    "graphs",
    "pool_bytes",
    "weight_bytes",
    "copy_bytes_per_s",
    "floor_ms",
    "ratio_to_eager",
    "ratio_to_compiled",
    "ratio_to_busy",
    "ratio_to_floor",
    "twin_ms",
    "samples",
    "context_tokens",
    "prompt_tokens",
    "new_tokens",
    "compiler",
    "emulated",
    "device",
)


def weight_bytes(model: nn.Module) -> tuple[int, int]:
    """Bytes of weights that a step up to the last norm reads, and those of the output projection.

    Tables that a step looks rows up in (tokens, positions) are left out of the first.
    """
    from torch import nn as modules

    tables = {id(m.weight) for m in model.modules() if isinstance(m, modules.Embedding)}
    head: Any = model.lm_head
    head_bytes = head.weight.nbytes
    step = sum(p.nbytes for p in model.parameters() if id(p) not in tables and p is not head.weight)
    return step, head_bytes


def floor_ms(row: dict[str, Any]) -> float | None:
    """Milliseconds in which the memory can deliver the row's weights: ``weight_bytes`` over ``copy_bytes_per_s``."""
    if not row.get("weight_bytes") or not row.get("copy_bytes_per_s"):
        return None
    return row["weight_bytes"] / row["copy_bytes_per_s"] * 1e3


def with_ratios(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with floors and ratios of wall times.

    ``ratio_to_eager`` and ``ratio_to_compiled`` compare rows that ran in turn. A row with ``twin_ms`` ran in a process
    of its own, where FULL_AND_PIECEWISE took so long: its ratio goes over that twin, so that a machine that was
    slower then does not count.
    """
    made = [dict(row) for row in rows]
    by = {(r["model"], r["case"], r["batch"], r["mode"]): r for r in made}
    for row in made:
        row["floor_ms"] = floor_ms(row)
        key = (row["model"], row["case"], row["batch"])
        here = by.get((*key, "FULL_AND_PIECEWISE"))
        factor: float | None = 1.0
        if row.get("twin_ms"):
            factor = here["wall_ms"] / row["twin_ms"] if here else None
        for name, mode in (("ratio_to_eager", "eager"), ("ratio_to_compiled", "compiled")):
            row[name] = _over(row["wall_ms"], by.get((*key, mode), {}).get("wall_ms"), factor)
        row["ratio_to_busy"] = _over(row["wall_ms"], row.get("gpu_busy_ms"))
        row["ratio_to_floor"] = _over(row["wall_ms"], row["floor_ms"])
    return made


def _over(value: float, base: float | None, factor: float | None = 1.0) -> float | None:
    return value * factor / base if base and factor else None


def headline_frame(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """The table: :data:`COLUMNS`, models as they came, decode before generate, modes in the order of :data:`MODES`."""
    import pandas as pd

    models = list(dict.fromkeys(row["model"] for row in rows))
    place = {mode: index for index, mode in enumerate(MODES)}
    ordered = sorted(
        with_ratios(rows),
        key=lambda r: (models.index(r["model"]), r["case"], r["batch"], place.get(r["mode"], len(MODES))),
    )
    return pd.DataFrame(ordered, columns=list(COLUMNS))


def goals(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The ratios that the table is read for, a row a model, case and batch; None where a side is missing."""
    by = {(r["model"], r["case"], r["batch"], r["mode"]): r for r in with_ratios(rows)}
    found = []
    for model, case, batch in dict.fromkeys((r["model"], r["case"], r["batch"]) for r in rows):

        def wall(mode: str, at: tuple[Any, ...] = (model, case, batch)) -> float | None:
            return by.get((*at, mode), {}).get("wall_ms")

        last = by.get((model, case, batch, "reduce-overhead"), {})
        best = by.get((model, case, batch, "FULL_AND_PIECEWISE"), {})
        found.append(
            {
                "model": model,
                "case": case,
                "batch": batch,
                "piecewise_over_full": _ratio(wall("PIECEWISE"), wall("FULL_AND_PIECEWISE")),
                "compiled_over_piecewise": _ratio(wall("compiled"), wall("PIECEWISE")),
                "full_over_reduce_overhead": _ratio(last.get("twin_ms"), last.get("wall_ms")),
                "full_over_busy": best.get("ratio_to_busy"),
                "full_over_floor": best.get("ratio_to_floor"),
                "piecewise_cpu_ms": by.get((model, case, batch, "PIECEWISE"), {}).get("cpu_ms"),
            }
        )
    return found


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None
