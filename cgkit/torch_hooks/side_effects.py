"""Dynamo's record of the Python objects that a traced function writes to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cgkit.torch_hooks.versions import gone


@dataclass(frozen=True)
class SideEffect:
    """One write to a Python object that Dynamo replays after the graph.

    ``target`` is Dynamo's name of the object, ``key`` the attribute (or the dict's key) written,
    None for a list. ``holds_tensor``: the new or the old value holds a tensor. ``stacks``: for each
    write of the object (file, line, source line) from the outermost to the innermost.
    """

    target: str
    attribute: str | None
    key: Any
    how: str
    holds_tensor: bool
    stacks: tuple[tuple[tuple[str, int, str], ...], ...]


def dynamo_side_effects() -> list[SideEffect]:
    """The writes to objects from outside that the running compilation will replay. Inside a backend.

    Reads ``SideEffects.store_attr_mutations`` and ``mutation_user_stacks`` of the current
    instruction translator. Run on torch 2.11 (CUDA) and 2.13 (CPU).
    """
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        effects = InstructionTranslator.current_tx().output.side_effects
        modified, stores = effects._get_modified_vars(), effects.store_attr_mutations
    except (ImportError, AttributeError):
        raise gone("InstructionTranslator.current_tx().output.side_effects") from None
    stacks_of = getattr(effects, "mutation_user_stacks", {})
    found: list[SideEffect] = []
    for variable in modified:
        target = _variable_source(variable)
        if not target:  # made inside forward: nobody outside sees it
            continue
        stacks = tuple(
            tuple((frame.filename, frame.lineno or 0, frame.line or "") for frame in stack)
            for stack in stacks_of.get(variable, ())
        )
        if variable in stores:
            owner = vars(variable).get("value")
            for name, value in stores[variable].items():
                holds = _holds_tensor(value) or isinstance(getattr(owner, name, None), torch.Tensor)
                found.append(SideEffect(target, name, None, "assigned", holds, stacks))
        else:
            found += [SideEffect(target, None, *change, stacks) for change in _changes(variable)]
    return found


def _changes(container: Any) -> list[tuple[Any, str, bool]]:
    """(key, how, holds a tensor) of each change of a list, dict or other container."""
    items, before = vars(container).get("items"), vars(container).get("original_items")
    if not isinstance(items, dict) or not isinstance(before, dict):
        return [(None, "contents changed", _holds_tensor(container))]
    new = {_plain_key(key): value for key, value in items.items()}
    old = {_plain_key(key): value for key, value in before.items()}
    changes: list[tuple[Any, str, bool]] = [
        (key, "assigned", _holds_tensor(value)) for key, value in new.items() if old.get(key) is not value
    ]
    return changes + [(key, "deleted", _holds_tensor(old[key])) for key in old if key not in new]


def _plain_key(key: Any) -> Any:
    """The Python key that a dict key of Dynamo stands for, or its text."""
    try:
        return getattr(key, "vt", key).as_python_constant()
    except Exception:  # a tensor, a module, ...: only shown
        return str(key)


def _variable_source(variable: Any) -> str:
    """Dynamo's name for where a variable comes from; "" if it was made inside the trace."""
    source = getattr(variable, "source", None)
    if source is None or type(source).__name__ == "TempLocalSource":
        return ""
    try:
        name = source.name
        return name() if callable(name) else name
    except NotImplementedError:
        return ""


def _holds_tensor(value: Any) -> bool:
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.tensor import TensorVariable

    kinds: list[type] = []
    VariableTracker.visit(lambda variable: kinds.append(type(variable)), value)
    return any(issubclass(kind, TensorVariable) for kind in kinds)
