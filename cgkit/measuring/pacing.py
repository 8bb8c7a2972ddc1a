"""Who sets the pace of a step: for each launch, what the CPU spent until it returned and what the GPU then ran.

The article ("一次 decode 步的 CPU 账单", the CPU bill of one decode step) adds up the larger of the two over all
kernels. That is the time of a step in which each launch waits for the kernel before it. Launches queue, so that
the CPU's time for one overlaps the GPU's time for others: :func:`queued_us` plays that through.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

    from cgkit.measuring.timeline import Timeline


def pacing(timeline: Timeline) -> pd.DataFrame:
    """A row a launch of the step that the bill takes (the median by wall time), in order.

    ``cpu_us``: from the launch before (or the step's begin) to this one's return, all Python on the way included;
    ``gpu_us``: run time of what it launched (of all kernels of a graph); ``kernels``: how many those are.
    """
    import pandas as pd

    from cgkit.measuring import bill
    from cgkit.measuring.step_window import StepWindow

    steps = timeline.steps[timeline.steps["process"] == bill.chosen_process(timeline, None)]
    window = StepWindow.of_step(timeline, bill.median_step(timeline, steps)[0])
    calls = timeline.events.loc[window.calls]  # by their rows: other processes launch in that time too
    work = timeline.kernels.groupby("launched_by")["dur_us"].agg(["sum", "count"]).reindex(calls.index)
    work = work[work["count"].notna()]  # a launch without a kernel sets no pace of its own
    ends = (calls["start_us"] + calls["dur_us"])[work.index]
    cpu = np.diff(np.concatenate([[window.start_us], ends.to_numpy()]))
    return pd.DataFrame(
        {"cpu_us": cpu, "gpu_us": work["sum"].to_numpy(), "kernels": work["count"].to_numpy(dtype=int)}
    )


def sum_of_max_us(cpu_us: Sequence[float], gpu_us: Sequence[float]) -> float:
    """The article's formula: the sum over launches of the larger of CPU and GPU time."""
    return float(np.maximum(cpu_us, gpu_us).sum())


def queued_us(cpu_us: Sequence[float], gpu_us: Sequence[float]) -> float:
    """The end of a step whose launches queue: a kernel starts when its launch has returned and the last ended."""
    host = device = 0.0
    for cpu, gpu in zip(cpu_us, gpu_us):
        host += cpu
        device = max(device, host) + gpu
    return max(host, device)
