"""Every private hook of torch (and Triton) that cgkit needs, one function each.

Nothing else in cgkit touches a private name of torch. Each function says on which versions it was
run; on a version where the hook is gone it raises UnsupportedTorchError with what was tried.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """The overload that ``packet(*args, **kwargs)`` would call, or None where ``packet`` is no packet of
    overloads or torch cannot tell without calling it (``torch._C._jit_resolve_packet``; torch 2.11, 2.13)."""
    from torch._ops import OpOverloadPacket

    if not isinstance(packet, OpOverloadPacket):
        return None
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


def operator_of(target: Any) -> tuple[str, str | None] | None:
    """``("ns::name", overload)`` of an operator; overload None for a packet of them; None for anything
    that is no operator of torch's registry (``torch._ops``; torch 2.11, 2.13)."""
    from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

    if isinstance(target, OpOverload):
        return str(target._schema.name), str(target._overloadname)
    if isinstance(target, OpOverloadPacket):
        return str(target._qualified_op_name), None
    if isinstance(target, HigherOrderOperator):
        return f"higher_order::{target.name()}", "default"
    return None


def returns_several(target: Any) -> bool | None:
    """Whether an overload's schema returns a list or several values; None if ``target`` is no overload
    (``OpOverload._schema``; torch 2.11, 2.13)."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return None
    return len(schema.returns) > 1 or any("List" in str(returned.type) for returned in schema.returns)
