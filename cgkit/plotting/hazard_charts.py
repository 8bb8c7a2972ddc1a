"""Pictures of what goes wrong: numbers that stay behind, steps that stall, where a search ends, what finds what."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from cgkit.plotting import style
from cgkit.plotting.style import About, put_title, styled, titled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_RIGHT, _WRONG = "#0072b2", "#d55e00"
#: Kind of harm -> colour and marker.
KINDS = {"wrong numbers": ("#d55e00", "X"), "slow": ("#e69f00", "s"), "stops": ("#0072b2", "o")}
#: Verdict of a stage -> fill, hatch.
_VERDICTS = {
    "same": ("#d4ecdf", ""),
    "differs": ("#f6c9a8", "//"),
    "refused": ("#f6c9a8", "\\\\"),
    "not reached": ("#eeeeee", ""),
}


@styled
def silent(frame: pd.DataFrame, about: About | None = None, *, xlabel: str = "step") -> Axes:
    """What Python would say beside what the replay says, step by step, a panel a case.

    ``frame``: columns ``case``, ``step``, ``python``, ``replay``; ``xlabel``: what ``step`` is.
    """
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(frame["case"]))
    figure = Figure(figsize=(max(2.7 * len(cases), 6.5), 2.9))
    panels = figure.subplots(1, len(cases), squeeze=False)[0]
    for ax, case in zip(panels, cases):
        rows = frame[frame["case"] == case]
        ax.plot(rows["step"], rows["python"], "-o", color=_RIGHT, markersize=4, label="Python would say")
        ax.plot(rows["step"], rows["replay"], "--X", color=_WRONG, markersize=7, label="the replay says")
        ax.set_title(case, fontsize=9.5)
        ax.set_xlabel(xlabel)
        ax.set_xticks(rows["step"])
        ax.set_ylim(0)
        ax.grid(axis="y")
    panels[0].set_ylabel("the step's result")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=2, loc="outside lower left")
    heading = figure.suptitle(
        titled("The same steps, called and replayed", about), x=0.008, ha="left", fontsize=10.5
    )
    heading.set_gid("cg-title")
    first: Axes = panels[0]
    return first


@styled
def step_times(frame: pd.DataFrame, about: About | None = None, *, ax: Axes | None = None) -> Axes:
    """The time of each call, one line a way; a call in which something was compiled has a ring.

    ``frame``: columns ``way``, ``call``, ``ms``, ``compiled`` (whether something was compiled in it).
    """
    ax = style.new_axes(ax, 8.4, 3.4)
    for number, (way, rows) in enumerate(frame.groupby("way", sort=False)):
        colour, marker = (_WRONG, "X") if number == 0 else (_RIGHT, "o")
        ax.plot(rows["call"], rows["ms"], linestyle="-" if number else "--", color=colour, linewidth=1)
        ax.plot(rows["call"], rows["ms"], marker, color=colour, markersize=6, linestyle="", label=str(way))
        made = rows[rows["compiled"]]
        ax.plot(made["call"], made["ms"], "o", markersize=13, markerfacecolor="none", color=style.INK)
    ax.plot(
        [], [], "o", markersize=11, markerfacecolor="none", color=style.INK, label="compiled in this call"
    )
    ax.set_yscale("log")
    ax.set_xticks(sorted(set(frame["call"])))
    ax.set_xlabel("call")
    ax.set_ylabel("ms a call (log scale)")
    ax.grid(axis="y")
    style.legend_below(ax, 3)
    put_title(ax, "The same calls twice: each ring is a compilation that somebody waited for", about)
    return ax


@styled
def road(frame: pd.DataFrame, about: About | None = None, *, ax: Axes | None = None) -> Axes:
    """The five stages as boxes, as far as the search went, and what it found under the box where it ended.

    ``frame``: of :meth:`cgkit.Bisection.to_frame`.
    """
    from matplotlib.patches import FancyBboxPatch

    ax = style.new_axes(ax, 9.2, 2.0)
    for at, row in enumerate(frame.itertuples()):
        fill, hatch = _VERDICTS[row.verdict]
        ax.add_patch(
            FancyBboxPatch(
                (at * 2, 0), 1.5, 0.8, boxstyle="round,pad=0.06", facecolor=fill, hatch=hatch,
                edgecolor="#8c959f", linewidth=1,
            )
        )  # fmt: skip
        ax.text(
            at * 2 + 0.75, 0.52, row.stage, ha="center", va="center", fontweight="bold", color=style.ON_FILL
        )
        ax.text(
            at * 2 + 0.75, 0.2, row.verdict, ha="center", va="center", fontsize=9, color=style.ON_FILL,
            bbox={"facecolor": fill, "edgecolor": "none", "pad": 1},
        )  # fmt: skip
        if at:
            ax.annotate(
                "",
                (at * 2 - 0.08, 0.4),
                (at * 2 - 0.42, 0.4),
                arrowprops={"arrowstyle": "->", "color": style.INK},
            )
        if row.verdict in ("differs", "refused"):
            found = "\n".join(part for part in (row.piece, row.operator) if part)
            ax.text(at * 2 + 0.75, -0.3, found or row.difference[:40], ha="center", va="top", fontsize=9)
    ax.set_xlim(-0.2, len(frame) * 2 - 0.3)
    ax.set_ylim(-0.85, 0.95)
    ax.set_axis_off()
    put_title(ax, "The first stage that differs from the eager model", about)
    return ax


def _narrow(tool: str) -> str:
    """The name of a tool on two lines, to stand beside the others: broken at a space, after a dot or ``_``."""
    if found := re.search(r" |(?<=[._])", tool):
        return f"{tool[: found.start()]}\n{tool[found.end() :]}"
    return tool


@styled
def museum(frame: pd.DataFrame, about: About | None = None, *, ax: Axes | None = None) -> Axes:
    """Which tool finds which hazard: a row an exhibit, a column a tool, the mark says what it does unnoticed.

    ``frame``: columns ``id``, ``kind`` (one of :data:`KINDS`), ``tool``.
    """
    order = sorted(range(len(frame)), key=lambda i: list(KINDS).index(frame["kind"].iloc[i]))
    rows = frame.iloc[order]
    tools = list(rows["tool"].value_counts().index)
    ax = style.new_axes(ax, 9.2, 1.6 + 0.27 * len(rows))
    for kind, (colour, marker) in KINDS.items():
        of = [(y, row) for y, row in enumerate(rows.itertuples()) if row.kind == kind]
        xs, ys = [tools.index(row.tool) for _, row in of], [y for y, _ in of]
        ax.plot(xs, ys, marker, color=colour, markersize=9, linestyle="", label=f"{kind} ({len(of)})")
    ax.set_yticks(range(len(rows)), list(rows["id"]))
    ax.set_xticks(range(len(tools)), [_narrow(tool) for tool in tools], fontsize=8.5)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.set_xlim(-0.5, len(tools) - 0.5)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.grid()
    ax.spines[:].set_visible(False)
    style.legend_below(ax, 3)
    put_title(ax, "What each hazard does unnoticed, and what finds it", about)
    return ax
