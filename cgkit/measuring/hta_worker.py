"""Runs HolisticTraceAnalysis on one trace and prints what it finds and costs, as JSON on the last line.

It runs in a process of its own, possibly in another environment, and therefore imports nothing of cgkit.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any


def main(path: str) -> dict[str, Any]:
    """Load, idle-time breakdown and launch statistics."""
    from importlib.metadata import version

    import hta.configs.config
    from hta.trace_analysis import TraceAnalysis

    assert hta
    before, begin = time.process_time(), time.perf_counter()
    analysis = TraceAnalysis(trace_files={0: path}, trace_dir="/", include_last_profiler_step=True)
    loaded = time.perf_counter()
    result: dict[str, Any] = {"load_s": loaded - begin}
    try:
        idle = analysis.get_idle_time_breakdown(ranks=[0], visualize=False)[0]
        result["idle"] = idle.to_dict("records")
    except Exception as error:  # what it cannot read is a result too
        result["idle_error"] = f"{type(error).__name__}: {error}"
    try:
        launches = analysis.get_cuda_kernel_launch_stats(ranks=[0], visualize=False)[0]
        result["launches"] = {
            "kernels": len(launches),
            "launch_us": float(launches["cpu_duration"].sum()),
            "run_us": float(launches["gpu_duration"].sum()),
        }
    except Exception as error:
        result["launches_error"] = f"{type(error).__name__}: {error}"
    result["bill_s"] = time.perf_counter() - loaded
    result["cpu_s"] = time.process_time() - before
    result["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result |= {"version": version("HolisticTraceAnalysis"), "pandas": version("pandas")}
    return result


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1]), default=str))
