"""Charts of splitting: the scan that numbers the pieces, and what other places to cut at would cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cgkit.plotting import style
from cgkit.plotting.style import About, legend_below, put_title, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


@styled
def scan(
    frame: pd.DataFrame, about: About | None = None, *, upto: int | None = None, ax: Axes | None = None
) -> Axes:
    """The nodes of a graph in order, each on the step of its piece: a staircase that rises at each cut.

    ``frame``: a row a node with ``operator``, ``piece`` (a number) and ``splitting`` (whether it is one to cut at).
    ``upto``: so many nodes have been scanned; the others are pale.
    """
    ax = style.new_axes(ax, max(6.0, 1.5 + 0.36 * len(frame)), 3.4)
    seen = len(frame) if upto is None else upto
    known = set()
    for place, row in enumerate(frame.itertuples()):
        done = place < seen
        colour, hatch, name = (
            (style.SPLITTING, "///", "operator to cut at")
            if row.splitting
            else (style.COMPILED, "", "any other operator")
        )
        look: dict[str, Any] = {
            "color": colour if done else "none",
            "edgecolor": style.INK if done else "#b0b7bf",
        }
        label = name if done and name not in known else None
        known.add(name if done else "")
        height = int(row.piece) if done else 0
        ax.bar(
            place,
            0.84,
            width=0.84,
            bottom=height - 0.42,
            hatch=hatch if done else "",
            label=label,
            linewidth=0.6,
            **look,
        )
    ax.set_xticks(range(len(frame)), list(frame["operator"]), rotation=55, ha="right", fontsize=8.5)
    ax.set_yticks(range(int(frame["piece"].max()) + 1))
    ax.set_xlim(-0.7, len(frame) - 0.3)
    ax.set_ylim(-0.7, frame["piece"].max() + 0.7)
    ax.set_ylabel("number of the piece")
    ax.set_xlabel("nodes of the graph, in order")
    ax.grid(axis="y")
    if known - {""}:
        legend_below(ax, 2)
    pieces = frame["piece"].iloc[:seen].nunique()
    put_title(ax, f"{seen} of {len(frame)} nodes scanned: {pieces} pieces", about)
    return ax


@styled
def ways_to_cut(frame: pd.DataFrame, about: About | None = None, *, ax: Axes | None = None) -> Axes:
    """What a step is made of for each choice of operators to cut at.

    ``frame``: a row a choice with ``cut at`` (text), ``recorded`` and ``between`` (pieces), ``different``
    (of the recorded).
    """
    ax = style.new_axes(ax, 8.4, 1.3 + 0.5 * len(frame))
    places = range(len(frame))
    ax.barh(places, frame["recorded"], color=style.COMPILED, label="recorded: one replay a step each")
    ax.barh(
        places,
        frame["between"],
        left=frame["recorded"],
        color=style.SPLITTING,
        hatch="///",
        edgecolor=style.INK,
        linewidth=0.5,
        label="between: run by Python at each step",
    )
    for place, row in zip(places, frame.itertuples()):
        ax.annotate(
            f"{row.recorded} + {row.between}, {row.different} different to compile",
            (row.recorded + row.between, place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    ax.set_yticks(places, list(frame["cut at"]))
    ax.invert_yaxis()
    ax.set_xlim(0, (frame["recorded"] + frame["between"]).max() * 1.5)
    ax.set_xlabel("pieces")
    legend_below(ax, 2)
    put_title(ax, "What a step is made of, by where the graph is cut", about)
    return ax
