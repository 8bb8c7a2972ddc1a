"""Dispatch modes: seeing every operator that runs, and not being seen."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Takes this thread's dispatch modes off for a block. Run on torch 2.13 (CPU)."""
    return _disable_current_modes()
