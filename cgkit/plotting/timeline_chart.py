"""The CPU against the GPU on one time axis: lanes, launches, gaps and pieces.

An event is drawn as long as it took. What is shorter than a pixel is not stretched: its row shows, for
each column of pixels, the share of the time that was filled (as height), and the note under the picture
says how many events are drawn so. One collection a colour keeps 100,000 events under a second. The
article's figure ("CPU 侧逐个 launch（上）与一次 graph launch（下）", launches one by one above, one graph
launch below) is :func:`compare_timelines`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cgkit.plotting import timeline_layout as rows_of
from cgkit.plotting.charts import _styled
from cgkit.plotting.style import INK, MEMORY, About, new_axes, put_title
from cgkit.plotting.timeline_layout import GAPS, Layout, Paint

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

Window = tuple[float, float]

#: Above so many rectangles an SVG holds them as a bitmap.
RASTERISE_ABOVE = 3000
MOST_ARROWS = 60
SPARSEST_ARROWS = 8  # rather none than one of so many launches
_DOTS_PER_INCH = 150  # what "a pixel" means here: a projector shows no more of a picture of this width
_BAR = 0.78  # height of an event, of a row's
_LINE = "#57606a"


@_styled
def timeline(
    events: pd.DataFrame,
    about: About | None = None,
    *,
    ax: Axes | None = None,
    window: Window | None = None,
    lanes: Sequence[str] | None = None,
    arrows: bool = True,
    gaps: pd.DataFrame | None = None,
    colour: str = "piece",
    most_deep: int | None = 5,
    title: str = "",
) -> Axes:
    """What the CPU and the GPU did at the same time.

    Args:
        events: ``Timeline.events``.
        window: from and to, in microseconds of the trace; else everything.
        lanes: only these lanes (as the ``lane`` column names them).
        arrows: from a launch to its kernel; a graph launch opens into a bracket over its kernels.
        gaps: when each GPU was idle: ``process``, ``device``, ``start_us``, ``dur_us``, ``cause`` (see
            :data:`cgkit.plotting.timeline_layout.GAPS`); else they are computed, without a cause.
        colour: ``piece`` (where pieces are known) or ``kind`` (by what a kernel's name says).
        most_deep: operators nested deeper than that are left out (None: all are drawn).
        title: in place of "CPU against GPU".
    """
    shown = rows_of.cut(events, window)
    band = _Band(shown, window or rows_of.extent(shown), lanes, most_deep, colour, gaps)
    ax = new_axes(ax, 9.6, 1.5 + 0.3 * max(band.layout.num_rows, 3))
    canvas = _Canvas(ax, band.window, 0.0)
    canvas.draw(band, arrows)
    _finish(ax, [(canvas, band)], title or "CPU against GPU", about)
    return ax


@_styled
def compare_timelines(
    frames: Sequence[pd.DataFrame],
    names: Sequence[str],
    about: About | None = None,
    *,
    ax: Axes | None = None,
    windows: Sequence[Window] | None = None,
    arrows: bool = True,
    colour: str = "piece",
    most_deep: int | None = 2,
) -> Axes:
    """Several runs above each other on one time axis, each from its own first event.

    Args:
        frames: ``Timeline.events`` of each, for instance one step eager and one replayed.
        names: of the modes.
        windows: the part of each to draw, in microseconds of its own trace; else all of it.

    Raises:
        ValueError: not as many names (or windows) as frames.
    """
    windows = list(windows) if windows is not None else [rows_of.extent(frame) for frame in frames]
    if not len(frames) == len(names) == len(windows):
        raise ValueError(
            f"{len(frames)} timelines, {len(names)} names, {len(windows)} windows: give one of each"
        )
    bands = [
        _Band(rows_of.cut(frame, window), window, None, most_deep, colour, None)
        for frame, window in zip(frames, windows)
    ]
    longest = max(band.window[1] - band.window[0] for band in bands)
    ax = new_axes(ax, 9.6, 1.5 + sum(0.3 * band.layout.num_rows + 0.45 for band in bands))
    drawn, top = [], 0.0
    for band, name in zip(bands, names):
        left = band.window[0]
        took_us = band.window[1] - left
        canvas = _Canvas(ax, (left, left + longest), top + 0.9)
        canvas.draw(band, arrows)
        scale, unit = rows_of.time_unit(longest)
        ax.text(0, top + 0.72, f"{name}: {took_us / scale:,.2f} {unit}", fontsize=10, fontweight="bold")
        bottom = top + 0.9 + band.layout.num_rows
        ax.plot([took_us, took_us], [top + 0.9, bottom], color=INK, linewidth=1.1, linestyle=(0, (4, 2)))
        drawn.append((canvas, band))
        top = bottom + 0.5
    _finish(ax, drawn, f"One time axis: {' against '.join(names)}", about)
    return ax


class _Band:
    """The events of one run in a window, laid out and painted."""

    def __init__(
        self,
        events: pd.DataFrame,
        window: Window,
        lanes: Sequence[str] | None,
        most_deep: int | None,
        colour: str,
        gaps: pd.DataFrame | None,
    ) -> None:
        self.events, self.window = events, window
        self.layout: Layout = rows_of.layout(events, lanes, most_deep)
        self.paint, self.palette = rows_of.paints(events, colour)
        self.start = events["start_us"].to_numpy(float)
        self.end = self.start + events["dur_us"].to_numpy(float)
        self.gaps = rows_of.cut(rows_of.gpu_gaps(events) if gaps is None else gaps, window)

    def places(self, indices: np.ndarray) -> np.ndarray:
        """Where the events with these indices of the whole trace stand here; -1: not in the window."""
        return self.events.index.get_indexer(indices)


@dataclass
class _Canvas:
    """Draws bands on ``ax``: x in microseconds from the window's start, one unit of y a row, from ``top``."""

    ax: Axes
    window: Window
    top: float
    merged: int = 0
    single: int = 0
    used: dict[str, Paint] = field(default_factory=dict)
    gap_kinds: dict[str, Paint] = field(default_factory=dict)
    left_out_arrows: int = 0

    @property
    def pixel_us(self) -> float:
        """Microseconds of one column of pixels."""
        figure = self.ax.get_figure(root=True)
        assert figure is not None
        inches = self.ax.get_position().width * figure.get_figwidth()
        return (self.window[1] - self.window[0]) / max(inches * _DOTS_PER_INCH, 1)

    def draw(self, band: _Band, arrows: bool) -> None:
        self._gaps(band)
        shown = band.layout.row >= 0
        short = shown & (band.end - band.start < self.pixel_us)
        long = shown & ~short
        self.merged, self.single = int(short.sum()), int(long.sum())
        filled = np.zeros((band.layout.num_rows, self._columns_of(band)))
        for code in np.unique(band.paint[shown]):
            paint = band.palette[code]
            self.used[paint.label] = paint
            mine = band.paint == code
            boxes = [self._boxes(band, long & mine), *self._columns(band, short & mine, filled)]
            self._fill(np.concatenate(boxes), paint)
        self._labels(band, np.flatnonzero(long))
        if arrows:
            self._arrows(band)

    def _boxes(self, band: _Band, chosen: np.ndarray) -> np.ndarray:
        """(left, right, top, bottom) of each chosen event, clipped to the window."""
        origin = self.window[0]
        left = np.maximum(band.start[chosen], band.window[0]) - origin
        right = np.minimum(band.end[chosen], band.window[1]) - origin
        y = self.top + band.layout.row[chosen] + (1 - _BAR) / 2
        return np.stack([left, right, y, y + _BAR], axis=1)

    def _columns_of(self, band: _Band) -> int:
        return int(np.ceil((band.window[1] - band.window[0]) / self.pixel_us))

    def _columns(self, band: _Band, chosen: np.ndarray, filled: np.ndarray) -> list[np.ndarray]:
        """Boxes of what is shorter than a pixel: in each column as high as its share of the time.

        ``filled``: the share of each row and column that other paints have taken; this one goes on top.
        """
        boxes = []
        width, count = self.pixel_us, filled.shape[1]
        for row in np.unique(band.layout.row[chosen]):
            inside = chosen & (band.layout.row == row)
            share = rows_of.busy_columns(band.start[inside], band.end[inside], band.window[0], width, count)
            at = np.flatnonzero(share > 0)
            left = at * width + band.window[0] - self.window[0]
            bottom = self.top + row + (1 + _BAR) / 2 - _BAR * filled[row, at]
            filled[row] += share
            boxes.append(np.stack([left, left + width, bottom - _BAR * share[at], bottom], axis=1))
        return boxes

    def _fill(self, boxes: np.ndarray, paint: Paint, zorder: float = 2.0) -> None:
        from matplotlib.collections import PolyCollection

        if not len(boxes):
            return
        left, right, top, bottom = boxes.T
        corners = np.stack([left, top, right, top, right, bottom, left, bottom], axis=1).reshape(-1, 4, 2)
        drawn = PolyCollection(
            list(corners),
            facecolor=paint.colour,
            edgecolor="white" if paint.hatch else "none",
            hatch=paint.hatch or None,
            linewidth=0,
            zorder=zorder,
            label=paint.label,
        )
        drawn.set_rasterized(len(boxes) > RASTERISE_ABOVE)
        self.ax.add_collection(drawn, autolim=False)

    def _labels(self, band: _Band, long: np.ndarray) -> None:
        """Names of the events with room for theirs, the widest first."""
        room = 0.0072 * (self.window[1] - self.window[0])  # about one character
        width = band.end[long] - band.start[long]
        for i in long[np.argsort(-width, kind="stable")][:40]:
            left, right = np.clip([band.start[i], band.end[i]], *band.window)
            text = short_name(str(band.events["name"].iloc[i]), int((right - left) / room) - 1)
            if not text:
                continue
            paint = band.palette[band.paint[i]]
            self.ax.text(
                (left + right) / 2 - self.window[0],
                self.top + band.layout.row[i] + 0.5,
                text,
                fontsize=7.5,
                ha="center",
                va="center_baseline",
                color=_ink_on(paint.colour),
                bbox={"facecolor": paint.colour, "edgecolor": "none", "pad": 0.8} if paint.hatch else None,
                clip_on=True,
                zorder=3,
            )

    def _gaps(self, band: _Band) -> None:
        """Shades when a GPU was idle, over its rows; a gap narrower than a pixel is left white."""
        wide = band.gaps[band.gaps["dur_us"] >= self.pixel_us]
        for cause, part in wide.groupby("cause", observed=True):
            paint = GAPS.get(str(cause), GAPS["idle"])
            self.gap_kinds[paint.label] = paint
            boxes = []
            for group in [group for group in band.layout.groups if group.side == "gpu"]:
                mine = part[(part["process"] == group.process) & (part["device"] == group.device)]
                left = np.maximum(mine["start_us"].to_numpy(float), band.window[0]) - self.window[0]
                right = left + mine["dur_us"].to_numpy(float)
                top = np.full(len(mine), self.top + group.first_row)
                boxes.append(np.stack([left, right, top, top + group.rows], axis=1))
            if boxes:
                self._fill(np.concatenate(boxes), paint, zorder=0.5)

    def _arrows(self, band: _Band) -> None:
        kind = band.events["kind"].astype(str).to_numpy()
        on_gpu = np.flatnonzero(np.isin(kind, rows_of.GPU) & (band.layout.row >= 0))
        by = band.events["launched_by"].to_numpy()
        calls = band.places(by[on_gpu])
        tied = (calls >= 0) & (band.layout.row[calls] >= 0)
        on_gpu, calls = on_gpu[tied], calls[tied]
        graph = kind[calls] == "graph_launch"
        for call in np.unique(calls[graph]):
            self._bracket(band, call, on_gpu[calls == call])
        single = np.flatnonzero(~graph)
        every = max(1, -(-len(single) // MOST_ARROWS))
        chosen = single[::every] if every <= SPARSEST_ARROWS else single[:0]
        self.left_out_arrows = len(single) - len(chosen)
        if len(chosen):
            self._lines(band, calls[chosen], on_gpu[chosen])

    def _lines(self, band: _Band, calls: np.ndarray, kernels: np.ndarray) -> None:
        from matplotlib.collections import LineCollection

        y0 = self.top + band.layout.row[calls] + (1 + _BAR) / 2
        y1 = self.top + band.layout.row[kernels] + (1 - _BAR) / 2
        x0, x1 = band.start[calls] - self.window[0], band.start[kernels] - self.window[0]
        lines = np.stack([np.stack([x0, y0], 1), np.stack([x1, y1], 1)], axis=1)
        self.ax.add_collection(
            LineCollection(
                list(lines), colors=_LINE, linewidths=0.7, alpha=0.75, zorder=2.5, gid="cg-arrows"
            ),
            autolim=False,
        )
        self.ax.plot(x1, y1, linestyle="none", marker=7, markersize=3, color=_LINE, zorder=2.6)

    def _bracket(self, band: _Band, call: int, kernels: np.ndarray) -> None:
        """From a graph launch to a bracket over all kernels that it replayed."""
        y0 = self.top + band.layout.row[call] + (1 + _BAR) / 2
        y1 = self.top + band.layout.row[kernels].min() + (1 - _BAR) / 2
        left = max(band.start[kernels].min(), band.window[0]) - self.window[0]
        right = min(band.end[kernels].max(), band.window[1]) - self.window[0]
        x0 = band.start[call] - self.window[0]
        self.ax.fill([x0, right, left], [y0, y1, y1], color=MEMORY, alpha=0.13, linewidth=0, zorder=1)
        self.ax.plot([x0, left], [y0, y1], color=MEMORY, linewidth=0.8, zorder=2.5)
        self.ax.plot(
            [left, right], [y1, y1], color=MEMORY, linewidth=2, zorder=2.6, gid="cg-bracket",
            solid_capstyle="butt",
        )  # fmt: skip
        if right - left > 0.14 * (self.window[1] - self.window[0]):
            self.ax.annotate(
                f"1 launch, {len(kernels)} kernels", ((left + right) / 2, y1), xytext=(0, 2.5),
                textcoords="offset points", ha="center", va="bottom", fontsize=8, color=INK, zorder=4,
            )  # fmt: skip


def _finish(ax: Axes, drawn: list[tuple[_Canvas, _Band]], what: str, about: About | None) -> None:
    """Row labels, time axis, legend, the note, the title."""
    bottom = max(canvas.top + band.layout.num_rows for canvas, band in drawn)
    window = drawn[0][0].window
    span = max(canvas.window[1] - canvas.window[0] for canvas, _ in drawn)
    ax.set_xlim(0, span)
    ax.set_ylim(bottom + 0.08, -0.05)
    ticks, labels = [], []
    for canvas, band in drawn:
        for group in band.layout.groups:
            ticks.append(canvas.top + group.first_row + group.rows / 2)
            labels.append(_two_lines(group.label) if group.rows > 1 else group.label)
            y = canvas.top + group.first_row
            ax.axhline(y, color="#d0d7de", linewidth=0.5 if group.side == "calls" else 0.9, zorder=0.4)
    ax.set_yticks(ticks, labels, fontsize=8.5)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    scale, unit = rows_of.time_unit(span)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value / scale:,.6g}")
    begin = f", from {window[0] / scale:,.2f} {unit} of the trace on" if len(drawn) == 1 and window[0] else ""
    figure = ax.get_figure(root=True)
    assert figure is not None
    notes = [
        textwrap.fill(note, int(figure.get_figwidth() * 10))
        for note in _notes([canvas for canvas, _ in drawn])
    ]
    ax.set_xlabel("\n".join([f"time ({unit}){begin}", *notes]), fontsize=9)
    ax.grid(axis="x")
    _legend(ax, [canvas for canvas, _ in drawn])
    put_title(ax, what, about)


def _notes(canvases: list[_Canvas]) -> list[str]:
    """What the picture leaves out or draws together."""
    notes = []
    merged, total = sum(c.merged for c in canvases), sum(c.merged + c.single for c in canvases)
    if merged:
        pixel = canvases[0].pixel_us
        notes.append(
            f"{merged:,} of {total:,} events are shorter than a pixel "
            f"({pixel:,.{0 if pixel > 10 else 2}f} µs): not stretched; a column is as high as "
            "the share of its time that they fill"
        )
    if left_out := sum(c.left_out_arrows for c in canvases):
        notes.append(f"without an arrow, so that the others can be seen: {left_out:,} launches")
    return notes


def _legend(ax: Axes, canvases: list[_Canvas]) -> None:
    from matplotlib.patches import Patch

    used = {label: paint for canvas in canvases for label, paint in canvas.used.items()}
    pieces = [label for label in used if label.startswith("piece ")]
    for label in pieces[4:]:
        used.pop(label)
    used |= {label: paint for canvas in canvases for label, paint in canvas.gap_kinds.items()}
    handles = [
        Patch(facecolor=p.colour, hatch=p.hatch or None, edgecolor="white", linewidth=0, label=label)
        for label, p in used.items()
    ]
    if len(pieces) > 4:
        handles.append(Patch(facecolor="none", label=f"and {len(pieces) - 4} more pieces"))
    options: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "fontsize": 8.5}
    ax.legend(handles=handles, handlelength=1.5, labelspacing=0.45, borderaxespad=0.2, **options)


def short_name(name: str, chars: int) -> str:
    """The telling part of an event's name in ``chars`` characters, or nothing.

    >>> short_name("void at::native::elementwise_kernel<4, float>(int)", 24)
    'elementwise_kernel'
    """
    bare = name.split("(")[0].split("<")[0].removeprefix("void ").removeprefix("aten::").strip()
    bare = bare.rsplit("::", 1)[-1] or name
    if len(bare) <= chars:
        return bare
    return bare[: chars - 1] + "…" if chars >= 6 else ""


def _ink_on(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 128 else "#1b1f24"


def _two_lines(label: str) -> str:
    first, dot, rest = label.rpartition(" · ")
    return f"{first}\n{rest}" if dot else label
