"""What a bill reads of a timeline: the events' columns as arrays, and which of them belong to a step."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cgkit.errors import TimelineError
from cgkit.measuring.event_kinds import CODE, GPU_WORK

if TYPE_CHECKING:
    import pandas as pd

    from cgkit.measuring.timeline import Timeline

_BLOCKING = re.compile(r"(?:cuda|cu|hip)Memcpy(?!.*(?:Async|Batch))")


@dataclass
class StepWindow:
    """A step's time on the CPU, its whole time, and the rows of the process that matter."""

    start_us: float
    cpu_end_us: float
    end_us: float
    launched: NDArray[np.int64]  # rows of the GPU work that the step launched
    calls: NDArray[np.int64]  # rows of its launches
    thread: int
    marked: int | None = None  # the thread of the step's own mark

    @property
    def wall_us(self) -> float:
        return self.end_us - self.start_us

    @classmethod
    def of_step(cls, timeline: Timeline, step: pd.Series) -> StepWindow:
        if step["name"] == "whole trace":
            return cls.of_all(timeline, int(step["process"]))
        c = event_columns(timeline)
        start = float(step["start_us"])
        cpu_end = start + float(step["dur_us"])
        first, last = np.searchsorted(c.start, [start, cpu_end])  # events are sorted by their start
        inside = np.arange(first, last)
        inside = inside[c.process[inside] == int(step["process"])]
        calls = inside[c.is_launch[inside]]
        launched = c.work_by_call[slice(*np.searchsorted(c.tied[c.work_by_call], [first, last]))]
        launched = launched[c.process[c.tied[launched]] == int(step["process"])]
        end = max(cpu_end, float(c.end[launched].max())) if len(launched) else cpu_end
        marked = int(step["thread"])
        return cls(start, cpu_end, end, np.sort(launched), calls, _thread(c, inside, marked), marked)

    @classmethod
    def of_all(cls, timeline: Timeline, process: int) -> StepWindow:
        c = event_columns(timeline)
        mine = (c.process == process) & ~c.is_other
        rows = np.flatnonzero(mine)
        work, cpu = np.flatnonzero(mine & c.is_work), np.flatnonzero(mine & c.is_cpu)
        if not len(rows):
            raise TimelineError(f"process {process} has no event that could be billed")
        start, end = float(c.start[rows].min()), float(c.end[rows].max())
        # a CPU that was not recorded is not seen to wait
        cpu_end = float(c.end[cpu].max()) if len(cpu) else end
        return cls(start, cpu_end, end, work, np.flatnonzero(mine & c.is_launch), _thread(c, rows, None))


@dataclass
class EventColumns:
    start: NDArray[np.float64]
    end: NDArray[np.float64]
    kind: NDArray[np.int8]
    process: NDArray[np.int32]
    thread: NDArray[np.int64]
    tied: NDArray[np.int64]
    graph: NDArray[np.int64]
    device: NDArray[np.int32]
    is_blocking: NDArray[np.bool_]  # a copy call that returns only when the copy is done

    def __post_init__(self) -> None:
        self.is_work = np.isin(self.kind, [CODE[kind] for kind in GPU_WORK])
        self.is_other = np.isin(self.kind, [CODE["other"], CODE["gpu_annotation"]])
        self.is_cpu = ~self.is_work & ~self.is_other
        self.is_kernel = self.kind == CODE["kernel"]
        self.is_launch = np.isin(self.kind, [CODE["launch"], CODE["graph_launch"]])
        self.is_copy = self.kind == CODE["copy_call"]
        known = np.flatnonzero(self.is_work & (self.tied >= 0))
        self.work_by_call = known[np.argsort(self.tied[known], kind="stable")]


def event_columns(timeline: Timeline) -> EventColumns:
    cached = timeline.__dict__.get("_bill_columns")
    if cached is not None and cached[0] is timeline.events:
        return cached[1]
    e = timeline.events
    start = e["start_us"].to_numpy()
    columns = EventColumns(
        start,
        start + e["dur_us"].to_numpy(),
        e["kind"].cat.codes.to_numpy(),
        e["process"].to_numpy(),
        e["thread"].to_numpy(),
        e["launched_by"].to_numpy(),
        e["graph_launch"].to_numpy(),
        e["device"].to_numpy(),
        _blocking(e),
    )
    timeline.__dict__["_bill_columns"] = (e, columns)
    return columns


def _blocking(events: pd.DataFrame) -> NDArray[np.bool_]:
    """Which rows are copy calls that block: by name, each different name asked once."""
    names = events["name"].cat
    blocks = np.array([_BLOCKING.match(str(name)) is not None for name in names.categories], bool)
    found = blocks[names.codes.to_numpy()] if len(blocks) else np.zeros(len(events), bool)
    return found & (events["kind"] == "copy_call").to_numpy()


def _thread(c: EventColumns, inside: NDArray[np.int64], marked: int | None) -> int:
    """The thread that launches most; without launches the marked one, or the one with the most events."""
    for rows in (inside[(c.is_launch | c.is_copy)[inside]], inside[c.is_cpu[inside]]):
        if len(rows):
            threads, count = np.unique(c.thread[rows], return_counts=True)
            if marked in threads and count[threads == marked][0] == count.max():
                return int(marked)  # type: ignore[arg-type]
            if marked is None or c.is_launch[rows].any():
                return int(threads[count.argmax()])
    return -1 if marked is None else marked
