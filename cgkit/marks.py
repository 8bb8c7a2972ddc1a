"""Marks for a profiler: who can be marked, and how marks come and go without a trace.

A profiler sees kernels and calls, but not which piece of a model they belong to. So while it runs, what
the stages call at each step is swapped for the same thing inside a named range, and put back after it.
Only *data* is swapped: the replay function in a wrapper's table, an attribute that holds a callable, the
code object of a generated function. The paths themselves hold no check and no branch for it: off, a
mark costs nothing at all, because nothing of it is there.

Whoever has something to swap implements :class:`Markable` and calls :func:`register` when it is made.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class Marker(Protocol):
    """What makes marks; :mod:`cgkit.measuring.profile_step` has one."""

    def function(
        self, function: Callable[..., Any], stage: str, piece: str = "", **facts: Any
    ) -> Callable[..., Any]:
        """``function`` inside a range. ``facts`` (model, mode, batch, emulated) hold if it is called."""

    def block(self, stage: str, piece: str = "") -> Callable[[], AbstractContextManager[Any]]:
        """Makes a range's context manager at each call."""


class Markable(Protocol):
    """Something that has callables to swap."""

    def put_marks(self, marker: Marker, undo: ExitStack) -> None:
        """Swaps marked callables in and leaves in ``undo`` how to put the old ones back."""


_alive: weakref.WeakSet[Any] = weakref.WeakSet()


def register(markable: Markable) -> None:
    """Lets ``markable`` be found as long as it lives."""
    _alive.add(markable)


def alive() -> list[Markable]:
    """All that is registered and still alive."""
    return list(_alive)


def swap_attribute(owner: Any, name: str, new: Any, undo: ExitStack) -> None:
    """Sets ``owner.name`` on the instance until ``undo`` is closed; what others set meanwhile stays."""
    own = vars(owner)
    had, old = name in own, own.get(name)
    own[name] = new

    def back() -> None:
        if own.get(name) is not new:
            return
        if had:
            own[name] = old
        else:
            del own[name]

    undo.callback(back)


def swap_item(table: dict[Any, Any], key: Any, new: Any, undo: ExitStack) -> None:
    """Sets ``table[key]``, which is there, until ``undo`` is closed; what others set meanwhile stays."""
    old = table[key]
    table[key] = new

    def back() -> None:
        if table.get(key) is new:
            table[key] = old

    undo.callback(back)


def mark_modules(root: nn.Module, marker: Marker, undo: ExitStack, /, **facts: Any) -> None:
    """Marks the parts of a model that runs eagerly: stage ``eager``, piece the module's path."""
    for path, module in module_parts(root):
        if "forward" not in vars(module):
            swap_attribute(module, "forward", marker.function(module.forward, "eager", path, **facts), undo)


def module_parts(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules that are worth a mark: each layer, each part of a layer, and what stands beside the
    layers. Not the linears within: a mark costs a microsecond or two, and there are hundreds."""
    for name, child in model.named_children():
        path = prefix + name
        if isinstance(child, _CONTAINERS):
            for number, layer in child.named_children():
                yield f"{path}.{number}", layer
                for part, module in layer.named_children():
                    if not isinstance(module, _CONTAINERS):
                        yield f"{path}.{number}.{part}", module
        elif any(isinstance(module, _CONTAINERS) for module in child.modules()):
            yield path, child
            yield from module_parts(child, f"{path}.")
        else:
            yield path, child
