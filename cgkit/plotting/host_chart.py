"""The host's time of a decode step as stacked bars, a bar a path; and the same without what dwarfs the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cgkit.plotting import style
from cgkit.plotting.style import About, put_title, styled, titled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

#: Part -> colour and hatching, in the order of the stack. Dots are sparse: dense ones are most of an SVG.
LOOKS: dict[str, tuple[str, str]] = {
    "attention launches": ("#e69f00", ""),
    "operator dispatch": ("#f0e442", "//"),
    "graph replays": ("#0072b2", ""),
    "address check": ("#56b4e9", "."),
    "wrapper": ("#009e73", "--"),
    "weights fetch": ("#d55e00", "\\\\"),
    "stitching code": ("#cc79a7", "||"),
    "entry": ("#8fb9d6", "xx"),
    "input copies": ("#999999", "++"),
    "input preparation": ("#c9c9c9", "--"),
    "input slices": ("#e3e3e3", "."),
    "dispatcher": ("#5e3c99", "o"),
    "forward context": ("#b2abd2", "\\\\"),
    "unexplained": ("#57606a", "xx"),
}
#: What is left out of the second picture.
LARGE = ("attention launches", "graph replays", "input preparation", "input copies")


@styled
def host_time(frame: pd.DataFrame, about: About | None = None, *, ax: Axes | None = None) -> Axes:
    """Stacked bars, a bar a path and batch: the whole step, and beside it the parts that cgkit's own code makes.

    ``frame``: a row a path, batch and part, with ``step_us``, ``whole_us`` and ``pieces``, as ``HostTime.to_frame()``
    gives it. With ``ax`` only the whole step is drawn. A part below zero (noise) is not drawn; the table has it.
    """
    bars = list(dict.fromkeys(zip(frame["path"], frame["batch"])))
    if ax is not None:
        _stack(ax, frame, bars, ())
        _legend(ax, frame)
        put_title(ax, _what(frame), about)
        return ax
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.4, 1.75 + 0.5 * len(bars)))
    whole, zoomed = figure.subplots(1, 2, sharey=True)
    _stack(whole, frame, bars, ())
    whole.set_title("The whole step", fontsize=9.5)
    _stack(zoomed, frame, bars, LARGE)
    zoomed.set_title("Without attention, replays and the inputs' preparation", fontsize=9.5)
    zoomed.tick_params(labelleft=False)
    figure.legend(handles=_handles(frame), ncols=5, loc="outside lower left", fontsize=8.5)
    heading = figure.suptitle(titled(_what(frame), about), x=0.008, ha="left", fontsize=10.5)
    heading.set_gid("cg-title")
    return whole


def _stack(ax: Axes, frame: pd.DataFrame, bars: list[tuple[Any, Any]], without: tuple[str, ...]) -> None:
    batches = {batch for _, batch in bars}
    totals = []
    for y, (path, batch) in enumerate(bars):
        rows = frame[(frame["path"] == path) & (frame["batch"] == batch) & ~frame["part"].isin(without)]
        parts = dict(zip(rows["part"], rows["step_us"]))
        left = 0.0
        for part, (colour, hatch) in LOOKS.items():
            width = max(parts.get(part, 0.0), 0.0)
            ax.barh(
                y, width, left=left, height=0.62, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5
            )
            left += width
        totals.append(left)
        pieces, left = int(rows["pieces"].iloc[0]), sum(parts.values())
        ax.annotate(f"{_us(left)} µs ({_us(left / pieces)} a piece)", (totals[-1], y), xytext=(5, 0), va="center",
                    textcoords="offset points", fontsize=8.5)  # fmt: skip
    names = [str(path) if len(batches) == 1 else f"{path}, batch {batch}" for path, batch in bars]
    ax.set_yticks(range(len(bars)), names)
    ax.set_ylim(len(bars) - 0.5, -0.5)
    ax.set_xlim(0, (max(totals, default=0.0) or 1.0) * 1.42)
    ax.set_xlabel("µs of host time a step")
    ax.grid(axis="x")


def _us(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"


def _what(frame: pd.DataFrame) -> str:
    wholes = frame.drop_duplicates(["path", "batch"])
    said = ", ".join(
        f"{row.path} {row.whole_us:,.0f} µs"
        for row in wholes.itertuples()
        if row.batch == wholes["batch"].iloc[0]
    )
    return f"Where the host's time of a decode step goes, batch {int(wholes['batch'].iloc[0])}: {said}"


def _handles(frame: pd.DataFrame) -> list[Any]:
    from matplotlib.patches import Patch

    held = set(frame["part"])
    return [
        Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=part)
        for part, (colour, hatch) in LOOKS.items()
        if part in held
    ]


def _legend(ax: Axes, frame: pd.DataFrame) -> None:
    style.legend_below(ax, 5, _handles(frame))
