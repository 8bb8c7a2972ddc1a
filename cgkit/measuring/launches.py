"""Launches one by one, and the gaps of each stream: the two tables that HolisticTraceAnalysis (HTA) has too.

Where they differ from HTA 0.5.0 (``cgkit bench traces`` compares them on one trace):

- HTA's launch statistics list ``cudaLaunchKernel``, ``cudaLaunchKernelExC`` and the asynchronous copies only: not
  the driver's calls (``cuLaunchKernel``, ``cuLaunchKernelEx``: all of Triton's launches), not AMD's, and not the
  kernels of a graph launch, since it joins one launch with one kernel. Restricted to those calls (``like_hta``),
  the numbers are equal.
- HTA rounds begins up and ends down to whole microseconds (unless ``HTA_DISABLE_NS_ROUNDING`` is set), which takes
  up to 2 us from every kernel: a GPU full of short kernels appears idle. Without the rounding the idle times are
  equal.
- HTA leaves out the last profiler step by default.
- HTA's idle time is the time between one event of a stream and the next (negative where they overlap), summed over
  streams; the bill's is the time in which no stream works, and runs to the step's ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cgkit.measuring.event_kinds import GPU_WORK

if TYPE_CHECKING:
    import pandas as pd

    from cgkit.measuring.timeline import Timeline

_HTA_KNOWS = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cudaMemcpyAsync", "cudaMemsetAsync")
#: Below this gap HTA holds that the GPU waits for itself and not for the CPU.
KERNEL_WAIT_US = 30.0


def launch_statistics(timeline: Timeline, *, like_hta: bool = False) -> pd.DataFrame:
    """A row for each piece of GPU work whose launch is in the trace.

    Returns:
        Columns ``name``, ``call``, ``kind`` (of the call), ``process``, ``launched_by`` (its row), ``launch_us``,
        ``run_us``, ``delay_us`` (from the call's end to the work's start; negative if it starts before the call
        returns). The kernels of a graph launch all have the one call's ``launch_us``: sum it over
        different ``launched_by``.
    """
    import pandas as pd

    events = timeline.events
    work = events[events["kind"].isin(GPU_WORK) & (events["launched_by"] >= 0)]
    calls = events.loc[work["launched_by"]]
    table = pd.DataFrame(
        {
            "name": work["name"].astype(str).to_numpy(),
            "call": calls["name"].astype(str).to_numpy(),
            "kind": calls["kind"].astype(str).to_numpy(),
            "process": work["process"].to_numpy(),
            "launched_by": work["launched_by"].to_numpy(),
            "launch_us": calls["dur_us"].to_numpy(),
            "run_us": work["dur_us"].to_numpy(),
            "delay_us": work["start_us"].to_numpy() - (calls["start_us"] + calls["dur_us"]).to_numpy(),
        },
        index=work.index,
    )
    return table[table["call"].isin(_HTA_KNOWS)] if like_hta else table


def idle_by_stream(timeline: Timeline) -> pd.DataFrame:
    """The gaps of each stream, between its first and its last work.

    Returns:
        Columns ``process``, ``device``, ``stream``, ``busy_us``, ``host_wait_us`` (the next work was launched only
        after the one before had ended), ``kernel_wait_us`` (other gaps below :data:`KERNEL_WAIT_US`), ``other_us``,
        ``works``.
    """
    import pandas as pd

    events = timeline.events
    work = events[events["kind"].isin(GPU_WORK)]
    by = work["launched_by"].to_numpy()
    launched = np.where(by >= 0, events["start_us"].to_numpy()[by], -np.inf)  # before the trace began
    rows = []
    for (process, device, stream), at in work.groupby(["process", "device", "stream"]).indices.items():
        start, run = work["start_us"].to_numpy()[at], work["dur_us"].to_numpy()[at]
        end = start + run
        gap, host = start[1:] - end[:-1], launched[at][1:] > end[:-1]
        short = ~host & (gap < KERNEL_WAIT_US)
        rows.append(
            {
                "process": process,
                "device": device,
                "stream": stream,
                "busy_us": float(run.sum()),
                "host_wait_us": float(gap[host].sum()),
                "kernel_wait_us": float(gap[short].sum()),
                "other_us": float(gap[~host & ~short].sum()),
                "works": len(at),
            }
        )
    columns = [
        "process",
        "device",
        "stream",
        "busy_us",
        "host_wait_us",
        "kernel_wait_us",
        "other_us",
        "works",
    ]
    return pd.DataFrame(rows, columns=columns).astype({"works": np.int64})
