"""Charts of tracing: how many graphs a row of calls makes, and what lies between a call and its graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cgkit.plotting import style
from cgkit.plotting.style import About, legend_below, put_title, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_LINES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D")


@styled
def traces_by_call(frame: pd.DataFrame, about: About | None = None, *, ax: Axes | None = None) -> Axes:
    """Graphs made so far, call by call, one staircase a way; calls that went wrong are crossed.

    ``frame``: of :func:`cgkit.measuring.retraces.count_traces`.
    """
    ax = style.new_axes(ax, 9.2, 3.6)
    ways = list(dict.fromkeys(frame["way"]))
    for number, way in enumerate(ways):
        rows = frame[frame["way"] == way]
        lift = 0.07 * (number - (len(ways) - 1) / 2)  # so that equal lines do not hide each other
        colour = style.SERIES[number % len(style.SERIES)]
        look: dict[str, Any] = {
            "color": colour,
            "linestyle": _LINES[number % 4],
            "marker": _MARKERS[number % 4],
            "markersize": 5,
        }
        last = int(rows["graphs"].iloc[-1])
        ax.step(rows["call"], rows["graphs"] + lift, where="post", label=f"{way}: {last}", **look)
        wrong = rows[~rows["agrees"]]
        ax.plot(wrong["call"], wrong["graphs"] + lift, "x", color=style.INK, markersize=11)
    sizes = frame[frame["way"] == ways[0]]
    ax.set_xticks(sizes["call"], [str(size) for size in sizes["size"]])
    ax.set_xlabel("tokens of each call, in order")
    ax.set_ylabel("graphs made so far")
    ax.set_ylim(0, frame["graphs"].max() + 0.6)
    ax.locator_params(axis="y", integer=True)
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    put_title(ax, "Each new graph is a compilation while somebody waits", about)
    return ax


@styled
def dispatch(frame: pd.DataFrame, about: About | None = None, *, ax: Axes | None = None) -> Axes:
    """Host time between a call and its graph, by the number of layers, one line a way.

    ``frame``: of :func:`cgkit.measuring.dispatch_cost.dispatch_cost`, with a column ``layers``.
    """
    ax = style.new_axes(ax, 7.6, 3.6)
    for number, (way, rows) in enumerate(frame.groupby("way", sort=False)):
        colour = style.SERIES[number % len(style.SERIES)]
        look: dict[str, Any] = {
            "color": colour,
            "linestyle": _LINES[number % 4],
            "marker": _MARKERS[number % 4],
        }
        ax.plot(rows["layers"], rows["us"], label=str(way), **look)
        ax.fill_between(
            rows["layers"], rows["low_us"], rows["high_us"], color=colour, alpha=0.15, linewidth=0
        )
    ax.set_xlabel("layers")
    ax.set_ylabel("µs a call, the graph itself empty")
    ax.set_ylim(0)
    ax.grid(axis="y")
    legend_below(ax, 3)
    put_title(ax, "What lies between a call and its graph (shaded: the middle half of the samples)", about)
    return ax
