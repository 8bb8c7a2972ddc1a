"""Every private hook of torch (and Triton) that cgkit needs, one function each.

Nothing else in cgkit touches a private name of torch. Each function says on which versions it was
run; on a version where the hook is gone it raises UnsupportedTorchError with what was tried.
"""

from __future__ import annotations

import inspect
import logging
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
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
        return torch._dynamo.convert_frame.register_bytecode_hook(hook)
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
        return key.vt.as_python_constant()
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
    return file.startswith((_LIBRARY_FOLDERS[0], "<frozen ")) or file.startswith(
        _LIBRARY_FOLDERS[1] + "tracing" + os.sep
    )


def storage_key(tensor: torch.Tensor) -> int:
    """A number that two tensors share if and only if they share their storage (fake ones too).

    ``untyped_storage()._cdata``: the same on 2.11 to 2.13. Valid while one of them is alive.
    """
    return tensor.untyped_storage()._cdata


# --- splitting -------------------------------------------------------------------------------


def destroy_library(library: torch.library.Library) -> None:
    """Takes back everything that ``library`` defined and implemented, at once and not when it is
    collected (``Library._destroy``; torch 2.11, 2.13)."""
    if not hasattr(library, "_destroy"):
        raise _gone("torch.library.Library._destroy")
    library._destroy()


def register_fake_in(library: torch.library.Library, op_name: str, fake_impl: Callable[..., Any]) -> None:
    """Registers a fake implementation whose life is that of ``library``, unlike the public
    ``torch.library.register_fake`` on a name (``Library._register_fake``; torch 2.11, 2.13)."""
    if not hasattr(library, "_register_fake"):
        raise _gone("torch.library.Library._register_fake")
    library._register_fake(op_name, fake_impl)


