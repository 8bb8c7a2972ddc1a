"""Operators: their names, schemas, overloads and kernels, and libraries that can be taken back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from cgkit.torch_hooks.versions import gone


def operator_of(target: Any) -> tuple[str, str | None] | None:
    """``("ns::name", overload)`` of an operator; overload None for a packet of them; None for anything
    that is no operator of torch's registry (``torch._ops``).

    Run on torch 2.11 (CUDA) and 2.13 (CPU).
    """
    if isinstance(target, OpOverload):
        return str(target._schema.name), str(target._overloadname)
    if isinstance(target, OpOverloadPacket):
        return str(target._qualified_op_name), None
    if isinstance(target, HigherOrderOperator):
        return f"higher_order::{target.name()}", "default"
    return None


def resolve_overload(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The overload that ``packet(*args, **kwargs)`` would call, or None where ``packet`` is no packet of
    overloads or torch cannot tell without calling it (``torch._C._jit_resolve_packet``).

    Run on torch 2.11 (CUDA) and 2.13 (CPU).
    """
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


def returns_several(target: Any) -> bool | None:
    """Whether an overload's schema returns a list or several values; None if ``target`` is no overload
    (``OpOverload._schema``). Run on torch 2.11 (CUDA) and 2.13 (CPU)."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return None
    return len(schema.returns) > 1 or any("List" in str(returned.type) for returned in schema.returns)


def written_arguments(op: OpOverload) -> list[str | None]:
    """For each return of ``op``, the argument that it is (``add_``, ``out=``), or None.

    Run on torch 2.13 (CPU).
    """
    schema = op._schema
    names: list[str | None] = []
    for returned in schema.returns:
        alias = returned.alias_info
        same = (
            [a.name for a in schema.arguments if a.alias_info and a.alias_info.before_set == alias.before_set]
            if alias is not None and alias.is_write
            else []
        )
        names.append(same[0] if same else None)
    return names


def mutated_arguments(op: OpOverload) -> list[str]:
    """The arguments that ``op`` says it writes to. Run on torch 2.13 (CPU)."""
    return [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def bound_argument(op: OpOverload, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The argument called ``name`` in a call of ``op``; None if it is left to its default, or unknown.

    Run on torch 2.13 (CPU).
    """
    given = {argument.name: value for argument, value in zip(op._schema.arguments, args)}
    return {**given, **kwargs}.get(name)


def has_python_kernel(op: OpOverload) -> bool:
    """Whether a call of ``op`` on CPU tensors would run Python code, registered with torch.library.

    torch.library notes each such registration (custom_op and Library.impl alike) in one set of
    "namespace/name.overload/key". Run on torch 2.13 (CPU).
    """
    namespace, _, name = op.name().partition("::")
    registered = getattr(torch.library, "_impls", None)
    if registered is None:
        raise gone("torch.library._impls")
    return any(f"{namespace}/{name}/{key}" in registered for key in _PYTHON_KERNEL_KEYS)


_PYTHON_KERNEL_KEYS = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd")


def run_cpu_kernel(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the kernel of ``op`` for CPU tensors past the modes; what the kernel calls meets them.

    Run on torch 2.13 (CPU).
    """
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    return op.redispatch(keys, *args, **kwargs)


def run_function_operator(op: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the Python that an operator over functions (``flex_attention``) is made of; NotImplemented if it has none
    that does for CPU tensors (``py_kernels``). Run on torch 2.13 (CPU)."""
    kernels = getattr(op, "py_kernels", {})
    key = torch._C.DispatchKey
    kernel = kernels.get(key.CPU) or kernels.get(key.CompositeExplicitAutograd)
    return NotImplemented if kernel is None else kernel(*args, **kwargs)


def is_composite(op: OpOverload) -> bool:
    """Whether ``op`` on CPU tensors is only a composition of others.

    In inference mode such operators reach a dispatch mode whole; otherwise in their parts.
    Run on torch 2.13 (CPU).
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(op.name(), "CompositeImplicitAutograd") and not has_kernel(op.name(), "CPU")


def destroy_library(library: torch.library.Library) -> None:
    """Takes back everything that ``library`` defined and implemented, at once and not when it is
    collected (``Library._destroy``). Run on torch 2.11 (CUDA) and 2.13 (CPU)."""
    if not hasattr(library, "_destroy"):
        raise gone("torch.library.Library._destroy")
    library._destroy()


def register_fake_in(library: torch.library.Library, op_name: str, fake_impl: Callable[..., Any]) -> None:
    """Registers a fake implementation whose life is that of ``library``, unlike the public
    ``torch.library.register_fake`` on a name (``Library._register_fake``).

    Run on torch 2.11 (CUDA) and 2.13 (CPU).
    """
    if not hasattr(library, "_register_fake"):
        raise gone("torch.library.Library._register_fake")
    library._register_fake(op_name, fake_impl)


def number_of_returns(op: OpOverload) -> int:
    """How many values ``op`` returns. Run on torch 2.13 (CPU)."""
    return len(op._schema.returns)
