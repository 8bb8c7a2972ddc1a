"""Dispatch modes: seeing every operator that runs, and not being seen; and what a graph that failed left on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Takes this thread's dispatch modes off for a block. Run on torch 2.13 (CPU)."""
    return _disable_current_modes()


@contextmanager
def modes_put_back() -> Iterator[None]:
    """After the block gradients, autocast and the levels of ``vmap`` and ``grad`` are as they were.

    A graph enters and leaves them by nodes of its own; where a node between the two raises, they stay on in the whole
    thread. Where a version does not count levels, they are left alone. Run on torch 2.13 (CPU).
    """
    functorch = torch._C._functorch
    depth = getattr(functorch, "get_dynamic_layer_stack_depth", lambda: 0)
    undo_to = getattr(functorch, "pop_dynamic_layer_stack_and_undo_to_depth", None)
    levels, gradients, casts, nested = depth(), torch.is_grad_enabled(), _autocast(), _autocast_nesting()
    try:
        yield
    finally:
        if undo_to is not None and depth() > levels:
            undo_to(levels)
        torch.set_grad_enabled(gradients)
        for device, (enabled, dtype) in casts.items():
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        while _autocast_nesting() > nested:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()


def _autocast() -> dict[str, tuple[bool, torch.dtype]]:
    return {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")}


def _autocast_nesting() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())
