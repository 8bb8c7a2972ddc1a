"""The map of the course: the road of a decode step, its five stages, and the notebooks along it."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from cgkit.plotting.style import COMPILED, EAGER, INK, new_axes, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

#: Stage, who does the work there, what goes in (the last stage's artefact is what comes out).
STAGES = (
    ("trace", "Dynamo, once", "a model"),
    ("split", "at attention", "one graph"),
    ("compile", "Inductor", "pieces"),
    ("capture", "CUDA graphs", "callables"),
    ("serve", "scheduler", "recorded\ngraphs"),
)
OUT = "tokens"
_WIDE, _STEP = 1.9, 3.0


@styled
def road(frame: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """The five stages from left to right, under each its notebooks, and below those that are about all of them.

    Args:
        frame: a row a notebook: ``number``, ``title``, ``stage`` (one of :data:`STAGES`, or "all"), ``there`` (False:
            not written yet, drawn dashed and grey).
        ax: axes to draw on.
    """
    ax = new_axes(ax, 12.5, 5.2)
    ax.set_axis_off()
    for place, (stage, tool, given) in enumerate(STAGES):
        left = place * _STEP
        _box(ax, left, 2.6, _WIDE, 0.9, f"{place + 1} {stage}", tool)
        _arrow(ax, left - _STEP + _WIDE, left, 3.05, given)
        for row, notebook in enumerate(frame[frame["stage"] == stage].itertuples()):
            _chip(ax, left - 0.45, 1.65 - row * 0.72, notebook)
    end = (len(STAGES) - 1) * _STEP + _WIDE
    _arrow(ax, end, end + _STEP - _WIDE, 3.05, OUT)
    across = list(frame[frame["stage"] == "all"].itertuples())
    for place, notebook in enumerate(across):
        _chip(ax, -0.45 + place * 3.6, -1.25, notebook)
    ax.text(-0.45, -0.42, "About the whole road:", fontsize=10)
    ax.set_xlim(-1.3, end + 1.4)
    ax.set_ylim(-1.45, 3.75)
    absent = "" if frame["there"].all() else " (dashed: not there yet)"
    ax.set_title(f"The road of one decode step, and the notebooks along it{absent}")
    return ax


def _box(ax: Axes, left: float, bottom: float, width: float, height: float, name: str, tool: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    shape = FancyBboxPatch(
        (left, bottom), width, height, boxstyle="round,pad=0.02", facecolor=COMPILED, edgecolor="none"
    )
    ax.add_patch(shape)
    middle = left + width / 2
    ax.text(middle, bottom + 0.58, name, ha="center", va="center", color="white", fontsize=13, weight="bold")
    ax.text(middle, bottom + 0.24, tool, ha="center", va="center", color="white", fontsize=10)


def _arrow(ax: Axes, left: float, right: float, height: float, label: str) -> None:
    arrow = {"arrowstyle": "-|>", "color": INK, "lw": 1.4}
    ax.annotate("", xy=(right - 0.05, height), xytext=(left + 0.07, height), arrowprops=arrow)
    ax.text((left + right) / 2, height + 0.13, label, ha="center", va="bottom", fontsize=9)


def _chip(ax: Axes, left: float, bottom: float, notebook: Any) -> None:
    from matplotlib.patches import FancyBboxPatch

    colour = INK if notebook.there else EAGER
    shape = FancyBboxPatch(
        (left, bottom),
        2.8,
        0.56,
        boxstyle="round,pad=0.02",
        facecolor="none",
        edgecolor=colour,
        linestyle="-" if notebook.there else "--",
    )
    ax.add_patch(shape)
    title = "\n".join(textwrap.wrap(notebook.title, 27))
    ax.text(
        left + 0.12, bottom + 0.28, notebook.number, va="center", color=colour, fontsize=11, weight="bold"
    )
    ax.text(left + 0.6, bottom + 0.28, title, va="center", color=colour, fontsize=8.5)
