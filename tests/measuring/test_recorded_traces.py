"""The traces in data/recordings: what a timeline says of them, against counts from the raw JSON."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path

import pytest

from cgkit.measuring import bill
from cgkit.measuring.timeline import Timeline

FOLDER = Path(__file__).parents[2] / "data" / "recordings"
TRACES = sorted(FOLDER.glob("h200-trace-*.json.gz"))
WORK = {"kernel", "gpu_memcpy", "gpu_memset"}


def counted(path: Path) -> dict:
    """Kernels, busy time in us, and kernels by launch, counted one event after the other."""
    with gzip.open(path) as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
    work = [e for e in events if e.get("cat") in WORK]
    busy, until = 0.0, float("-inf")
    for start, end in sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in work):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    calls = {
        e["args"]["correlation"]: e["name"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    kernels = [e for e in work if e["cat"] == "kernel"]
    by_call = defaultdict(int)
    for kernel in kernels:
        by_call[calls.get(kernel["args"]["correlation"], "")] += 1
    return {"kernels": len(kernels), "busy": busy, "by_call": by_call}


def test_all_modes_shapes_and_batches_are_there():
    names = {path.name.removeprefix("h200-trace-").removesuffix(".json.gz") for path in TRACES}
    assert names == {
        f"{shape}-b{batch}-{mode}"
        for shape in ("llama-3.2-1b", "llama-3.1-8b")
        for batch in (1, 32)
        for mode in ("eager", "compiled", "PIECEWISE", "FULL", "reduce-overhead")
    }


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name[11:-8])
def test_counts_equal_the_raw_files_and_bills_add_up(path):
    raw, timeline = counted(path), Timeline.from_trace(path)
    kernels = timeline.kernels
    assert len(kernels) == raw["kernels"] == int((kernels["launched_by"] >= 0).sum())
    in_graphs = sum(count for name, count in raw["by_call"].items() if "GraphLaunch" in name)
    assert int((kernels["graph_launch"] >= 0).sum()) == in_graphs
    for one in (bill.whole(timeline), timeline.bill()):
        assert sum(one.parts.values()) == pytest.approx(one.wall_us, rel=0.01)
        assert sum(one.gpu.values()) == pytest.approx(one.wall_us, rel=0.01)
        assert one.parts["unexplained"] <= 0.05 * one.wall_us
    assert bill.whole(timeline).gpu["busy"] == pytest.approx(raw["busy"], abs=0.01)
    mode = timeline.about["mode"]
    assert (in_graphs > 0) is (mode in ("PIECEWISE", "FULL", "reduce-overhead"))
    if mode != "reduce-overhead":  # which is not cgkit's, and knows no pieces
        assert (kernels["stage"].astype(str) != "").all() and (kernels["piece"].astype(str) != "").all()
