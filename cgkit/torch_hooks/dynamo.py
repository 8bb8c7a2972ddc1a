"""Dynamo: one trace, what it leaves behind, and the lock that compilations share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import CodeType
from typing import Any

import torch

from cgkit.torch_hooks.versions import gone


def compile_lock() -> Any:
    """The re-entrant lock that Dynamo and Inductor themselves compile under.

    Taking it keeps a trace in another thread out of our compilations, which change global state.
    Run on torch 2.11 (CUDA) and 2.13 (CPU).
    """
    from torch._dynamo import convert_frame

    try:
        return convert_frame.compile_lock
    except AttributeError:
        raise gone("torch._dynamo.convert_frame.compile_lock") from None


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Tells Dynamo that ``dim`` may have any size from 2 up. Run on torch 2.11 (CUDA) and 2.13 (CPU)."""
    torch._dynamo.mark_dynamic(tensor, dim)


def register_bytecode_hook(hook: Callable[[CodeType, CodeType], CodeType | None]) -> Any:
    """Calls ``hook(old code, new code)`` after each compilation; the result has ``remove()``.

    The hooks are one dict a process, which Dynamo walks while it compiles: add and remove under a lock.
    Run on torch 2.11 (CUDA) and 2.13 (CPU).
    """
    try:
        return torch._dynamo.convert_frame.register_bytecode_hook(hook)  # type: ignore[arg-type]
    except AttributeError:
        raise gone("torch._dynamo.convert_frame.register_bytecode_hook") from None


def count_bytecode_hooks() -> int:
    """How many bytecode hooks are registered in the process (for tests).

    Run on torch 2.11 (CUDA) and 2.13 (CPU).
    """
    return len(torch._dynamo.convert_frame._bytecode_hooks)


def forget_code(code: CodeType) -> None:
    """Drops what Dynamo has cached for this one code object. Run on torch 2.11 (CUDA) and 2.13 (CPU)."""
    try:
        from torch._C._dynamo.eval_frame import reset_code
    except ImportError:
        raise gone("torch._C._dynamo.eval_frame.reset_code") from None
    reset_code(code)


def drop_all_guards(entries: Any) -> list[bool]:
    """A ``guard_filter_fn`` that keeps nothing, as ``torch.compiler.skip_all_guards_unsafe``.

    Run on torch 2.11 (CUDA) and 2.13 (CPU).
    """
    return [False] * len(entries)


#: Dynamo calls the compiled graph through a global whose name starts so.
#: Run on torch 2.11 (CUDA) and 2.13 (CPU).
COMPILED_FN_PREFIX = "__compiled_fn_"


def tracing_context() -> Any:
    """The tracing context of the compilation that runs in this thread.

    Run on torch 2.11 (CUDA) and 2.13 (CPU).
    """
    try:
        context = torch._guards.TracingContext.try_get()
    except AttributeError:
        raise gone("torch._guards.TracingContext") from None
    if context is None or context.fake_mode is None:
        raise gone("tracing context with a fake mode inside a backend")
    return context


def in_tracing_context(context: Any) -> AbstractContextManager[Any]:
    """Re-enters a tracing context after Dynamo has returned.

    ``standalone_compile(dynamic_shapes="from_tracing_context")`` finds its symbols through it.
    Run on torch 2.11 (CUDA) and 2.13 (CPU).
    """
    return torch._guards.tracing(context)


def traced_code(context: Any) -> list[CodeType]:
    """The code of the traced function and of all that were inlined.

    Run on torch 2.11 (CUDA) and 2.13 (CPU).
    """
    return list(getattr(context, "traced_code", None) or ())


def placeholder_source(node: torch.fx.Node) -> str:
    """Where a placeholder's value comes from, as Dynamo says it (``L['self']...``); "" if unknown.

    Only inside the backend: afterwards Dynamo drops the record. Run on torch 2.11 (CUDA) and 2.13 (CPU).
    """
    source = getattr(node.meta.get("grapharg"), "source", None) or getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", "")
    return name() if callable(name) else name


