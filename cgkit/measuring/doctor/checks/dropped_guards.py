"""What the trace assumed and nobody checks any more, and whether the sizes that will be run keep to it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from cgkit import torch_hooks
from cgkit.errors import CgkitError, TraceError
from cgkit.measuring.doctor.compare import difference
from cgkit.measuring.doctor.findings import Finding, at
from cgkit.measuring.doctor.guard_values import failing, values_at_trace
from cgkit.measuring.doctor.patient import Patient, cannot
from cgkit.measuring.doctor.registry import check
from cgkit.tracing import TracedGraph
from cgkit.tracing.frames import Frame, called_from
from cgkit.tracing.traced_graph import plain_source

#: Every size up to this one is tried.
_SMALL = 64


@check("dropped-guard")
def dropped_guards(patient: Patient) -> Iterator[Finding]:
    """Guards on sizes, each tried on the sizes that will run: is the result another one there?"""
    traced = patient.traced
    if traced is None:
        return
    for guard in torch_hooks.size_guards(traced.fake_mode):
        yield _of_size(patient, guard, traced)
    patient.notes["guard values"] = values_at_trace(patient)
    rows = guard_rows(patient)
    kinds = Counter(kind for _, kind, *_ in rows)
    if rows:
        most = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(4))
        yield Finding(
            "dropped-guard",
            "info",
            f"{len(rows)} guards of the trace are dropped ({most}, ...): compiled code does not look again",
            "change nothing of the model after the first call; .would_fail(*new_inputs) tries the guards on a new "
            "call, .guards_frame() lists them with their sources",
            again="cgkit.doctor(model, *example_inputs).guards_frame()",
        )


def _of_size(patient: Patient, guard: torch_hooks.SizeGuard, traced: TracedGraph) -> Finding:
    broken = failing_sizes(patient, guard)
    severity, meaning = "info", "no size that will run breaks it"
    if broken:
        shown = ", ".join(map(str, broken[:6])) + (", ..." if len(broken) > 6 else "")
        severity, meaning = tried(patient, broken)
        meaning = f"{len(broken)} of the sizes that will run break it ({shown}): {meaning}"
    return Finding(
        "dropped-guard",
        severity,
        f"the trace assumed {said(guard)}, and nobody checks it any more; {meaning}",
        "make the code the same for every size (no branch on a size), or record and run only sizes that keep to it"
        if severity != "info"
        else "nothing to do for these sizes",
        again=f"cgkit.trace(model, *example_inputs).dropped_guards  # {guard.text}",
        **at(located(guard, traced)),
    )


def failing_sizes(patient: Patient, guard: torch_hooks.SizeGuard) -> list[int]:
    """The sizes that will run at which the guard does not hold, every dynamic dimension having that size."""
    if not patient.is_dynamic:
        return []
    symbols = [str(symbol) for symbol in guard.expression.free_symbols]
    return [n for n in _sizes_that_run(patient) if guard.holds(dict.fromkeys(symbols, n)) is False]


def _sizes_that_run(patient: Patient) -> list[int]:
    """Recorded sizes, those that are padded to them (the model by itself would have seen the smaller one), and some
    above them."""
    listed, limit = patient.sizes, patient.config.max_num_batched_tokens
    sizes = {*listed, *range(1, min(listed.largest, _SMALL) + 1)}
    above = {listed.largest + 1, 2 * listed.largest, *([limit] if limit else [])}
    return sorted(size for size in sizes | above if limit is None or size <= limit)


def tried(patient: Patient, sizes: list[int]) -> tuple[str, str]:
    """Runs model and trace at some of the sizes: (severity, what came of it)."""
    assert patient.traced is not None
    chosen = list(dict.fromkeys([sizes[0], sizes[len(sizes) // 2], sizes[-1]]))
    refused: list[str] = []
    same: list[str] = []
    restless: list[str] = []
    for size in chosen:
        args, kwargs = patient.call_of_size(size)
        try:
            with patient.as_given():
                expected = patient.model(*args, **kwargs)
        except Exception as error:
            refused.append(f"the model itself refuses {size} ({type(error).__name__})")
            continue
        args, kwargs = patient.call_of_size(size)  # anew: the model may write its inputs
        try:
            with patient.as_given():
                got = patient.traced(*args, **kwargs)
        except Exception as error:
            return "warning", f"at {size} the trace raises {type(error).__name__}, and the model does not"
        differs = difference(expected, got)
        if differs and repeats_itself(patient, size, expected):
            return "error", f"at {size} the trace computes something else than the model ({differs})"
        (restless if differs else same).append(str(size))
    if restless:
        return (
            "warning",
            f"at {', '.join(restless)} two runs of the model differ, so nothing can agree with it",
        )
    if not same:
        return "info", refused[0]
    return "info", f"at {', '.join(same)} the trace gives what the model gives"


def repeats_itself(patient: Patient, size: int, before: Any) -> bool:
    """Whether another run of the model on this size gives what it gave ``before``: else one run tells nothing."""
    args, kwargs = patient.call_of_size(size)
    try:
        with patient.as_given():
            return not difference(before, patient.model(*args, **kwargs))
    except Exception:  # the model's own, that it did not raise before
        return False


def said(guard: torch_hooks.SizeGuard) -> str:
    """A guard with ``x.shape[0]`` for its symbols."""
    text = guard.text
    for symbol, source in guard.sources.items():
        plain = re.sub(r"\.size\(\)\[(\d+)\]$", r".shape[\1]", plain_source(source))
        text = re.sub(rf"\b{symbol}\b", re.sub(r"^L\['(\w+)'\]", r"\1", plain), text)
    return re.sub(
        r"^(Eq|Ne)\((.+), (.+)\)$", lambda m: f"{m[2]} {'==' if m[1] == 'Eq' else '!='} {m[3]}", text
    )


def symbol_sources(traced: TracedGraph) -> dict[str, tuple[str, int]]:
    """Where each symbol is read: (source of the tensor, dimension)."""
    found: dict[str, tuple[str, int]] = {}
    for entry in traced.inputs:
        if entry.kind == "argument":
            for dim in entry.dynamic_dims:
                found.setdefault(entry.shape[dim], (entry.source, dim))
    return found


def located(guard: torch_hooks.SizeGuard, traced: TracedGraph) -> Frame | None:
    """The user's line of a guard; torch keeps only the end of a file's name."""
    if guard.where is None:
        return None
    file, line, source = guard.where
    whole = next((name for name in traced.traced_files if name.endswith(file)), file)
    return called_from(traced.graph_module.graph, (whole, line, source))


def guard_rows(patient: Patient) -> list[tuple[str, str, str, str, int]]:
    """(source, kind, guard, file, line) of every guard that is dropped.

    Raises:
        CgkitError: there is no trace.
    """
    traced = _needs_trace(patient)
    rows = [
        (plain_source(source), kind, "" if key is None else str(key), "", 0)
        for source, kind, key in traced.guards
        if kind != "SHAPE_ENV"
    ]
    for guard in torch_hooks.size_guards(traced.fake_mode):
        file, line, _ = located(guard, traced) or ("", 0, "")
        rows.append((said(guard), "SIZE", guard.text, file, line))
    return rows


def failing_assumptions(patient: Patient, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Which assumptions of the trace a new call breaks, each a sentence.

    Raises:
        CgkitError: there is no trace.
    """
    traced = _needs_trace(patient)
    failed = []
    try:
        traced.check_arguments(args, kwargs)
    except TraceError as error:
        failed.append(f"refused by cgkit: {cannot(error)}")
    failed += failing(patient, patient.notes.get("guard values", []), args, kwargs)
    bound = traced.arguments.signature.bind(*args, **kwargs)
    bound.apply_defaults()
    scope = {"__builtins__": {}, "L": bound.arguments}
    try:
        sizes = {
            symbol: int(eval(source, scope).shape[dim])  # Dynamo's text
            for symbol, (source, dim) in symbol_sources(traced).items()
        }
    except (AttributeError, LookupError, TypeError):  # no tensor where there was one: said already
        return failed
    for guard in torch_hooks.size_guards(traced.fake_mode):
        if guard.holds(sizes) is False:
            file, line, source = located(guard, traced) or ("", 0, "")
            place = f", at {file}:{line}: {source}" if file else ""
            failed.append(f"{said(guard)} does not hold{place}")
    for entry in traced.inputs:
        failed += _unlike(entry, scope, sizes)
    return list(dict.fromkeys(failed))


def _unlike(entry: Any, scope: dict[str, Any], sizes: dict[str, int]) -> list[str]:
    """Dimensions that carry one symbol and have two sizes now."""
    if entry.kind != "argument" or not entry.dynamic_dims:
        return []
    tensor: torch.Tensor = eval(entry.source, scope)  # Dynamo's text
    return [
        f"{plain_source(entry.source)}.shape[{dim}] is {tensor.shape[dim]}, and another dimension that was the same "
        f"in the trace is {sizes[entry.shape[dim]]}"
        for dim in entry.dynamic_dims
        if entry.shape[dim] in sizes and tensor.shape[dim] != sizes[entry.shape[dim]]
    ]


def _needs_trace(patient: Patient) -> TracedGraph:
    if patient.traced is None:
        raise CgkitError(
            f"{patient.name} could not be traced, so it has no guards: {cannot(patient.failure)}"
        )  # type: ignore[arg-type]
    return patient.traced