def resolve_overload(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The overload that ``packet(*args, **kwargs)`` would call, or None where torch cannot tell
    without calling it (``torch._C._jit_resolve_packet``; torch 2.11, 2.13)."""
    overloads = packet.overloads()
    if len(overloads) == 1:
        return getattr(packet, overloads[0])
    resolve = getattr(torch._C, "_jit_resolve_packet", None)
    if resolve is None:
        return None
    try:
        return getattr(packet, resolve(packet._qualified_op_name, *args, **kwargs))
    except (RuntimeError, TypeError, AttributeError):
        return None


def free_symbol_names(value: Any) -> frozenset[str]:
    """The names of the symbols in ``value`` (a tensor's shape, strides and offset; a SymInt; a nest
    of them). ``torch.fx.experimental.symbolic_shapes.free_symbols``; torch 2.11, 2.13."""
    if isinstance(value, (tuple, list)):
        return frozenset().union(*(free_symbol_names(element) for element in value))
    if not isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return frozenset()
    from torch.fx.experimental.symbolic_shapes import free_symbols

    return frozenset(str(symbol) for symbol in free_symbols(value))


def plain_symbol_name(value: Any) -> str | None:
    """The symbol's name if ``value`` is a SymInt that is one bare symbol, like ``s77``; else None
    (``SymInt.node.expr``; torch 2.11, 2.13)."""
    if not isinstance(value, torch.SymInt):
        return None
    expr = value.node.expr
    return str(expr) if expr.is_Symbol else None


def is_fake(value: Any) -> bool:
    """Whether ``value`` is a fake tensor (``torch._subclasses.FakeTensor``; torch 2.11, 2.13)."""
    from torch._subclasses import FakeTensor

    return isinstance(value, FakeTensor)


# --- compiling ---------------------------------------------------------------------------------


def compile_lock() -> Any:
    """The re-entrant lock that Dynamo and Inductor themselves compile under (2.11, 2.13).

    Taking it keeps a trace in another thread out of our compilations, which change global state.
    """
    from torch._dynamo import convert_frame

    try:
        return convert_frame.compile_lock
    except AttributeError:
        raise _gone("torch._dynamo.convert_frame.compile_lock") from None


def standalone_compile(
    graph_module: torch.fx.GraphModule, fake_args: Sequence[Any], fake_mode: Any, options: dict[str, Any]
) -> Callable[..., Sequence[Any]]:
    """Inductor's ``standalone_compile`` on fakes of ``fake_mode``; the artefact (2.11, 2.13).

    A fresh tracing context carries the fake mode in (``dynamic_shapes="from_tracing_context"``), so
    that symbols keep their meaning and a mode without symbols gives a static compilation, without
    a real example tensor. The graph module is given away: hand in a copy.
    """
    from torch._guards import TracingContext, tracing

    try:
        from torch._inductor import standalone_compile as compile_it
    except ImportError:
        raise _gone("torch._inductor.standalone_compile") from None
    more: dict[str, Any] = {}
    if "donate_graph_module" in inspect.signature(compile_it).parameters:  # 2.13
        more["donate_graph_module"] = True
    with torch.inference_mode(False), torch.no_grad(), tracing(TracingContext(fake_mode)):
        return compile_it(
            graph_module,
            list(fake_args),
            dynamic_shapes="from_tracing_context",
            options={"config_patches": options},
            **more,
        )


def inductor_options() -> set[str]:
    """The names of Inductor's options, as ``config_patches`` takes them (2.11, 2.13)."""
    from torch._inductor import list_options

    return set(list_options())


def generated_kernels() -> int:
    """How many kernels Inductor has generated in this process, cache hits included (2.11, 2.13)."""
    from torch._inductor import metrics

    return getattr(metrics, "generated_kernel_count", 0)


def find_cpp_compiler() -> str | None:
    """The C++ compiler that Inductor would use for CPU code, or None (2.11, 2.13)."""
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler
    except ImportError:
        raise _gone("torch._inductor.cpp_builder.get_cpp_compiler") from None
    try:
        return get_cpp_compiler()
    except (RuntimeError, OSError, subprocess.SubprocessError):
        return None


def new_fake_mode() -> Any:
    """A fake mode with a shape environment of its own (2.11, 2.13)."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv())


def fake_mode_of(values: Iterable[Any]) -> Any | None:
    """The fake mode of the first fake tensor among ``values``, or None (2.11, 2.13)."""
    return next((value.fake_mode for value in values if is_fake(value)), None)


def running_fake(fake_mode: Any) -> AbstractContextManager[Any]:
    """A context in which operators on ``fake_mode``'s tensors compute shapes only (2.11, 2.13).

    The Python dispatcher is switched on as well, without which composite operators would turn
    symbolic sizes into numbers.
    """
    from torch._dispatch.python import enable_python_dispatcher

    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))  # inference tensors do not count their writes
    stack.enter_context(torch.no_grad())
    stack.enter_context(fake_mode)
    stack.enter_context(enable_python_dispatcher())
    return stack


def symbolic_expression(value: Any) -> Any:
    """The sympy expression of a SymInt, SymFloat or SymBool (2.11, 2.13)."""
    return value.node.expr


def symbol_facts(fake_mode: Any, symbol: Any) -> tuple[str, str]:
    """What the shape environment knows of a symbol: its range and its example (2.11, 2.13)."""
    environment = getattr(fake_mode, "shape_env", None)
    known_range = getattr(environment, "var_to_range", {}).get(symbol, "?")
    for name in ("backed_var_to_val", "var_to_val"):  # the name differs between versions
        values = getattr(environment, name, None)
        if values is not None and symbol in values:
            return str(known_range), str(values[symbol])
    return str(known_range), "?"


def specialised_symbols(fake_mode: Any) -> dict[Any, int]:
    """Symbols that the shape environment has fixed to a number meanwhile (2.11, 2.13)."""
    replacements = getattr(getattr(fake_mode, "shape_env", None), "replacements", {})
    return {
        symbol: int(value) for symbol, value in replacements.items() if getattr(value, "is_Integer", False)
    }


def substitute_symbols(value: Any, numbers: dict[Any, int]) -> Any:
    """``value`` with ``numbers`` for symbols; an int if none is left, else as it was (2.11, 2.13)."""
    if not isinstance(value, torch.SymInt):
        return value
    import sympy

    expression = value.node.expr.xreplace({symbol: sympy.Integer(n) for symbol, n in numbers.items()})
    return int(expression) if expression.is_number else value


def assumed_of_symbols(fake_mode: Any) -> list[str]:
    """What has been assumed of the symbols so far, as text in order (2.11, 2.13)."""
    return [str(guard.expr) for guard in getattr(getattr(fake_mode, "shape_env", None), "guards", ())]
