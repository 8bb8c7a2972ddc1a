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
from typing import TYPE_CHECKING, Any

from cgkit.plotting import timeline_layout as rows_of
from cgkit.plotting.style import INK, LONGEST_NAME, About, literal, new_axes, put_title, styled
from cgkit.plotting.timeline_canvas import Band, Canvas, Window

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_LONGEST_LANE = 44  # characters of a label: beside it must stand the drawing


@styled
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
    rows_of.check(events)
    shown = rows_of.cut(events, window)
    band = Band(shown, window or rows_of.extent(shown), lanes, most_deep, colour, gaps)
    own = ax is None
    ax = new_axes(ax, 9.6, 1.5 + 0.3 * max(band.layout.num_rows, 3))
    canvas = Canvas(ax, band.window, 0.0)
    canvas.draw(band, arrows)
    _finish(ax, [(canvas, band)], title or "CPU against GPU", about, own)
    return ax


@styled
def compare_timelines(
    frames: Sequence[pd.DataFrame],
    names: Sequence[str],
    about: About | None = None,
    *,
    ax: Axes | None = None,
    windows: Sequence[Window] | None = None,
    gaps: Sequence[pd.DataFrame | None] | None = None,
    arrows: bool = True,
    colour: str = "piece",
    most_deep: int | None = 2,
) -> Axes:
    """Several runs above each other on one time axis, each from its own first event.

    Args:
        frames: ``Timeline.events`` of each, for instance one step eager and one replayed.
        names: of the modes.
        windows: the part of each to draw, in microseconds of its own trace; else all of it.
        gaps: of each, as for :func:`timeline`.

    Raises:
        ValueError: none at all, or not as many names (or windows) as frames.
    """
    if not frames:
        raise ValueError("there is no timeline to draw")
    for frame in frames:
        rows_of.check(frame)
    windows = list(windows) if windows is not None else [rows_of.extent(frame) for frame in frames]
    if not len(frames) == len(names) == len(windows):
        raise ValueError(
            f"{len(frames)} timelines, {len(names)} names, {len(windows)} windows: give one of each"
        )
    names = [name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…" for name in names]
    bands = [
        Band(rows_of.cut(frame, window), window, None, most_deep, colour, idle)
        for frame, window, idle in zip(frames, windows, gaps or [None] * len(frames))
    ]
    longest = max(band.window[1] - band.window[0] for band in bands)
    own = ax is None
    ax = new_axes(ax, 9.6, 1.5 + sum(0.3 * band.layout.num_rows + 0.45 for band in bands))
    drawn, top = [], 0.0
    for band, name in zip(bands, names):
        left = band.window[0]
        took_us = band.window[1] - left
        canvas = Canvas(ax, (left, left + longest), top + 0.9)
        canvas.draw(band, arrows)
        scale, unit = rows_of.time_unit(longest)
        label = f"{literal(name)}: {took_us / scale:,.2f} {unit}"
        ax.text(0, top + 0.72, label, fontsize=10, fontweight="bold")
        bottom = top + 0.9 + band.layout.num_rows
        ax.plot([took_us, took_us], [top + 0.9, bottom], color=INK, linewidth=1.1, linestyle=(0, (4, 2)))
        drawn.append((canvas, band))
        top = bottom + 0.5
    _finish(ax, drawn, f"One time axis: {' against '.join(names)}", about, own)
    return ax


def _finish(
    ax: Axes, drawn: list[tuple[Canvas, Band]], what: str, about: About | None, own_figure: bool
) -> None:
    """Row labels, time axis, legend, the note, the title; a figure of our own grows until the legend fits."""
    canvases = [canvas for canvas, _ in drawn]
    bottom = max(canvas.top + band.layout.num_rows for canvas, band in drawn)
    span = max(canvas.window[1] - canvas.window[0] for canvas in canvases)
    ax.set_xlim(0, span)
    ax.set_ylim(bottom + 0.08, -0.05)
    _label_rows(ax, drawn)
    figure = ax.get_figure(root=True)
    assert figure is not None
    scale, unit = rows_of.time_unit(span)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value / scale:,.6g}")
    start = canvases[0].window[0]
    begin = f", from {start / scale:,.2f} {unit} of the trace on" if len(drawn) == 1 and start else ""
    notes = [textwrap.fill(note, int(figure.get_figwidth() * 11)) for note in _notes(drawn)]
    ax.set_xlabel("\n".join([f"time ({unit}){begin}", *notes]), fontsize=9, linespacing=1.45)
    ax.grid(axis="x")
    entries = _legend(ax, canvases)
    if own_figure:
        figure.set_figheight(max(figure.get_figheight(), 0.215 * entries + 0.85))  # type: ignore[union-attr]
    put_title(ax, what, about)


def _label_rows(ax: Axes, drawn: list[tuple[Canvas, Band]]) -> None:
    ticks, labels = [], []
    for canvas, band in drawn:
        for group in band.layout.groups:
            ticks.append(canvas.top + group.first_row + group.rows / 2)
            lines = _two_lines(group.label) if group.rows > 1 else [group.label]
            labels.append("\n".join(literal(line, _LONGEST_LANE) for line in lines))
            y = canvas.top + group.first_row
            ax.axhline(y, color="#d0d7de", linewidth=0.5 if group.side == "calls" else 0.9, zorder=0.4)
    ax.set_yticks(ticks, labels, fontsize=8.5)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


def _notes(drawn: list[tuple[Canvas, Band]]) -> list[str]:
    """What the picture leaves out or draws together."""
    notes = []
    canvases = [canvas for canvas, _ in drawn]
    merged, total = sum(c.merged for c in canvases), sum(c.merged + c.single for c in canvases)
    if merged:
        pixel = canvases[0].pixel_us
        notes.append(
            f"{merged:,} of {total:,} events are shorter than a pixel "
            f"({pixel:,.{0 if pixel > 10 else 2}f} µs): not stretched; a column is as high as "
            "the share of its time that they fill"
        )
    if too_deep := sum(band.layout.too_deep for _, band in drawn):
        notes.append(f"nested too deep to be drawn (most_deep=None draws all): {too_deep:,} events")
    if left_out := sum(c.left_out_arrows for c in canvases):
        notes.append(f"without an arrow, so that the others can be seen: {left_out:,} launches")
    return notes


def _legend(ax: Axes, canvases: list[Canvas]) -> int:
    """What the paints mean; of many pieces the first four. Gives the number of entries."""
    from matplotlib.patches import Patch

    used = {label: paint for canvas in canvases for label, paint in canvas.used.items()}
    pieces = [label for label in used if label.startswith("piece ")]
    for label in pieces[4:]:
        used.pop(label)
    used |= {label: paint for canvas in canvases for label, paint in canvas.gap_kinds.items()}
    handles = [
        Patch(facecolor=p.colour, hatch=p.hatch or None, edgecolor="white", linewidth=0, label=label)
        for label, p in ((literal(label, LONGEST_NAME), paint) for label, paint in used.items())
    ]
    if len(pieces) > 4:
        handles.append(Patch(facecolor="none", label=f"and {len(pieces) - 4} more pieces"))
    options: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "fontsize": 8.5}
    ax.legend(handles=handles, handlelength=1.5, labelspacing=0.45, borderaxespad=0.2, **options)
    return len(handles)


def _two_lines(label: str) -> list[str]:
    first, dot, rest = label.rpartition(" · ")
    return [first, rest] if dot else [label]
