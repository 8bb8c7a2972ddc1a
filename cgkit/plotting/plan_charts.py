"""Charts of a plan of capture sizes: what comes and what it is padded to, and lists side by side.

The frames are those of :mod:`cgkit.measuring.plan_sizes` and :mod:`cgkit.measuring.compare_sizes`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cgkit.plotting import style
from cgkit.plotting.style import About, legend_below, put_title, styled
from cgkit.plotting.tables import human_bytes

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Batches above the sizes that are rarer than this (a share) are told in the axis' label and not drawn.
_RARE = 0.001


@styled
def plan(
    frame: pd.DataFrame, sizes: Sequence[int] | None, about: About | None = None, *, ax: Axes | None = None
) -> Axes:
    """How often each batch comes, and the sizes that are recorded.

    Args:
        frame: a row a batch: ``batch``, ``count``, ``padded``, ``captured``.
        sizes: recorded ones, as lines; None: nothing is said of recording.
    """
    ax = style.new_axes(ax, 8.4, 3.0)
    _histogram(ax, frame, sizes)
    if sizes is not None:
        legend_below(ax, 3)
    put_title(ax, _plan_title(frame, sizes), about)
    return ax


@styled
def compare(
    frame: pd.DataFrame, about: About | None = None, *, unit: str = "ms", ax: Axes | None = None
) -> Axes:
    """The expected cost of a step with each list.

    Args:
        frame: a row a list: ``list``, ``sizes`` (their number), ``graphs``, ``expected_step_cost``, ``waste``,
            ``captured_steps``, ``pool_bytes`` (may be missing), ``best_part_cost`` (missing where the list is a plan).
    """
    ax = style.new_axes(ax, 8.4, 1.4 + 0.42 * len(frame))
    _bars(ax, frame, unit)
    legend_below(ax, 2)
    put_title(ax, _compare_title(frame), about)
    return ax


@styled
def by_number(
    frame: pd.DataFrame,
    ladders: pd.DataFrame,
    about: About | None = None,
    *,
    unit: str = "ms",
    ax: Axes | None = None,
) -> Axes:
    """The expected cost of a step with the best list of so many sizes, and the engines' lists as points.

    ``frame``: ``sizes`` (how many) and ``expected_step_cost``; ``ladders``: the same with ``list``.
    """
    ax = style.new_axes(ax, 8.4, 3.6)
    ax.plot(frame["sizes"], frame["expected_step_cost"], "o-", color=style.MEMORY, linewidth=1.8, markersize=4,
            label="the best list of so many sizes")  # fmt: skip
    looks = zip(
        ("s", "^", "D", "v", "P", "X"), (style.COMPILED, style.PADDING, style.SPLITTING, "#cc79a7", "#56b4e9")
    )
    for row, (marker, colour) in zip(ladders.to_dict("records"), looks):
        ax.plot([row["sizes"]], [row["expected_step_cost"]], marker, color=colour, markersize=8, linestyle="none",
                markeredgecolor=style.INK, markeredgewidth=0.5, label=row["list"])  # fmt: skip
    ax.set_xlabel("recorded sizes")
    ax.set_ylabel(f"expected cost of a step, {unit}")
    ax.grid(axis="y")
    legend_below(ax, 3)
    best = frame["expected_step_cost"].min()
    near = frame[frame["expected_step_cost"] <= best * 1.01]["sizes"].min()
    put_title(ax, f"{near} well chosen sizes are within 1 % of the best {frame['sizes'].max()}", about)
    return ax


@styled
def overview(
    histogram: pd.DataFrame,
    sizes: Sequence[int],
    lists: pd.DataFrame,
    about: About | None = None,
    *,
    unit: str = "ms",
) -> Axes:
    """:func:`plan` above :func:`compare`, in one figure; returns the upper axes."""
    from matplotlib.figure import Figure

    figure: Figure = Figure(figsize=(9.2, 4.6 + 0.42 * len(lists)))
    upper, lower = figure.subplots(2, 1, height_ratios=[2.4, 0.9 + 0.36 * len(lists)])
    _histogram(upper, histogram, sizes)
    _bars(lower, lists, unit)
    handles = [*upper.get_legend_handles_labels()[0], *lower.get_legend_handles_labels()[0]]
    figure.legend(handles=handles, ncols=3, loc="outside lower left")
    line = "\n".join(textwrap.wrap(about.line() if about else "", 95))
    upper.set_title("\n".join(filter(None, [_plan_title(histogram, sizes), line])))
    lower.set_title(_compare_title(lists))
    return upper


def _histogram(ax: Axes, frame: pd.DataFrame, sizes: Sequence[int] | None) -> None:
    from matplotlib.ticker import MaxNLocator

    every = frame.groupby("batch", as_index=False).agg(count=("count", "sum"))
    total = every["count"].sum()
    held = frame[frame["captured"]].groupby("batch")["count"].sum()
    most = _shown_to(every, sizes)
    shown = every[every["batch"] <= most]
    share = [100 * count / total for count in shown["count"]]
    caught = [100 * held.get(batch, 0.0) / total for batch in shown["batch"]]
    width = 1.0 if most > 60 else 0.85
    ax.bar(
        shown["batch"],
        caught,
        width=width,
        color=style.REAL,
        alpha=0.75,
        label="replays a graph" if sizes else "",
    )
    over = [whole - part for whole, part in zip(share, caught)]
    label = "runs without a graph" if sizes is not None and sum(over) > 1e-9 else ""
    ax.bar(shown["batch"], over, bottom=caught, width=width, color=style.EAGER, hatch="///", edgecolor="white",
           linewidth=0, label=label)  # fmt: skip
    for number, size in enumerate(sizes or ()):
        ax.axvline(size + 0.5, color=style.PADDING, linewidth=0.8, alpha=0.8,
                   label="a recorded size" if not number else "")  # fmt: skip
    ax.set_xlim(0.5, most + 1)
    ax.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    ax.set_ylim(0, max([*share, 1e-9]) * 1.12)
    beyond = total - shown["count"].sum()
    rest = (
        f"; {beyond / total:.1%} of the steps are larger, up to {int(every['batch'].max())}" if beyond else ""
    )
    ax.set_xlabel(f"tokens in the step{rest}")
    ax.set_ylabel("% of the steps")
    ax.grid(axis="y")


def _shown_to(every: pd.DataFrame, sizes: Sequence[int] | None) -> int:
    """The largest batch on the axis: the largest size, or the largest batch near it that is not rare."""
    if sizes:
        near = every[(every["batch"] <= 2 * sizes[-1]) & (every["count"] >= _RARE * every["count"].sum())]
        return max([sizes[-1], *near["batch"]]) + max(sizes[-1] // 20, 1)
    running = every["count"].cumsum() / every["count"].sum()
    return int(every["batch"][running >= 1 - _RARE - 1e-12].min())


def _bars(ax: Axes, frame: pd.DataFrame, unit: str) -> None:
    cost, rows = list(frame["expected_step_cost"]), frame.to_dict("records")
    ours = [
        row.get("best_part_cost") is None or row["best_part_cost"] != row["best_part_cost"] for row in rows
    ]
    colours = [style.MEMORY if mine else style.MODES["compiled"] for mine in ours]
    ax.barh(range(len(rows)), cost, height=0.62, color=colours, hatch=["///" if mine else "" for mine in ours],
            edgecolor="white", linewidth=0.5)  # fmt: skip
    best = [(y, row["best_part_cost"]) for y, row in enumerate(rows) if not ours[y]]
    if best:
        ax.plot([x for _, x in best], [y for y, _ in best], "|", color=style.INK, markersize=13, markeredgewidth=1.6,
                label="with the best sizes of that list, not its smallest")  # fmt: skip
    for y, row in enumerate(rows):
        ax.annotate(
            _note(row), (cost[y], y), xytext=(7, 0), textcoords="offset points", va="center", fontsize=8.5
        )
    ax.set_yticks(range(len(rows)), [f"{row['list']} ({row['sizes']} sizes)" for row in rows])
    ax.invert_yaxis()
    ax.set_xlim(0, max(cost) * 1.75)
    ax.set_xlabel(f"expected cost of a step, {unit}")
    ax.grid(axis="x")


def _note(row: dict) -> str:
    parts = [f"{row['expected_step_cost']:.3f}", f"{row['waste']:.1%} padding"]
    if row["captured_steps"] < 0.9995:
        parts.append(f"{row['captured_steps']:.1%} replayed")
    if row.get("pool_bytes") is not None and row["pool_bytes"] == row["pool_bytes"]:
        parts.append(human_bytes(row["pool_bytes"]))
    return ", ".join(parts)


def _plan_title(frame: pd.DataFrame, sizes: Sequence[int] | None) -> str:
    total = frame["count"].sum()
    if sizes is None:
        mean = (frame["batch"] * frame["count"]).sum() / total
        return f"{total:,.0f} steps; {mean:.1f} tokens on average"
    held = frame.loc[frame["captured"], "count"].sum() / total
    return f"{len(sizes)} recorded sizes; {held:.1%} of the steps replay one of them"


def _compare_title(frame: pd.DataFrame) -> str:
    first = frame.iloc[0]
    others = frame.iloc[1:]
    if not len(others):
        return f"{first['list']}: {first['expected_step_cost']:.3f} a step"
    best = others.loc[others["expected_step_cost"].idxmin()]
    gain = best["expected_step_cost"] / first["expected_step_cost"] - 1
    if gain < 5e-4:
        return f"The expected step: {first['list']} costs what {best['list']} does, the best of the others"
    return f"The expected step: {best['list']}, the best of the others, costs {gain:.1%} more than {first['list']}"
