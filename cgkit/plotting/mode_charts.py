"""Charts of graph modes: the pool while each is recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cgkit.plotting import style
from cgkit.plotting.style import About, legend_below, put_title, styled
from cgkit.plotting.tables import human_bytes

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

#: Colour, dashes and marker of a mode: told apart without colour too.
LOOKS = {
    "PIECEWISE": (style.MODES["PIECEWISE"], "-", "o"),
    "FULL": (style.MODES["FULL"], "--", "s"),
    "FULL_DECODE_ONLY": ("#cc79a7", ":", "^"),
    "FULL_AND_PIECEWISE": ("#d55e00", "-.", "D"),
}


@styled
def pool_while_recording(frame: pd.DataFrame, about: About | None = None, *, ax: Axes | None = None) -> Axes:
    """The pool's size after each recorded key, against the time that recording took so far; a line a mode.

    ``frame``: a row a key, with ``asked``, ``order``, ``seconds``, ``pool_reserved_bytes``, ``graphs``,
    ``num_tokens``, as ``ModeTable.to_frame()`` gives it. The largest size is named where a line begins.
    """
    ax = style.new_axes(ax, 8.4, 3.6)
    top = float(frame["pool_reserved_bytes"].max()) if len(frame) else 0.0
    scale, unit = (2**20, "MiB") if top >= 2**20 else (2**10, "KiB")
    for mode, rows in frame.groupby("asked", sort=False) if len(frame) else ():
        rows = rows.sort_values("order")
        seconds = [0.0, *(1e3 * rows["seconds"].cumsum())]
        held = [0.0, *(rows["pool_reserved_bytes"] / scale)]
        colour, dashes, marker = LOOKS.get(str(mode), (style.SHARED, "-", "x"))
        label = (
            f"{mode}: {int(rows['graphs'].sum())} graphs, {human_bytes(rows['pool_reserved_bytes'].iloc[-1])}"
        )
        ax.step(seconds, held, where="pre", color=colour, linestyle=dashes, linewidth=1.6, label=label)
        ax.plot(seconds[1:], held[1:], marker, color=colour, markersize=4)
    ax.set_xlabel("ms spent on recordings so far (warm-ups not counted); a marker is one size, largest first")
    ax.set_ylabel(f"pool, {unit} reserved")
    ax.set_xlim(left=0)
    ax.set_ylim(0, top / scale * 1.08 or 1)
    ax.grid(axis="y")
    legend_below(ax, 2)
    if len(frame):
        last = frame.sort_values("order").groupby("asked")["pool_reserved_bytes"].last()
        what = f"Most memory in the graphs' pool: {last.idxmax()}, {human_bytes(last.max())}"
        if last.nunique() == 1 and len(last) > 1:
            what = f"Every mode's graphs take {human_bytes(last.max())} of pool"
    else:
        what = "Nothing was recorded"
    put_title(ax, what, about)
    return ax
