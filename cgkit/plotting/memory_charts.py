"""Charts of memory: waterfall, ledger, orders of recording, a pool's segments, lifetimes, prediction.

Each takes the DataFrame of the measuring object of the same name and an optional ``ax``, and returns the Axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cgkit.plotting import style
from cgkit.plotting.folding import blocks_of_equal
from cgkit.plotting.style import About, legend_below, put_title, styled
from cgkit.plotting.tables import human_bytes

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

#: Colour and hatch of each part of a device's memory.
PARTS = {
    "weights": (style.COMPILED, ""),
    "KV cache": ("#56b4e9", "//"),
    "activations": (style.SPLITTING, "\\\\"),
    "graph pool": (style.MEMORY, "xx"),
    "context and other": (style.EAGER, ".."),
    "free": ("#ffffff", ""),
}
_GREY = "#d0d7de"


@styled
def waterfall(frame: pd.DataFrame, about: About | None = None, *, ax: Axes | None = None) -> Axes:
    """A bar a part, each beginning where the one before ends. ``frame``: ``part``, ``bytes``, ``start_bytes``.

    Parts differ by orders of magnitude and are drawn to one scale all the same: a thin bar is a small part, and its
    figure stands beside it.
    """
    ax = style.new_axes(ax, 8.4, 0.9 + 0.42 * len(frame))
    total = float(frame["bytes"].sum()) or 1.0
    scale, unit = _scale(total)
    for y, row in enumerate(frame.to_dict("records")):
        colour, hatch = PARTS.get(row["part"], (style.SHARED, ""))
        left, width = row["start_bytes"] / scale, row["bytes"] / scale
        edge = "white" if hatch else style.INK if row["part"] == "free" else colour
        ax.barh(y, width, left=left, height=0.62, color=colour, hatch=hatch, edgecolor=edge, linewidth=0.7)
        note = f"{human_bytes(row['bytes'])} ({row['bytes'] / total:.1%})"
        right = left + width
        before = right > 0.72 * total / scale and left > 0.28 * total / scale
        inside = width > 0.72 * total / scale
        ax.annotate(
            note,
            (left if before or inside else right, y),
            xytext=(6 if inside else -6 if before else 6, 0),
            textcoords="offset points",
            ha="right" if before and not inside else "left",
            va="center",
            fontsize=9,
            color=style.ON_FILL if inside else style.INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.85} if inside else None,
        )
        if y + 1 < len(frame):
            ax.plot([right, right], [y, y + 1], color=style.INK, linewidth=0.5, linestyle=":")
    ax.set_yticks(range(len(frame)), list(frame["part"]))
    ax.invert_yaxis()
    ax.set_xlim(0, total / scale * 1.01)
    ax.set_xlabel(unit)
    ax.grid(axis="x")
    pool = frame.loc[frame["part"] == "graph pool", "bytes"].sum()
    put_title(ax, f"Memory: {human_bytes(total)} in all, the graph pool {human_bytes(pool)}", about)
    return ax


@styled
def ledger(frame: pd.DataFrame, about: About | None = None, *, ax: Axes | None = None) -> Axes:
    """The pool over the recordings: reserved as an envelope, what was allocated at most inside each as bars.

    ``frame``: a row a recording in order, with ``mode``, ``num_tokens``, ``reserved_after_bytes``, and, where they were
    measured, ``peak_allocated_bytes``.
    """
    ax = style.new_axes(ax, 8.4, 3.0)
    scale, unit = _scale(frame["reserved_after_bytes"].max() if len(frame) else 0)
    edges = range(len(frame) + 1)
    reserved = [value / scale for value in frame["reserved_after_bytes"]]
    ax.stairs(reserved, edges, fill=True, color=_GREY, baseline=0)
    ax.stairs(reserved, edges, color=style.INK, linewidth=1.3, baseline=None, label="reserved by the pool")
    known = "peak_allocated_bytes" in frame and frame["peak_allocated_bytes"].notna().all()
    if known and len(frame):
        peaks = [value / scale for value in frame["peak_allocated_bytes"]]
        ax.stairs(peaks, edges, fill=True, facecolor=style.MEMORY, alpha=0.75, hatch="///", edgecolor="white",
                  linewidth=0, label="allocated at most, inside the recording")  # fmt: skip
    _sizes_above(ax, frame, max(reserved, default=1.0) or 1.0)
    ax.set_xlabel("graphs recorded so far (above: the size being recorded, in tokens)")
    ax.set_ylabel(unit)
    legend_below(ax, 2)
    last = frame["reserved_after_bytes"].iloc[-1] if len(frame) else 0
    nodes = frame["nodes"].sum() if "nodes" in frame and len(frame) and frame["nodes"].notna().all() else None
    title = f"{len(frame)} graphs in one pool: {human_bytes(last)} reserved"
    title += (
        f", {human_bytes(frame['peak_allocated_bytes'].max())} in use at most" if known and len(frame) else ""
    )
    put_title(ax, title + (f", {int(nodes):,} nodes" if nodes is not None else ""), about)
    return ax


@styled
def orders(frame: pd.DataFrame, about: About | None = None, *, ax: Axes | None = None) -> Axes:
    """The pool's reserved bytes over the recordings, for each order of sizes.

    ``frame``: ledgers one under the other, with a column ``order_of_sizes``
    (:func:`cgkit.measuring.memory.compare_orders`); of a recorded ledger, its column ``run``.
    """
    if "order_of_sizes" not in frame and "run" in frame:
        frame = frame[frame["run"] != "both modes"].assign(order_of_sizes=frame["run"])
    ax = style.new_axes(ax, 8.4, 3.0)
    scale, unit = _scale(frame["reserved_after_bytes"].max() if len(frame) else 0)
    looks = [(style.MEMORY, "-"), (style.PADDING, "--"), (style.COMPILED, ":")]
    ends = []
    for (label, part), (colour, dash) in zip(frame.groupby("order_of_sizes", sort=False), looks):
        reserved = [0.0, *(value / scale for value in part["reserved_after_bytes"])]
        last = part["reserved_after_bytes"].iloc[-1]
        ax.step(range(len(reserved)), reserved, where="post", color=colour, linestyle=dash, linewidth=2,
                label=f"{label}: {human_bytes(last)}")  # fmt: skip
        ends.append((str(label), float(last)))
    ax.set_xlim(left=0)
    ax.set_ylim(0, (frame["reserved_after_bytes"].max() / scale if len(frame) else 1) * 1.12)
    ax.set_xlabel("graphs recorded so far")
    ax.set_ylabel(f"reserved, {unit}")
    ax.grid(axis="y")
    legend_below(ax, 2)
    title = "The order of recording and the pool's size"
    if len(ends) == 2 and ends[0][1]:
        more = ends[1][1] / ends[0][1] - 1
        title = f"{ends[1][0]} takes {abs(more):.0%} {'more' if more >= 0 else 'less'} than {ends[0][0]}"
    put_title(ax, title[0].upper() + title[1:], about)
    return ax


@styled
def by_largest(frame: pd.DataFrame, about: About | None = None, *, ax: Axes | None = None) -> Axes:
    """The pool's reserved bytes over the largest recorded size, a line for each way of recording.

    ``frame``: the largest sizes as index, a column of bytes for each way; a way's figures include all smaller sizes.
    """
    ax = style.new_axes(ax, 8.4, 3.4)
    scale, unit = _scale(frame.max().max())
    looks = zip((style.MEMORY, style.PADDING, style.COMPILED, style.SPLITTING), ("o-", "s--", "^:", "D-."))
    for (way, column), (colour, look) in zip(frame.items(), looks):
        ax.plot(
            range(len(column)),
            column / scale,
            look,
            color=colour,
            linewidth=1.8,
            markersize=5,
            label=str(way),
        )
    ax.set_xticks(range(len(frame)), [str(size) for size in frame.index])
    ax.set_xlabel("largest recorded size (tokens); the smaller ones are recorded too")
    ax.set_ylabel(f"reserved, {unit}")
    ax.set_ylim(bottom=0)
    ax.grid(axis="y")
    legend_below(ax, 2)
    last = frame.iloc[-1]
    ratio = last.max() / last.min() if last.min() else 0.0
    most = str(last.idxmax())
    put_title(
        ax, f"{most[:1].upper()}{most[1:]}: {ratio:.1f} times {last.idxmin()} at {frame.index[-1]} tokens", about
    )  # fmt: skip
    return ax


@styled
def segments(frame: pd.DataFrame, about: About | None = None, *, ax: Axes | None = None) -> Axes:
    """The pool's segments: grey envelopes for what is reserved, stripes for live blocks, to one scale.

    ``frame``: a row a block, with ``segment``, ``segment_bytes``, ``pool``, ``offset_bytes``, ``block_bytes``,
    ``state``.
    """
    from matplotlib.collections import PolyCollection

    rows = frame.drop_duplicates("segment").sort_values("segment").to_dict("records")
    shown = min(len(rows), 40)
    ax = style.new_axes(ax, 8.4, max(1.9, 1.2 + 0.34 * shown))
    biggest = max((row["segment_bytes"] for row in rows), default=1)
    scale, unit = _scale(biggest)
    height = {row["segment"]: y for y, row in enumerate(rows[:shown])}
    ax.barh(range(shown), [row["segment_bytes"] / scale for row in rows[:shown]], height=0.7, color=_GREY,
            edgecolor=style.INK, linewidth=0.6, label="reserved")  # fmt: skip
    live = frame[(frame["state"] == "live") & frame["segment"].isin(height)]
    boxes = [
        _box(
            row["offset_bytes"] / scale,
            (row["offset_bytes"] + row["block_bytes"]) / scale,
            height[row["segment"]],
        )
        for row in live.to_dict("records")
    ]
    ax.add_collection(
        PolyCollection(
            boxes, facecolors=style.MEMORY, edgecolors="white", linewidths=0.6, label="live blocks"
        )
    )
    names = [f"segment {row['segment']} ({row['pool']})" for row in rows[:shown]]
    ax.set_yticks(range(shown), names)
    ax.invert_yaxis()
    ax.set_xlim(0, biggest / scale * 1.02)
    ax.set_xlabel(f"offset in the segment, {unit}")
    legend_below(ax, 2)
    reserved, used = (
        sum(row["segment_bytes"] for row in rows),
        frame.loc[frame["state"] == "live", "block_bytes"].sum(),
    )
    more = f" (the first {shown} are drawn)" if len(rows) > shown else ""
    what = f"{len(rows)} segment{'s' if len(rows) != 1 else ''}{more}: {human_bytes(reserved)} reserved, "
    put_title(ax, what + f"{human_bytes(used)} in {int((frame['state'] == 'live').sum())} live blocks", about)
    return ax


@styled
def lifetimes(
    frame: pd.DataFrame,
    replays: Sequence[str] | None = None,
    about: About | None = None,
    *,
    ax: Axes | None = None,
) -> Axes:
    """A bar an output: from the replay that writes it to the one that overwrites it.

    Solid until its last reader inside the step, pale while it merely happens to be intact still; a cross where it is
    overwritten. ``frame`` and ``replays``: of :class:`cgkit.measuring.lifetimes.Lifetimes`; without ``replays`` (a
    recording has none) they are read off the frame.
    """
    replays = _replays(frame) if replays is None else replays
    rows = frame.to_dict("records")
    ax = style.new_axes(ax, 8.4, min(1.6 + 0.16 * max(len(rows), 6), 9.0))
    end = len(replays)
    for y, row in enumerate(rows):
        start = row["written_at"]
        lost = end if _missing(row["overwritten_at"]) else int(row["overwritten_at"])
        read = start + 1 if _missing(row["last_read_at"]) else max(int(row["last_read_at"]), start) + 1
        solid = min(read, lost) if lost > start else start
        final = _missing(row["last_read_at"])
        ax.barh(y, lost - start, left=start, height=0.8, color=style.SHARED, alpha=0.55)
        ax.barh(y, solid - start, left=start, height=0.8, color=style.PADDING if final else style.COMPILED,
                hatch="///" if final else "", edgecolor="white", linewidth=0.3)  # fmt: skip
        if lost < end:
            ax.plot([lost], [y], marker="x", color=style.INK, markersize=4, linestyle="none")
    step = max(1, -(-len(rows) // 24))
    ax.set_yticks(
        range(0, len(rows), step), [f"{r['name']}: {r['output']}"[:34] for r in rows[::step]], fontsize=7.5
    )
    wide = max(1, -(-end // 20))
    ax.set_xticks(
        range(0, end, wide), [str(name) for name in replays[::wide]], rotation=60, ha="left", fontsize=7.5
    )
    ax.xaxis.tick_top()
    for boundary, at in _steps(frame):
        ax.axvline(at, color=style.INK, linewidth=0.8, linestyle="--" if boundary else "-")
    ax.set_xlim(0, end)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_xlabel("replays in order (dashed: a new step)   ✕ overwritten by that replay")
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=style.COMPILED, label="read by a later piece of the step until here"),
        Patch(facecolor=style.PADDING, hatch="///", edgecolor="white", label="the step's result"),
        Patch(facecolor=style.SHARED, alpha=0.55, label="no longer read, not yet overwritten"),
    ]
    legend_below(ax, 3, handles)
    lost_count = int(frame["overwritten_at"].notna().sum())
    put_title(ax, f"{lost_count} of {len(frame)} outputs are overwritten by a later replay", about)
    return ax


@styled
def prediction(
    frame: pd.DataFrame,
    measured: pd.DataFrame | None = None,
    about: About | None = None,
    *,
    ax: Axes | None = None,
) -> Axes:
    """The predicted peak of each size (bars), the measured one beside it, and both reserved curves.

    ``frame``: :meth:`PoolPrediction.to_frame`; ``measured``: a ledger's frame, or None. Or ``frame`` alone is what
    :meth:`PoolPrediction.compare` gives, also recorded: of several runs the first is drawn.
    """
    ax = style.new_axes(ax, 8.4, 3.2)
    if "predicted_allocated_bytes" in frame:
        steps, real = _compared(frame, "predicted"), _compared(frame, "measured")
    else:
        steps = _by_step(frame)
        real = None if measured is None else _by_step(measured)
    top = max([steps["reserved"].max(), 0 if real is None else real["reserved"].max()])
    scale, unit = _scale(top)
    wide = 0.36 if real is not None else 0.7
    x = list(range(len(steps)))
    shift = wide / 2 if real is not None else 0.0
    ax.bar([i - shift for i in x], steps["peak"] / scale, wide, color=style.SPLITTING, hatch="//", edgecolor="white",
           linewidth=0, label="allocated at most: predicted")  # fmt: skip
    ax.step([*x, len(x)], _closed(steps["reserved"] / scale), where="post", color=style.SPLITTING, linewidth=1.6,
            linestyle="--", label="reserved: predicted")  # fmt: skip
    if real is not None:
        ax.bar(
            [i + shift for i in range(len(real))],
            real["peak"] / scale,
            wide,
            color=style.MEMORY,
            label="allocated at most: measured",
        )
        ax.step([*range(len(real)), len(real)], _closed(real["reserved"] / scale), where="post", color=style.MEMORY,
                linewidth=1.6, label="reserved: measured")  # fmt: skip
    short = {"PIECEWISE": "P", "FULL": "F"}
    one_mode = steps["mode"].nunique() == 1
    names = [
        f"{n}" if one_mode else f"{short.get(m, m)} {n}" for m, n in zip(steps["mode"], steps["num_tokens"])
    ]
    ax.set_xticks(x, names, rotation=0 if len(x) < 25 else 90, fontsize=9 if len(x) < 25 else 7)
    ax.set_xlim(-0.6, len(x) - 0.4)
    ax.set_ylim(0, top / scale * 1.12 if top else 1)
    ax.set_xlabel(
        "size (tokens), in the order of recording" + ("" if one_mode else "; P: PIECEWISE, F: FULL")
    )
    ax.set_ylabel(unit)
    ax.grid(axis="y")
    legend_below(ax, 2)
    title = f"Predicted: {human_bytes(steps['peak'].max())} allocated at most, {human_bytes(steps['reserved'].max())} "
    title += "reserved"
    if real is not None:
        title += f"; measured: {human_bytes(real['peak'].max())} and {human_bytes(real['reserved'].max())}"
    put_title(ax, title, about)
    return ax


# --- inside ------------------------------------------------------------------------------------------


def _by_step(frame: pd.DataFrame) -> pd.DataFrame:
    grouped = frame.groupby(["mode", "num_tokens", "uniform_decode"], sort=False)
    return grouped.agg(
        peak=("peak_allocated_bytes", "max"), reserved=("reserved_after_bytes", "last")
    ).reset_index()


def _compared(frame: pd.DataFrame, side: str) -> pd.DataFrame:
    """One side of a comparison, of its first run, as :func:`_by_step` has it."""
    if "run" in frame:
        frame = frame[frame["run"] == frame["run"].iloc[0]]
    names = {f"{side}_allocated_bytes": "peak", f"{side}_reserved_bytes": "reserved"}
    return frame.rename(columns=names).reset_index(drop=True)


def _replays(frame: pd.DataFrame) -> list[str]:
    """The replays that wrote outputs, by their place; one that wrote none has no name."""
    known = {
        int(row["written_at"]): f"{row['name']} @ {row['num_tokens']}" for row in frame.to_dict("records")
    }
    lost = frame["overwritten_at"].dropna()
    return [known.get(at, "") for at in range(int(max([*known, *lost], default=-1)) + 1)]


def _closed(values: Any) -> list[float]:
    held = list(values)
    return [*held, *held[-1:]]


def _scale(most: float) -> tuple[float, str]:
    """What to divide bytes by, and the unit's name."""
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if most >= 2 * size:
            return float(size), unit
    return 1.0, "bytes"


