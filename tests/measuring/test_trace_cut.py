"""Traces cut to their steps and freed of names, on events that are made up here."""

from __future__ import annotations

import copy
import json

from cgkit.measuring.timeline import Timeline
from cgkit.measuring.trace_cut import cut_to_steps, scrubbed, without_paths

STEP = "cgkit step"


def event(name, ts, dur, cat="cpu_op", **args):
    return {"ph": "X", "name": name, "cat": cat, "pid": 7, "tid": 7, "ts": ts, "dur": dur, "args": args}


def synthetic():
    """Two steps, each with a marked launch and its kernel, and things around them."""
    events = [event("before", 0.0, 5.0)]
    for number, start in enumerate((100.0, 300.0)):
        events += [
            event(STEP, start, 100.0),
            event("cgkit:replay:submod_0", start + 10, 20.0),
            event("cgkit::some_operator", start + 40, 5.0),
            event("cudaGraphLaunch", start + 12, 10.0, "cuda_runtime", correlation=number + 1, cbid=1),
            {**event("k", start + 50, 30.0, "kernel", correlation=number + 1, stream=7, device=0), "pid": 0},
        ]
    events += [
        event("ProfilerStep#1", 90.0, 400.0, "user_annotation"),
        event("after", 500.0, 1.0),
        {"ph": "s", "id": 1, "pid": 7, "tid": 7, "ts": 112.0, "cat": "ac2g", "name": "ac2g"},
        {
            "ph": "M",
            "name": "process_name",
            "pid": 7,
            "tid": 0,
            "ts": 0,
            "args": {"name": "/opt/bin/python3.12"},
        },
    ]
    return {"traceEvents": events, "host_name": "secret", "traceName": "/home/me/t.json", "schemaVersion": 1}


def names(trace):
    return [e["name"] for e in trace["traceEvents"]]


def test_only_what_lies_in_steps_stays_and_our_ranges_are_annotations():
    cut = cut_to_steps(synthetic(), STEP)
    assert not {"before", "after", "ProfilerStep#1"} & set(names(cut))
    assert names(cut).count("k") == 2 and "process_name" in names(cut)
    kinds = {e["name"]: e.get("cat") for e in cut["traceEvents"]}
    assert kinds["cgkit:replay:submod_0"] == kinds[STEP] == "user_annotation"
    assert kinds["cgkit::some_operator"] == "cpu_op"


def test_a_trace_without_steps_stays_whole():
    trace = synthetic()
    trace["traceEvents"] = [e for e in trace["traceEvents"] if e["name"] != STEP]
    assert len(cut_to_steps(copy.deepcopy(trace), STEP)["traceEvents"]) == len(trace["traceEvents"])


def test_scrubbing_leaves_what_a_timeline_reads_and_nothing_else():
    cut = cut_to_steps(synthetic(), STEP)
    small = scrubbed(cut)
    text = json.dumps(small)
    assert not [word for word in ("secret", "/home", "/opt", "ac2g", "cbid") if word in text]
    assert min(e["ts"] for e in small["traceEvents"] if e["ph"] == "X") == 0.0
    before, after = (Timeline.from_events(t["traceEvents"]) for t in (cut, small))
    assert after.completeness["kernels_tied"] == before.completeness["kernels_tied"] == 2
    columns = [
        "kind",
        "name",
        "start_us",
        "dur_us",
        "correlation",
        "launched_by",
        "graph_launch",
        "piece",
        "stage",
    ]
    assert before.events[columns].astype(str).equals(after.events[columns].astype(str))
    assert list(after.kernels["piece"]) == ["submod_0"] * 2 and list(after.kernels["stage"]) == ["replay"] * 2
    assert len(after.steps) == 2


def test_paths_are_cut_and_names_of_kernels_are_not():
    assert without_paths("/home/me/site-packages/x/model.py(3): f") == "model.py(3): f"
    assert without_paths("C:\\Users\\me\\model.py(3): f") == "model.py(3): f"
    assert without_paths("torch/nn/modules/module.py(1): _call") == "module.py(1): _call"
    for kernel in (
        "void at::native::vectorized_elementwise_kernel<4, at::native::Add<float>>(int)",
        "aten::div",
        "## Call CompiledFxGraph fabc ##",
        "a" * 5000 + "/",
    ):
        assert without_paths(kernel) == kernel
