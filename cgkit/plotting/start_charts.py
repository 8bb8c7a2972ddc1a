"""Charts of starts: cold against warm, the adaptors side by side, many equal layers against few.

The frames are those of ``cgkit bench startup``, ``adaptors`` and ``dedup``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cgkit.plotting import style
from cgkit.plotting.style import About, legend_below, put_title, styled
from cgkit.plotting.tables import human_bytes

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

#: The parts of a start, in order: name, columns, colour, hatch.
PARTS = (
    ("imports (torch, Dynamo, Inductor)", ("import_s", "compiler_import_s"), "#c4c9cf", ""),
    ("weights", ("model_s",), style.MEMORY, ""),
    ("Dynamo's trace, split", ("trace_s", "split_s"), style.SPLITTING, "\\\\\\"),
    ("compile stage", ("compile_s",), style.COMPILED, "///"),
    ("first answer", ("answer_s",), "#cc79a7", "--"),
)
#: How an adaptor's starts are told apart: cache, colour, hatch.
CACHES = (("empty", style.COMPILED, "///"), ("full", style.MEMORY, ""))


@styled
def startup(frame: pd.DataFrame, about: About | None = None, *, ax: Axes | None = None) -> Axes:
    """Each model's start, cold above warm, in stacked parts.

    ``frame``: a row a start, with ``model``, ``cache`` ("cold", "warm") and the parts in seconds (:data:`PARTS`), as
    ``cgkit bench startup`` gives it. Several starts of one kind: the one of median length is drawn.
    """
    rows = [_median_start(part) for _, part in frame.groupby(["model", "cache"], sort=False)]
    ax = style.new_axes(ax, 9.2, 1.7 + 0.36 * len(rows))
    places: list[float] = []
    names: list[str] = []
    y = 0.0
    totals = {(row["model"], row["cache"]): row["start_s"] for row in rows}
    compiles = {(row["model"], row["cache"]): row["compile_s"] for row in rows}
    shares = []
    for row in rows:
        y += 0.45 if places and row["cache"] == "cold" else 0.0
        _stack(ax, y, row, label=not places)
        note = f"{row['start_s']:.1f} s"
        cold = (row["model"], "cold")
        if row["cache"] != "cold" and cold in totals:
            shares.append(row["compile_s"] / compiles[cold])
            note += f": {row['start_s'] / totals[cold]:.0%} of cold, compile stage {shares[-1]:.0%}"
        _beside(ax, row["start_s"], y, note)
        places.append(y)
        names.append(f"{row['model']}, {row['cache']}")
        y += 1.0
    ax.set_yticks(places, names)
    ax.invert_yaxis()
    ax.set_xlim(0, max(totals.values(), default=1.0) * 1.3)
    ax.set_xlabel("seconds from import to the first answer")
    ax.grid(axis="x")
    legend_below(ax, 5)
    left = f" (at most {max(shares):.0%} of it is left)" if shares else ""
    traced = any(row["cache"] != "cold" and not row.get("traces_loaded") for row in rows)
    what = "the compile stage" if traced else "trace and compile stage"
    put_title(ax, f"A warm start saves {what}{left}, and no import", about)
    return ax


def _median_start(part: pd.DataFrame) -> dict[str, Any]:
    """The row of median length (of two, the shorter)."""
    ordered = part.sort_values("start_s")
    return ordered.iloc[(len(ordered) - 1) // 2].to_dict()


def _stack(ax: Axes, y: float, row: dict[str, Any], label: bool) -> None:
    left = 0.0
    for name, columns, colour, hatch in PARTS:
        seconds = sum(float(row.get(column, 0.0)) for column in columns)
        ax.barh(
            y, seconds, left=left, height=0.8, color=colour, hatch=hatch, edgecolor="white", linewidth=0,
            label=name if label else None,
        )  # fmt: skip
        left += seconds


@styled
def adaptors(frame: pd.DataFrame, about: About | None = None, *, ax: Axes | None = None) -> Axes:
    """Each adaptor's compile stage with an empty and with a full cache, and what it leaves behind.

    ``frame``: a row an adaptor and start, with ``compiler``, ``cache`` ("empty", "full"), ``compile_s``, ``handle``,
    ``handles``, ``files``, ``file_bytes``, as ``cgkit bench adaptors`` gives it. A bar is the mean of the starts of its
    kind; each of them is a dot, so that it shows how far two equal starts differ.
    """
    groups = list(frame.groupby("compiler", sort=False))
    ax = style.new_axes(ax, 8.8, 1.6 + 0.78 * len(groups))
    most = float(frame["compile_s"].max())
    for number, (_, part) in enumerate(groups):
        for offset, (cache, colour, hatch) in zip((-0.2, 0.2), CACHES):
            seconds = list(part[part["cache"] == cache]["compile_s"])
            if not seconds:
                continue
            mean = sum(seconds) / len(seconds)
            ax.barh(
                number + offset, mean, height=0.38, color=colour, hatch=hatch, edgecolor="white", linewidth=0,
                label=None if number else f"{cache} cache",
            )  # fmt: skip
            if len(seconds) > 1:
                ax.plot(seconds, [number + offset] * len(seconds), "o", color=style.INK, markersize=4)
            text = f"{mean:.1f} s" + _left_behind(part, cache)
            _beside(ax, max(seconds) + 0.015 * most, number + offset, text)  # clear of the last dot
    ax.set_yticks(range(len(groups)), [str(name) for name, _ in groups])
    ax.invert_yaxis()
    ax.set_xlim(0, most * 1.66)
    ax.set_xlabel("seconds of the compile stage, in a fresh process (dots: each of several starts)")
    ax.grid(axis="x")
    legend_below(ax, 2)
    put_title(ax, "Three adaptors: the compile stage cold and warm", about)
    return ax


def _left_behind(part: pd.DataFrame, cache: str) -> str:
    """What lies in the cache folder afterwards, behind the cold bar."""
    row = part.iloc[0]
    if cache != "empty":
        return ""
    if not row["files"]:
        return ": keeps nothing"
    return (
        f": keeps {row['handles']} x {row['handle']}, {row['files']} files, {human_bytes(row['file_bytes'])}"
    )


@styled
def dedup(frame: pd.DataFrame, about: About | None = None, *, ax: Axes | None = None) -> Axes:
    """Layers against the seconds of each stage: what equal layers share does not grow.

    ``frame``: a row a depth, with ``layers``, ``pieces``, ``compilations``, ``trace_s``, ``split_s``, ``compile_s``, as
    ``cgkit bench dedup`` gives it.
    """
    frame = frame.sort_values("layers")
    ax = style.new_axes(ax, 8.4, 3.4)
    layers = list(frame["layers"])
    for column, name, colour, marker, line in (
        ("compile_s", "compile stage, all pieces", style.COMPILED, "s", "-"),
        ("trace_s", "Dynamo's trace", style.SPLITTING, "o", "--"),
        ("split_s", "split", style.EAGER, "^", ":"),
    ):
        ax.plot(layers, frame[column], color=colour, marker=marker, linestyle=line, label=name)
    ax.set_xscale("log", base=2)
    ax.set_xticks(
        layers,
        [
            f"{row['layers']}\n{row['pieces']} pieces, {row['compilations']} compiled"
            for row in frame.to_dict("records")
        ],
    )
    ax.minorticks_off()
    ax.margins(x=0.12)
    ax.set_ylim(0, max(frame["compile_s"].max(), frame["trace_s"].max()) * 1.12)
    ax.set_xlabel("layers (logarithmic)")
    ax.set_ylabel("seconds")
    ax.grid(axis="y")
    legend_below(ax, 3)
    first, last = frame.iloc[0], frame.iloc[-1]
    ratio = last["compile_s"] / first["compile_s"]
    put_title(
        ax,
        f"{last['layers'] / first['layers']:.3g} times the layers: {ratio:.2f} times the compile time, "
        f"{last['trace_s'] / first['trace_s']:.1f} times the trace",
        about,
    )
    return ax


def _beside(ax: Axes, x: float, y: float, text: str) -> None:
    ax.annotate(text, (x, y), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8.5)
