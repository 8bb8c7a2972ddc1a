"""When the GPU had nothing to do, gap by gap, and what the CPU did meanwhile.

The bill (:mod:`cgkit.measuring.bill`) adds idle time up by cause, exactly; a picture shades whole gaps. Here each
gap is one row, named after the cause that fills most of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cgkit.measuring import bill, intervals

if TYPE_CHECKING:
    import pandas as pd

    from cgkit.measuring.timeline import Timeline

COLUMNS = ("process", "device", "start_us", "dur_us", "cause")


def gaps(timeline: Timeline) -> pd.DataFrame:
    """All gaps of each GPU between its process' first and last event.

    Returns:
        A row a gap: ``process``, ``device``, ``start_us``, ``dur_us``, ``cause`` (one of the bill's ``idle_...``: the
        one that takes the largest part of the gap).
    """
    import pandas as pd

    c = bill._columns(timeline)
    device = timeline.events["device"].to_numpy()
    parts = []
    for process in timeline.steps["process"].unique():
        mine = c.process == process
        if not (mine & c.is_work).any():
            continue
        window = bill._Window.of_all(timeline, int(process))
        cpu = bill._cpu_sets(c, mine, window)
        for gpu in np.unique(device[mine & c.is_work]):
            work = np.flatnonzero(mine & c.is_work & (device == gpu))
            busy = intervals.union(c.start[work], c.end[work])
            found = intervals.complement(busy, window.start_us, window.end_us)
            part = pd.DataFrame({"start_us": found[:, 0], "dur_us": found[:, 1] - found[:, 0]})
            part["cause"] = _causes(found, cpu, bill._replays(c, work[c.graph[work] >= 0]))
            parts.append(part.assign(process=process, device=gpu))
    if not parts:
        return pd.DataFrame(columns=list(COLUMNS))
    return pd.concat(parts, ignore_index=True)[list(COLUMNS)]


def _causes(
    found: intervals.Set, cpu: dict[str, intervals.Set], replays: intervals.Set
) -> NDArray[np.object_]:
    """For each gap the cause that covers most of it; between nodes of a replay it is the graph itself."""
    names, covered = ["idle_inside_graph"], [_covered(found, replays)]
    left = 1.0 - covered[0] / np.maximum(found[:, 1] - found[:, 0], 1e-12)
    for name, sources in bill._IDLE.items():
        names.append(name)
        covered.append(left * sum(_covered(found, cpu[source]) for source in sources))
    return np.array(names, dtype=object)[np.argmax(np.stack(covered), axis=0)]


def _covered(found: intervals.Set, by: intervals.Set) -> NDArray[np.float64]:
    """How much of each interval the set covers, in microseconds."""
    if not len(by):
        return np.zeros(len(found))
    lengths = np.r_[0.0, np.cumsum(by[:, 1] - by[:, 0])]

    def until(when: NDArray[np.float64]) -> NDArray[np.float64]:
        at = np.searchsorted(by[:, 0], when, side="right")
        last = np.maximum(at - 1, 0)
        return np.where(at > 0, lengths[last] + np.minimum(when, by[last, 1]) - by[last, 0], 0.0)

    return until(found[:, 1]) - until(found[:, 0])
