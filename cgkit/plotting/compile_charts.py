"""Charts of what compilation buys: static against general, the autotuner's candidates, passes, custom ops.

The frames are those of ``cgkit bench static``, ``passes`` and ``custom-ops``. A chart of several panels has all of
them in a figure of its own, and only its first one in axes that it is given.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cgkit.plotting import style
from cgkit.plotting.style import About, legend_below, put_title, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

#: Callables of ``cgkit bench static``: marker, colour, filled, name.
CALLABLES = {
    "static": ("o", "#56b4e9", False, "static"),
    "static, tuned": ("D", style.COMPILED, True, "static, autotuned"),
    "cuBLAS": ("x", style.PADDING, True, "cuBLAS (of a piece its products alone)"),
}
#: Candidates by backend: colour and hatch.
BACKENDS = {"ATen": (style.PADDING, "///"), "Triton": (style.COMPILED, "")}
#: Batches, in order: colour and hatch.
BATCHES = ((style.COMPILED, ""), (style.SPLITTING, "///"), (style.MEMORY, "\\\\\\"), (style.EAGER, "xx"))
#: More candidates than this are counted, not drawn.
SHOWN = 16


@styled
def static(frame: pd.DataFrame, about: About | None = None, *, ax: Axes | None = None) -> Axes:
    """Time of each callable over the general one's, a row a product or piece and batch; compile time beside.

    ``frame``: ``subject``, ``piece``, ``batch``, ``callable`` ("general", "static", "static, tuned", "cuBLAS"), ``us``,
    ``compile_s``, as ``cgkit bench static`` gives it.
    """
    rows = list(frame.groupby(["subject", "piece", "batch"], sort=False))
    panels = style.new_panels(ax, (2.6, 1), 10.0, 1.7 + 0.27 * len(rows))
    ratios: list[float] = []
    for y, (_, part) in enumerate(rows):
        by = part.set_index("callable")
        general = float(by.loc["general", "us"])
        for name, (marker, colour, filled, words) in CALLABLES.items():
            if name in by.index:
                ratio = float(by.loc[name, "us"]) / general
                ratios += [ratio] if name == "static, tuned" else []
                _point(panels[0], ratio, y, marker, colour, filled, words if not y else None)
        panels[0].annotate(
            f"{general:,.1f} µs", (1.0, y), xycoords=("axes fraction", "data"), xytext=(-2, 0),
            textcoords="offset points", ha="right", va="center", fontsize=8.5,
        )  # fmt: skip
        if len(panels) > 1:
            _compile_points(panels[1], by, y)
    _relative_axis(panels[0], [name for name, _ in rows])
    if len(panels) > 1:
        _compile_axis(panels[1])
    legend_below(panels[0], 4, panels=len(panels))
    put_title(panels[0], _bought(ratios), about, panels=len(panels))
    return panels[0]


def _bought(ratios: Sequence[float]) -> str:
    if not ratios:
        return "Static against general"
    middle = sorted(ratios)[len(ratios) // 2]
    return (
        f"Tuned for one size: {min(ratios):.2f} to {max(ratios):.2f} of the general time, median {middle:.2f}"
    )


def _point(ax: Axes, x: float, y: float, marker: str, colour: str, filled: bool, label: str | None) -> None:
    face = colour if filled else "none"
    ax.plot(
        [x], [y], marker, color=colour, markerfacecolor=face, markersize=6.5, markeredgewidth=1.5, label=label
    )


def _relative_axis(ax: Axes, names: Sequence[Any]) -> None:
    ax.axvline(1.0, color=style.INK, linewidth=1, label="general")
    labels = [
        f"{piece}" if subject == "product" else f"{subject} {piece}, batch {batch}"
        for subject, piece, batch in names
    ]
    ax.set_yticks(range(len(names)), labels, fontsize=8.5)
    for y, (before, after) in enumerate(itertools.pairwise(names)):
        if before[:2] != after[:2]:
            ax.axhline(y + 0.5, color="#8c959f", linewidth=0.5)
    ax.set_ylim(len(names) - 0.4, -0.6)
    low, high = ax.get_xlim()
    ax.set_xlim(min(low, 0.9), max(high, 1.1) + 0.2 * (max(high, 1.1) - min(low, 0.9)))
    ax.set_xlabel("time of one call over the general callable's (its µs: right edge)")
    ax.grid(axis="x")


def _compile_points(ax: Axes, by: pd.DataFrame, y: float) -> None:
    _point(ax, float(by.loc["general", "compile_s"]), y, "|", style.INK, True, None)
    for name in ("static", "static, tuned"):
        if name in by.index:
            marker, colour, filled, _ = CALLABLES[name]
            _point(ax, float(by.loc[name, "compile_s"]), y, marker, colour, filled, None)


def _compile_axis(ax: Axes) -> None:
    ax.set_xscale("log")
    _plain(ax)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel("compile time (s)")
    ax.grid(axis="x")


def _plain(ax: Axes) -> None:
    """A logarithmic axis with numbers written out."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = ax.get_xlim()
    digits = (1.0,) if high / low > 30 else (1.0, 2.0, 5.0)
    ax.xaxis.set_major_locator(LogLocator(subs=digits))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())


