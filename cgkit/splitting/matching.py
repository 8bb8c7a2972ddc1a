"""Which nodes are splitting operators: names of operators, and nodes that carry them.

Implements the article's "切分算子：splitting_ops 与「铰链」" (splitting operators, the hinges). The article
compares ``str(node.target)`` with the list, so that ``ns::name`` or an overload matches nothing, silently.
Here ``ns.name``, ``ns::name``, ``ns.name.overload`` and ``ns::name.overload`` all match, whether the
node holds an overload, a packet of overloads, or (for ATen) the torch function or method; and a name
that matches nothing is an error.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from cgkit.config import DEFAULT_SPLITTING_OPS
from cgkit.errors import SplitError
from cgkit.splitting.values import called_overload, is_number
from cgkit.torch_hooks import operator_of

#: Python operators whose ATen name differs from their own.
_PYTHON_OPERATORS = {
    "truediv": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "and_": "bitwise_and",
    "or_": "bitwise_or",
    "xor": "bitwise_xor",
    "invert": "bitwise_not",
    "iadd": "add_",
    "isub": "sub_",
    "imul": "mul_",
    "itruediv": "div_",
}


def operator_name(node: fx.Node) -> str:
    """What ``node`` calls, as ``ns::name`` or ``ns::name.overload``; Python's own and unknown
    functions by their qualified name, methods that are no ATen operator as ``.name``."""
    target = node.target
    if found := operator_of(target):
        qualified, overload = found
        return qualified if overload in (None, "default") else f"{qualified}.{overload}"
    if node.op == "call_method":
        return _aten_name(str(target)) or f".{target}"
    if node.op == "call_function" and callable(target):
        if not is_number(node) and (name := _function_name(target)):
            return name
        module = (getattr(target, "__module__", None) or "").removeprefix("_")
        return f"{module}.{getattr(target, '__qualname__', type(target).__qualname__)}"
    return str(target)


def operator_names(graph: fx.Graph) -> list[str]:
    """What ``graph`` calls, each name once, in order: names that ``splitting_ops`` takes."""
    calls = ("call_function", "call_method", "call_module")
    return list(dict.fromkeys(operator_name(node) for node in graph.nodes if node.op in calls))


def splitting_nodes(
    graph: fx.Graph, splitting_ops: Sequence[str] | None
) -> tuple[tuple[str, ...], set[fx.Node]]:
    """The operators to split at, as ``ns::name[.overload]``, and the nodes of ``graph`` that call them.

    Args:
        graph: the graph to look in.
        splitting_ops: names in any of the four spellings (or the operators themselves). None: those of
            :data:`cgkit.config.DEFAULT_SPLITTING_OPS` that the graph holds.

    Raises:
        SplitError: a name is malformed, or no node calls it. The message lists the graph's operators.
    """
    optional = splitting_ops is None
    if isinstance(splitting_ops, str):
        raise SplitError(f"splitting_ops={splitting_ops!r} must be a list: [{splitting_ops!r}]")
    wanted = dict.fromkeys(map(_canonical, DEFAULT_SPLITTING_OPS if splitting_ops is None else splitting_ops))
    found: dict[str, set[fx.Node]] = {name: set() for name in wanted}
    for node in graph.nodes:
        if node.op in ("call_function", "call_method"):
            for name in _names(node, wanted):
                found[name].add(node)
    missing = [name for name, nodes in found.items() if not nodes]
    if missing and not optional:
        raise _unknown(missing, graph)
    held = tuple(name for name, nodes in found.items() if nodes)
    return held, set().union(*found.values())


def _canonical(spec: Any) -> str:
    """``ns.name[.overload]`` and ``ns::name[.overload]`` -> ``ns::name[.overload]``."""
    if found := operator_of(spec):
        return found[0] if found[1] is None else ".".join(found)  # type: ignore[arg-type]
    if isinstance(spec, str):
        namespace, separator, rest = spec.strip().partition("::")
        if not separator:
            namespace, separator, rest = spec.strip().partition(".")
        name, dot, overload = rest.partition(".")
        parts = [namespace, name, *([overload] if dot else [])]
        if separator and all(part.isidentifier() for part in parts):
            return f"{namespace}::{rest}"
    raise SplitError(
        f"splitting_ops holds {spec!r}, which is no operator's name: "
        "write 'namespace::name', 'namespace.name', or either with '.overload'"
    )


def _names(node: fx.Node, wanted: Iterable[str]) -> list[str]:
    """Those of the names ``wanted`` that ``node`` answers to."""
    name = operator_name(node)
    packet = name.partition(".")[0]
    candidates = [w for w in wanted if w.partition(".")[0] == packet]
    if not any("." in w for w in candidates):
        return candidates
    _, overload = operator_of(node.target) or (name, None)
    if overload is None:
        _, overload = operator_of(called_overload(node)) or (name, None)
    return [w for w in candidates if "." not in w or w.partition(".")[2] == overload]


@lru_cache(maxsize=4096)
def _aten_name(name: str) -> str | None:
    return f"aten::{name}" if hasattr(torch.ops.aten, name) else None


@lru_cache(maxsize=4096)
def _function_name(target: Callable[..., Any]) -> str | None:
    """The ATen name of a function of torch or of a Python operator, if there is one."""
    module, name = getattr(target, "__module__", None) or "", getattr(target, "__name__", "")
    if module == "_operator":
        return _aten_name(_PYTHON_OPERATORS.get(name, name))
    if module.split(".")[0] == "torch":
        return _aten_name(name)
    return None


def _unknown(missing: list[str], graph: fx.Graph) -> SplitError:
    present = sorted(operator_names(graph))
    close = [c for name in missing for c in difflib.get_close_matches(name, present, n=2, cutoff=0.75)]
    hint = f" Did you mean {' or '.join(map(repr, dict.fromkeys(close)))}?" if close else ""
    return SplitError(
        f"the graph holds no operator {', '.join(map(repr, missing))}, so it cannot be cut there.{hint} "
        f"Its operators: {', '.join(present) or 'none'}"
    )
