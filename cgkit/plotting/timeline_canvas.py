"""Draws one run's events on axes: boxes as long as events took, columns of what is shorter, arrows, gaps.

:mod:`cgkit.plotting.timeline_chart` makes pictures of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from cgkit.plotting import timeline_layout as rows_of
from cgkit.plotting.style import MEMORY, ON_FILL, literal
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


class Band:
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
        self.layout: Layout = rows_of.layout(events, lanes, most_deep, ("work", "calls", "gpu"))
        self.paint, self.palette = rows_of.paints(events, colour)
        self.start = events["start_us"].to_numpy(float)
        self.end = self.start + events["dur_us"].to_numpy(float)
        self.gaps = rows_of.cut(rows_of.gpu_gaps(events) if gaps is None else gaps, window)

    def places(self, indices: np.ndarray) -> np.ndarray:
        """Where the events with these indices of the whole trace stand here; -1: not in the window."""
        return self.events.index.get_indexer(indices)


@dataclass
class Canvas:
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

    def draw(self, band: Band, arrows: bool) -> None:
        shown = band.layout.row >= 0
        short = shown & (band.end - band.start < self.pixel_us)
        long = shown & ~short
        self.merged, self.single = int(short.sum()), int(long.sum())
        filled = np.zeros((band.layout.num_rows, self._columns_of(band)))
        for code in np.unique(band.paint[shown]):
            paint = band.palette[code]
            self.used[paint.label] = paint
            mine = band.paint == code
            short_mine = self._columns(
                band.start, band.end, band.layout.row, short & mine, filled, band.window[0]
            )
            self._fill(np.concatenate([self._boxes(band, long & mine), *short_mine]), paint)
        self._gaps(band, filled)
        self._labels(band, np.flatnonzero(long))
        if arrows:
            self._arrows(band)

    def _boxes(self, band: Band, chosen: np.ndarray) -> np.ndarray:
        """(left, right, top, bottom) of each chosen event, clipped to the window."""
        origin = self.window[0]
        left = np.maximum(band.start[chosen], band.window[0]) - origin
        right = np.minimum(band.end[chosen], band.window[1]) - origin
        y = self.top + band.layout.row[chosen] + (1 - _BAR) / 2
        return np.stack([left, right, y, y + _BAR], axis=1)

    def _columns_of(self, band: Band) -> int:
        return int(np.ceil((band.window[1] - band.window[0]) / self.pixel_us))

    def _columns(
        self,
        start: np.ndarray,
        end: np.ndarray,
        row_of: np.ndarray,
        chosen: np.ndarray,
        filled: np.ndarray,
        left_us: float,
    ) -> list[np.ndarray]:
        """Boxes of what is shorter than a pixel: in each column as high as its share of the time.

        ``filled``: the share of each row and column that other paints have taken; this one goes on top.
        """
        boxes = []
        width, count = self.pixel_us, filled.shape[1]
        for row in np.unique(row_of[chosen]):
            inside = chosen & (row_of == row)
            share = rows_of.busy_columns(start[inside], end[inside], left_us, width, count)
            at = np.flatnonzero(share > 0)
            left = at * width + left_us - self.window[0]
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

    def _labels(self, band: Band, long: np.ndarray) -> None:
        """Names of the events with room for theirs, the widest first."""
        room = 0.0096 * (self.window[1] - self.window[0])  # about one character, beside a legend
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
                literal(text),
                fontsize=7.5,
                ha="center",
                va="center_baseline",
                color=_ink_on(paint.colour),
                bbox={"facecolor": paint.colour, "edgecolor": "none", "pad": 0.8} if paint.hatch else None,
                clip_on=True,
                zorder=3,
            )

    def _gaps(self, band: Band, filled: np.ndarray) -> None:
        """Fills the time when a GPU was idle in the first row of each of its streams, like events."""
        for cause, part in band.gaps.groupby("cause", observed=True):
            paint = GAPS.get(str(cause), GAPS["idle"])
            boxes = []
            for group in [group for group in band.layout.groups if group.side == "gpu"]:
                mine = part[(part["process"] == group.process) & (part["device"] == group.device)]
                start = np.maximum(mine["start_us"].to_numpy(float), band.window[0])
                end = np.minimum((mine["start_us"] + mine["dur_us"]).to_numpy(float), band.window[1])
                row = np.full(len(mine), group.first_row)
                short = end - start < self.pixel_us
                top = self.top + row[~short] + (1 - _BAR) / 2
                left, right = start[~short] - self.window[0], end[~short] - self.window[0]
                boxes.append(np.stack([left, right, top, top + _BAR], axis=1))
                boxes += self._columns(start, end, row, short, filled, band.window[0])
            if sum(map(len, boxes)):
                self.gap_kinds[paint.label] = paint
                self._fill(np.concatenate(boxes), paint, zorder=0.5)

    def _arrows(self, band: Band) -> None:
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

    def _lines(self, band: Band, calls: np.ndarray, kernels: np.ndarray) -> None:
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

    def _bracket(self, band: Band, call: int, kernels: np.ndarray) -> None:
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
            self.ax.annotate(  # at the left: in the middle stands the name of the call that waits for them
                f"1 launch, {len(kernels)} kernels", (left, y1), xytext=(3, 3), textcoords="offset points",
                ha="left", va="bottom", fontsize=7.5, color=ON_FILL, zorder=4, gid="cg-bracket-note",
                bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 0.6},
            )  # fmt: skip


def short_name(name: str, chars: int) -> str:
    """The telling part of an event's name in ``chars`` characters, or nothing; of ``file.py(12): run`` the function.

    >>> short_name("void at::native::elementwise_kernel<4, float>(int)", 24)
    'elementwise_kernel'
    """
    if python := re.search(r"([^/]*)\(\d+\): (.+)$", name):
        name = python[2]
    bare = name.split("(")[0].split("<")[0].removeprefix("void ").removeprefix("aten::").strip()
    bare = bare.rsplit("::", 1)[-1] or name
    if len(bare) <= chars:
        return bare
    return bare[: chars - 1] + "…" if chars >= 6 else ""


def _ink_on(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 128 else ON_FILL
