"""The charts: each takes a DataFrame and an optional ``ax``, and returns the Axes.

Nothing is shown and nothing is written to disk. A title says what is shown, of which model, mode,
batch and device, and whether graphs were emulated or the numbers recorded elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cgkit.plotting import style
from cgkit.plotting.folding import blocks_of_equal
from cgkit.plotting.style import About, put_title, styled
from cgkit.plotting.tables import human_seconds

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


@styled
def compile_times(frame: pd.DataFrame, about: About | None = None, *, ax: Axes | None = None) -> Axes:
    """When each piece was compiled, one row a *different* piece; equal ones share it and cost nothing.

    Args:
        frame: one row a piece and shape, with ``piece``, ``key`` and ``compile_s`` (of equal pieces only
            the first one's counts), optionally ``shape`` ("general" or a token count).
    """
    groups: list[dict[str, Any]] = []
    by_key: dict[Any, dict[str, Any]] = {}
    for row in frame.to_dict("records"):
        key = row["key"]
        if key in by_key:
            by_key[key]["equal"] += 1
            continue
        name = _with_shape(str(row["piece"]), row.get("shape"))
        by_key[key] = {"piece": name, "seconds": float(row["compile_s"]), "equal": 0}
        groups.append(by_key[key])
    ax = style.new_axes(ax, 8.4, 1.15 + 0.42 * max(len(groups), 1))
    start, total = 0.0, sum(group["seconds"] for group in groups)
    for y, group in enumerate(groups):
        ax.barh(y, group["seconds"], left=start, color=style.COMPILED, height=0.6)
        start += group["seconds"]
        _compile_note(ax, y, start - group["seconds"], start, total, group)
    ax.set_yticks(range(len(groups)), [group["piece"] for group in groups])
    ax.invert_yaxis()
    ax.set_xlim(0, max(total, 1e-9) * 1.03)
    ax.set_xlabel("seconds since the first piece was begun")
    ax.grid(axis="x")
    put_title(ax, f"{len(groups)} of {len(frame)} pieces really compiled, {total:.1f} s", about)
    return ax


def _compile_note(ax: Axes, y: int, left: float, right: float, total: float, group: dict[str, Any]) -> None:
    """Seconds and sharing of one row: in its bar where there is room, else on the emptier side of it."""
    equal = group["equal"]
    note = f"{group['seconds']:.2f} s"
    if equal:
        note += f", and {equal} equal {'piece' if equal == 1 else 'pieces'} for nothing"
    inside = right - left > (0.45 if equal else 0.12) * total
    before = not inside and left > total - right
    ax.annotate(
        note,
        (left if before else right, y),
        xytext=(-5 if inside or before else 5, 0),
        textcoords="offset points",
        ha="right" if inside or before else "left",
        va="center",
        fontsize=9,
        color="white" if inside else style.INK,
    )


@styled
def capture_seconds(frame: pd.DataFrame, about: About | None = None, *, ax: Axes | None = None) -> Axes:
    """Time to record each size, stacked by mode. ``frame``: ``mode``, ``num_tokens``, ``seconds``."""
    ax = style.new_axes(ax, 8.4, 2.6)
    table = frame.pivot_table(index="num_tokens", columns="mode", values="seconds", aggfunc="sum").fillna(0)
    bottom = [0.0] * len(table)
    for mode in table.columns:
        heights = [1000 * value for value in table[mode]]
        colour, hatch = _mode_colour(mode), style.MODE_HATCHES.get(str(mode), "")
        ax.bar(
            range(len(table)), heights, bottom=bottom, width=0.7, label=mode,
            color=colour, hatch=hatch, edgecolor="white", linewidth=0,
        )  # fmt: skip
        bottom = [a + b for a, b in zip(bottom, heights)]
    ax.set_xticks(range(len(table)), [str(size) for size in table.index])
    ax.set_xlabel("size recorded (tokens)")
    ax.set_ylabel("ms")
    ax.grid(axis="y")
    ax.margins(y=0.25 if len(table.columns) > 1 else 0.1)
    if len(table.columns) > 1:
        ax.legend(ncols=3, loc="upper left")
    total = frame["seconds"].sum()
    put_title(ax, f"{len(frame)} graphs recorded in {human_seconds(total)}", about)
    return ax


@styled
def padding_steps(frame: pd.DataFrame, about: About | None = None, *, ax: Axes | None = None) -> Axes:
    """Tokens of each step: those asked for, those that only pad, and how the step ran.

    ``frame``: a row a step, with ``kind``, ``num_tokens``, ``num_padded_tokens`` (after padding), ``mode``.
    """
    ax = style.new_axes(ax, 8.4, 2.8)
    steps = range(len(frame))
    real = list(frame["num_tokens"])
    extra = [padded - tokens for padded, tokens in zip(frame["num_padded_tokens"], real)]
    ax.bar(steps, real, width=0.92, color=style.REAL, label="asked for")
    if any(extra):
        ax.bar(
            steps,
            extra,
            bottom=real,
            width=0.92,
            color=style.PADDING,
            alpha=0.6,
            hatch="////",
            edgecolor="white",
            linewidth=0,
            label="padding",
        )
    top = max(frame["num_padded_tokens"], default=1)
    if top > 4 * sorted(frame["num_padded_tokens"])[len(frame) // 2]:
        ax.set_yscale("symlog", linthresh=16)
        ax.set_yticks(
            [t for t in (0, 4, 8, 16, 64, 256, 1024, 4096) if t <= top * 1.2],
            [str(t) for t in (0, 4, 8, 16, 64, 256, 1024, 4096) if t <= top * 1.2],
        )
    for start, stop, (kind, mode) in blocks_of_equal(list(zip(frame["kind"], frame["mode"]))):
        long = stop - start > 0.12 * len(frame)
        alone = start == 0 and stop == 1  # the usual prefill before everything: room to its right
        ax.annotate(
            f"{kind}, {mode}" if long or alone else mode if stop - start > 1 else "",
            (-0.5 if alone else (start + stop - 1) / 2, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 2),
            textcoords="offset points",
            ha="left" if alone else "center",
            va="bottom",
            fontsize=8.5,
            color=style.INK,
        )
        if start:
            ax.axvline(start - 0.5, color="#8c959f", linewidth=0.5)
    share = sum(extra) / max(sum(real) + sum(extra), 1)
    padded_steps = sum(value > 0 for value in extra)
    ax.set_xlim(-0.6, len(frame) - 0.4)
    ax.set_xlabel("step")
    ax.locator_params(axis="x", integer=True)
    ax.set_ylabel("tokens")
    style.legend_below(ax, 2)
    put_title(
        ax, f"{padded_steps} of {len(frame)} steps were padded; {share:.1%} of all rows computed", about
    )
    return ax


@styled
def ms_per_token(frame: pd.DataFrame, about: About | None = None, *, ax: Axes | None = None) -> Axes:
    """The median time of a decode step by mode, with the middle half of the steps as a whisker.

    ``frame``: ``mode`` and ``ms_per_token``, optionally ``low_ms`` and ``high_ms`` (quartiles).
    """
    ax = style.new_axes(ax, 8.4, 0.95 + 0.42 * len(frame))
    values = list(frame["ms_per_token"])
    colours = [_mode_colour(mode) for mode in frame["mode"]]
    spread = {"low_ms", "high_ms"} <= set(frame.columns)
    ends = [max(v, b) for v, b in zip(values, frame["high_ms"])] if spread else values
    _bars(ax, list(frame["mode"]), values, colours, "{:.2f} ms", ends)
    if spread:
        low = [max(v - a, 0) for v, a in zip(values, frame["low_ms"])]
        high = [max(b - v, 0) for v, b in zip(values, frame["high_ms"])]
        ax.errorbar(
            values, range(len(values)), xerr=[low, high], fmt="none", ecolor=style.INK, capsize=3, lw=1
        )
    ax.set_xlabel("ms a decode step (median; whisker: the middle half of the steps)")
    put_title(ax, "Time per token, the same prompts in every mode", about)
    return ax


def _bars(
    ax: Axes,
    names: Sequence[str],
    values: Sequence[float],
    colours: Sequence[str],
    write: str,
    ends: Sequence[float] | None = None,
) -> None:
    """Horizontal bars from the top, each with its value behind it (behind ``ends``, if they are longer)."""
    ends = values if ends is None else ends
    ax.barh(range(len(names)), values, color=colours, height=0.62)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    for y, (value, end) in enumerate(zip(values, ends)):
        ax.annotate(
            write.format(value),
            (end, y),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    ax.set_xlim(0, (max(ends, default=0) or 1) * 1.16)
    ax.grid(axis="x")


def _mode_colour(mode: str) -> str:
    return style.MODES.get(str(mode), style.SHARED)


def _with_shape(piece: str, shape: Any) -> str:
    return piece if shape in (None, "general") else f"{piece} @ {shape}"
