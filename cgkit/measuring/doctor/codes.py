"""The codes that a finding may have. They are stable: a code is not renamed, and means the same in every version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: code -> (the worst severity that it is given, what it means)
CODES: Mapping[str, tuple[str, str]] = {
    "graph-break": ("error", "Dynamo cannot go on at this line, so the model is not one graph"),
    "trace-failed": (
        "error",
        "the model cannot be traced for another reason (forward raises, writes a global, ...)",
    ),
    "specialised-dim": (
        "error",
        "a dimension that changes became a number: a reshape, a comparison, a fixed partner",
    ),
    "zero-one": ("error", "a batch of one takes another path than the trace, which was made for 2 and more"),
    "uneven-sizes": ("warning", "the dynamic dimensions have more than one size, and a recording has one"),
    "nothing-dynamic": ("warning", "no argument is annotated as a tensor, so no dimension is dynamic"),
    "dropped-guard": (
        "error",
        "an assumption of the trace that is not checked again; an error if a size breaks it",
    ),
    "recompilation": (
        "warning",
        "a call that would be traced again under guards, with the guard that triggers it",
    ),
    "guard-cost": ("info", "what evaluating the guards takes at each step, where they stand (level 1)"),
    "none-argument": ("error", "an argument that is None in some calls and given in others"),
    "frozen-number": ("error", "a Python value that is baked into the graph"),
    "argument-differs": ("error", "another call does not fit the trace"),
    "buffer-write": ("error", "forward writes a tensor that the model keeps"),
    "host-sync": ("error", "the host reads a value of the GPU, or waits for it"),
    "capture-forbidden": ("error", "an operator that cannot be recorded for another reason"),
    "other-stream": ("error", "work, or memory, on a stream that is not the one that is captured"),
    "host-copy": ("error", "a tensor of the CPU is made, copied or pinned in forward"),
    "cpu-tensor": ("error", "a tensor that the graph reads lies on another device than the model"),
    "random-numbers": (
        "error",
        "random numbers: from a generator that a graph does not advance (error), or none (info)",
    ),
    "dynamic-operator": (
        "warning",
        "an operator in a recorded piece whose work may depend on more than shapes",
    ),
    "outside-pool": ("warning", "tensors that a graph reads and that its pool does not own"),
    "moved-input": ("error", "an input of a recorded piece that lies elsewhere in each step"),
    "replay-differs": ("error", "recorded and replayed, the model computes something else than eagerly"),
    "mixed-rows": ("error", "the rows of a batch are mixed, so what it is padded with is in its result"),
    "above-largest": ("warning", "batches above the largest recorded size run without a graph"),
    "size-gap": ("warning", "a gap in the sizes pads a batch to a multiple of itself"),
    "size-never-run": ("warning", "a size is recorded that no step has"),
    "piece-not-shared": ("warning", "pieces of the same operators are compiled more than once"),
    "cache-miss": ("info", "the next start compiles anew, and the factor of the key that is to blame"),
}


def codes_frame() -> Any:
    """A DataFrame, a row a code: ``code``, ``worst`` (severity), ``meaning``, ``found_by`` (names of checks)."""
    import pandas as pd

    from cgkit.measuring.doctor import checks as checks
    from cgkit.measuring.doctor.registry import CHECKS

    rows = [
        (code, worst, meaning, ", ".join(each.name for each in CHECKS.values() if code in each.codes))
        for code, (worst, meaning) in CODES.items()
    ]
    return pd.DataFrame(rows, columns=["code", "worst", "meaning", "found_by"])