@styled
def candidates(frame: pd.DataFrame, about: About | None = None, *, ax: Axes | None = None) -> Axes:
    """What the autotuner tried for one product, the fastest first.

    ``frame``: a row a candidate of one product: ``inputs``, ``candidate``, ``backend``, ``parameters``, ``ms``
    (infinite: it failed), ``chosen``, as ``cgkit bench static --candidates-csv`` gives it.
    """
    tried = frame[frame["ms"].map(math.isfinite)].sort_values("ms")
    shown = tried.head(SHOWN)
    if not bool((shown["backend"] == "ATen").any()):  # the library is always shown
        shown = tried[(tried["backend"] == "ATen") | (tried["ms"] <= shown["ms"].max())].sort_values("ms")
    ax = style.new_axes(ax, 9.2, 1.6 + 0.27 * len(shown))
    seen: set[str] = set()
    for y, row in enumerate(shown.to_dict("records")):
        colour, hatch = BACKENDS.get(row["backend"], (style.EAGER, "xx"))
        ax.barh(
            y, row["ms"] * 1e3, color=colour, hatch=hatch, edgecolor="white", linewidth=0, height=0.72,
            label=None if row["backend"] in seen else row["backend"],
        )  # fmt: skip
        seen.add(row["backend"])
        note = f"{row['ms'] * 1e3:,.2f} µs" + (", chosen" if row["chosen"] else "")
        ax.annotate(
            note, (row["ms"] * 1e3, y), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8.5
        )
    ax.set_yticks(range(len(shown)), [_short(row) for row in shown.to_dict("records")], fontsize=8.5)
    ax.invert_yaxis()
    ax.set_xlim(0, (float(shown["ms"].max()) if len(shown) else 1.0) * 1e3 * 1.25)
    ax.set_xlabel("µs, as the autotuner measured it")
    ax.grid(axis="x")
    legend_below(ax, 3)
    put_title(ax, _tried(frame, tried, shown), about)
    return ax


def _tried(frame: pd.DataFrame, tried: pd.DataFrame, shown: pd.DataFrame) -> str:
    what = " and ".join(dict.fromkeys(frame["inputs"].astype(str).str.replace(", ", " by ")))
    failed = len(frame) - len(tried)
    more = f", the fastest {SHOWN} drawn" if len(shown) < len(tried) else ""
    more += " and the library" if len(shown) > SHOWN else ""
    return f"{len(frame)} candidates for {what}{more}" + (f"; {failed} failed" if failed else "")


def _short(row: dict[str, Any]) -> str:
    """The candidate's name with its block sizes, where it has any."""
    parameters = row.get("parameters")
    blocks = re.findall(r"(BLOCK_[MNK]|num_warps|num_stages)\s*=\s*(\d+)", str(parameters or ""))
    words = {"num_warps": "warp", "num_stages": "stage"}
    found = dict(blocks)
    sizes = "x".join(found[f"BLOCK_{letter}"] for letter in "MNK" if f"BLOCK_{letter}" in found)
    rest = [f"{number} {words[name]}{'s' * (number != '1')}" for name, number in blocks if name in words]
    return ", ".join([f"M, N, K {sizes}", *rest]) if sizes else str(row["candidate"])


@styled
def passes(frame: pd.DataFrame, about: About | None = None, *, ax: Axes | None = None) -> Axes:
    """Each variant of the graph passes: kernels, bytes that they move, time of a step by batch.

    ``frame``: a row a variant and batch, as ``cgkit bench passes`` gives it: ``variant``, ``batch``, ``wall_ms``,
    ``step_bytes_at_16_tokens`` (older recordings: ``bytes_at_16_tokens``, of each different piece once),
    ``generated_kernels``, and from a GPU ``kernels_a_layer`` and ``gpu_busy_ms``.
    """
    of_a_step = "step_bytes_at_16_tokens" in frame
    column = "step_bytes_at_16_tokens" if of_a_step else "bytes_at_16_tokens"
    counted = "of a step" if of_a_step else "of each different piece"
    words = f"MiB read and written, 16 tokens\n(Inductor's count {counted})"
    columns = [_kernels(frame), ("mib", words), _STEP]
    moved = frame.assign(mib=frame[column] / 2**20)
    return _beside_each_other(moved, columns, f"Graph passes off and on: {_steps(frame)}", about, ax)


