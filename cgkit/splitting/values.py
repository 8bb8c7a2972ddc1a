"""What is known of a node's value: its example, whether it is a number, whether it can be made again.

Dynamo leaves each node's fake value in ``meta["example_value"]``, ``make_fx`` in ``meta["val"]``; a
graph that was built by hand may have neither. Everything here then answers as carefully as it must.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from cgkit.torch_hooks import is_fake, operator_of, resolve_overload, returns_several

SYM_SIZE = torch.ops.aten.sym_size.int
_NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
_SYM_FUNCTIONS = {f for name in dir(torch) if name.startswith("sym_") and callable(f := getattr(torch, name))}
_BUILTINS = {builtins.abs, builtins.max, builtins.min, builtins.pow, builtins.round, builtins.int}
_BUILTINS |= {builtins.float, builtins.bool}
#: Uninitialised allocations: no kernel runs, no random number is drawn, nothing is read but metadata.
_ALLOCATORS = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
#: Methods that change a tensor's shape or strides in place: a size read before is not one read after.
_METADATA_WRITERS = {
    *("resize_", "resize_as_", "set_", "t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_"),
    *("unsqueeze_", "as_strided_", "rename_", "_set_data", "set_data"),
}


def fake_value(node: fx.Node) -> Any:
    """The example value of ``node``, or None if the graph does not tell."""
    return node.meta.get("example_value", node.meta.get("val"))


def called_overload(node: fx.Node) -> Any:
    """The overload that ``node`` calls where it holds a packet of several; None if that cannot be told."""
    args, kwargs = fx.node.map_aggregate(
        (node.args, node.kwargs), lambda arg: fake_value(arg) if isinstance(arg, fx.Node) else arg
    )
    return resolve_overload(node.target, args, kwargs)


def shape_of(node: fx.Node) -> tuple[Any, ...] | None:
    """The shape of ``node`` as the trace saw it, symbols included; None if unknown. Only of a fake
    tensor: a real one as example does not say which of its sizes are fixed."""
    value = fake_value(node)
    return tuple(value.shape) if is_fake(value) else None


def is_number(node: fx.Node) -> bool:
    """Whether ``node`` is known to be a number (int, float, bool or a symbolic one)."""
    value = fake_value(node)
    if value is not None:
        return isinstance(value, _NUMBERS)
    return node.type in _NUMBERS or node.target is SYM_SIZE


def is_arithmetic(node: fx.Node, numbers: Callable[[fx.Node], bool] = is_number) -> bool:
    """Whether ``node`` computes a number from numbers alone, so that doing it again or elsewhere
    changes nothing. ``numbers`` tells which of its inputs are numbers."""
    if node.op != "call_function" or not is_number_function(node.target):
        return False
    value = fake_value(node)
    if value is not None and not isinstance(value, _NUMBERS):
        return False
    if not all(map(numbers, node.all_input_nodes)):
        return False
    return all(map(_holds_numbers_only, (*node.args, *node.kwargs.values())))


def _holds_numbers_only(arg: Any) -> bool:
    if isinstance(arg, (tuple, list)):
        return all(map(_holds_numbers_only, arg))
    return isinstance(arg, (fx.Node, *_NUMBERS))


def is_number_function(target: Any) -> bool:
    """Whether ``target`` is a function of numbers: given numbers alone, it gives one."""
    module = getattr(target, "__module__", None)
    if module in ("_operator", "operator"):
        return target not in (operator.getitem, operator.setitem, operator.delitem)
    return module == math.__name__ or target in _SYM_FUNCTIONS or target in _BUILTINS


def is_allocation(node: fx.Node) -> bool:
    """Whether ``node`` only makes an uninitialised tensor, so that making it earlier changes nothing."""
    if node.op not in ("call_function", "call_method") or "out" in node.kwargs:
        return False
    target = node.target
    if found := operator_of(target):
        name, overload = found
        return name.startswith("aten::") and _called(node) in _ALLOCATORS and overload != "out"
    if isinstance(target, str):
        return target in _ALLOCATORS
    return any(target is getattr(torch, name, None) for name in _ALLOCATORS)


def is_sequence(node: fx.Node) -> bool:
    """Whether ``node`` gives a tuple or list (of which ``getitem`` takes elements), as far as known.

    Without an example value: an operator's schema tells; for anything else, an element at a whole
    number is taken for one of a sequence. On a tensor that is a view, which may be made early as well.
    """
    value = fake_value(node)
    if value is not None:
        return isinstance(value, (tuple, list))
    if (several := returns_several(node.target)) is not None:
        return several
    return node.op in ("call_function", "call_method", "call_module")


def changes_metadata(graph: fx.Graph) -> bool:
    """Whether some node changes a tensor's shape or strides in place."""
    return any(_called(node) in _METADATA_WRITERS for node in graph.nodes)


def _called(node: fx.Node) -> str:
    target = node.target
    if found := operator_of(target):
        return found[0].partition("::")[2]
    return target if isinstance(target, str) else getattr(target, "__name__", "")
