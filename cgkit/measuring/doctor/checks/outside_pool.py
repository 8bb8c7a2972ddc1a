"""Tensors that a graph reads and that live outside of its pool: who owns them, and will they stay?"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from cgkit.measuring.doctor.findings import Finding
from cgkit.measuring.doctor.observe import graph_inputs, observe
from cgkit.measuring.doctor.patient import Patient
from cgkit.measuring.doctor.registry import check
from cgkit.tracing.traced_graph import plain_source

_AGAIN = "cgkit.doctor(model, *example_inputs).outside_frame()"
_OWNERS = {
    "parameter": "the model",
    "buffer": "the model",
    "attribute": "the model, unregistered",
    "other": "a global or a closure",
}


class Outside(NamedTuple):
    """A tensor as it was when doctor looked."""

    place: int  # among the graph's inputs; -1: an operator fetched it by itself
    source: str
    owner: str
    kind: str
    nbytes: int
    address: int
    tensor: weakref.ref[torch.Tensor]


@check("outside-pool", "cpu-tensor")
def outside_pool(patient: Patient) -> Iterator[Finding]:
    """Parameters and buffers in one line; globals, closures and what operators fetch one by one; other devices."""
    if patient.traced is None:
        return
    with patient.in_context():
        values = dict(zip(patient.traced.inputs, graph_inputs(patient)))
    held: dict[str, list[torch.Tensor]] = {}
    kept: list[Outside] = []
    for entry, value in values.items():
        if not isinstance(value, torch.Tensor) or entry.kind in ("argument", "symint"):
            continue
        held.setdefault(entry.kind, []).append(value)
        kept.append(_outside(entry.index, plain_source(entry.source), entry.kind, value))
        if entry.kind == "other":
            yield _of_nobody(f"the graph reads {plain_source(entry.source)}", value)
        yield from _elsewhere(patient, entry, value)
    for sight, tensor in observe(patient).outside:
        owner = _owner_of(patient, tensor)
        kept.append(_outside(-1, f"{sight.operator}: {owner or 'unknown'}", "operator", tensor))
        yield _fetched(sight, tensor, owner)
    patient.notes["outside"] = kept
    if held:
        listed = ", ".join(
            f"{len(tensors)} {kind}{'s' * (len(tensors) > 1)} ({sum(t.nbytes for t in tensors):,} bytes)"
            for kind, tensors in held.items()
        )
        yield Finding(
            "outside-pool",
            "info",
            f"the graph reads {listed} outside of its pool, alive as long as their owner keeps them "
            "(.outside_frame() says whether each still lies where it was)",
            "load weights before capture, or in place (copy_): .to() and new tensors leave the graph the old ones",
            again=_AGAIN,
        )


def outside_rows(patient: Patient) -> list[tuple[Any, ...]]:
    """(source, owner, kind, bytes, address, alive, in_place) of each tensor outside of the pool, as it is now.

    ``alive``: the tensor still exists. ``in_place``: its owner still holds it at the address that a recording of then
    reads; for what an operator fetched by itself, whether the tensor is still there.
    """
    kept: list[Outside] = patient.notes.get("outside", [])
    try:
        with patient.in_context():
            now = graph_inputs(patient)
    except Exception:  # an owner is gone, or holds no tensor any more
        now = []
    rows = []
    for each in kept:
        tensor = each.tensor()
        current = now[each.place] if 0 <= each.place < len(now) else tensor if each.place < 0 else None
        in_place = isinstance(current, torch.Tensor) and current.data_ptr() == each.address
        rows.append(
            (each.source, each.owner, each.kind, each.nbytes, each.address, tensor is not None, in_place)
        )
    return rows


def _outside(index: int, source: str, kind: str, tensor: torch.Tensor) -> Outside:
    owner = _OWNERS.get(kind, "unknown to the graph")
    return Outside(index, source, owner, kind, tensor.nbytes, tensor.data_ptr(), weakref.ref(tensor))


def _of_nobody(what: str, value: torch.Tensor) -> Finding:
    return Finding(
        "outside-pool",
        "warning",
        f"{what}, a tensor of {value.nbytes} bytes that neither the model nor the call holds (a global, a closure): "
        "who lets go of it leaves the graph a stale address, and no check looks at it",
        "register it as a buffer of the model, or pass it in",
        again=_AGAIN,
    )


def _fetched(sight: Any, tensor: torch.Tensor, owner: str) -> Finding:
    """An operator in a recorded piece that reads a tensor which it was not given."""
    held = f"{owner} holds it now" if owner else "nobody is known to hold it"
    return Finding(
        "outside-pool",
        "warning",
        f"{sight.operator} reads a tensor of {tensor.nbytes} bytes that it was not given ({held}): the graph keeps its "
        "address, and no check of inputs sees it move or die",
        "pass it to the operator as an argument; or name the operator in splitting_ops, so that it runs eagerly",
        again=_AGAIN,
        **sight.where(),
    )


def _owner_of(patient: Patient, tensor: torch.Tensor) -> str:
    """The name under which the model holds the memory of ``tensor``, or ""."""
    address = tensor.untyped_storage().data_ptr()
    model = patient.model
    named = [*model.named_parameters(), *model.named_buffers()]
    named += [
        (f"{name}.{key}".lstrip("."), value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    ]
    return next((name for name, each in named if each.untyped_storage().data_ptr() == address), "")


def _elsewhere(patient: Patient, entry: Any, value: torch.Tensor) -> Iterator[Finding]:
    if value.device.type == patient.device.type:
        return
    yield Finding(
        "cpu-tensor",
        "error",
        f"{plain_source(entry.source)} lies on {value.device} and the model on {patient.device}: each step copies it, "
        "which a capturing stream refuses unless it is pinned, and a replay copies from the old address",
        f"move it to {patient.device} once, before capture",
        again="cgkit.trace(model, *example_inputs).inputs",
    )
