"""What launching costs: its histogram, its parts on a machine, its growth with a graph's nodes, and where it
stops to matter.

Each function takes the DataFrames of :mod:`cgkit.measuring` and an optional ``ax``, and returns the Axes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from cgkit.plotting.style import (
    COMPILED,
    EAGER,
    INK,
    MEMORY,
    MODES,
    PADDING,
    SERIES,
    SHARED,
    About,
    new_axes,
    put_title,
    styled,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

#: Colour, hatch and name of each kind of launch.
_KINDS = {
    "launch": (EAGER, "", "kernel launch"),
    "graph_launch": (MODES["FULL"], "///", "graph launch"),
}
_MARKERS = {"eager": "o", "compiled": "s", "PIECEWISE": "^", "FULL": "D"}


@styled
def launch_costs(
    launches: pd.DataFrame, about: About | None = None, *, bins: int = 48, ax: Axes | None = None
) -> Axes:
    """How long the calls took that launch something, as a histogram over a logarithmic axis.

    ``launches``: a row a call, with ``kind`` ("launch" or "graph_launch") and ``dur_us`` (the CPU time of the call),
    as ``Timeline.launches`` has them. Calls of no length are left out, and counted in the title.
    """
    from matplotlib.ticker import MaxNLocator

    ax = new_axes(ax, 8.4, 3.0)
    shown = launches[launches["dur_us"] > 0]
    if not len(shown):
        ax.text(0.5, 0.5, "no launch in this timeline", ha="center", va="center", transform=ax.transAxes)
        ax.set_axis_off()
        put_title(ax, "No launches", about)
        return ax
    low, high = math.log10(shown["dur_us"].min()), math.log10(shown["dur_us"].max())
    low, high = low - 0.02, max(high + 0.02, low + 0.3)
    edges = [10 ** (low + (high - low) * i / bins) for i in range(bins + 1)]
    top = 0.0
    for kind, (colour, hatch, name) in _KINDS.items():
        costs = shown[shown["kind"].astype(str) == kind]["dur_us"]
        if not len(costs):
            continue
        median = float(costs.median())
        counts, _, _ = ax.hist(
            costs, edges, color=colour, alpha=0.65, hatch=hatch, edgecolor="white", linewidth=0.3,
            label=f"{len(costs):,} x {name}, median {median:,.1f} µs",
        )  # fmt: skip
        ax.axvline(median, ymax=1 / 1.42, color=colour, linewidth=1.6, linestyle="--" if hatch else "-")
        top = max(top, float(max(counts)))  # type: ignore[arg-type]
    ax.set_xscale("log")
    _plain_numbers(ax.xaxis, edges[0], edges[-1])
    ax.set_xlim(edges[0], edges[-1])
    ax.set_ylim(0, top * 1.42)
    ax.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.set_xlabel("CPU time of one call (µs, logarithmic; lines: medians)")
    ax.set_ylabel("calls")
    ax.grid(axis="y")
    ax.legend(loc="upper right")
    left_out = len(launches) - len(shown)
    rest = f" ({left_out} of no length left out)" if left_out else ""
    put_title(ax, f"What {len(shown):,} launches cost the CPU{rest}", about)
    return ax


@styled
def launch_overhead(
    frame: pd.DataFrame,
    about: About | None = None,
    *,
    claims: pd.DataFrame | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Every measured case as a bar over a logarithmic axis, with the claims beside as hatched bands.

    ``frame``: ``what``, ``count``, ``unit``, ``median_us``, ``low_us``, ``high_us``. ``claims``: ``what``, ``low_us``,
    ``high_us``: what somebody says, not what was measured.
    """
    told = claims.to_dict("records") if claims is not None else []
    rows = frame.to_dict("records")
    ax = new_axes(ax, 8.4, 1.2 + 0.3 * (len(rows) + len(told)))
    least = min([row["median_us"] for row in rows] + [claim["low_us"] for claim in told])
    most = max([row["high_us"] for row in rows] + [claim["high_us"] for claim in told])
    left = 10 ** math.floor(math.log10(max(least, 1e-3)) - 0.05)
    names = []
    for y, row in enumerate(rows):
        value = row["median_us"]
        ax.barh(y, value - left, left=left, height=0.62, color=_colour_of(row["what"]))
        ax.errorbar(
            value, y, xerr=[[max(value - row["low_us"], 0)], [max(row["high_us"] - value, 0)]],
            fmt="none", ecolor=INK, capsize=2, lw=0.9,
        )  # fmt: skip
        _value(ax, max(value, row["high_us"]), y, f"{value:,.2f} µs" if value < 10 else f"{value:,.0f} µs")
        names.append(f"{row['what']}: {_counted(row['count'], row['unit'])}" if row["unit"] else row["what"])
    for y, claim in enumerate(told, len(rows)):
        ax.barh(
            y, claim["high_us"] - claim["low_us"], left=claim["low_us"], height=0.62, facecolor="none",
            edgecolor=PADDING, hatch="////", linewidth=1,
        )  # fmt: skip
        _value(ax, claim["high_us"], y, f"{claim['low_us']:g} to {claim['high_us']:g} µs, claimed")
        names.append(f"article: {claim['what']}")
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set_xscale("log")
    ax.set_xlim(left, most * (most / left) ** 0.22)
    _plain_numbers(ax.xaxis, left, most)
    ax.set_xlabel("host time of one call (µs; median, whisker: 10 to 90 %)")
    ax.grid(axis="x")
    put_title(ax, "What stands in the way of a kernel", about)
    return ax


