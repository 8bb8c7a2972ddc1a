"""Pieces that call the same operators and are compiled apart all the same."""

from __future__ import annotations

from collections.abc import Iterator

from cgkit.errors import CgkitError
from cgkit.measuring.doctor.findings import Finding
from cgkit.measuring.doctor.patient import Patient, cannot
from cgkit.measuring.doctor.registry import NotCheckedError, check
from cgkit.measuring.explain import explain


@check("piece-not-shared")
def unshared(patient: Patient) -> Iterator[Finding]:
    """For each row of operators that several pieces have: are they compiled once? If not, the first difference."""
    try:
        compiled = patient.compiled
    except CgkitError as error:
        raise NotCheckedError(cannot(error)) from error
    if compiled is None:
        return
    alike: dict[tuple[str, ...], dict[object, list[str]]] = {}
    for backend in compiled.backends:
        alike.setdefault(backend.piece.ops, {}).setdefault(backend.general.key, []).append(backend.name)
    for by_key in alike.values():
        if len(by_key) < 2:
            continue
        (first, *_), (other, *_) = list(by_key.values())[:2]
        pieces = sum(map(len, by_key.values()))
        diff = explain(compiled).why_different(first, other)
        text = any(
            "'" in what for row in diff.differences for what in row.what if what.startswith("constant")
        )
        yield Finding(
            "piece-not-shared",
            "warning" if text else "info",
            f"{pieces} pieces call the same operators and are compiled {len(by_key)} times: {diff.verdict()}",
            "give the operator its name through lookup_args of register_op"
            if text
            else "make what differs a tensor (a buffer of the layer), if the layers are meant to be alike",
            cost=f"{len(by_key) - 1} compilations more than one",
            again=f"cgkit.explain(compiled).why_different({first!r}, {other!r})",
        )
