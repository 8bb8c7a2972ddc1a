"""Where each event of a timeline goes: rows, paints, gaps, and what is shorter than a pixel.

The frame is ``Timeline.events``. A *group* is a block of rows with one label: the operators of a CPU
thread (nested ones below each other), that thread's calls into the runtime, or one stream of a GPU.
The static picture and the interactive one both draw from here, so that they show the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

WORK = ("python", "annotation", "op", "guard", "other")
CALLS = ("launch", "graph_launch", "copy_call", "sync", "runtime")
GPU_MARKS = ("gpu_annotation",)
GPU = ("kernel", "memcpy", "memset")
#: Kinds in the order of the legend.
KINDS = (*WORK, *CALLS, *GPU, *GPU_MARKS)
_EPSILON_US = 5e-4  # Kineto rounds to nanoseconds: a child may end that much after its parent
_OVERLAP_US = 1.0  # a kernel may begin before the one before it in its stream has ended: they share a row
#: The blocks of rows that a lane may have, from the top.
SIDES = ("work", "calls", "gpu", "gpu_marks")


@dataclass(frozen=True)
class Paint:
    """How one sort of event looks. ``dark``: the colour on a dark page. ``hatch``: also in grey print."""

    label: str
    colour: str
    dark: str = ""
    hatch: str = ""


#: Costs of the CPU are grey, launches vermilion; the GPU's work is blue, attention orange and hatched.
PAINTS: dict[str, Paint] = {
    "python": Paint("Python", "#d5dae0", "#3d454e"),
    "annotation": Paint("annotation", "#e6e9ed", "#2f363e"),
    "op": Paint("operator (dispatch)", "#b3bcc6", "#5b6673"),
    "guard": Paint("guards", "#cc79a7", hatch="xx"),
    "other": Paint("other", "#d5dae0", "#3d454e"),
    "launch": Paint("kernel launch", "#d55e00", "#e8742a"),
    "graph_launch": Paint("graph launch", "#009e73", "#1fb58c", hatch="\\\\"),
    "copy_call": Paint("copy call", "#8a6d00", "#c9a92c"),
    "sync": Paint("waiting (sync)", "#f5f0c0", "#57542f", hatch=".."),
    "runtime": Paint("other runtime call", "#8c959f", "#8c959f"),
    "gpu_annotation": Paint("mark on the GPU", "#e6e9ed", "#2f363e"),
    "matrix": Paint("kernel: matrix product", "#0072b2", "#2f8fd0"),
    "attention": Paint("kernel: attention", "#e69f00", "#e69f00", hatch="////"),
    "kernel": Paint("kernel: other", "#8fc5ea", "#7dbbe6"),
    "memcpy": Paint("memory copy or fill", "#f0e442", "#d9cd3a"),
    "memset": Paint("memory copy or fill", "#f0e442", "#d9cd3a"),
}
PIECE_COLOURS = ("#0072b2", "#86c5ee", "#a569a8", "#2b2f63")
PIECE_HATCHES = ("", "\\\\", "..", "xx")

#: Why the GPU had nothing to do, as the bill names it.
GAPS: dict[str, Paint] = {
    "idle_launching": Paint("idle: CPU launching", "#f7d7c4", "#4d2c19", hatch="//"),
    "idle_python": Paint("idle: CPU in Python or dispatch", "#dfe3e8", "#30373f", hatch=""),
    "idle_sync": Paint("idle: CPU in a sync", "#f5f0c0", "#454223", hatch=".."),
    "idle_elsewhere": Paint("idle: CPU elsewhere", "#eef0f2", "#24292f", hatch="\\\\"),
    "idle_inside_graph": Paint("idle: between nodes of a graph", "#cdeadf", "#173d31", hatch="--"),
    "idle": Paint("idle", "#e1e5ea", "#262c33", hatch="//"),
}

_attention = re.compile(r"attention|attn|flash|fmha|paged|mha_|sdpa", re.I)
_matrix = re.compile(r"gemm|gemv|cutlass|cublas|nvjet|xmma|cijk_|splitk|matmul|_mm_|dot_kernel|wgmma", re.I)


def kernel_class(name: str) -> str:
    """``attention``, ``matrix`` or ``kernel``: by words in the kernel's name, so a guess.

    >>> kernel_class("flash_fwd_splitkv_kernel"), kernel_class("nvjet_tst_64x8"), kernel_class("rms_norm")
    ('attention', 'matrix', 'kernel')
    """
    if _attention.search(name):
        return "attention"
    return "matrix" if _matrix.search(name) else "kernel"


@dataclass
class Group:
    """Some rows under one label. ``side``: ``work``, ``calls``, ``gpu_marks`` or ``gpu``; ``device`` -1: a CPU."""

    label: str
    side: str
    process: int
    device: int
    first_row: int
    rows: int


@dataclass
class Layout:
    """``row`` of each event (-1: not drawn), the groups from the top, and how many lie too deep to be drawn."""

    groups: list[Group]
    row: np.ndarray
    too_deep: int = 0

    @property
    def num_rows(self) -> int:
        """All rows of all groups."""
        return sum(group.rows for group in self.groups)


def layout(
    events: pd.DataFrame,
    lanes: Sequence[str] | None = None,
    most_deep: int | None = None,
    sides: Sequence[str] = SIDES,
) -> Layout:
    """Gives each event a row: threads that call the runtime first, each process' GPU under its threads.

    Args:
        events: ``Timeline.events``, or a part of it.
        lanes: only these lanes.
        most_deep: leave out operators nested deeper than that.
        sides: only these, in this order within a lane.
    """
    row = np.full(len(events), -1, dtype=np.int32)
    start, dur = events["start_us"].to_numpy(float), events["dur_us"].to_numpy(float)
    kind = events["kind"].astype(str).to_numpy()
    lane_codes, lane_names = codes_of(events["lane"])
    groups: list[Group] = []
    too_deep = 0
    side_of = np.array([_side(k) for k in kind], dtype=object) if len(kind) else np.array([], dtype=object)
    for code in _lane_order(events, lane_codes, lane_names, side_of):
        name = lane_names[code]
        if lanes is not None and name not in lanes:
            continue
        inside = np.flatnonzero(lane_codes == code)
        if len(inside) and (kind[inside] == "other").all():
            continue  # the profiler's own remarks
        for side in sides:
            chosen = inside[side_of[inside] == side]
            if not len(chosen):
                continue
            depth = _depths(start[chosen], dur[chosen], _OVERLAP_US if side == "gpu" else _EPSILON_US)
            if most_deep is not None and side == "work":
                too_deep += int((depth >= most_deep).sum())
                depth[depth >= most_deep] = -1
            rows = int(depth.max()) + 1
            first = groups[-1].first_row + groups[-1].rows if groups else 0
            row[chosen] = np.where(depth >= 0, depth + first, -1)
            process, device = (int(events[column].iloc[chosen[0]]) for column in ("process", "device"))
            groups.append(Group(_group_label(name, side), side, process, device, first, rows))
    _shorten(groups)
    return Layout(groups, row, too_deep)


def _shorten(groups: list[Group]) -> None:
    """Takes "rank 0 · " off the labels where there is only that rank."""
    lanes = [group for group in groups if group.side in ("work", "gpu") and " · " in group.label]
    ranks = {group.label.split(" · ")[0] for group in lanes}
    for group in lanes:
        rank, _, rest = group.label.partition(" · ")
        if len(ranks) == 1 and rank.startswith("rank"):
            group.label = rest


def _side(kind: str) -> str:
    if kind in CALLS:
        return "calls"
    if kind in GPU:
        return "gpu"
    return "gpu_marks" if kind in GPU_MARKS else "work"


def _group_label(lane: str, side: str) -> str:
    if side == "calls":
        return "runtime calls"
    return "marks" if side == "gpu_marks" else lane


def _lane_order(
    events: pd.DataFrame, codes: np.ndarray, names: Sequence[str], side_of: np.ndarray
) -> list[int]:
    """Lane codes from the top: by process; CPU threads by their calls; then streams by their number."""

    def key(code: int) -> tuple[float, ...]:
        inside = codes == code
        first = int(np.argmax(inside))
        process = int(events["process"].iloc[first])
        on_gpu = bool((side_of[inside] == "gpu").any() or (side_of[inside] == "gpu_marks").any())
        if on_gpu:
            return (process, 1, int(events["device"].iloc[first]), int(events["stream"].iloc[first]))
        return (process, 0, -int((side_of[inside] == "calls").sum()), -int(inside.sum()))

    return sorted((c for c in range(len(names)) if (codes == c).any()), key=key)


def codes_of(column: pd.Series) -> tuple[np.ndarray, list[str]]:
    """A column as whole numbers and what they stand for."""
    import pandas as pd

    codes, names = pd.factorize(column.astype(str))
    return codes, [str(name) for name in names]


def _depths(start: np.ndarray, dur: np.ndarray, slack_us: float) -> np.ndarray:
    """How many events of the same group enclose each; events that merely overlap get rows of their own."""
    order = np.lexsort((-dur, start))
    begins, ends = start[order].tolist(), (start + dur)[order].tolist()
    depth = np.zeros(len(start), dtype=np.int32)
    open_ends: list[float] = []
    for place, begin, end in zip(order.tolist(), begins, ends):
        while open_ends and open_ends[-1] <= begin + slack_us:
            open_ends.pop()
        depth[place] = len(open_ends)
        open_ends.append(end)
    return depth


def paints(events: pd.DataFrame, by: str = "piece") -> tuple[np.ndarray, list[Paint]]:
    """The paint of each event, as an index into the list.

    Args:
        events: ``Timeline.events``, or a part of it.
        by: ``piece``: kernels (and what launched them) in their piece's colour, where the piece is known;
            ``kind``: kernels by what their name says they compute.
    """
    kinds, kind_names = codes_of(events["kind"])
    kind_names = [name if name in PAINTS else "other" for name in kind_names]
    keys = list(PAINTS)
    codes = np.array([keys.index(name) for name in kind_names] or [0], dtype=np.int32)[kinds]
    codes = codes.astype(np.int32)
    names, texts = codes_of(events["name"])
    classes = np.array([keys.index(kernel_class(text)) for text in texts] or [0], dtype=np.int32)
    kernel = codes == keys.index("kernel")
    codes[kernel] = classes[names[kernel]]
    palette = list(PAINTS.values())
    if by == "piece" and "piece" in events:
        _paint_pieces(events, codes, palette, keys.index("attention"))
    return codes, palette


def _paint_pieces(events: pd.DataFrame, codes: np.ndarray, palette: list[Paint], attention: int) -> None:
    """Kernels, graph launches and marks of a piece get its paint; a piece that is attention keeps its own."""
    pieces, names = codes_of(events["piece"])
    kind = events["kind"].astype(str).to_numpy()
    stage = events["stage"].astype(str).to_numpy() if "stage" in events else np.full(len(kind), "")
    coloured = np.isin(kind, ("kernel", "memcpy", "memset"))
    plain = 0
    for code, name in sorted(enumerate(names), key=lambda pair: natural(pair[1])):
        inside = coloured & (pieces == code)
        if not name or name == "nan" or not inside.any():
            continue
        if (stage[inside] == "attention").mean() > 0.5:
            codes[inside] = attention
            continue
        colour = PIECE_COLOURS[plain % len(PIECE_COLOURS)]
        hatch = PIECE_HATCHES[plain // len(PIECE_COLOURS) % len(PIECE_HATCHES)]
        palette.append(Paint(f"piece {name}", colour, colour, hatch))
        codes[inside] = len(palette) - 1
        plain += 1


def natural(text: str) -> list[tuple[int, int | str]]:
    """Sorts ``submod_10`` after ``submod_9``."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", text) if part]