@styled
def against_nodes(frame: pd.DataFrame, about: About | None = None, *, ax: Axes | None = None) -> Axes:
    """The host time of one graph launch against the number of nodes, and the same kernels launched one by one.

    ``frame``: as :func:`launch_overhead` takes it. Drawn are the rows of ``cudaGraphLaunch``, and a straight line for
    as many times the operator with an empty kernel.
    """
    graphs = frame[frame["what"] == "cudaGraphLaunch"].sort_values("count")
    ax = new_axes(ax, 8.4, 3.2)
    if not len(graphs):
        ax.text(
            0.5,
            0.5,
            "not measured: graph launches need a GPU",
            ha="center",
            va="center",
            transform=ax.transAxes,
        )
        ax.set_axis_off()
        put_title(ax, "Launching a graph against its number of nodes: not measured", about)
        return ax
    nodes, us = list(graphs["count"]), list(graphs["median_us"])
    low = [a - b for a, b in zip(us, graphs["low_us"])]
    high = [b - a for a, b in zip(us, graphs["high_us"])]
    ax.errorbar(
        nodes, us, yerr=[low, high], color=MODES["FULL"], marker="D", capsize=3, label="one graph launch"
    )
    single = frame[frame["what"].str.startswith("torch operator, an empty kernel")]
    if len(single):
        each = float(single["median_us"].iloc[0])
        ax.plot(
            nodes, [each * n for n in nodes], color=EAGER, linestyle="--", marker="o",
            label=f"the same operators one by one ({each:,.1f} µs each, measured once)",
        )  # fmt: skip
    for n, value in zip(nodes, us):
        ax.annotate(
            f"{value:,.1f}",
            (n, value),
            xytext=(0, -13),
            textcoords="offset points",
            ha="center",
            fontsize=8.5,
        )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(nodes, [f"{n:,}" for n in nodes])
    ax.minorticks_off()
    _plain_numbers(ax.yaxis, *ax.get_ylim())
    ax.margins(y=0.15)
    ax.set_xlabel("kernel nodes in the graph")
    ax.set_ylabel("host time (µs)")
    ax.grid()
    ax.legend(loc="upper left")
    put_title(
        ax, f"Launching {nodes[-1]:,} nodes costs {us[-1] / us[0]:,.1f} times as much as {nodes[0]}", about
    )
    return ax