def fake_example(example: Any, context: Any) -> Any:
    """The fake form of a placeholder's example, in the context's fake mode, with the trace's symbols.

    The fakes in ``meta["example_value"]`` belong to a fake mode that Dynamo has already left; the
    context remembers which symbols each real tensor got (``tensor_to_context``).
    Run on torch 2.11 (CUDA) and 2.13 (CPU).
    """
    if not isinstance(example, torch.Tensor) or isinstance(example, torch._subclasses.FakeTensor):
        return example
    symbolic = context.tensor_to_context.get(example)
    if symbolic is None:
        return context.fake_mode.from_tensor(example, static_shapes=True)
    return context.fake_mode.from_tensor(
        example, symbolic_context=symbolic, source=getattr(symbolic, "tensor_source", None)
    )


@contextmanager
def quiet_loggers() -> Iterator[None]:
    """Silences the tracebacks that Dynamo logs beside the exception it raises.

    Run on torch 2.11 (CUDA) and 2.13 (CPU).
    """
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
    """What a function made by ``torch.compile`` wraps, or the function itself.

    Run on torch 2.11 (CUDA) and 2.13 (CPU).
    """
    if getattr(function, "_torchdynamo_disable", False):
        return function
    return getattr(function, "_torchdynamo_orig_callable", function)


def is_compiled(target: Any) -> bool:
    """Whether ``target`` is what ``torch.compile`` returned, or a module that ``Module.compile`` changed.

    By the class's name: to import it would load all of Dynamo.

    Run on torch 2.13 (CPU).
    """
    if any(cls.__name__ == "OptimizedModule" for cls in type(target).__mro__):
        return True
    if getattr(target, "_compiled_call_impl", None) is not None:
        return True
    return original_of_compiled(target) is not target


class _LeanDynamoUtils:
    """``torch._dynamo.utils`` as Dynamo's bytecode sees it, less what costs time at each call.

    The bytecode opens a profiler range around fetching the graph's inputs, and reads sizes through
    functions that switch Dynamo off and on again: microseconds a step that only a trace in progress needs.
    """

    @staticmethod
    def record_pregraph_bytecode_enter() -> None:
        return None

    @staticmethod
    def record_pregraph_bytecode_exit(_: Any) -> None:
        return None

    @staticmethod
    def call_size(x: torch.Tensor, dim: int) -> int:
        return x.size(dim)

    @staticmethod
    def call_stride(x: torch.Tensor, dim: int) -> int:
        return x.stride(dim)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch._dynamo.utils, name)


_lean_dynamo_utils = _LeanDynamoUtils()


def lean_global(value: Any) -> Any:
    """What stands for a global of Dynamo's bytecode when no guard is before it: its helpers, made lean.

    Where the bytecode of a version has no such helpers (2.11 has some of them), nothing is replaced.
    Run on torch 2.11 (CUDA) and 2.13 (CPU).
    """
    import torch._dynamo.utils

    return _lean_dynamo_utils if value is torch._dynamo.utils else value


def dynamo_guards(context: Any) -> list[tuple[str, str, Any]]:
    """(source, kind, key) of every guard of a trace so far, as text; to be asked inside of the backend.

    ``kind`` is the name of Dynamo's builder ("CONSTANT_MATCH", "SEQUENCE_LENGTH", "DICT_CONTAINS", ...);
    ``key`` what a dictionary, or an object of its attributes, was asked for. Empty where Dynamo keeps its guards
    otherwise: nothing breaks then, but less of the arguments is checked (tests/test_silently_wrong.py fails).

    Run on torch 2.11 and 2.13 (CPU).
    """
    found = []
    guards = getattr(getattr(context, "guards_context", None), "dynamo_guards", ())
    for guard in guards:
        name, build = getattr(guard, "name", ""), getattr(guard, "create_fn", None)
        source = name() if callable(name) else name
        kind = getattr(getattr(build, "func", build), "__name__", "")
        bound = getattr(build, "keywords", None) or {}
        positional = getattr(build, "args", ())
        key = bound.get("key", bound.get("attr", positional[0] if positional else None))
        if kind == "HASATTR" and key is None:  # 2.11 has what was asked for in the source's text
            source, _, key = str(source).rpartition(".")
        found.append((str(source), kind, key))
    return found
