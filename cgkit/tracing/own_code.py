"""A copy of a function that Dynamo takes for another: what torch keeps of the one says nothing about the other."""

from __future__ import annotations

from types import FunctionType


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
