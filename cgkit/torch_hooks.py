"""Every private hook of torch (and Triton) that cgkit needs, one function each.

Nothing else in cgkit touches a private name of torch. Each function says on which versions it was
run; on a version where the hook is gone it raises UnsupportedTorchError with what was tried.
"""

from __future__ import annotations

import inspect
import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from cgkit.errors import UnsupportedTorchError

RUN_ON = "torch 2.11 (CUDA) and 2.13 (CPU)"


def _gone(hook: str) -> UnsupportedTorchError:
    return UnsupportedTorchError(
        f"torch {torch.__version__} has no {hook} as cgkit knows it (run on {RUN_ON}); "
        "install one of these versions, or adapt cgkit/torch_hooks.py"
    )


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
    with torch.no_grad(), tracing(TracingContext(fake_mode)):
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
    stack.enter_context(torch.no_grad())
    stack.enter_context(fake_mode)
    stack.enter_context(enable_python_dispatcher())
    return stack


def storage_id(tensor: torch.Tensor) -> int:
    """A number that two tensors share exactly if they share a storage; fakes too (2.11, 2.13)."""
    return tensor.untyped_storage()._cdata


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


def shape_guards(fake_mode: Any) -> list[str]:
    """What has been assumed of the symbols so far, as text in order (2.11, 2.13)."""
    return [str(guard.expr) for guard in getattr(getattr(fake_mode, "shape_env", None), "guards", ())]
