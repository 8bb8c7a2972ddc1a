"""Every private hook of torch (and Triton) that cgkit needs, one function each.

Nothing else in cgkit touches a private name of torch. Each function says on which versions it was
run; on a version where the hook is gone it raises UnsupportedTorchError with what was tried.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch

from cgkit.errors import UnsupportedTorchError

RUN_ON = "torch 2.11 (CUDA) and 2.13 (CPU)"


def _gone(hook: str) -> UnsupportedTorchError:
    return UnsupportedTorchError(
        f"torch {torch.__version__} has no {hook} as cgkit knows it (run on {RUN_ON}); "
        "install one of these versions, or adapt cgkit/torch_hooks.py"
    )


# --- Dynamo: one trace -----------------------------------------------------------------------


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Tells Dynamo that ``dim`` may have any size from 2 up. Same on 2.11 to 2.13."""
    torch._dynamo.mark_dynamic(tensor, dim)


def register_bytecode_hook(hook: Callable[[CodeType, CodeType], CodeType | None]) -> Any:
    """Calls ``hook(old code, new code)`` after each compilation; the result has ``remove()``.

    Same on 2.11 to 2.13. The hooks are one dict a process, which Dynamo walks while it compiles:
    add and remove under a lock.
    """
    try:
        return torch._dynamo.convert_frame.register_bytecode_hook(hook)  # type: ignore[arg-type]
    except AttributeError:
        raise _gone("torch._dynamo.convert_frame.register_bytecode_hook") from None


def count_bytecode_hooks() -> int:
    """How many bytecode hooks are registered in the process (for tests). 2.11 to 2.13."""
    return len(torch._dynamo.convert_frame._bytecode_hooks)


def forget_code(code: CodeType) -> None:
    """Drops what Dynamo has cached for this one code object. Same on 2.11 to 2.13."""
    try:
        from torch._C._dynamo.eval_frame import reset_code
    except ImportError:
        raise _gone("torch._C._dynamo.eval_frame.reset_code") from None
    reset_code(code)


#: Dynamo calls the compiled graph through a global whose name starts so (2.11 to 2.13).
COMPILED_FN_PREFIX = "__compiled_fn_"


def drop_all_guards(entries: Any) -> list[bool]:
    """A ``guard_filter_fn`` that keeps nothing (torch.compiler.skip_all_guards_unsafe, 2.10 up)."""
    return [False] * len(entries)


def tracing_context() -> Any:
    """The tracing context of the compilation that runs in this thread. Same on 2.11 to 2.13."""
    try:
        context = torch._guards.TracingContext.try_get()
    except AttributeError:
        raise _gone("torch._guards.TracingContext") from None
    if context is None or context.fake_mode is None:
        raise _gone("tracing context with a fake mode inside a backend")
    return context


def in_tracing_context(context: Any) -> AbstractContextManager[Any]:
    """Re-enters a tracing context after Dynamo has returned. Same on 2.11 to 2.13.

    ``standalone_compile(dynamic_shapes="from_tracing_context")`` finds its symbols through it.
    """
    return torch._guards.tracing(context)


def traced_code(context: Any) -> list[CodeType]:
    """The code of the traced function and of all that were inlined. Same on 2.11 to 2.13."""
    return list(getattr(context, "traced_code", None) or ())


def placeholder_source(node: torch.fx.Node) -> str:
    """Where a placeholder's value comes from, as Dynamo says it (``L['self']...``); "" if unknown.

    Only inside the backend: afterwards Dynamo drops the record. Same on 2.11 to 2.13.
    """
    source = getattr(node.meta.get("grapharg"), "source", None) or getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", "")
    return name() if callable(name) else name


def fake_example(example: Any, context: Any) -> Any:
    """The fake form of a placeholder's example, in the context's fake mode, with the trace's symbols.

    The fakes in ``meta["example_value"]`` belong to a fake mode that Dynamo has already left; the
    context remembers which symbols each real tensor got (``tensor_to_context``). 2.11 to 2.13.
    """
    if not isinstance(example, torch.Tensor) or isinstance(example, torch._subclasses.FakeTensor):
        return example
    symbolic = context.tensor_to_context.get(example)
    if symbolic is None:
        return context.fake_mode.from_tensor(example, static_shapes=True)
    return context.fake_mode.from_tensor(
        example, symbolic_context=symbolic, source=getattr(symbolic, "tensor_source", None)
    )


def shape_guards(context: Any) -> list[str]:
    """What the trace assumed of its symbols, as text; 2.11 to 2.13."""
    shape_env = context.fake_mode.shape_env
    return [] if shape_env is None else [str(guard.expr) for guard in shape_env.guards]


@dataclass(frozen=True)
class SideEffect:
    """One write to a Python object that Dynamo replays after the graph.

    ``target`` is Dynamo's name of the object, ``key`` the attribute (or the dict's key) written,
    None for a list. ``holds_tensor``: the new or the old value holds a tensor. ``frames``: for each
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
    instruction translator (2.11 to 2.13).
    """
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        effects = InstructionTranslator.current_tx().output.side_effects
        modified, stores = effects._get_modified_vars(), effects.store_attr_mutations
    except (ImportError, AttributeError):
        raise _gone("InstructionTranslator.current_tx().output.side_effects") from None
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


@contextmanager
def quiet_loggers() -> Iterator[None]:
    """Silences the tracebacks that Dynamo logs beside the exception it raises. 2.11 to 2.13."""
    loggers = [logging.getLogger(name) for name in ("torch._guards", "torch._subclasses.fake_tensor")]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before):
            logger.disabled = disabled


def original_of_compiled(function: Any) -> Any:
    """What a function made by ``torch.compile`` wraps, or the function itself. 2.11 to 2.13."""
    if getattr(function, "_torchdynamo_disable", False):
        return function
    return getattr(function, "_torchdynamo_orig_callable", function)


_LIBRARY_FOLDERS = tuple(os.path.dirname(file) + os.sep for file in (torch.__file__, __file__))


def is_library_file(file: str) -> bool:
    """Whether a source file is torch's or cgkit's own tracing code, not the user's."""
    return file.startswith((_LIBRARY_FOLDERS[0], "<frozen ", _LIBRARY_FOLDERS[1] + "tracing" + os.sep))


def storage_key(tensor: torch.Tensor) -> int:
    """A number that two tensors share if and only if they share their storage (fake ones too).

    ``untyped_storage()._cdata``: the same on 2.11 to 2.13. Valid while one of them is alive.
    """
    return tensor.untyped_storage()._cdata


# --- Names that have no public home (the same on 2.11 to 2.13) ---------------------------------

OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket


def dispatch_mode_class() -> type[Any]:
    """``TorchDispatchMode``: a mode that sees every operator below autograd. 2.11 to 2.13."""
    from torch.utils._python_dispatch import TorchDispatchMode

    return TorchDispatchMode
