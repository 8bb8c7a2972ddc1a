"""Tensors inside nested values: found with the expression that reaches each, or replaced.

Arguments of a model, its outputs and a step's attention metadata are whatever the model's author
likes: tuples, lists, dicts, named tuples, dataclasses, plain objects. One walk serves every stage.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

_MAX_DEPTH = 6  # deeper than any call is built; ends the walk through objects that point at each other
_PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device)


def tensor_leaves(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in ``value`` with the Python expression that reaches each from ``path``.

    Looks into tuples, lists, dicts with plain keys, dataclasses and plain objects with attributes;
    not into modules, classes or functions.
    """
    yield from _leaves(value, path, 0)


def _leaves(value: Any, path: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif depth < _MAX_DEPTH:
        for step, child in _children(value):
            yield from _leaves(child, path + step, depth + 1)


def map_tensors(function: Callable[[str, torch.Tensor], Any], value: Any, path: str = "") -> Any:
    """``value`` with each tensor replaced by ``function(path, tensor)``; walks as :func:`tensor_leaves`.

    What holds a replaced tensor is copied, never changed; what holds none is shared.
    """
    return _mapped(function, value, path, 0)


def replace_tensors(value: Any, into: Mapping[int, Any]) -> Any:
    """``value`` with the tensors whose ``id`` is in ``into`` replaced, as :func:`map_tensors` does it."""
    return map_tensors(lambda _, tensor: into.get(id(tensor), tensor), value)


def _mapped(function: Callable[[str, torch.Tensor], Any], value: Any, path: str, depth: int) -> Any:
    if isinstance(value, torch.Tensor):
        return function(path, value)
    if isinstance(value, _PLAIN) or depth >= _MAX_DEPTH:
        return value

    def inside(step: str, child: Any) -> Any:
        return _mapped(function, child, path + step, depth + 1)

    if isinstance(value, (tuple, list)):
        items = [inside(f"[{index}]", item) for index, item in enumerate(value)]
        if all(new is old for new, old in zip(items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        changes = {key: new for key, old in value.items() if (new := inside(f"[{key!r}]", old)) is not old}
    elif _is_record(value):
        content = _attributes(value)
        changes = {name: new for name, old in content.items() if (new := inside(f".{name}", old)) is not old}
    else:
        return value
    if not changes:
        return value
    changed = copy.copy(value)  # of the same class, whatever it is beside a dict
    for key, new in changes.items():
        if isinstance(value, dict):
            changed[key] = new
        else:
            object.__setattr__(changed, key, new)  # a frozen dataclass too
    return changed


def _children(value: Any) -> Iterable[tuple[str, Any]]:
    """What lies directly in the container ``value``, each with the text that reaches it."""
    if isinstance(value, (tuple, list)):
        return [(f"[{index}]", child) for index, child in enumerate(value)]
    if isinstance(value, dict):
        return [(f"[{key!r}]", child) for key, child in value.items() if isinstance(key, (str, int))]
    if _is_record(value):
        return [(f".{name}", child) for name, child in _attributes(value).items() if name.isidentifier()]
    return ()


def _is_record(value: Any) -> bool:
    """Whether ``value`` is a plain object whose attributes are its content."""
    if isinstance(value, (type, ModuleType, torch.nn.Module)) or callable(value):
        return False
    plain = type(value).__module__.split(".")[0] not in ("torch", "numpy", "builtins")
    return (
        isinstance(value, SimpleNamespace)
        or dataclasses.is_dataclass(value)
        or (plain and hasattr(value, "__dict__"))
    )


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of a record, those of a dataclass with slots included."""
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
    return vars(value)
