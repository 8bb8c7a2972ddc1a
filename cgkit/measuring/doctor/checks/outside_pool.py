"""Tensors that a graph reads and that live outside of its pool: who owns them, and will they stay?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from cgkit.measuring.doctor.findings import Finding
from cgkit.measuring.doctor.observe import graph_inputs
from cgkit.measuring.doctor.patient import Patient
from cgkit.measuring.doctor.registry import check
from cgkit.tracing.traced_graph import plain_source

_AGAIN = "cgkit.trace(model, *example_inputs).inputs"


@check("outside-pool", "cpu-tensor")
def outside_pool(patient: Patient) -> Iterator[Finding]:
    """Parameters and buffers in one line; globals and closures one by one; tensors on another device."""
    if patient.traced is None:
        return
    with patient.in_context():
        values = dict(zip(patient.traced.inputs, graph_inputs(patient)))
    held: dict[str, list[torch.Tensor]] = {}
    for entry, value in values.items():
        if not isinstance(value, torch.Tensor) or entry.kind in ("argument", "symint"):
            continue
        held.setdefault(entry.kind, []).append(value)
        if entry.kind == "other":
            yield Finding(
                "outside-pool",
                "warning",
                f"the graph reads {plain_source(entry.source)}, a tensor of {value.nbytes} bytes that neither the "
                "model nor the call holds (a global, a closure): who lets go of it leaves the graph a stale "
                "address, and no check looks at it",
                "register it as a buffer of the model, or pass it in",
                again=_AGAIN,
            )
        yield from _elsewhere(patient, entry, value)
    if held:
        listed = ", ".join(
            f"{len(tensors)} {kind}{'s' * (len(tensors) > 1)} ({sum(t.nbytes for t in tensors):,} bytes)"
            for kind, tensors in held.items()
        )
        yield Finding(
            "outside-pool",
            "info",
            f"the graph reads {listed} outside of its pool, alive as long as the model",
            "load weights before capture, or in place (copy_): .to() and new tensors leave the graph the old ones",
            again=_AGAIN,
        )


def _elsewhere(patient: Patient, entry: Any, value: torch.Tensor) -> Iterator[Finding]:
    if value.device.type == patient.device.type:
        return
    yield Finding(
        "cpu-tensor",
        "error",
        f"{plain_source(entry.source)} lies on {value.device} and the model on {patient.device}: each step copies it, "
        "which a capturing stream refuses unless it is pinned, and a replay copies from the old address",
        f"move it to {patient.device} once, before capture",
        again=_AGAIN,
    )
