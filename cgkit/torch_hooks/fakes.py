"""Fake tensors and fake modes: running operators for their shapes alone."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch


def is_fake(value: Any) -> bool:
    """Whether ``value`` is a fake tensor. Run on torch 2.11 (CUDA) and 2.13 (CPU)."""
    from torch._subclasses import FakeTensor

    return isinstance(value, FakeTensor)


def new_fake_mode() -> Any:
    """A fake mode with a shape environment of its own. Run on torch 2.11 (CUDA) and 2.13 (CPU)."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv())


def fake_tensor_mode(allow_real_inputs: bool = False) -> Any:
    """A fake mode without symbols: concrete shapes, nothing allocated. Run on torch 2.13 (CPU)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=allow_real_inputs)


def fake_mode_of(values: Iterable[Any]) -> Any | None:
    """The fake mode of the first fake tensor among ``values``, or None.

    Run on torch 2.11 (CUDA) and 2.13 (CPU).
    """
    return next((value.fake_mode for value in values if is_fake(value)), None)


def running_fake(fake_mode: Any) -> AbstractContextManager[Any]:
    """A context in which operators on ``fake_mode``'s tensors compute shapes only.

    The Python dispatcher is switched on as well, without which composite operators would turn
    symbolic sizes into numbers. Run on torch 2.11 (CUDA) and 2.13 (CPU).
    """
    from torch._dispatch.python import enable_python_dispatcher

    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))  # inference tensors do not count their writes
    stack.enter_context(torch.no_grad())
    stack.enter_context(fake_mode)
    stack.enter_context(enable_python_dispatcher())
    return stack


def data_dependence_errors() -> tuple[type[Exception], ...]:
    """What a fake run raises where a value, not a shape, decides. Run on torch 2.13 (CPU)."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    return (DataDependentOutputException, DynamicOutputShapeException)


def missing_fake_errors() -> tuple[type[Exception], ...]:
    """What a fake run raises for an operator without a fake implementation. Run on torch 2.13 (CPU)."""
    from torch._subclasses.fake_tensor import UnsupportedOperatorException

    return (UnsupportedOperatorException,)
