"""The compile Gantt: what each stage did when, what came from a cache and what was shared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cgkit.plotting.style import About, new_axes, put_title
from cgkit.plotting.style import style as settings

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

#: A stage's colour, and the hatching that tells it apart without colours.
STAGES = {
    "trace": ("#0072b2", ""),
    "split": ("#56b4e9", ".."),
    "compile": ("#e69f00", "//"),
    "capture": ("#009e73", "\\\\"),
}
#: What was not compiled anew, but found on disk.
FOUND = {"hit": "found in Inductor's cache", "loaded": "loaded from the compile cache"}
#: At most so many bars of a stage; the shortest are summed up in a last one.
MOST = 14


def compile_gantt(frame: pd.DataFrame, about: About | None = None, *, ax: Axes | None = None) -> Axes:
    """A bar for each thing that was done, from its start to its end.

    Args:
        frame: ``stage``, ``what``, ``start_s``, ``seconds``, ``cache``, ``shared_with``, and of captures
            ``graphs`` and ``recording_s`` (:class:`cgkit.measuring.compile_log.CompilationLog`). Of pieces
            that share a compilation one bar is drawn, with how many use it.
        about: stands in the title.
    """
    with settings():
        bars = _bars(frame)
        ax = new_axes(ax, 10.0, 1.3 + 0.34 * max(len(bars), 1))
        origin = min((bar["start_s"] for bar in bars), default=0.0)
        end = max((bar["start_s"] + bar["seconds"] - origin for bar in bars), default=1.0) or 1.0
        for y, bar in enumerate(bars):
            _bar(ax, y, bar, origin, end)
        ax.set_yticks(range(len(bars)), [bar["label"] for bar in bars])
        ax.set_ylim(len(bars) - 0.4, -0.6)
        ax.set_xlim(0, end * 1.02)
        ax.set_xlabel("seconds since the first thing was begun")
        ax.grid(axis="x")
        put_title(ax, _title(frame, end), about)
        return ax


def _bars(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The bars in the order of stages and then of time; what was shared is counted where it came from."""
    shared: dict[str, int] = {}
    bars: list[dict[str, Any]] = []
    for row in frame.to_dict("records"):
        if row.get("cache") == "shared":
            owner = f"{row['shared_with']}{_at(row)}"
            shared[owner] = shared.get(owner, 0) + 1
        else:
            bars.append({**row, "label": _label(row)})
    for bar in bars:
        bar["equal"] = shared.get(f"{bar['piece']}{_at(bar)}", 0) if bar["stage"] == "compile" else 0
    out: list[dict[str, Any]] = []
    for stage in STAGES:
        of_stage = sorted((bar for bar in bars if bar["stage"] == stage), key=lambda bar: bar["start_s"])
        out += _longest(stage, of_stage)
    return out


def _longest(stage: str, bars: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The longest :data:`MOST` of ``bars`` in order, and one that stands for the rest."""
    if len(bars) <= MOST:
        return bars
    kept = sorted(bars, key=lambda bar: -bar["seconds"])[: MOST - 1]
    rest = [bar for bar in bars if bar not in kept]
    spans = [(bar["start_s"], bar["seconds"]) for bar in rest]
    total = sum(seconds for _, seconds in spans)
    summed = {
        "stage": stage,
        "label": f"{stage}  {len(rest)} shorter ones",
        "start_s": spans[0][0],
        "spans": spans,
    }
    return [*(bar for bar in bars if bar in kept), {**summed, "seconds": total, "cache": "", "equal": 0}]


def _label(row: dict[str, Any]) -> str:
    what = row["what"] if row["stage"] in ("compile", "capture") else ""
    words = what if len(what) <= 28 else f"{what[:27]}…"
    return f"{row['stage']}  {words}".strip()


def _at(row: dict[str, Any]) -> str:
    return f" @ {row['shape']}"


def _bar(ax: Axes, y: int, bar: dict[str, Any], origin: float, end: float) -> None:
    colour, hatch = STAGES[bar["stage"]]
    found = bar.get("cache") in FOUND
    spans = bar.get("spans") or [(bar["start_s"], bar["seconds"])]
    for start, seconds in spans:
        look: dict[str, Any] = (
            {"color": "none", "edgecolor": colour} if found else {"color": colour, "edgecolor": "white"}
        )
        ax.barh(
            y, seconds, left=start - origin, height=0.66, hatch=hatch, linewidth=1.2 if found else 0.0, **look
        )
    left = min(start for start, _ in spans) - origin
    right = max(start + seconds for start, seconds in spans) - origin
    ax.plot([left], [y], marker="|", markersize=9, color=colour)  # where it began, however short it is
    before = left > end - right
    ax.annotate(
        _note(bar),
        (left if before else right, y),
        xytext=(-7 if before else 6, 0),
        textcoords="offset points",
        ha="right" if before else "left",
        va="center",
        fontsize=9,
    )


def _note(bar: dict[str, Any]) -> str:
    parts = [_seconds(bar["seconds"])]
    if bar["stage"] == "capture" and bar.get("graphs") == bar.get("graphs") and bar.get("graphs"):
        graphs = int(bar["graphs"])
        parts.append(f"{graphs} graph{'s' * (graphs != 1)}, {_seconds(bar['recording_s'])} of it recording")
    if bar.get("cache") in FOUND:
        parts.append(FOUND[bar["cache"]])
    if bar["equal"]:
        parts.append(f"shared with {bar['equal']} equal piece{'s' * (bar['equal'] != 1)}")
    return ", ".join(parts)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"


def _title(frame: pd.DataFrame, end: float) -> str:
    compiled = frame[frame["stage"] == "compile"]
    counts = compiled["cache"].value_counts()
    words = {
        "miss": "compiled",
        "none": "taken as they are",
        **FOUND,
        "shared": "shared",
    }
    said = ", ".join(f"{counts[cache]} {word}" for cache, word in words.items() if counts.get(cache))
    span = f"{end:.1f} s from trace to graphs" if (frame["stage"] == "capture").any() else f"{end:.1f} s"
    asked = f"{len(compiled)} compilation{'s' * (len(compiled) != 1)} asked for"
    return f"{span}. {asked}: {said}" if len(compiled) else span
