"""What a step does on the GPU, counted by the profiler: busy time, kernels, copies, launches.

To be asked when all timing is done: in a process in which the profiler has run, launches cost more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from cgkit import marks

#: Steps in one profile.
PROFILED = 3


def profiled(step: Callable[[], Any]) -> dict[str, Any]:
    """``gpu_busy_ms`` (sum of what ran on the GPU), ``kernels``, ``copies``, ``kernel_launches`` and
    ``graph_launches`` of a step: means of some steps in one profile.

    What can be marked runs as under a profiler: a plan then replays by torch, and the profiler sees each launch."""
    from torch.profiler import ProfilerActivity, profile

    with ExitStack() as undo:
        for markable in marks.alive():
            markable.put_marks(_NoRanges(), undo)
        step()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            for _ in range(PROFILED):
                step()
                torch.cuda.synchronize()
    return counted(
        [(e.name, str(e.device_type), e.time_range.elapsed_us()) for e in profiler.events()], PROFILED
    )


class _NoRanges:
    """A :class:`cgkit.marks.Marker` that puts no range around anything: a range would be counted as an event."""

    def function(
        self, function: Callable[..., Any], stage: str, piece: str = "", **facts: Any
    ) -> Callable[..., Any]:
        """``function`` as it is."""
        return function

    def block(self, stage: str, piece: str = "") -> Callable[[], AbstractContextManager[Any]]:
        """No range."""
        return nullcontext


def counted(events: Sequence[tuple[str, str, float]], steps: int) -> dict[str, Any]:
    """What a step holds, of a profile's events: (name, device, microseconds) each."""
    on_gpu = [(name, us) for name, device, us in events if device.endswith("CUDA")]
    copies = sum(name.startswith(("Memcpy", "Memset")) for name, _ in on_gpu)
    calls = [name for name, device, _ in events if not device.endswith("CUDA")]
    return {
        "gpu_busy_ms": sum(us for _, us in on_gpu) / steps / 1e3,
        "kernels": (len(on_gpu) - copies) / steps,
        "copies": copies / steps,
        "kernel_launches": sum("LaunchKernel" in name for name in calls) / steps,
        "graph_launches": sum("GraphLaunch" in name for name in calls) / steps,
    }
