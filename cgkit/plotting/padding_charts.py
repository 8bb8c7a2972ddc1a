"""Charts of padding: staircases, waste, coverage, expected waste.

The frames are those that :mod:`cgkit.measuring.padding` gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cgkit.plotting import style
from cgkit.plotting.folding import blocks_of_equal
from cgkit.plotting.style import About, legend_below, put_title, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1, 1, 1)))
#: Colour and hatch of what a batch gets.
COVERED = {
    **{mode: (style.MODES[mode], style.MODE_HATCHES.get(mode, "")) for mode in ("FULL", "PIECEWISE")},
    "not captured": ("#ffffff", "xx"),
}
_WORDS = {"real": "of the real tokens", "padded": "of the padded tokens"}


@styled
def staircase(
    frame: pd.DataFrame, about: About | None = None, *, seen: Sequence[int] = (), ax: Axes | None = None
) -> Axes:
    """What a batch of each token count is padded to. One ladder: the padding is filled; several: lines side by side.

    Args:
        frame: a row a ladder and batch: ``ladder``, ``batch``, ``padded``, ``captured``.
        seen: counts that really occurred, marked on the diagonal.
    """
    parts = list(frame.groupby("ladder", sort=False))
    ax = style.new_axes(ax, 8.4, 3.0 if len(parts) == 1 else 4.2)
    most = int(frame["batch"].max())
    if len(parts) == 1:
        _one_stair(ax, parts[0][1])
    else:
        for number, (name, part) in enumerate(parts):
            captured = part[part["captured"]]
            edges = [*(captured["batch"] - 0.5), captured["batch"].max() + 0.5] if len(captured) else []
            if edges:
                ax.stairs(list(captured["padded"]), edges, baseline=None, label=str(name), color=_colour(number),
                          linewidth=_width(number, parts), linestyle=_DASHES[number % len(_DASHES)])  # fmt: skip
        ax.plot([1, most], [1, most], color=style.INK, linewidth=0.8, linestyle=":", label="no padding")
    if seen:
        points = sorted({point for point in seen if point <= most})
        ax.plot(points, points, "o", color=style.REAL, markersize=4.5, label="occurred in this run")
    ax.set_xlabel("tokens in the batch")
    ax.locator_params(axis="x", integer=True)
    ax.set_ylabel("tokens computed")
    ax.set_xlim(0.5, most + 0.5)
    ax.set_ylim(0, frame["padded"].max() * 1.08)
    ax.grid(axis="y")
    legend_below(ax, 4)
    put_title(ax, _stairs_title(parts, most), about)
    return ax


def _stairs_title(parts: list, most: int) -> str:
    if len(parts) > 1:
        return f"What batches of 1 to {most} tokens are padded to, by ladder"
    part = parts[0][1]
    held = part[part["captured"]]
    sizes = held["padded"].nunique()
    share = (held["padded"] - held["batch"]).sum() / max(held["padded"].sum(), 1)
    top = int(held["batch"].max()) if len(held) else 0
    return (
        f"{sizes} sizes; if all up to {top} came equally often, {share:.0%} of the padded tokens is padding"
    )


def _one_stair(ax: Axes, part: pd.DataFrame) -> None:
    counts, padded = list(part["batch"]), list(part["padded"])
    edges = [*(count - 0.5 for count in counts), counts[-1] + 0.5]
    ax.stairs(padded, edges, baseline=counts, fill=True, facecolor=style.PADDING, alpha=0.30, hatch="///",
              label="padding")  # fmt: skip
    ax.stairs(counts, edges, fill=True, color=style.REAL, alpha=0.6, label="real tokens")
    ax.stairs(padded, edges, color=style.PADDING, linewidth=1.3, baseline=None)
    above = part[~part["captured"]]
    if len(above):
        at = above["batch"].min() - 0.5
        ax.axvline(at, color=style.INK, linewidth=0.8, linestyle=":")
        right = at < 0.7 * counts[-1]
        ax.annotate("larger: runs compiled,\nwithout a graph", (at, max(padded)), xytext=(5 if right else -5, -2),
                    textcoords="offset points", va="top", ha="left" if right else "right", fontsize=8.5)  # fmt: skip


@styled
def waste(frame: pd.DataFrame, divisor: str, about: About | None = None, *, ax: Axes | None = None) -> Axes:
    """The share of padding against batch size, a line a ladder.

    ``divisor``: "real" (padding over the tokens asked for) or "padded" (over the tokens that run); the axis names it.
    """
    ax = style.new_axes(ax, 8.4, 3.6)
    most = int(frame["batch"].max())
    peaks = {}
    parts = list(frame.groupby("ladder", sort=False))
    for number, (name, part) in enumerate(parts):
        held = part[part["captured"]]
        values = [100 * value for value in held[f"waste_of_{divisor}"]]
        edges = [*(held["batch"] - 0.5), held["batch"].max() + 0.5] if len(held) else [0.5]
        peaks[str(name)] = max(values, default=0.0)
        if len(held):
            ax.stairs(values, edges, baseline=None, color=_colour(number), label=str(name),
                      linewidth=_width(number, parts), linestyle=_DASHES[number % len(_DASHES)])  # fmt: skip
    ax.set_xlim(0.5, most + 0.5)
    ax.set_ylim(0, max([*peaks.values(), 1.0]) * 1.08)
    ax.set_xlabel("tokens in the batch (a line ends where its ladder does)")
    ax.locator_params(axis="x", integer=True)
    ax.set_ylabel(f"padding, % {_WORDS[divisor]}")
    ax.grid(axis="y")
    legend_below(ax, 4)
    most_of_all = max(peaks.values(), default=0.0)
    worst = ", ".join(name for name, peak in peaks.items() if peak > most_of_all - 1e-9)
    put_title(ax, f"Padding in % {_WORDS[divisor]}; at most {most_of_all:.0f} %: {worst}", about)
    return ax


@styled
def coverage(frame: pd.DataFrame, about: About | None = None, *, ax: Axes | None = None) -> Axes:
    """The strip of what each batch size gets: FULL, PIECEWISE, or no graph. A row a kind of batch."""
    kinds = list(dict.fromkeys(frame["kind"]))
    ax = style.new_axes(ax, 8.4, 1.3 + 0.5 * len(kinds))
    most = int(frame["batch"].max())
    for y, kind in enumerate(kinds):
        part = frame[frame["kind"] == kind].sort_values("batch")
        batches = list(part["batch"])
        for start, stop, mode in blocks_of_equal(list(part["mode"])):
            colour, hatch = COVERED[mode]
            edge = "white" if mode != "not captured" else "#8c959f"
            ax.barh(y, stop - start, left=batches[start] - 0.5, height=0.66, color=colour, hatch=hatch,
                    edgecolor=edge, linewidth=0.5)  # fmt: skip
            text = (
                f"{mode} {batches[start]} to {batches[stop - 1]}" if stop - start > 1 else f"{batches[start]}"
            )
            if (stop - start) > 0.0135 * most * len(text):
                ax.text((batches[start] + batches[stop - 1]) / 2, y, text, ha="center", va="center", fontsize=8.5,
                        color=style.ON_FILL, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5})  # fmt: skip
    from matplotlib.patches import Patch

    ax.set_yticks(range(len(kinds)), kinds)
    ax.invert_yaxis()
    ax.set_xlim(0.5, most + 0.5)
    ax.set_xlabel("tokens in the batch")
    ax.locator_params(axis="x", integer=True)
    handles = [
        Patch(
            facecolor=colour,
            hatch=hatch,
            edgecolor="white" if name != "not captured" else "#8c959f",
            label=name,
        )
        for name, (colour, hatch) in COVERED.items()
        if name in set(frame["mode"])
    ]
    legend_below(ax, 3, handles)
    missing = (frame["mode"] == "not captured").groupby(frame["kind"], sort=False).sum()
    said = ", ".join(f"{int(count)} of {kind}" for kind, count in missing.items() if count)
    put_title(
        ax,
        f"Batches of 1 to {most} tokens: " + (f"no graph for {said}" if said else "all have a graph"),
        about,
    )
    return ax


@styled
def expected(
    frame: pd.DataFrame, divisor: str, about: About | None = None, *, ax: Axes | None = None
) -> Axes:
    """The expected waste of each ladder under a distribution, and how many of the steps have a graph."""
    ax = style.new_axes(ax, 8.4, 1.0 + 0.42 * len(frame))
    values = [100 * value for value in frame[f"waste_of_{divisor}"]]
    ax.barh(
        range(len(frame)),
        values,
        height=0.62,
        color=style.PADDING,
        alpha=0.75,
        hatch="///",
        edgecolor="white",
    )
    ax.set_yticks(range(len(frame)), [f"{n} ({s} sizes)" for n, s in zip(frame["ladder"], frame["sizes"])])
    ax.invert_yaxis()
    top = max([*values, 0.1])
    for y, (value, steps) in enumerate(zip(values, frame["captured_steps"])):
        note = f"{value:.2f} %" + ("" if steps >= 1 else f"; {1 - steps:.1%} of the steps have no graph")
        ax.annotate(note, (value, y), xytext=(6, 0), textcoords="offset points", va="center", fontsize=9)
    ax.set_xlim(0, top * (1.2 if (frame["captured_steps"] >= 1).all() else 1.75))
    ax.set_xlabel(f"expected padding, % {_WORDS[divisor]}")
    ax.grid(axis="x")
    best = frame["ladder"].iloc[min(range(len(values)), key=values.__getitem__)]
    put_title(ax, f"Expected padding {_WORDS[divisor]}: least with {best}, {min(values):.2f} %", about)
    return ax


def _colour(number: int) -> str:
    return (*style.SERIES[:4], style.PADDING, style.SPLITTING, style.EAGER)[number % 7]


def _width(number: int, parts: Sequence[object]) -> float:
    """Later lines are thinner, so that one that lies on an equal one leaves it to be seen."""
    return 1.2 + 0.7 * (len(parts) - 1 - number)