@styled
def custom_ops(frame: pd.DataFrame, about: About | None = None, *, ax: Axes | None = None) -> Axes:
    """Hand-written layers against torch code: kernels, time of a step by batch, compile time.

    ``frame``: as :func:`passes` takes it, with ``compile_s``.
    """
    words = "seconds to trace and compile (the\nfirst row: and to load the compiler)"
    columns = [_kernels(frame), _STEP, ("compile_s", words)]
    return _beside_each_other(frame, columns, f"Layers as operators of their own: {_steps(frame)}", about, ax)


_STEP = ("wall_ms", "ms a step (GPU busy: |)")


def _steps(frame: pd.DataFrame) -> str:
    """How long a step takes over that of the first variant, in all others and at all batches."""
    first = frame["variant"].iloc[0]
    base = frame[frame["variant"] == first].set_index("batch")["wall_ms"]
    others = frame[frame["variant"] != first]
    ratios = [float(row["wall_ms"] / base[row["batch"]]) for row in others.to_dict("records")]
    return f"a step takes {min(ratios):.2f} to {max(ratios):.2f} times {first!r}" if ratios else str(first)


def _kernels(frame: pd.DataFrame) -> tuple[str, str]:
    """What is counted: kernels that ran a layer, or, without a GPU, those that Inductor generated."""
    if "kernels_a_layer" in frame and frame["kernels_a_layer"].notna().all():
        return "kernels_a_layer", "kernels a layer, as they ran"
    return "generated_kernels", "kernels that Inductor\ngenerated, all pieces"


def _beside_each_other(
    frame: pd.DataFrame, columns: Sequence[tuple[str, str]], what: str, about: About | None, ax: Axes | None
) -> Axes:
    variants = list(dict.fromkeys(frame["variant"]))
    batches = list(dict.fromkeys(frame["batch"]))
    panels = style.new_panels(ax, (1,) * len(columns), 10.4, 1.9 + 0.2 * len(variants) * (1 + len(batches)))
    for panel, (column, words) in zip(panels, columns):
        most = float(frame[column].max()) or 1.0
        each = frame.groupby("variant", sort=False)[column].nunique().max() > 1
        for number, batch in enumerate(batches if each else batches[:1]):
            part = frame[frame["batch"] == batch].set_index("variant")
            _bars(panel, part, column, variants, number, len(batches) if each else 1)
        panel.set_xlim(0, most * 1.32)
        panel.set_xlabel(words)
        panel.grid(axis="x")
        panel.tick_params(axis="y", length=0)
    panels[0].set_yticks(range(len(variants)), variants)
    panels[0].set_ylim(len(variants) - 0.45, -0.55)
    _batch_legend(panels, batches)
    put_title(panels[0], what, about, panels=len(panels))
    return panels[0]


def _bars(ax: Axes, part: pd.DataFrame, column: str, variants: Sequence[str], number: int, of: int) -> None:
    colour, hatch = BATCHES[number % len(BATCHES)] if of > 1 else (style.SHARED, "")
    height = 0.8 / of
    whole = bool((part[column] % 1 == 0).all())
    for y, variant in enumerate(variants):
        value, at = float(part.loc[variant, column]), y + (number - (of - 1) / 2) * height
        ax.barh(at, value, height=height * 0.92, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
        ax.annotate(
            f"{value:,.0f}" if whole or value >= 100 else f"{value:#.3g}", (value, at), xytext=(5, 0),
            textcoords="offset points", va="center", fontsize=8.5,
        )  # fmt: skip
        busy = part.loc[variant].get("gpu_busy_ms") if column == "wall_ms" else None
        if busy is not None and not math.isnan(busy):
            for colour_, width in (("white", 4.0), (style.INK, 1.8)):  # seen on a dark bar too
                ax.plot([busy], [at], "|", color=colour_, markersize=9, markeredgewidth=width)


def _batch_legend(panels: Sequence[Axes], batches: Sequence[Any]) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="white", linewidth=0, label=f"batch {batch}")
        for batch, (colour, hatch) in zip(batches, BATCHES)
    ]
    if len(batches) > 1:
        both = Patch(facecolor=style.SHARED, label="the same at every batch")
        legend_below(panels[0], len(handles) + 1, [*handles, both], panels=len(panels))
