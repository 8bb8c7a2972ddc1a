"""What only ``cgkit.doctor`` asks of torch: the guards on sizes with their lines, and where Dynamo breaks a graph."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import HigherOrderOperator

from cgkit.torch_hooks.dynamo import forget_code, quiet_loggers, traced_code, tracing_context

#: Operators over functions that ask a tensor, on the host, which function to call.
READ_A_PREDICATE = frozenset({"cond", "while_loop"})


@dataclass(frozen=True)
class SizeGuard:
    """What a trace assumed of its sizes. ``where``: (end of the file's name, line, source), or None;
    ``sources``: where each of its symbols is read (``L['x'].size()[0]``), as far as that is known.
    Run on torch 2.13 (CPU)."""

    text: str
    expression: Any
    where: tuple[str, int, str] | None
    sources: Mapping[str, str] = field(default_factory=dict)

    def holds(self, sizes: Mapping[str, int]) -> bool | None:
        """Whether it holds for these sizes (by symbol); None where they do not decide it. False where it has no value
        there (a size divided by half of 1)."""
        numbers = {
            symbol: sizes[str(symbol)] for symbol in self.expression.free_symbols if str(symbol) in sizes
        }
        try:
            value = self.expression.xreplace(numbers)
        except ZeroDivisionError:
            return False
        if value == True or value == False:  # noqa: E712 - sympy's own truth values
            return bool(value)
        return None


def size_guards(holder: Any) -> list[SizeGuard]:
    """What has been assumed of the symbols of a fake mode (or a tracing context's), each with the user's line.

    Where a version keeps no line with a guard there is none. Run on torch 2.13 (CPU).
    """
    fake_mode = getattr(holder, "fake_mode", holder)
    environment = getattr(fake_mode, "shape_env", None)
    known = getattr(environment, "var_to_sources", {})
    found: dict[str, SizeGuard] = {}
    for guard in getattr(environment, "guards", ()):
        said = getattr(getattr(guard, "sloc", None), "maybe_user_loc", None) or ""
        match = re.search(r"(.*?)\s*# (\S+):(\d+) in \S+", said)
        where = (match[2], int(match[3]), match[1].strip()) if match else None
        if not hasattr(guard.expr, "free_symbols"):
            continue
        sources = {str(s): _name(known[s][0]) for s in guard.expr.free_symbols if known.get(s)}
        found.setdefault(str(guard.expr), SizeGuard(str(guard.expr), guard.expr, where, sources))
    return list(found.values())


def _name(source: Any) -> str:
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)


@dataclass
class Segments:
    """What Dynamo makes of a function when it may break the graph.

    ``graphs``: how many; ``breaks``: (reason, frames from the outermost) of each break; ``error``: what it raised;
    ``failed``: the guards that failed, one text for each entry that did not fit, in the order of the calls.
    Run on torch 2.13 (CPU).
    """

    graphs: int = 0
    breaks: list[tuple[str, list[tuple[str, int, str]]]] = field(default_factory=list)
    error: Exception | None = None
    codes: list[Any] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def forget(self) -> None:
        """Drops what Dynamo keeps for the code that it compiled."""
        for code in dict.fromkeys(self.codes):
            forget_code(code)


def segments(function: Callable[..., Any]) -> tuple[Callable[..., Any], Segments]:
    """``function`` under Dynamo's guards with breaks allowed, run operator by operator, and what is found when
    it is first called. ``.forget()`` when done. Run on torch 2.13 (CPU)."""
    found = Segments(codes=[function.__code__])

    def backend(graph_module: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        found.graphs += 1
        found.codes += traced_code(tracing_context())
        reason: Any = getattr(graph_module, "compile_subgraph_reason", None)
        if getattr(reason, "graph_break", False):
            frames = [(f.filename, f.lineno or 0, f.line or "") for f in reason.user_stack]
            found.breaks.append((reason.reason, frames))
        return graph_module.forward

    def failed(guard: Any) -> None:
        found.failed.append(str(getattr(guard, "reason", guard)))

    compiled = torch._dynamo.optimize(backend, guard_fail_fn=failed)(function)  # as torch.compile(function)

    def run(*args: Any, **kwargs: Any) -> Any:
        with quiet_loggers(), _no_warnings_logged():
            return compiled(*args, **kwargs)

    return run, found


@contextmanager
def _no_warnings_logged() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)


def is_random(operator: Any) -> bool:
    """Whether an operator draws random numbers. Run on torch 2.13 (CPU)."""
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


def reads_values(operator: Any, args: Any = ()) -> bool:
    """Whether a call of an operator gives the host a value, or an output whose shape depends on values.

    Run on torch 2.13 (CPU).
    """
    if isinstance(operator, HigherOrderOperator):
        return operator.name() in READ_A_PREDICATE
    if getattr(operator, "overloadpacket", None) is torch.ops.aten.index:  # by numbers it reads nothing
        masks = (torch.bool, torch.uint8)
        return any(getattr(index, "dtype", None) in masks for index in args[1])
    tags = getattr(operator, "tags", ())
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


@contextmanager
def as_if_compiling() -> Iterator[None]:
    """Models that ask ``torch.compiler.is_compiling()`` hear yes: they take the path that a trace takes.

    Where a version keeps no such flag, nothing changes. Run on torch 2.13 (CPU).
    """
    if not hasattr(torch.compiler, "_is_compiling_flag"):
        yield
        return
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before
