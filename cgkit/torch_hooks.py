"""Every private hook of torch (and Triton) that cgkit needs, one function each.

Nothing else in cgkit touches a private name of torch. Each function says on which versions it was
run; on a version where the hook is gone it raises UnsupportedTorchError with what was tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any

import torch
from torch._ops import OpOverload as OpOverload
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from cgkit.errors import UnsupportedTorchError

RUN_ON = "torch 2.11 (CUDA) and 2.13 (CPU)"


def _gone(hook: str) -> UnsupportedTorchError:
    return UnsupportedTorchError(
        f"torch {torch.__version__} has no {hook} as cgkit knows it (run on {RUN_ON}); "
        "install one of these versions, or adapt cgkit/torch_hooks.py"
    )


# -- what the emulated graph platform needs ---------------------------------------------------------


def with_lazy_bits(tensor: torch.Tensor, conj: bool, neg: bool) -> torch.Tensor:
    """``tensor`` seen through a lazy conjugate and a lazy negative. Run on 2.13; old names."""
    if conj:
        tensor = tensor.conj()
    return torch._neg_view(tensor) if neg else tensor


def storage_identity(tensor: torch.Tensor) -> int:
    """A number that tensors on one storage have in common; also for fake tensors. Run on 2.13."""
    return tensor.untyped_storage()._cdata


def fake_tensor_mode(allow_real_inputs: bool = False) -> Any:
    """A new FakeTensorMode without symbols: concrete shapes, nothing allocated. Run on 2.13."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=allow_real_inputs)


def data_dependence_errors() -> tuple[type[Exception], ...]:
    """What a fake run raises where a value, not a shape, decides. Run on 2.13."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    return (DataDependentOutputException, DynamicOutputShapeException)


def missing_fake_errors() -> tuple[type[Exception], ...]:
    """What a fake run raises for an operator without a fake implementation. Run on 2.13."""
    from torch._subclasses.fake_tensor import UnsupportedOperatorException

    return (UnsupportedOperatorException,)


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Takes this thread's dispatch modes off for a block. Run on 2.13; there since 2.1."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


_PYTHON_KERNEL_KEYS = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd")


def has_python_kernel(op: OpOverload) -> bool:
    """Whether a call of ``op`` on CPU tensors would run Python code, registered with torch.library.

    torch.library notes each such registration (custom_op and Library.impl alike) in one set of
    "namespace/name.overload/key". Run on 2.13; the same in 2.11.
    """
    namespace, _, name = op.name().partition("::")
    registered = getattr(torch.library, "_impls", None)
    if registered is None:
        raise _gone("torch.library._impls")
    return any(f"{namespace}/{name}/{key}" in registered for key in _PYTHON_KERNEL_KEYS)


def run_cpu_kernel(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the kernel of ``op`` for CPU tensors past the modes; what the kernel calls meets them.

    Run on 2.13.
    """
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    return op.redispatch(keys, *args, **kwargs)


def is_composite(op: OpOverload) -> bool:
    """Whether ``op`` on CPU tensors is only a composition of others. Run on 2.13.

    In inference mode such operators reach a dispatch mode whole; otherwise in their parts.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(op.name(), "CompositeImplicitAutograd") and not has_kernel(op.name(), "CPU")


def written_arguments(op: OpOverload) -> list[str | None]:
    """For each return of ``op``, the argument that it is (``add_``, ``out=``), or None. Run on 2.13."""
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


def writes(op: OpOverload) -> bool:
    """Whether ``op`` says that it changes one of its arguments. Run on 2.13."""
    return op._schema.is_mutable


def bound_argument(op: OpOverload, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The argument called ``name`` in a call of ``op``. Run on 2.13."""
    if name in kwargs:
        return kwargs[name]
    position = [argument.name for argument in op._schema.arguments].index(name)
    return args[position]
