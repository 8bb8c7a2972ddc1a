"""Names that an operator only looks something up by leave the piece: then equal layers are equal pieces.

An operator that stands inside a piece and is told the layer's name (a write into the layer's KV cache, say)
makes every layer's piece another one, each with a compilation of its own (engines lost minutes to it: vLLM
#33267, and #33441, which took the name off its operator). Here the operator stays as it is and says
which of its arguments are such names (``register_op(..., lookup_args=["layer_name"])``). In the piece that is
compiled, each name becomes a number that is an input, and the operator a sibling that takes the number.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from cgkit import torch_hooks
from cgkit.splitting.register import (
    RegisteredOp,
    direct_call,
    register_op,
    registered_op_of,
    resolved_signature,
)

NAMESPACE = "cgkit_by_number"

_names: list[str] = []
_numbers: dict[str, int] = {}
_siblings: dict[str, tuple[Any, Any]] = {}  # by operator: for which overload, and its sibling
_lock = threading.Lock()


@dataclass(frozen=True)
class Lifted:
    """A piece's graph as it is compiled.

    Attributes:
        graph_module: the graph, with a further placeholder at the end for each name; the piece's own graph
            if there are none.
        numbers: what to pass for these placeholders, in order.
    """

    graph_module: fx.GraphModule
    numbers: tuple[int, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names that the numbers stand for."""
        return tuple(_names[number] for number in self.numbers)

    def bind(self, runnable: Callable[..., Any]) -> Callable[..., Any]:
        """``runnable`` with the numbers behind its arguments."""
        if not self.numbers:
            return runnable
        numbers = self.numbers

        def bound(*args: Any) -> Any:
            return runnable(*args, *numbers)

        return bound


def number_of(name: str) -> int:
    """The number that stands for ``name`` in this process."""
    with _lock:
        if name not in _numbers:
            _numbers[name] = len(_names)
            _names.append(name)
        return _numbers[name]


def lift_names(graph_module: fx.GraphModule) -> Lifted:
    """Takes the names out of a piece's graph that its operators declare as ``lookup_args``.

    Equal names in one piece become one number, so that two pieces are equal only if they repeat names alike.
    ``graph_module`` is left as it is.
    """
    calls = [
        (node, op)
        for node in graph_module.graph.nodes
        if node.op == "call_function" and (op := registered_op_of(node.target)) is not None and op.lookup_args
    ]
    if not calls:
        return Lifted(graph_module)
    own = copy.deepcopy(graph_module)
    by_name = {node.name: node for node in own.graph.nodes}
    last = [node for node in own.graph.nodes if node.op == "placeholder"][-1:]
    placeholders: dict[str, fx.Node] = {}

    def placeholder(name: str) -> fx.Node:
        if name not in placeholders:
            where = own.graph.inserting_after(last[-1]) if last else own.graph.inserting_before(None)
            with where:
                placeholders[name] = own.graph.placeholder(f"looked_up_{len(placeholders)}")
            last.append(placeholders[name])
        return placeholders[name]

    for original, op in calls:
        _take_names(by_name[original.name], op, placeholder)
    own.recompile()
    return Lifted(own, tuple(map(number_of, placeholders)))


def by_number(target: Any) -> Any:
    """The operator that takes numbers where ``target`` (an overload of :func:`cgkit.register_op`) takes names: what
    stands for it in a compiled piece. None for an operator without ``lookup_args``."""
    op = registered_op_of(target)
    return sibling_of(op) if op is not None and op.lookup_args else None


def _take_names(node: fx.Node, op: RegisteredOp, placeholder: Callable[[str], fx.Node]) -> None:
    """Makes ``node`` call the sibling, with a placeholder for each name that stands in it as text."""
    parameters = list(inspect.signature(op.op_func).parameters)
    args, kwargs, lifted = list(node.args), dict(node.kwargs), []
    for name in op.lookup_args:
        index = parameters.index(name)
        value = kwargs[name] if name in kwargs else args[index] if index < len(args) else None
        if not isinstance(value, str):
            continue  # left out, or not text after all: the operator stays as it is
        lifted.append(name)
        if name in kwargs:
            kwargs[name] = placeholder(value)
        else:
            args[index] = placeholder(value)
    if len(lifted) == len(op.lookup_args):
        node.target = sibling_of(op)
        node.args, node.kwargs = tuple(args), kwargs


def sibling_of(op: RegisteredOp) -> Any:
    """The operator that takes numbers where ``op`` takes names; made when it is first needed.

    A fake run must not ask which number it is (that would fix it to one): it takes the first name there is,
    and the operator has promised that nothing but a look-up depends on it.
    """
    made = _siblings.get(op.name)
    if made is not None and made[0] is op.overload:
        return made[1]
    signature = resolved_signature(op.op_func)
    places = [(list(signature.parameters).index(name), name) for name in op.lookup_args]
    new = signature.replace(
        parameters=[
            p.replace(annotation=int) if p.name in op.lookup_args else p
            for p in signature.parameters.values()
        ]
    )

    def call(function: Callable[..., Any], name_of: Callable[[Any], str], args: Any, kwargs: Any) -> Any:
        given = list(args)
        for index, name in places:
            if index < len(given):
                given[index] = name_of(given[index])
            else:
                kwargs[name] = name_of(kwargs[name])
        return function(*given, **kwargs)

    # Not through the dispatcher a second time, where the kernel is one function for every device.
    direct = direct_call(op.overload)
    assert direct is not None

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(direct.call, _names.__getitem__, args, kwargs)

    def fake(*args: Any, **kwargs: Any) -> Any:
        return call(op.overload, lambda number: _names[0] if _names else "", args, kwargs)

    run.__signature__ = new  # type: ignore[attr-defined]
    sibling = register_op(
        op.name.replace("::", "__"),
        run,
        op.mutates_args,
        fake_impl=fake,
        dispatch_key=op.dispatch_key,
        namespace=NAMESPACE,
    )
    _siblings[op.name] = (op.overload, sibling)
    return sibling


def number_inputs(fake_mode: Any, count: int, known: Sequence[Any] = ()) -> list[Any]:
    """``count`` SymInts of ``fake_mode`` that stand for any number each; ``known`` are taken first."""
    more = [torch_hooks.any_number(fake_mode, f"looked_up_{index}") for index in range(len(known), count)]
    return [*known, *more][:count]
