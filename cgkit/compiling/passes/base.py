"""What a graph pass is: a name, a call on a graph, and an identity that compile caches can go by.

Implements the article's "自定义 pass" (passes of one's own): a pass stands in Inductor's post-grad hook, after
functionalisation, decompositions and Inductor's own patterns, and before its lowering.
"""

from __future__ import annotations

import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
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
        self.name = getattr(function, "__name__", type(function).__name__)

    def __call__(self, graph: fx.Graph) -> int:
        return self._function(graph)

    def uuid(self) -> str:
        """Of the function's source."""
        return hashlib.sha256(f"{self.name}\n{source_of(self._function)}".encode()).hexdigest()[:16]


def source_of(thing: Any) -> str:
    """The source that decides what ``thing`` (a class or a function) does.

    Of cgkit's own: the whole folder, since passes share their matching. Of a class of somebody else: its own
    source and that of its bases, of a function its own. Where there is none (an interactive prompt), the byte
    code.
    """
    if thing.__module__.startswith("cgkit.compiling.passes"):
        files = sorted(Path(__file__).parent.glob("*.py"))
        return thing.__qualname__ + "".join(path.read_text(encoding="utf-8") for path in files)
    if isinstance(thing, type):
        own = [cls for cls in thing.__mro__ if cls not in (object, ABC, GraphPass)]
        return "\n".join(_source_or_code(cls) for cls in own)
    return _source_or_code(thing)


def _source_or_code(thing: Any) -> str:
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        functions = vars(thing).values() if isinstance(thing, type) else [thing]
        codes = [getattr(function, "__code__", None) for function in functions]
        return thing.__qualname__ + "".join(f"{c.co_code!r}{c.co_consts!r}{c.co_names!r}" for c in codes if c)
