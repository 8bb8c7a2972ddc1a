"""What the dropped guards would have compared: the values at the trace, and those of a new call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from cgkit.measuring.doctor.patient import Patient
from cgkit.tracing.arguments import is_constant
from cgkit.tracing.traced_graph import plain_source

_MISSING = type("_MISSING", (), {"__repr__": lambda self: "not there"})()


class Kept(NamedTuple):
    """One guard's source as Dynamo writes it, its kind, and what it saw."""

    source: str
    kind: str
    key: Any
    seen: Any


def values_at_trace(patient: Patient) -> list[Kept]:
    """What each guard looks at, as it is now; for guards whose source can be read from outside."""
    if patient.traced is None:
        return []
    scope = _scope(patient, patient.args, patient.kwargs)
    found = []
    for source, kind, key in dict.fromkeys((s, k, _hashable(key)) for s, k, key in patient.traced.guards):
        seen = _fact(source, kind, key, scope)
        if seen is not None and seen is not _MISSING:
            found.append(Kept(source, kind, key, seen))
    return found


def failing(
    patient: Patient, kept: list[Kept], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[str]:
    """A sentence for each guard that a call of the model, as it is now, would fail."""
    scope = _scope(patient, args, kwargs)
    dynamic = {
        entry.source: entry.dynamic_dims for entry in (patient.traced.inputs if patient.traced else ())
    }
    for source, kind, key, seen in kept:
        now = _fact(source, kind, key, scope)
        if isinstance(seen, _Tensor) and isinstance(now, _Tensor):
            seen, now = (each.without(dynamic.get(source, ())) for each in (seen, now))
        if now is None or (now == seen and type(now) is type(seen)):
            continue
        what = f"{plain_source(source)}{_SAYS.get(kind, '')}" + (f" of {key!r}" if "CONTAINS" in kind else "")
        yield f"{kind} on {what} fails: {_shown(seen)} at the trace, {_shown(now)} now"


_SAYS = {"SEQUENCE_LENGTH": " (length)", "TYPE_MATCH": " (type)"}


class _Tensor(NamedTuple):
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    shape: tuple[Any, ...]

    def without(self, dims: tuple[int, ...]) -> _Tensor:
        return self._replace(shape=tuple(None if d in dims else n for d, n in enumerate(self.shape)))

    def __repr__(self) -> str:
        sizes = ", ".join("*" if size is None else str(size) for size in self.shape)
        return f"{str(self.dtype).removeprefix('torch.')}[{sizes}] on {self.device}" + (
            ", with gradients" if self.requires_grad else ""
        )


class _Same:
    """Equal to the very object only."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"the {type(self.value).__name__} at {id(self.value):#x}"


def _fact(source: str, kind: str, key: Any, scope: dict[str, Any]) -> Any:
    """What a guard of ``kind`` sees at ``source``; None for guards that are not understood here."""
    try:
        value = eval(source, scope)  # Dynamo's text
    except (NameError, SyntaxError, TypeError):
        return None
    except Exception:
        return _MISSING
    if isinstance(value, torch.Tensor):
        return _Tensor(value.dtype, value.device, value.requires_grad, tuple(value.shape))
    if kind == "SEQUENCE_LENGTH" and hasattr(value, "__len__"):
        return len(value)
    if kind in ("DICT_CONTAINS", "DICT_NOT_CONTAINS") and key is not None:
        return key in value
    if kind == "TYPE_MATCH":
        return type(value)
    if kind.endswith("_MATCH") and is_constant(value):
        return value
    return _Same(value) if kind in ("ID_MATCH", "CLOSURE_MATCH", "FUNCTION_MATCH") else None


def _scope(patient: Patient, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = patient.signature.bind(*args, **kwargs)
    bound.apply_defaults()
    function = getattr(patient.model.forward, "__func__", patient.model.forward)
    return {
        "__builtins__": {"type": type, "len": len, "list": list, "dict": dict},
        "L": {**bound.arguments, "self": patient.model},
        "G": getattr(function, "__globals__", {}),
    }


def _hashable(key: Any) -> Any:
    return key if isinstance(key, (str, int)) else None


def _shown(value: Any) -> str:
    return getattr(value, "__qualname__", None) or repr(value)
