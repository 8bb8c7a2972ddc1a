"""The bill of a step as stacked bars: for each mode the CPU's side above the GPU's, on one time axis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cgkit.plotting.style import LONGEST_NAME, ON_FILL, About, literal, new_axes, put_title, style
from cgkit.plotting.timeline_layout import GAPS, PAINTS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

#: Part -> its words, colour and hatching: those of the timeline, so that both pictures are read alike.
LOOKS = {
    "python": ("Python", PAINTS["python"].colour, ""),
    "dispatch": ("operators (dispatch)", PAINTS["op"].colour, "//"),
    "guards": ("guards", PAINTS["guard"].colour, "xx"),
    "kernel_launches": ("kernel launches", PAINTS["launch"].colour, ""),
    "graph_launches": ("graph launches", PAINTS["graph_launch"].colour, "\\\\"),
    "copies": ("starting copies", PAINTS["copy_call"].colour, "++"),
    "runtime_other": ("other driver calls", PAINTS["runtime"].colour, "||"),
    "waiting": ("waiting for the GPU", PAINTS["sync"].colour, ".."),
    "unexplained": ("unexplained", "#57606a", "xx"),
    "busy": ("GPU busy", PAINTS["matrix"].colour, ""),
    "idle_launching": ("GPU idle: CPU launching", GAPS["idle_launching"].colour, "//"),
    "idle_python": ("GPU idle: CPU in Python or dispatch", GAPS["idle_python"].colour, ""),
    "idle_sync": ("GPU idle: CPU waits", GAPS["idle_sync"].colour, ".."),
    "idle_elsewhere": ("GPU idle: CPU elsewhere", GAPS["idle_elsewhere"].colour, "\\\\"),
    "idle_inside_graph": ("GPU idle: inside a graph", GAPS["idle_inside_graph"].colour, "--"),
}


def bill(frame: pd.DataFrame, about: About | None = None, *, ax: Axes | None = None) -> Axes:
    """Where the wall time went, two bars a mode.

    Args:
        frame: what ``Bill.to_frame()`` gives, of one or several bills one after the other: ``side`` ("cpu" or
            "gpu"), ``part``, ``us`` and ``mode``.
        about: of what.
        ax: where to draw.
    """
    with style():
        modes = list(dict.fromkeys(frame["mode"]))
        alone = ax is None
        ax = new_axes(ax, 9.4, 2.5 + 0.75 * len(modes))
        longest = frame.groupby(["mode", "side"])["us"].sum().max()
        scale, unit = (1000.0, "ms") if longest >= 1000 else (1.0, "µs")
        drawn: dict[str, Any] = {}
        sides = [
            (side, label) for side, label in (("cpu", "CPU"), ("gpu", "GPU")) if (frame["side"] == side).any()
        ]
        shifts = (-0.19, 0.19) if len(sides) == 2 else (0.0,)
        for i, mode in enumerate(modes):
            for (side, _), shift in zip(sides, shifts):
                y = i + shift
                rows = frame[(frame["mode"] == mode) & (frame["side"] == side)]
                _stack(ax, y, dict(zip(rows["part"], rows["us"] / scale)), longest / scale, drawn)
        ticks = [(i + shift, label) for i, _ in enumerate(modes) for (_, label), shift in zip(sides, shifts)]
        ax.set_yticks([y for y, _ in ticks], [label for _, label in ticks], fontsize=9)
        _names(ax, modes)
        ax.set_ylim(len(modes) - 0.5, -0.5)
        ax.set_xlim(0, longest / scale * 1.02 or 1)
        ax.set_xlabel(f"wall time under the profiler, whose own work is in it ({unit})")
        ax.grid(axis="x")
        _legend(ax, [part for part in LOOKS if part in drawn], drawn, alone)
        put_title(ax, "Where the wall time goes", about)
    return ax


def _stack(ax: Axes, y: float, parts: dict[str, float], longest: float, drawn: dict[str, Any]) -> None:
    """One bar; a part that has the room says its share of it."""
    left, total = 0.0, sum(parts.values())
    for part, (_, colour, hatch) in LOOKS.items():
        width = parts.get(part, 0.0)
        if width <= 0:
            continue
        bar = ax.barh(
            y, width, left=left, height=0.36, color=colour, hatch=hatch, edgecolor="#57606a", linewidth=0.4
        )
        drawn.setdefault(part, bar)
        if width > 0.06 * longest:
            dark = part in ("kernel_launches", "graph_launches", "busy", "unexplained", "copies")
            ax.text(
                left + width / 2,
                y,
                f"{100 * width / total:.0f} %",
                ha="center",
                va="center",
                fontsize=8.5,
                color="white" if dark else ON_FILL,
                bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.2} if hatch else None,
            )
        left += width


def _names(ax: Axes, modes: list[str]) -> None:
    """The modes beside their pairs of bars, outside of the tick labels."""
    for i, mode in enumerate(modes):
        ax.annotate(
            literal(str(mode), LONGEST_NAME),
            (0, i),
            xycoords=("axes fraction", "data"),
            xytext=(-38, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontweight="bold",
        )


def _legend(ax: Axes, parts: list[str], drawn: dict[str, Any], alone: bool) -> None:
    """What the colours mean: under the figure if it is ours, else under the axes."""
    handles, labels = [drawn[part] for part in parts], [LOOKS[part][0] for part in parts]
    figure = ax.get_figure(root=True)
    if alone and figure is not None:
        figure.legend(handles, labels, ncols=4, loc="outside lower center")
    else:
        ax.legend(handles, labels, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.25))
