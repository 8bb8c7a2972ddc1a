"""Every private hook of torch (and Triton) that cgkit needs, one function each.

Nothing else in cgkit touches a private name of torch. Each function says on which versions it was
run; on a version where the hook is gone it raises UnsupportedTorchError with what was tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def triton_direct_launch(compiled_kernel: Any) -> Callable[[Sequence[int], int, Sequence[Any]], None] | None:
    """``launch(grid, raw_stream, arguments)`` for a compiled Triton kernel, past Triton's own dispatch.

    ``arguments`` are all parameters in the order of the signature, constants included; pointers may be
    plain integers. None where the kernel's private ``run`` is not known to take this call: the caller
    then launches in the public way. Launch hooks of Triton's profiler do not fire.

    Read in, and written for, Triton 3.6; other versions give None, as does Triton's interpreter.
    """
    import triton

    if ".".join(triton.__version__.split(".")[:2]) != "3.6":
        return None
    try:
        run, function = compiled_kernel.run, compiled_kernel.function
        packed = compiled_kernel.packed_metadata
    except AttributeError:
        return None
    if not callable(run) or function is None:
        return None

    def launch(grid: Sequence[int], stream: int, arguments: Sequence[Any]) -> None:
        run(grid[0], grid[1], grid[2], stream, function, packed, None, None, None, *arguments)

    return launch


def current_raw_stream(device_index: int) -> int:
    """The address of the current CUDA stream of a device. torch 2.11; elsewhere by the public way."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw(device_index) if raw is not None else torch.cuda.current_stream(device_index).cuda_stream