def busy_intervals(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The union of intervals, as starts and ends: what overlaps counts once."""
    if not len(start):
        return start, end
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    new = np.concatenate(([True], start[1:] > reach[:-1]))
    return start[new], reach[np.concatenate((np.flatnonzero(new)[1:] - 1, [len(reach) - 1]))]


def gpu_gaps(events: pd.DataFrame) -> pd.DataFrame:
    """Between the first and the last event of each GPU: when nothing ran on any of its streams.

    Returns columns ``process``, ``device``, ``start_us``, ``dur_us`` and ``cause`` (here always ``idle``: the
    bill knows more).
    """
    import pandas as pd

    on_gpu = events[events["kind"].astype(str).isin(GPU)]
    rows = []
    for (process, device), part in on_gpu.groupby(["process", "device"], observed=True):
        starts, ends = busy_intervals(
            part["start_us"].to_numpy(float), (part["start_us"] + part["dur_us"]).to_numpy(float)
        )
        rows += [(process, device, a, b - a, "idle") for a, b in zip(ends[:-1], starts[1:])]
    return pd.DataFrame(rows, columns=["process", "device", "start_us", "dur_us", "cause"])


def busy_columns(start: np.ndarray, end: np.ndarray, left: float, column_us: float, count: int) -> np.ndarray:
    """Share (0 to 1) of each of ``count`` columns of ``column_us`` from ``left`` that the events fill.

    The events must not be longer than a column: then each touches two at most.
    """
    busy = np.zeros(count + 2)
    if not len(start):
        return busy[:count]
    start, end = np.clip(start, left, left + count * column_us), np.clip(end, left, left + count * column_us)
    first = np.clip(((start - left) // column_us).astype(np.int64), 0, count)
    border = left + (first + 1) * column_us
    np.add.at(busy, first, np.minimum(end, border) - start)
    np.add.at(busy, first + 1, np.maximum(end - border, 0.0))
    return np.minimum(busy[:count] / column_us, 1.0)


def cut(events: pd.DataFrame, window: tuple[float, float] | None) -> pd.DataFrame:
    """The events that overlap ``window`` (microseconds), index unchanged, so that ties still hold."""
    if window is None:
        return events
    start = events["start_us"]
    return events[(start < window[1]) & (start + events["dur_us"] > window[0])]


_NEEDED = ("lane", "kind", "name", "start_us", "dur_us", "process", "device", "stream", "launched_by")


def check(events: pd.DataFrame) -> None:
    """Refuses a frame of which no true picture can be drawn.

    Raises:
        ValueError: a column is missing, a row of the index is not unique, or a time is NaN.
    """
    if missing := [name for name in _NEEDED if name not in events]:
        raise ValueError(
            f"the events have no column {', '.join(missing)}: draw Timeline.events, or rows of it"
        )
    if not events.index.is_unique:
        twice = events.index[events.index.duplicated()][0]
        raise ValueError(
            f"row {twice} is there twice, so that no launch can be told: draw several traces with compare_timelines, "
            "or read all files of one run with Timeline.from_trace"
        )
    odd = events[["start_us", "dur_us"]].isna().any(axis=1)
    if odd.any():
        raise ValueError(
            f"{int(odd.sum()):,} events have no start_us or dur_us (the first: row {odd.idxmax()}): drop them with "
            "events.dropna(subset=['start_us', 'dur_us'])"
        )


def extent(events: pd.DataFrame) -> tuple[float, float]:
    """First start and last end, in microseconds."""
    if not len(events):
        return 0.0, 1.0
    first = float(events["start_us"].min())
    return first, max(float((events["start_us"] + events["dur_us"]).max()), first + 1e-3)


def time_unit(span_us: float) -> tuple[float, str]:
    """What to divide microseconds by so that ``span_us`` has few digits, and the unit's name."""
    if span_us >= 2e6:
        return 1e6, "s"
    return (1e3, "ms") if span_us >= 2e3 else (1.0, "µs")
