"""What a graph pass is: a name, a call on a graph, and an identity that compile caches can go by.

Implements the article's "自定义 pass" (passes of one's own): a pass stands in Inductor's post-grad hook, after
functionalisation, decompositions and Inductor's own patterns, and before its lowering.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import fx


class GraphPass(ABC):
    """One pass. Subclasses set ``name`` and write ``__call__``; their attributes are their options.

    ``notes`` is for what a reader of the report should know (why a place was left as it is); the manager empties
    it before each call.
    """

    name: str = ""

    @property
    def notes(self) -> list[str]:
        """Sentences about the last call."""
        return self.__dict__.setdefault("_notes", [])

    @abstractmethod
    def __call__(self, graph: fx.Graph) -> int:
        """Changes ``graph`` in place; returns how many places matched."""

    def options(self) -> dict[str, Any]:
        """What sets this object apart from another of its class."""
        return {key: value for key, value in vars(self).items() if not key.startswith("_")}

    def uuid(self) -> str:
        """16 hexadecimal digits of the source and the options: another pass is another compilation."""
        text = "\n".join([source_of(type(self)), *(f"{k}={v!r}" for k, v in sorted(self.options().items()))])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __repr__(self) -> str:
        options = ", ".join(f"{key}={value!r}" for key, value in self.options().items())
        return f"{type(self).__name__}({options})"


class FunctionPass(GraphPass):
    """A function ``(graph) -> int`` as a pass; its name is the function's."""

    def __init__(self, function: Callable[[fx.Graph], int]) -> None:
        self._function = function
        named = function.func if isinstance(function, functools.partial) else function
        self.name = getattr(named, "__name__", type(named).__name__)

    def __call__(self, graph: fx.Graph) -> int:
        return self._function(graph)

    def uuid(self) -> str:
        """Of what the function does: its source, and the values that it holds."""
        return hashlib.sha256(f"{self.name}\n{source_of(self._function)}".encode()).hexdigest()[:16]


def source_of(thing: Any) -> str:
    """The text that decides what ``thing`` (a class, a function, something callable) does.

    Of cgkit's own: the whole folder, since passes share their matching. Of somebody else's: the source and the byte
    code, the values that it holds (defaults, closures, bound arguments, attributes), and the same of each function and
    the plain values that it names among its module's globals. A value counts by its ``repr``: one without a ``repr`` of
    its own is another one in every process, which costs a compilation and no wrong result.
    """
    if getattr(thing, "__module__", "").startswith("cgkit.compiling.passes"):
        files = sorted(Path(__file__).parent.glob("*.py"))
        return thing.__qualname__ + "".join(path.read_text(encoding="utf-8") for path in files)
    return "\n".join(_texts(thing, set()))


def _texts(thing: Any, seen: set[int]) -> Iterator[str]:
    """What :func:`source_of` says of somebody else's ``thing``; nothing twice."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, type):
        for cls in (cls for cls in thing.__mro__ if not _is_known(cls)):
            yield _source(cls)
            for name, value in vars(cls).items():
                if name != "__firstlineno__":
                    yield from (name, *_held(getattr(value, "__func__", value), seen))
    elif isinstance(thing, types.FunctionType):
        yield from (_source(thing), _code(thing.__code__))
        for value in (
            *inspect.getclosurevars(thing).nonlocals.values(),
            thing.__defaults__,
            thing.__kwdefaults__,
        ):
            yield from _held(value, seen, any_value=True)
        for name in sorted(_names(thing.__code__) & thing.__globals__.keys()):
            yield from (name, *_held(thing.__globals__[name], seen))
    elif isinstance(thing, types.MethodType):
        yield from _texts(thing.__func__, seen)
        yield from _texts(thing.__self__, seen)
    elif isinstance(thing, functools.partial):
        yield from _texts(thing.func, seen)
        yield from _held((thing.args, sorted(thing.keywords.items())), seen, any_value=True)
    else:
        yield from _texts(type(thing), seen)
        yield from _held(sorted(getattr(thing, "__dict__", {}).items()), seen, any_value=True)


def _held(value: Any, seen: set[int], any_value: bool = False) -> Iterator[str]:
    """The same of a value that a function names (then only what is plain), or holds (``any_value``)."""
    if isinstance(value, types.FunctionType | types.MethodType | functools.partial | type):
        yield getattr(value, "__qualname__", "")
        if not _is_known(value):
            yield from _texts(value, seen)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _held(each, seen, any_value)
    elif isinstance(value, set | frozenset):
        yield repr(sorted(map(repr, value)))
    elif any_value or isinstance(value, types.NoneType | bool | int | float | complex | str | bytes | dict):
        yield repr(value)


def _is_known(thing: Any) -> bool:
    """Whether a version (of torch, of Python, of cgkit) stands for it."""
    root = (getattr(thing, "__module__", None) or "").partition(".")[0]
    return root in ("torch", "cgkit", "builtins") or root in sys.stdlib_module_names - {"__main__"}


def _source(thing: Any) -> str:
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):  # an interactive prompt; the byte code says the rest
        return thing.__qualname__


def _code(code: types.CodeType) -> str:
    constants = [
        _code(each) if isinstance(each, types.CodeType) else _constant(each) for each in code.co_consts
    ]
    return f"{code.co_code!r}{constants}{code.co_names!r}"


def _constant(value: Any) -> str:
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _names(code: types.CodeType) -> set[str]:
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))
