"""Inductor: the Python that it generated for a compiled piece."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

#: How far from the artefact the generated code is looked for: far above what is needed (5 on torch 2.13).
_DEPTH = 16


def generated_wrapper(runnable: Callable[..., Any]) -> str | None:
    """The wrapper code (allocations, kernel calls, deletes) behind what ``standalone_compile`` returned.

    None if there is none (another compiler), or if the artefact is not built as on the versions known: the callable
    is a closure over AOTAutograd's wrappers, somewhere inside which stands the object with ``source_code``.
    Run on torch 2.13 (CPU).
    """
    seen: set[int] = set()
    level: list[Any] = [runnable]
    for _ in range(_DEPTH):
        following: list[Any] = []
        for value in level:
            if id(value) in seen:
                continue
            seen.add(id(value))
            source = getattr(value, "source_code", None)
            if isinstance(source, str) and source:
                return source
            following += _held_by(value)
        level = following
    return None


def _held_by(value: Any) -> Iterator[Any]:
    """What a callable holds on to, as far as that is code of torch's compiler or a closure."""
    if isinstance(value, types.FunctionType):
        held: list[Any] = [getattr(value, "__wrapped__", None), *vars(value).values()]
        for cell in value.__closure__ or ():
            try:
                held.append(cell.cell_contents)
            except ValueError:  # an empty cell
                continue
    elif isinstance(value, types.MethodType):
        held = [value.__self__, value.__func__]
    elif isinstance(value, functools.partial):
        held = [value.func, *value.args, *value.keywords.values()]
    else:
        held = [*getattr(value, "__dict__", {}).values()]
    for each in held:
        callable_ = isinstance(each, (types.FunctionType, types.MethodType, functools.partial))
        if callable_ or type(each).__module__.startswith(("torch._inductor", "torch._functorch")):
            yield each
