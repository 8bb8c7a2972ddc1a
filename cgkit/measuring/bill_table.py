"""Bills as a table for people: parts in words, times with their share, counts with how complete they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

    from cgkit.measuring.bill import Bill

_MEANING = {
    "python": "Python, outside of operators",
    "dispatch": "inside operators, outside of calls",
    "guards": "Dynamo's guards",
    "kernel_launches": "launching kernels one by one",
    "graph_launches": "launching graphs",
    "copies": "starting copies",
    "runtime_other": "other calls of the driver",
    "waiting": "waiting for the GPU",
    "unexplained": "unexplained",
    "busy": "busy",
    "idle_launching": "idle, the CPU was launching",
    "idle_python": "idle, the CPU was in Python",
    "idle_sync": "idle, the CPU was waiting",
    "idle_elsewhere": "idle, the CPU was elsewhere",
    "idle_inside_graph": "idle, between nodes of a graph",
}


def reading_table(bills: Sequence[Bill]) -> pd.DataFrame:
    """Bills side by side for people: the parts in words, times with their share of the wall time, then the counts.

    Where no GPU was at work, only the CPU's side and the launches are shown.
    """
    import pandas as pd

    rows: list[dict[str, str]] = []
    names = names_of(bills)

    def row(side: str, label: str, cells: Sequence[str]) -> None:
        rows.append({"": side, "part": label, **dict(zip(names, cells))})

    row("wall", "", [f"{one.wall_us:,.0f} us" for one in bills])
    saw_gpu = any(one.saw_gpu for one in bills)
    for side in ("cpu", "gpu") if saw_gpu else ("cpu",):
        sides = [one.parts if side == "cpu" else one.gpu for one in bills]
        for part in sides[0]:
            if any(parts[part] > 0 for parts in sides):
                row(
                    side,
                    _MEANING[part],
                    [_time(parts[part], one.wall_us) for parts, one in zip(sides, bills)],
                )
    if saw_gpu:
        row("kernels", "tied to their launch", [f"{one.kernels_tied:,} of {one.kernels:,}" for one in bills])
        row("", "run by a graph launch", [f"{one.kernels_in_graphs:,} of {one.kernels:,}" for one in bills])
    row("launches", "one by one", [_calls(one.launches, one.median_launch_us) for one in bills])
    row("", "of graphs", [_calls(one.graph_launches, one.median_graph_launch_us) for one in bills])
    if not saw_gpu:
        return pd.DataFrame(rows)
    ahead = [f"{one.queue_depth['median']:,.0f} (at most {one.queue_depth['max']:,.0f})" for one in bills]
    row("queue", "kernels that wait, median", ahead)
    row("article", "sum of max(launch, run)", [f"{one.article_formula_us:,.0f} us" for one in bills])
    return pd.DataFrame(rows)


def names_of(bills: Sequence[Bill]) -> list[str]:
    """A name for each bill, no two equal: its mode and, where that is not enough, its step and process."""
    names = [one.mode or one.step or "bill" for one in bills]
    for more in ([one.step for one in bills], [f"process {one.process}" for one in bills]):
        names = [f"{name} · {extra}" if names.count(name) > 1 else name for name, extra in zip(names, more)]
    return [name if names.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(names)]


def _time(us: float, wall_us: float) -> str:
    return f"{us:,.0f} us {100 * us / wall_us if wall_us else 0:5.1f} %"


def _calls(count: int, median_us: float) -> str:
    return f"{count:,} ({median_us:,.1f} us, median)" if count else "0"
