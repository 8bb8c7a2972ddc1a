"""A traced model's call once its weights can no longer change.

Dynamo's bytecode fetches every weight from its module at every call: a hundred dictionary look-ups and
more, which before a step of recorded pieces is half of the host's work. Recorded graphs read the
weights at the addresses of their recording whatever the module holds by then. So from the lock on the
weights are fetched no more, and the call is a generated function of a few lines that hands
them over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from inspect import Parameter
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from cgkit.tracing.traced_graph import TracedGraph

_ARGUMENT = re.compile(r"L\['(\w+)'\]")


class _Taken(Exception):  # noqa: N818 - not an error: ends a call after the graph's inputs are known
    """The graph's inputs were collected."""


class _Output:
    """Stands for one output of the graph while the model's own result is looked at."""


def with_fixed_weights(
    traced: TracedGraph, execute: Callable[..., Sequence[Any]], args: tuple[Any, ...]
) -> Callable[..., Any] | None:
    """``execute`` behind a call with as many positional arguments as ``args``, weights fetched now.

    None where the bytecode does more than hand over inputs and outputs (it sets an attribute, or makes an
    object of the outputs): then it is needed.
    """
    names = _positional(traced, len(args))
    if names is None or traced.side_effects:
        return None
    inputs = _graph_inputs(traced, args)
    result = _result(traced, args)
    texts = [_text(entry, names) for entry in traced.inputs]
    if inputs is None or result is None or None in texts:
        return None
    scope = {"execute": execute}
    scope |= {f"w{entry.index}": inputs[entry.index] for entry in traced.inputs if entry.is_weight}
    gather = _compile(f"def call({', '.join(names)}):\n    return [{', '.join(map(str, texts))}]\n", scope)
    if not _same(gather(*args), inputs):
        return None
    source = f"def call({', '.join(names)}):\n    out = execute({', '.join(map(str, texts))})\n    return {result}\n"
    return _compile(source, scope)


def _positional(traced: TracedGraph, count: int) -> list[str] | None:
    parameters = list(traced.arguments.signature.parameters.values())[:count]
    plain = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    ours = {"execute", "out", *(f"w{entry.index}" for entry in traced.inputs)}
    fit = len(parameters) == count and all(p.kind in plain and p.name not in ours for p in parameters)
    return [parameter.name for parameter in parameters] if fit else None


def _graph_inputs(traced: TracedGraph, args: tuple[Any, ...]) -> list[Any] | None:
    taken: list[Any] = []

    def take(*inputs: Any) -> Any:
        taken.extend(inputs)
        raise _Taken

    try:
        traced.bind(take)(*args)
    except _Taken:
        return taken
    return None


def _result(traced: TracedGraph, args: tuple[Any, ...]) -> str | None:
    """The model's result as an expression in ``out``, the graph's outputs."""
    outputs = [_Output() for _ in range(traced.num_outputs)]
    try:
        return _expression(traced.bind(lambda *inputs: tuple(outputs))(*args), outputs)
    except Exception:  # the bytecode computes with what it got
        return None


def _expression(value: Any, outputs: list[_Output]) -> str | None:
    if isinstance(value, _Output):
        return f"out[{outputs.index(value)}]"
    if value is None or type(value) in (bool, int, str):
        return repr(value)
    if type(value) in (tuple, list):
        parts = [_expression(item, outputs) for item in value]
        inner = ", ".join(map(str, parts))
        text = f"[{inner}]" if type(value) is list else f"({inner}{',' if len(parts) == 1 else ''})"
        return None if None in parts else text
    if type(value) is dict and all(type(key) is str for key in value):
        parts = [_expression(item, outputs) for item in value.values()]
        return None if None in parts else "{" + ", ".join(f"{k!r}: {p}" for k, p in zip(value, parts)) + "}"
    return None


def _text(entry: Any, names: list[str]) -> str | None:
    """How the generated call reaches one input of the graph; None if it cannot."""
    if entry.is_weight:
        return f"w{entry.index}"
    found = _ARGUMENT.match(entry.source)
    if found is None or found.group(1) not in names:
        return None
    rest = entry.source[found.end() :]
    return None if "L[" in rest or "G[" in rest else found.group(1) + rest


def _same(ours: list[Any], theirs: list[Any]) -> bool:
    return len(ours) == len(theirs) and all(
        a is b if isinstance(a, torch.Tensor) else type(a) is type(b) and a == b for a, b in zip(ours, theirs)
    )


def _compile(source: str, scope: dict[str, Any]) -> Callable[..., Any]:
    names = dict(scope)
    exec(compile(source, "<cgkit call with fixed weights>", "exec"), names)  # our own text
    return names["call"]