def _box(left: float, right: float, y: int) -> list[tuple[float, float]]:
    return [(left, y - 0.35), (right, y - 0.35), (right, y + 0.35), (left, y + 0.35)]


def _missing(value: Any) -> bool:
    return value is None or value != value or type(value).__name__ == "NAType"


def _steps(frame: pd.DataFrame) -> list[tuple[bool, int]]:
    starts = frame.groupby("step")["written_at"].min().tolist()
    return [(True, int(at)) for at in starts[1:]]


def _sizes_above(ax: Axes, frame: pd.DataFrame, top: float) -> None:
    """The size being recorded above its stretch, and the mode above those."""
    for start, stop, (_, size) in blocks_of_equal(list(zip(frame["mode"], frame["num_tokens"]))):
        ax.axvline(start, color="#8c959f", linewidth=0.5)
        if stop - start > 0.03 * len(frame):
            ax.text((start + stop) / 2, top * 1.04, f"{size}", ha="center", va="bottom", fontsize=8)
    for start, stop, mode in blocks_of_equal(list(frame["mode"])):
        narrow = stop - start < 0.15 * len(frame)
        x, side = (stop, "right") if narrow and start else (start, "left")
        ax.text(x, top * 1.16, f" {mode}", ha=side, va="bottom", fontsize=9, fontweight="bold")
    ax.set_xlim(0, max(len(frame), 1))
    ax.set_ylim(0, top * 1.3)
