"""Charts of served traffic: what requests waited for, which graphs ran, how large the batches were.

The frames are those of :mod:`cgkit.measuring.serve_traffic`, all runs together, with a column ``mode``.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from cgkit.plotting import style
from cgkit.plotting.style import About, legend_below, put_title, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKS = ((0.5, "o", "median"), (0.9, "s", "p90"), (0.99, "D", "p99"))
_HATCHES = {"FULL": "", "PIECEWISE": "///", "NONE": "xx"}
_COLOURS = {**style.MODES, "FULL_AND_PIECEWISE": style.SERIES[2], "FULL_DECODE_ONLY": style.PADDING}
_WORDS = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token",
    "total_ms": "time to the last token",
}


@styled
def overview(requests: pd.DataFrame, steps: pd.DataFrame, about: About | None = None) -> Axes:
    """Four panels: time to first token, per output token, steps by what was taken, batch sizes; returns the first."""
    from matplotlib.figure import Figure

    modes = list(dict.fromkeys(requests["mode"]))
    figure: Figure = Figure(figsize=(9.6, 3.6 + 0.7 * len(modes)))
    (first, second), (third, fourth) = figure.subplots(2, 2)
    _quantiles(first, requests, "ttft_ms")
    _quantiles(second, requests, "tpot_ms")
    _taken(third, steps)
    _batches(fourth, steps)
    second.tick_params(labelleft=False)
    third.set_title("Steps by what was taken")
    fourth.set_title("Tokens in a step, before padding")
    first.set_title("Time to first token")
    second.set_title("Time per output token")
    handles = first.get_legend_handles_labels()[0] + third.get_legend_handles_labels()[0]
    if len(modes) > 1:
        handles += fourth.get_legend_handles_labels()[0]
    figure.legend(handles=handles, ncols=4, loc="outside lower left")
    line = "\n".join(textwrap.wrap(about.line() if about else "", 105))
    heading = figure.suptitle(
        "\n".join(filter(None, [_verdict(requests, about), line])), x=0.008, ha="left", fontsize=10.5
    )
    heading.set_gid("cg-title")
    return first


@styled
def latencies(
    requests: pd.DataFrame, what: str = "ttft_ms", about: About | None = None, *, ax: Axes | None = None
) -> Axes:
    """Median, p90 and p99 of ``what`` (``ttft_ms``, ``tpot_ms`` or ``total_ms``), a line a mode."""
    ax = style.new_axes(ax, 8.4, 1.3 + 0.4 * requests["mode"].nunique())
    _quantiles(ax, requests, what)
    legend_below(ax, 3)
    put_title(ax, f"{_WORDS[what].capitalize()} of {requests['mode'].value_counts().max():,} requests", about)
    return ax


@styled
def steps_taken(steps: pd.DataFrame, about: About | None = None, *, ax: Axes | None = None) -> Axes:
    """How many steps ran FULL, PIECEWISE and without a graph, and what of each mode's work was padding."""
    ax = style.new_axes(ax, 8.4, 1.3 + 0.4 * steps["mode"].nunique())
    _taken(ax, steps)
    legend_below(ax, 3)
    put_title(ax, "Steps by what was taken", about)
    return ax


@styled
def batch_sizes(steps: pd.DataFrame, about: About | None = None, *, ax: Axes | None = None) -> Axes:
    """How many steps had at most so many tokens, a line a mode."""
    ax = style.new_axes(ax, 8.4, 3.0)
    _batches(ax, steps)
    legend_below(ax, 4)
    put_title(ax, "Tokens in a step, before padding", about)
    return ax


def _verdict(requests: pd.DataFrame, about: About | None) -> str:
    """The title: the mode with the shortest median time per output token, against the longest; nothing of the kind
    where modes are emulated, as they differ by nothing that a GPU would know."""
    if about is not None and about.emulated:
        return (
            f"{requests['mode'].value_counts().max():,} requests through {requests['mode'].nunique()} modes"
        )
    medians = requests.groupby("mode", sort=False)["tpot_ms"].median().dropna()
    if len(medians) < 2:
        return f"{len(requests):,} requests served"
    best, worst = medians.idxmin(), medians.idxmax()
    return (
        f"A token takes {medians[best]:.2f} ms in {best} and {medians[worst]:.2f} ms in {worst} (medians of the same "
        "traffic)"
    )


def _quantiles(ax: Axes, requests: pd.DataFrame, what: str) -> None:
    groups = list(requests.groupby("mode", sort=False))
    for row, (mode, part) in enumerate(groups):
        values = [part[what].quantile(share) for share, _, _ in _MARKS]
        colour = _COLOURS.get(str(mode), style.EAGER)
        ax.plot(values, [row] * len(values), color=colour, linewidth=1.4, alpha=0.6)
        for value, (_, mark, name) in zip(values, _MARKS):
            label = name if row == 0 else None
            ax.plot(value, row, mark, color=style.INK, markerfacecolor=colour, markersize=6, label=label)
    ax.set_yticks(range(len(groups)), [str(mode) for mode, _ in groups])
    ax.set_ylim(len(groups) - 0.5, -0.5)
    ax.set_xlim(0, None)
    ax.set_xlabel("ms")
    ax.grid(axis="x")


def _taken(ax: Axes, steps: pd.DataFrame) -> None:
    groups = list(steps.groupby("mode", sort=False))
    for taken, hatch in _HATCHES.items():
        counts = [int((part["taken"] == taken).sum()) for _, part in groups]
        starts = [
            int(part["taken"].isin(list(_HATCHES)[: list(_HATCHES).index(taken)]).sum()) for _, part in groups
        ]
        name = "without a graph" if taken == "NONE" else f"{taken} replayed"
        ax.barh(
            range(len(groups)), counts, left=starts, height=0.6, color=style.MODES[taken], hatch=hatch,
            edgecolor="white", label=name,
        )  # fmt: skip
    for row, (_, part) in enumerate(groups):
        computed = part["num_padded_tokens"].sum()
        share = (computed - part["num_tokens"].sum()) / max(computed, 1)
        ax.annotate(
            f"{share:.0%} padding", (len(part), row), xytext=(6, 0), textcoords="offset points", va="center",
            fontsize=8.5,
        )  # fmt: skip
    ax.set_yticks(range(len(groups)), [str(mode) for mode, _ in groups])
    ax.set_ylim(len(groups) - 0.5, -0.5)
    ax.set_xlim(0, 1.22 * max(len(part) for _, part in groups))
    ax.set_xlabel("steps")


def _batches(ax: Axes, steps: pd.DataFrame) -> None:
    for number, (mode, part) in enumerate(steps.groupby("mode", sort=False)):
        sizes = part["num_tokens"].sort_values()
        shares = [100 * (index + 1) / len(sizes) for index in range(len(sizes))]
        colour = _COLOURS.get(str(mode), style.EAGER)
        dash = ("-", "--", "-.", ":")[number % 4]
        ax.step(
            [sizes.iloc[0], *sizes], [0, *shares], where="post", color=colour, linestyle=dash, label=str(mode)
        )
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_xlabel("tokens, at most")
    ax.set_ylabel("% of the steps")
    ax.set_ylim(0, 103)
    ax.grid()
