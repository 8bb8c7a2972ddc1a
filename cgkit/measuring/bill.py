"""The bill of a step: where its wall time went, on the CPU and on the GPU.

The CPU's side cuts the wall time of the thread that launches into disjoint parts: each instant belongs
to what the thread was doing most closely, in the order of :data:`CPU_PARTS`. The GPU's side cuts the same time
into busy (streams that overlap count once) and idle, and asks for each idle instant what the CPU was doing then.

The article ("为什么需要 CUDA Graph", why CUDA graphs) names three costs of a step, Python, launches and
the GPU's own time, and three weapons against them; and computes a step's time as the sum over kernels of the larger
of launch time and run time. That is the time of a step in which each launch waits for the kernel before it and
nothing else takes time. Launches queue, and Python takes time too: the sum stands beside the bill as
``article_formula_us``, for comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cgkit.display import Shown
from cgkit.errors import TimelineError
from cgkit.measuring import intervals
from cgkit.measuring.bill_table import names_of, reading_table
from cgkit.measuring.event_kinds import CODE
from cgkit.measuring.step_window import EventColumns, StepWindow, event_columns

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from cgkit.measuring.timeline import Timeline

#: The parts of the CPU's side in the order in which they are shown, and the kinds of events that they consist of.
CPU_PARTS = {
    "python": ("annotation", "python"),
    "dispatch": ("op",),
    "guards": ("guard",),
    "kernel_launches": ("launch",),
    "graph_launches": ("graph_launch",),
    "copies": ("copy_call",),
    "runtime_other": ("runtime",),
    "waiting": ("sync",),
}
#: Who owns an instant that several cover: the first of these.
_PRIORITY = (
    "waiting",
    "graph_launches",
    "kernel_launches",
    "copies",
    "runtime_other",
    "guards",
    "dispatch",
    "python",
)
#: An idle instant of the GPU is named after the CPU's part.
IDLE_CAUSES = {
    "idle_launching": ("kernel_launches", "graph_launches", "copies"),
    "idle_python": ("python", "dispatch", "guards"),
    "idle_sync": ("waiting",),
    "idle_elsewhere": ("runtime_other", "unexplained"),
}
#: A launch reaches an idle GPU within some tens of microseconds; far beyond, something else kept it.
_LATE_US = 1000.0


@dataclass(repr=False)
class Bill(Shown):
    """Where the wall time of one step went; all times in microseconds.

    ``parts`` (CPU) and ``gpu`` each add up to ``wall_us``, which runs from the step's begin on the CPU to the
    later of its end there and the end of the last GPU work that it launched. After the CPU's end the step waits
    for the GPU. ``python`` is the time inside an annotation and outside of all operators and calls; outside of
    annotations too, time is ``unexplained``. A copy call that blocks (``cudaMemcpy``, ``hipMemcpyWithStream``:
    no "Async" in the name) is under ``waiting``. GPU work of an earlier step that runs
    within this one's time counts as busy; ``kernels`` are those that this step launched (in a step that is a
    whole trace, all). Several GPUs of one process are busy when any of them is; ``busy_by_gpu`` keeps them apart.

    ``queue_depth``: ``median`` and ``max`` number of kernels launched and not yet started when a launch returns,
    ``median_ahead_us`` and ``max_ahead_us`` from a launch's return to its kernel's start. ``article_formula_us``: the
    sum over launches of the larger of the call and the run time of what it launched (of all kernels of a graph).
    """

    wall_us: float
    parts: dict[str, float]
    gpu: dict[str, float]
    kernels: int
    kernels_tied: int
    launches: int
    graph_launches: int
    kernels_in_graphs: int
    median_launch_us: float
    median_graph_launch_us: float
    queue_depth: dict[str, float]
    article_formula_us: float
    step: str = ""
    process: int = 0
    mode: str = ""
    about: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    busy_by_gpu: dict[int, float] = field(default_factory=dict)

    @property
    def saw_gpu(self) -> bool:
        """Whether any GPU was at work; if none was, calling it idle would mislead."""
        return self.kernels > 0 or self.gpu["busy"] > 0

    def to_frame(self) -> pd.DataFrame:
        """A row a part: ``side`` (cpu or gpu), ``part``, ``us``, ``share`` (of the wall time), ``mode``."""
        import pandas as pd

        rows = [
            {"side": side, "part": part, "us": us, "share": us / self.wall_us if self.wall_us else 0.0}
            for side, parts in (("cpu", self.parts), ("gpu", self.gpu))
            for part, us in parts.items()
        ]
        return pd.DataFrame(rows).assign(mode=self.mode)

    def facts(self) -> dict[str, Any]:
        """The numbers beside the parts, by name."""
        names = (
            "kernels",
            "kernels_tied",
            "kernels_in_graphs",
            "launches",
            "graph_launches",
            "median_launch_us",
            "median_graph_launch_us",
            "article_formula_us",
        )
        depth = {f"queue_{name}": value for name, value in self.queue_depth.items()}
        return {name: getattr(self, name) for name in names} | depth

    @staticmethod
    def compare(bills: Sequence[Bill]) -> pd.DataFrame:
        """Bills side by side: a row a part and a column a mode.

        ``side`` is "cpu" or "gpu" (microseconds), or "facts" (as :meth:`facts` names them, and ``wall_us``).
        """
        import pandas as pd

        if not bills:
            raise TimelineError("there is no bill to compare")
        columns: dict[str, dict[tuple[str, str], float]] = {}
        for name, one in zip(names_of(bills), bills):
            column: dict[tuple[str, str], float] = {("facts", "wall_us"): one.wall_us}
            column |= {("cpu", part): us for part, us in one.parts.items()}
            column |= {("gpu", part): us for part, us in one.gpu.items()}
            columns[name] = column | {("facts", fact): value for fact, value in one.facts().items()}
        table = pd.DataFrame(columns)
        table.index = pd.MultiIndex.from_tuples(table.index, names=["side", "part"])
        return table.reset_index()

    def table(self) -> pd.DataFrame:
        """For reading: each part that is not zero, in words, with its time and its share."""
        return reading_table([self])

    def plot(self, ax: Axes | None = None) -> Axes:
        """Two stacked bars, the CPU's and the GPU's; see :func:`cgkit.plotting.bill.bill`."""
        return plot([self], ax)

    def __repr__(self) -> str:
        from cgkit.plotting.tables import text_table

        title = " · ".join(filter(None, (self.mode, self.step, str(self.about.get("device") or ""))))
        return "\n".join([f"Bill of {title}", text_table(self.table()), *self.notes])


def plot(bills: Sequence[Bill], ax: Axes | None = None) -> Axes:
    """Bills of several modes as stacked bars on one axis."""
    import pandas as pd

    from cgkit.plotting import bill as picture
    from cgkit.plotting.style import About

    frames = [one.to_frame().assign(mode=name) for name, one in zip(names_of(bills), bills)]
    if not any(one.saw_gpu for one in bills):
        frames = [frame[frame["side"] == "cpu"] for frame in frames]
    keys = ("model", "mode", "batch", "device", "recorded")
    common = {key: {str(one.about.get(key) or "") for one in bills} for key in keys}
    about = About(
        **{key: values.pop() if len(values) == 1 else "" for key, values in common.items()},
        emulated=any(one.about.get("emulated") for one in bills) or None,
    )
    return picture.bill(pd.concat(frames, ignore_index=True), about, ax=ax)


def bill(timeline: Timeline, step: int | None = None, process: int | None = None) -> Bill:
    """The bill of one step of one process; see :meth:`Timeline.bill`.

    Raises:
        TimelineError: there is no such step or process.
    """
    steps = timeline.steps
    process = chosen_process(timeline, process)
    mine = steps[steps["process"] == process]
    notes: list[str] = []
    if step is None:
        chosen, note = median_step(timeline, mine)
        notes += [note] if note else []
    else:
        found = mine[mine["step"] == step]
        if not len(found):
            there = ", ".join(map(str, mine["step"].tolist()[:20]))
            raise TimelineError(f"step {step} is not in the trace of process {process}; there are: {there}")
        chosen = found.iloc[0]
    window = StepWindow.of_step(timeline, chosen)
    return _bill(timeline, window, str(chosen["name"]), process, notes)


def whole(timeline: Timeline, process: int | None = None) -> Bill:
    """The bill of everything that a process did, whatever steps are marked."""
    process = chosen_process(timeline, process)
    return _bill(timeline, StepWindow.of_all(timeline, process), "whole trace", process, [])


def chosen_process(timeline: Timeline, process: int | None) -> int:
    """The process that is meant; by default the one with the most kernels, the first of equals."""
    there = sorted(timeline.steps["process"].unique().tolist())
    if process is None:
        kernels = timeline.kernels["process"].value_counts()
        if not there:
            raise TimelineError("the trace has nothing that could be billed: neither CPU nor GPU events")
        return min(there, key=lambda one: (-int(kernels.get(one, 0)), one))
    if process not in there:
        raise TimelineError(f"process {process} is not in the trace; there are: {', '.join(map(str, there))}")
    return process


def median_step(timeline: Timeline, steps: pd.DataFrame) -> tuple[pd.Series, str]:
    """The step with the median wall time; the last one is left out if the file was cut off."""
    steps = steps.sort_values("start_us", kind="stable")
    if timeline.completeness.get("truncated") and len(steps) > 1:
        steps = steps.iloc[:-1]
    if len(steps) == 1:
        return steps.iloc[0], ""
    walls = [StepWindow.of_step(timeline, steps.iloc[i]).wall_us for i in range(len(steps))]
    at = int(np.argsort(walls, kind="stable")[(len(walls) - 1) // 2])
    return steps.iloc[at], f"{steps.iloc[at]['name']} is the median of {len(steps)} steps by wall time"


def _bill(timeline: Timeline, window: StepWindow, step: str, process: int, notes: list[str]) -> Bill:
    c = event_columns(timeline)
    mine = c.process == process
    cpu = cpu_sets(c, mine, window)
    gpu = _gpu_parts(c, mine, window, cpu)
    kernels = window.launched[c.is_kernel[window.launched]]
    single = window.calls[c.kind[window.calls] == CODE["launch"]]
    graphs = window.calls[c.kind[window.calls] == CODE["graph_launch"]]
    away = int((c.thread[window.calls] != window.thread).sum())
    if away:
        notes = [
            *notes,
            f"{away:,} of {len(window.calls):,} launches are on other threads than the one billed",
        ]
    if window.marked not in (None, window.thread):
        notes = [
            *notes,
            f"the step's mark is on thread {window.marked} and its launches are on thread {window.thread}, which is "
            "billed: what that one does between its own events is unexplained",
        ]
    notes = [*notes, *_late(c, mine, window)]
    busy = _busy_by_gpu(c, mine, window)
    if len(busy) > 1:
        told = ", ".join(f"GPU {device} {us:,.0f} us" for device, us in busy.items())
        notes.append(f"{len(busy)} GPUs; busy: {told}")
    if len(graphs):
        notes.append(
            "the profiler lists every kernel of a graph, which makes the graph launch itself dearer than it is "
            "without it: compare with cgkit bench launch-overhead"
        )
    return Bill(
        wall_us=window.wall_us,
        parts={part: intervals.length(cpu[part]) for part in (*CPU_PARTS, "unexplained")},
        gpu=gpu,
        kernels=len(kernels),
        kernels_tied=int((c.tied[kernels] >= 0).sum()),
        launches=len(single),
        graph_launches=len(graphs),
        kernels_in_graphs=int((c.graph[kernels] >= 0).sum()),
        median_launch_us=_median((c.end - c.start)[single]),
        median_graph_launch_us=_median((c.end - c.start)[graphs]),
        queue_depth=_queue(c, kernels),
        article_formula_us=_article(c, window.launched),
        step=step,
        process=process,
        mode=str(timeline.about.get("mode") or ""),
        about=timeline.about,
        notes=notes,
        busy_by_gpu=busy,
    )


def _busy_by_gpu(c: EventColumns, mine: NDArray[np.bool_], window: StepWindow) -> dict[int, float]:
    """Microseconds in which each GPU was busy."""
    work = np.flatnonzero(mine & c.is_work)
    found = {}
    for device in np.unique(c.device[work]):
        rows = work[c.device[work] == device]
        busy = intervals.clip(intervals.union(c.start[rows], c.end[rows]), window.start_us, window.end_us)
        found[int(device)] = intervals.length(busy)
    return found


def _late(c: EventColumns, mine: NDArray[np.bool_], window: StepWindow) -> list[str]:
    """Says so if the GPU begins long after the first launch although nothing in the trace keeps it."""
    known = window.launched[c.tied[window.launched] >= 0]
    if not len(known):
        return []
    first = known[c.start[known].argmin()]
    delay = float(c.start[first] - c.end[c.tied[first]])
    before = mine & c.is_work & (c.start < c.start[first]) & (c.end > c.end[c.tied[first]])
    if delay < _LATE_US or before.any():
        return []
    return [
        f"the GPU begins {delay:,.0f} us after the first launch returned, and nothing in the trace keeps it: earlier "
        "work is probably missing, and the time counts as idle"
    ]


def cpu_sets(c: EventColumns, mine: NDArray[np.bool_], window: StepWindow) -> dict[str, intervals.Set]:
    """Disjoint sets of time that together are the whole window, by part."""
    on = np.flatnonzero(mine & c.is_cpu & (c.thread == window.thread))
    on = on[(c.start[on] < window.cpu_end_us) & (c.end[on] > window.start_us)]
    left = intervals.complement(intervals.EMPTY, window.start_us, window.end_us)
    tail = intervals.clip(left, window.cpu_end_us, window.end_us)
    left = intervals.clip(left, window.start_us, window.cpu_end_us)
    sets: dict[str, intervals.Set] = {}
    for part in _PRIORITY:
        rows = on[np.isin(c.kind[on], [CODE[kind] for kind in CPU_PARTS[part]])]
        if part in ("waiting", "copies"):  # a copy that blocks is a wait
            blocking = on[c.is_blocking[on]]
            rows = np.union1d(rows, blocking) if part == "waiting" else np.setdiff1d(rows, blocking)
        covered = intervals.union(c.start[rows], c.end[rows])
        sets[part] = intervals.intersect(left, covered)
        left = intervals.subtract(left, covered)
    sets["waiting"] = intervals.union(*np.concatenate([sets["waiting"], tail]).T)
    sets["unexplained"] = left
    return sets


def _gpu_parts(
    c: EventColumns, mine: NDArray[np.bool_], window: StepWindow, cpu: dict[str, intervals.Set]
) -> dict[str, float]:
    """Busy, and idle by what the CPU did meanwhile; gaps between nodes of one replay apart."""
    work = np.flatnonzero(mine & c.is_work)
    busy = intervals.clip(intervals.union(c.start[work], c.end[work]), window.start_us, window.end_us)
    idle = intervals.complement(busy, window.start_us, window.end_us)
    inside = intervals.intersect(idle, replays(c, work[c.graph[work] >= 0]))
    idle = intervals.subtract(idle, inside)
    parts = {"busy": intervals.length(busy)}
    for name, causes in IDLE_CAUSES.items():
        parts[name] = sum(intervals.length(intervals.intersect(idle, cpu[cause])) for cause in causes)
    return parts | {"idle_inside_graph": intervals.length(inside)}


def replays(c: EventColumns, rows: NDArray[np.int64]) -> intervals.Set:
    """From the first node's start to the last node's end of each graph launch."""
    if not len(rows):
        return intervals.EMPTY
    rows = rows[np.argsort(c.graph[rows], kind="stable")]
    first = np.flatnonzero(np.r_[True, np.diff(c.graph[rows]) != 0])
    return intervals.union(np.minimum.reduceat(c.start[rows], first), np.maximum.reduceat(c.end[rows], first))


def _queue(c: EventColumns, kernels: NDArray[np.int64]) -> dict[str, float]:
    """How far the CPU runs ahead, at the return of each launch."""
    kernels = kernels[c.tied[kernels] >= 0]
    returned = c.end[c.tied[kernels]]
    when = np.unique(returned)
    launched = np.searchsorted(np.sort(returned), when, side="right")
    # a kernel may start before its launch returns: then it never waits
    started = np.searchsorted(np.sort(np.maximum(c.start[kernels], returned)), when, side="right")
    depth, ahead = launched - started, np.maximum(c.start[kernels] - returned, 0.0)
    return {
        "median": _median(depth),
        "max": float(depth.max()) if len(depth) else 0.0,
        "median_ahead_us": _median(ahead),
        "max_ahead_us": float(ahead.max()) if len(ahead) else 0.0,
    }


def _article(c: EventColumns, launched: NDArray[np.int64]) -> float:
    """Sum over launches of the larger of the call and what it ran; work without a launch counts its run time."""
    kernels = launched[c.is_kernel[launched]]
    known = kernels[c.tied[kernels] >= 0]
    calls, where = np.unique(c.tied[known], return_inverse=True)
    run = np.bincount(where, (c.end - c.start)[known], minlength=len(calls))
    untied = kernels[c.tied[kernels] < 0]
    return float(np.maximum(run, (c.end - c.start)[calls]).sum() + (c.end - c.start)[untied].sum())


def _median(values: NDArray[Any]) -> float:
    return float(np.median(values)) if len(values) else 0.0
