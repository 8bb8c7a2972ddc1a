"""What a trace makes of a change that comes after it: followed, refused, or not noticed.

Without guards nobody asks whether the graph still fits. What is fetched at each call (weights) is followed; what
cgkit compares at each call is refused; everything else that Dynamo turned into a constant stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from cgkit.errors import CgkitError
from cgkit.tracing import trace

FOLLOWED, REFUSED, UNNOTICED, WITHOUT_EFFECT = "followed", "refused", "unnoticed", "without effect"


def after_trace(
    model: nn.Module,
    args: Sequence[Any],
    change: Callable[[nn.Module, tuple[Any, ...]], Any],
) -> str:
    """Traces ``model(*args)``, then makes a change, and says what the trace does about it.

    Args:
        change: called with the model and the arguments. It changes the model, or returns other arguments (a tuple) for
            the second call, or both.

    Returns:
        "followed" (the trace gives what the changed model gives), "refused" (it raises a CgkitError), "unnoticed" (it
        gives something else, silently), or "without effect" (the model itself gives what it gave before).
    """
    args = tuple(args)
    traced = trace(model, *args)
    with torch.no_grad():
        before = model(*args)
        changed = change(model, args)
        args = changed if isinstance(changed, tuple) else args
        wanted = model(*args)
        try:
            found = traced(*args)
        except CgkitError:
            return REFUSED
    if not _same(found, wanted):
        return UNNOTICED
    return WITHOUT_EFFECT if _same(before, wanted) else FOLLOWED


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and torch.allclose(one, other, equal_nan=True)