@styled
def crossover(
    frame: pd.DataFrame, crossings: pd.DataFrame, about: About | None = None, *, ax: Axes | None = None
) -> Axes:
    """Time of a step against the batch size, measured and predicted, and where the GPU becomes the slower one.

    ``frame``: ``mode``, ``batch``, ``wall_ms``, ``gpu_busy_ms`` (or None), ``roofline_ms``, ``predicted_ms``.
    ``crossings``: ``mode``, ``measured_batch``, ``predicted_batch`` (0: from the smallest batch on; infinity: not
    within what was measured).
    """
    ax = new_axes(ax, 8.4, 4.2)
    batches = sorted(set(frame["batch"]))
    roofline = frame.drop_duplicates("batch").sort_values("batch")
    ax.plot(
        roofline["batch"], roofline["roofline_ms"], color=INK, linestyle=":", linewidth=1.8,
        label="roofline (weights and KV cache, FLOPs)",
    )  # fmt: skip
    # JSON has no infinity: a recording says "beyond"
    said = {row["mode"]: row for row in crossings.replace("beyond", math.inf).to_dict("records")}
    for mode, rows in frame.groupby("mode", sort=False):
        rows, colour = rows.sort_values("batch"), MODES.get(str(mode), SHARED)
        marker = _MARKERS.get(str(mode), "v")
        label = f"{mode}: {_crossing(said.get(mode, {}))}"
        ax.plot(rows["batch"], rows["wall_ms"], color=colour, marker=marker, markersize=5, label=label)
        ax.plot(rows["batch"], rows["predicted_ms"], color=colour, linestyle="--", linewidth=1)
        measured = said.get(mode, {}).get("measured_batch")
        if _within(measured, batches):
            ax.axvline(float(measured), color=colour, linewidth=0.9, linestyle="-.")
    busy = frame[frame["mode"] == "FULL"].dropna(subset=["gpu_busy_ms"]).sort_values("batch")
    if len(busy):
        ax.plot(
            busy["batch"], busy["gpu_busy_ms"].astype(float), color=MEMORY, linewidth=4, alpha=0.3,
            label="GPU busy (FULL)",
        )  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(batches, [str(batch) for batch in batches])
    ax.minorticks_off()
    _plain_numbers(ax.yaxis, *ax.get_ylim())
    ax.set_xlabel("batch (requests, one new token each)")
    ax.set_ylabel("ms a step")
    ax.grid()
    figure = ax.get_figure(root=True)
    assert figure is not None
    if len(figure.axes) == 1:
        figure.legend(
            *ax.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8.5,
            title="Batch sizes at which a mode is launch-bound", title_fontsize=8.5,
        )  # fmt: skip
    else:
        ax.legend(fontsize=8)
    put_title(ax, "Where a step stops to be launch-bound (solid: measured, dashed: predicted)", about)
    return ax


def _counted(count: int, unit: str) -> str:
    return f"1 {unit.removesuffix('s')}" if count == 1 else f"{count:,} {unit}"


def _crossing(row: dict[str, Any]) -> str:
    """What is known of one mode's crossing."""
    measured, predicted = row.get("measured_batch"), _batch(row.get("predicted_batch"))
    if measured is None or math.isnan(measured):
        return f"{predicted} (predicted)"
    if math.isinf(measured):
        return f"every batch (predicted: {predicted})"
    if measured < 1:
        return f"no batch (predicted: {predicted})"
    return f"{_batch(measured)} (predicted: {predicted})"


def _batch(value: Any) -> str:
    if value is None or math.isnan(value):
        return "?"
    if math.isinf(value):
        return "every batch"
    return "none" if value < 1 else f"to {value:,.0f}"


def _within(value: Any, batches: list[int]) -> bool:
    known = isinstance(value, (int, float)) and math.isfinite(value)
    return known and batches[0] <= value <= batches[-1]


def _colour_of(what: str) -> str:
    if "raph" in what:
        return MODES["FULL"]
    if "guard" in what or "Module" in what:
        return SERIES[2]
    return COMPILED if "Triton" in what else EAGER


def _value(ax: Axes, x: float, y: float, text: str) -> None:
    ax.annotate(text, (x, y), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8.5)


def _plain_numbers(axis: Any, low: float, high: float) -> None:
    """Round numbers as ticks, at least three of them, written out."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7), tuple(1 + i / 4 for i in range(36))):
        ticks = [digit * 10.0**power for power in powers for digit in digits]
        if sum(low <= tick <= high for tick in ticks) >= 3:
            break
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
