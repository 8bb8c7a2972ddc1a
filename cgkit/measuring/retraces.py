"""How often a model is traced for a row of calls: by ``torch.compile`` with its guards, and by cgkit.

Exhibit for the article's "自定义 dispatcher：绕过 Dynamo guard 的全部原理" (how the custom dispatcher gets round
Dynamo's guards): with guards, a call that does not fit is traced and compiled again, while a user waits.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cgkit import torch_hooks
from cgkit.config import CompilationConfig, CompilationLevel, CUDAGraphMode
from cgkit.errors import CgkitError, TraceError
from cgkit.pipeline import support_torch_compile
from cgkit.tracing import trace
from cgkit.tracing.own_code import with_own_code

if TYPE_CHECKING:
    import pandas as pd

_serial = itertools.count()
#: ``dynamic=`` of ``torch.compile`` by the name of the way; None: cgkit's one trace.
WAYS: dict[str, dict[str, Any] | None] = {
    "torch.compile, dynamic=False": {"dynamic": False},
    "torch.compile": {},
    "torch.compile, dynamic=True": {"dynamic": True},
    "cgkit.trace": None,
}


def count_traces(
    model: nn.Module, calls: Iterable[Sequence[Any]], ways: Iterable[str] = tuple(WAYS)
) -> pd.DataFrame:
    """Makes the same calls in each way, and counts the graphs that Dynamo has made after each.

    Args:
        model: traced anew in each way; neither it nor what Dynamo keeps of it is changed.
        calls: arguments of one call each. They are run by the graph as it was traced: nothing is compiled.
        ways: of :data:`WAYS`.

    Returns:
        A row a way and call: ``way``, ``call`` (from 1), ``size`` (dimension 0 of the first argument), ``graphs``
        (made so far), ``agrees`` (whether the result is what the model gives; False where the call is refused).

    Raises:
        CgkitError: there is no such way.
    """
    import pandas as pd

    rows = []
    made_calls = [tuple(call) for call in calls]
    for way in ways:
        if way not in WAYS:
            raise CgkitError(f"there is no way {way!r} to trace; there are {', '.join(map(repr, WAYS))}")
        made: list[Any] = []
        run = (
            _one_trace(model, made_calls[0], made) if WAYS[way] is None else _guarded(model, made, WAYS[way])
        )
        for number, call in enumerate(made_calls, 1):
            with torch.no_grad():
                agrees = _agrees(run, model, call)
            rows.append((way, number, call[0].shape[0], len(made), agrees))
    return pd.DataFrame(rows, columns=["way", "call", "size", "graphs", "agrees"])


def _guarded(model: nn.Module, made: list[Any], options: dict[str, Any] | None) -> Callable[..., Any]:
    """``torch.compile`` of a copy of ``forward``, under a name of its own: torch remembers by file, line and name
    which sizes have changed before, and that must not come from another way."""

    def backend(graph: Any, _: Any) -> Any:
        made.append(graph)
        return graph.forward

    own = _renamed(model.forward.__func__)  # type: ignore[attr-defined]
    return torch.compile(MethodType(own, model), backend=backend, **(options or {}))


def _renamed(function: Any) -> FunctionType:
    """A copy of a function whose code has a name that no other has."""
    return with_own_code(function, f"{function.__name__}_{next(_serial)}")


def dynamo_runs_by_level(model: nn.Module, calls: Iterable[Sequence[Any]]) -> pd.DataFrame:
    """How often Dynamo compiles something while the same calls are made at each compilation level.

    Nothing is compiled after Dynamo (``compiler="eager"``), cut or recorded.

    Args:
        model: of a class that is not decorated; a copy of it is.

    Returns:
        A row a level: ``level``, ``name``, ``dynamo_runs``.
    """
    import pandas as pd

    rows = []
    calls = [tuple(call) for call in calls]
    for level in CompilationLevel:
        seen: list[Any] = []
        config = CompilationConfig(
            level=level, compiler="eager", cudagraph_mode=CUDAGraphMode.NONE, splitting_ops=()
        )
        fresh = _decorated_copy(model, config)
        hook = torch_hooks.register_bytecode_hook(lambda old, new, seen=seen: seen.append(old))  # type: ignore[misc]
        try:
            with torch.no_grad():
                for call in calls:
                    fresh(*call)
        finally:
            hook.remove()
        rows.append((level.value, level.name, len(seen)))
    return pd.DataFrame(rows, columns=["level", "name", "dynamo_runs"])


def _decorated_copy(model: nn.Module, config: CompilationConfig) -> nn.Module:
    """``model`` as an instance of a decorated class of its own, with the same weights."""

    class Bare(nn.Module):
        forward = _renamed(type(model).forward)

        def __init__(self) -> None:
            super().__init__()
            self.__dict__.update(copy.copy(model).__dict__)

    return support_torch_compile(Bare)(compilation_config=config)  # type: ignore[call-arg]


def _one_trace(model: nn.Module, call: tuple[Any, ...], made: list[Any]) -> Callable[..., Any]:
    traced = trace(model, *call)
    made.append(traced.graph_module)
    return traced


def _agrees(run: Callable[..., Any], model: nn.Module, call: tuple[Any, ...]) -> bool:
    try:
        return torch.allclose(run(*call), model(*call))
    except TraceError:
        return False
