"""The headline as a sheet of small panels: a row a model, a column a case and batch size, a bar a mode."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from cgkit.plotting import style
from cgkit.plotting.style import About, styled, titled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

#: Colour and hatching of a mode.
LOOKS: dict[str, tuple[str, str]] = {
    "eager": (style.EAGER, ""),
    "level 1": ("#cc79a7", ".."),
    "compiled": (style.MODES["compiled"], ""),
    "PIECEWISE": (style.MODES["PIECEWISE"], ""),
    "FULL": (style.MODES["FULL"], "//"),
    "FULL_AND_PIECEWISE": (style.MODES["FULL"], ""),
    "torch.compile": ("#e69f00", ""),
    "reduce-overhead": ("#e69f00", "\\\\"),
}
_FLOOR = "#c0392b"


@styled
def headline(frame: pd.DataFrame, about: About | None = None) -> Axes:
    """All panels of ``cgkit bench headline`` on one figure; the first one's axes are returned.

    ``frame``: its CSV: ``model``, ``case``, ``mode``, ``batch``, ``wall_ms``, ``cpu_ms``, ``gpu_busy_ms``,
    ``floor_ms``, ``ratio_to_eager``, ``emulated``, ``device``.
    """
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(frame["model"]))
    columns = sorted({(case, int(batch)) for case, batch in zip(frame["case"], frame["batch"])})
    modes = [mode for mode in LOOKS if mode in set(frame["mode"])]
    height = 0.75 + len(models) * (0.62 + 0.225 * len(modes))
    figure = Figure(figsize=(max(9.4, 2.2 + 2.7 * len(columns)), height))
    grid: Any = figure.subplots(len(models), len(columns), squeeze=False)
    for axes, model in zip(grid, models):
        for number, (ax, (case, batch)) in enumerate(zip(axes, columns)):
            part = frame[(frame["model"] == model) & (frame["case"] == case) & (frame["batch"] == batch)]
            if len(part) == 0:
                ax.set_axis_off()
                continue
            panel(part, modes, ax=ax)
            ax.set_title(_heading(part, str(case), batch), fontsize=9)
            if number:
                ax.set_yticklabels([])
            else:
                ax.annotate(str(model), (0, 1), xycoords="axes fraction", xytext=(-6, 7), ha="right",
                            textcoords="offset points", fontsize=10.5, fontweight="bold")  # fmt: skip
    fit = min(4, max(2, len(columns) - 1))  # of the legend's entries side by side
    figure.legend(handles=_handles(frame), ncols=fit, loc="outside lower left", fontsize=9)
    about = about or _about(frame)
    heading = figure.suptitle(titled(_what(frame), about), x=0.008, ha="left", fontsize=11)
    heading.set_gid("cg-title")
    return grid[0][0]


@styled
def panel(frame: pd.DataFrame, modes: list[str] | None = None, *, ax: Axes | None = None) -> Axes:
    """One model, case and batch: a bar a mode with the wall time; inside it the GPU's busy time, a tick for the CPU's,
    a line for the floor. Behind it the time and how many times faster than eager that is (``*``: over ``twin_ms``).
    Without ``ax`` the figure has a legend, too."""
    modes = modes or [mode for mode in LOOKS if mode in set(frame["mode"])]
    alone = ax is None
    ax = style.new_axes(ax, 7.4, 1.4 + 0.26 * len(modes))
    rows = {row["mode"]: row for row in frame.to_dict("records")}
    longest = max(float(row["wall_ms"]) for row in rows.values())
    for y, mode in enumerate(modes):
        if mode not in rows:
            ax.annotate(
                "not measured", (0, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
            )
            continue
        row, (colour, hatch) = rows[mode], LOOKS[mode]
        wall, busy, cpu = (_number(row.get(name)) for name in ("wall_ms", "gpu_busy_ms", "cpu_ms"))
        ax.barh(y, wall, height=0.7, color=colour, alpha=0.55 if busy else 0.85, hatch=hatch, edgecolor="white",
                linewidth=0)  # fmt: skip
        if busy:
            ax.barh(y, min(busy, wall), height=0.34, color=style.INK, alpha=0.72)
        if cpu:
            ax.plot([min(cpu, wall)] * 2, [y - 0.42, y + 0.42], color=style.INK, linewidth=1.6)
        times, apart = _number(row.get("ratio_to_eager")), "*" if _number(row.get("twin_ms")) else ""
        faster = (
            "" if not times or mode == "eager" else f"  {1 / times:.{1 if times > 0.0505 else 0}f}×{apart}"
        )
        ax.annotate(
            _ms(wall) + faster, (wall, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
        )
    floors = [value for value in (_number(row.get("floor_ms")) for row in rows.values()) if value]
    if floors:
        ax.axvline(floors[0], color=_FLOOR, linewidth=1.1, linestyle=(0, (4, 2)))
    ax.set_yticks(range(len(modes)), modes, fontsize=8.5)
    ax.set_ylim(len(modes) - 0.45, -0.55)
    ax.set_xlim(0, longest * 1.42)
    ax.tick_params(axis="x", labelsize=8)
    ax.locator_params(axis="x", nbins=4)
    ax.grid(axis="x")
    if alone:
        ax.set_xlabel("ms", fontsize=8.5)
        style.legend_below(ax, 2, _handles(frame))
    return ax


def _heading(part: pd.DataFrame, case: str, batch: int) -> str:
    first = part.iloc[0]
    if case == "generate":
        return f"{int(first['prompt_tokens'])} in, {int(first['new_tokens'])} out, batch {batch} (ms)"
    return f"a decode step, batch {batch} (ms)"


def _what(frame: pd.DataFrame) -> str:
    decode = frame[(frame["case"] == "decode") & frame["ratio_to_eager"].notna() & (frame["mode"] != "eager")]
    if decode.empty:
        return "Every way to run a model, side by side"
    best = decode.iloc[int(decode["ratio_to_eager"].argmin())]  # several CSVs in one frame repeat their index
    return (
        f"Every way to run a model, side by side: at best {1 / best['ratio_to_eager']:.1f} times eager "
        f"({best['model']}, {best['mode']}, batch {int(best['batch'])})"
    )


def _about(frame: pd.DataFrame) -> About:
    emulated = bool(frame["emulated"].any())
    recorded = str(frame.attrs.get("recorded", ""))
    device = "" if emulated or recorded else ", ".join(dict.fromkeys(map(str, frame["device"])))
    return About("random weights", device=device, emulated=emulated, recorded=recorded)


def _handles(frame: pd.DataFrame) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(facecolor=style.EAGER, alpha=0.55, label="wall time, synchronised; × faster than eager")
    ]
    if frame["gpu_busy_ms"].notna().any():
        handles.append(Patch(facecolor=style.INK, alpha=0.72, label="GPU busy"))
    if frame["cpu_ms"].notna().any():
        handles.append(
            Line2D(
                [],
                [],
                color=style.INK,
                marker="|",
                markersize=9,
                markeredgewidth=1.6,
                linestyle="none",
                label="CPU: until the call returns",
            )
        )
    if frame["floor_ms"].notna().any():
        label = "floor: weight bytes over copy bandwidth"
        handles.append(Line2D([], [], color=_FLOOR, linewidth=1.1, linestyle=(0, (4, 2)), label=label))
    if "twin_ms" in frame and frame["twin_ms"].notna().any():
        label = "* own process: × by way of FULL_AND_PIECEWISE"
        handles.append(Line2D([], [], linestyle="none", label=label))
    return handles


def _number(value: Any) -> float:
    """``value`` as a float; 0 where it is missing."""
    found = float("nan") if value is None else float(value)
    return 0.0 if math.isnan(found) else found


def _ms(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"
