"""A copy of a function that Dynamo takes for another: what torch keeps of the one says nothing about the other; and
the ``forward`` that is a model's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from torch import nn

_OWN = "_cgkit_own_forward"  # on an instance whose forward is another one for the time of a call


def with_own_code(function: FunctionType, name: str = "") -> FunctionType:
    """A copy of ``function`` with a code object of its own.

    Args:
        name: of the copied code ("": the same). Torch remembers by file, line and name which sizes have changed before.
    """
    code = function.__code__
    own = FunctionType(
        code.replace(co_name=name or code.co_name),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    own.__kwdefaults__, own.__annotations__ = function.__kwdefaults__, function.__annotations__
    own.__qualname__ = function.__qualname__
    return own


def own_forward(model: nn.Module) -> Callable[..., Any]:
    """What ``nn.Module``'s call of ``model`` runs: an instance's own ``forward`` before that of its class."""
    attributes = model.__dict__
    own = attributes[_OWN] if _OWN in attributes else attributes.get("forward")
    return own if own is not None else functools.partial(type(model).forward, model)


@contextmanager
def with_forward(model: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, ``model.forward`` is ``forward``, and :func:`own_forward` what it was before."""
    attributes = model.__dict__
    if _OWN in attributes:  # a call inside of a call
        yield
        return
    attributes[_OWN] = before = attributes.get("forward")
    attributes["forward"] = forward
    try:
        yield
    finally:
        del attributes[_OWN]
        if before is None:
            del attributes["forward"]
        else:
            attributes["forward"] = before
