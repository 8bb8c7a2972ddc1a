"""When the GPU had nothing to do, and what the CPU did meanwhile: the bill's idle time, laid out on the time axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cgkit.measuring import bill, intervals
from cgkit.measuring.step_window import EventColumns, StepWindow, event_columns

if TYPE_CHECKING:
    import pandas as pd

    from cgkit.measuring.timeline import Timeline

COLUMNS = ("process", "device", "start_us", "dur_us", "cause")


def gaps(timeline: Timeline) -> pd.DataFrame:
    """The idle time of each GPU between its process' first and last event, cut where the cause changes.

    With one GPU a process, the sum of each cause is that of the bill of the whole trace.

    Returns:
        A row a stretch: ``process``, ``device``, ``start_us``, ``dur_us``, ``cause`` (one of the bill's ``idle_...``).
    """
    import pandas as pd

    c = event_columns(timeline)
    device = timeline.events["device"].to_numpy()
    parts = []
    for process in timeline.steps["process"].unique():
        mine = c.process == process
        if not (mine & c.is_work).any():
            continue
        window = StepWindow.of_all(timeline, int(process))
        cpu = bill.cpu_sets(c, mine, window)
        for gpu in np.unique(device[mine & c.is_work]):
            work = np.flatnonzero(mine & c.is_work & (device == gpu))
            for cause, found in _by_cause(c, work, window, cpu).items():
                part = pd.DataFrame({"start_us": found[:, 0], "dur_us": found[:, 1] - found[:, 0]})
                parts.append(part.assign(process=process, device=gpu, cause=cause))
    if not parts:
        return pd.DataFrame(columns=list(COLUMNS))
    table = pd.concat(parts, ignore_index=True)[list(COLUMNS)]
    return table.sort_values(["process", "device", "start_us"], ignore_index=True)


def _by_cause(
    c: EventColumns, work: np.ndarray, window: StepWindow, cpu: dict[str, intervals.Set]
) -> dict[str, intervals.Set]:
    """The idle time of one GPU as disjoint sets, in the bill's order of causes."""
    busy = intervals.union(c.start[work], c.end[work])
    idle = intervals.complement(busy, window.start_us, window.end_us)
    inside = intervals.intersect(idle, bill.replays(c, work[c.graph[work] >= 0]))
    idle = intervals.subtract(idle, inside)
    sets = {}
    for cause, sources in bill.IDLE_CAUSES.items():
        both = np.concatenate([cpu[source] for source in sources])
        sets[cause] = intervals.intersect(idle, intervals.union(both[:, 0], both[:, 1]))
    return sets | {"idle_inside_graph": inside}
