"""A copy of the graph in which sizes are numbers: what crosses a cut is a tensor or a symbol.

``x.size()`` gives a ``torch.Size``, which no compiled piece takes as an input, and a static size
taken apart across a cut would become a Python int where the next piece expects a symbol. vLLM learned
both after the article (PR #37395). So every size is read as the graph-level symbol where the trace
knows it, as a literal where it is static, and as ``aten.sym_size.int`` otherwise.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import fx

from cgkit.errors import SplitError
from cgkit.splitting.values import SYM_SIZE, changes_metadata, fake_value, is_arithmetic, shape_of
from cgkit.torch_hooks import codegen_of, plain_symbol_name

_SIZE_CALLS = {torch.ops.aten.sym_size, torch.ops.aten.sym_size.default, torch.ops.aten.sym_size.int}
_SIZE_CALLS |= {torch.ops.aten.size, torch.ops.aten.size.default, torch.ops.aten.size.int}


def normalised_copy(graph_module: fx.GraphModule) -> tuple[fx.GraphModule, dict[str, fx.Node]]:
    """A copy of ``graph_module`` with sizes decomposed, and its graph-level symbols.

    The copy shares parameters and constants with the original, which is left as it was. The symbols
    are the nodes that hold them, in order: Dynamo's SymInt placeholders, and an ``aten.sym_size.int``
    at the head of the graph for a symbol that has none.

    Raises:
        SplitError: the graph has no output node.
    """
    graph = _copy_graph(graph_module.graph)
    symbols = _graph_level_symbols(graph)
    size_may_change = changes_metadata(graph)
    for node in graph.nodes:
        if queried := _queried_size(node):
            _replace_size(graph, node, *queried, symbols, size_may_change)
        elif is_arithmetic(node, numbers=lambda _: False):  # of literals only: a literal itself
            with suppress(ArithmeticError, ValueError):  # raises at run time, where the model's code does
                _replace(node, node.target(*node.args, **node.kwargs))
    _unpack_sequences(graph)
    graph.lint()
    return fx.GraphModule(graph_module, graph, type(graph_module).__name__), symbols


def _copy_graph(old: fx.Graph) -> fx.Graph:
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in old.nodes:
        new = graph.node_copy(node, lambda n: values[n])
        # GraphArg holds the example tensors themselves; nothing after Dynamo needs it
        new.meta.pop("grapharg", None)
        if "example_value" not in new.meta and "val" in new.meta:
            new.meta["example_value"] = new.meta["val"]
        values[node] = new
    if not any(node.op == "output" for node in graph.nodes):
        raise SplitError("the graph has no output node: build it with `graph.output(...)`")
    graph.set_codegen(copy.deepcopy(codegen_of(old)))
    return graph


def _graph_level_symbols(graph: fx.Graph) -> dict[str, fx.Node]:
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    symbols: dict[str, fx.Node] = {}
    for node in placeholders:
        if (name := plain_symbol_name(fake_value(node))) is not None:
            symbols.setdefault(name, node)
    body = next(node for node in graph.nodes if node.op != "placeholder")
    for node in placeholders:
        for dim, size in enumerate(shape_of(node) or ()):
            name = plain_symbol_name(size)
            if name is not None and name not in symbols:
                with graph.inserting_before(body):
                    symbols[name] = _sym_size(graph, node, dim, size)
    return symbols


def _sym_size(graph: fx.Graph, tensor: fx.Node, dim: int, size: Any) -> fx.Node:
    node = graph.call_function(SYM_SIZE, (tensor, dim))
    if size is not None:
        node.meta["example_value"] = size
    return node


def _queried_size(node: fx.Node) -> tuple[fx.Node, int | None] | None:
    """(tensor, dim) if ``node`` reads a tensor's size, dim None for all of it; None if it does not."""
    method = node.op == "call_method" and node.target == "size"
    function = node.op == "call_function" and node.target in _SIZE_CALLS
    attribute = node.op == "call_function" and node.target is getattr and node.args[1:] == ("shape",)
    if not (method or function or attribute) or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 and not attribute else None)
    if dim is not None and not isinstance(dim, int):
        return None
    return node.args[0], dim


def _replace_size(
    graph: fx.Graph,
    node: fx.Node,
    tensor: fx.Node,
    dim: int | None,
    symbols: dict[str, fx.Node],
    size_may_change: bool,
) -> None:
    """Puts a number for the size query ``node`` (a tuple of numbers if it asks for all dimensions)."""
    if node in symbols.values():
        return
    # in-place changes of shape leave a tensor's example with its last shape, so that only the query's
    # own example tells what the size was then
    seen = fake_value(node) if shape_of(tensor) is not None else None
    shape = None if size_may_change else shape_of(tensor)

    def number(d: int, size: Any) -> Any:
        if isinstance(size, int):
            return size
        if (name := plain_symbol_name(size)) in symbols:
            return symbols[name]
        if node.target is SYM_SIZE:
            return node
        with graph.inserting_before(node):
            return _sym_size(graph, tensor, d, size)

    if dim is not None:
        size = seen if seen is not None or shape is None else shape[dim]
        if (new := number(dim, size)) is not node:
            _replace(node, new)
    elif (sizes := seen if seen is not None else shape) is not None:
        _replace(node, tuple(number(d, size) for d, size in enumerate(sizes)))
    else:
        _replace_size_of_unknown_rank(graph, node, lambda d: number(d, None), size_may_change)


def _replace_size_of_unknown_rank(
    graph: fx.Graph, node: fx.Node, number: Callable[[int], Any], size_may_change: bool
) -> None:
    """Without a shape, single dimensions can be asked for, and the whole is asked for where it is used,
    so that it need not cross a cut (unless the answer may be another one there)."""
    for user in list(node.users):
        if user.target is operator.getitem and isinstance(user.args[1], int):
            _replace(user, number(user.args[1]))
        elif not size_may_change and user.op != "output" and node.next is not user:
            with graph.inserting_before(user):
                user.replace_input_with(node, graph.node_copy(node))
    if not node.users:
        graph.erase_node(node)


def _replace(node: fx.Node, value: Any) -> None:
    """Uses ``value`` (a number, a node, or a tuple of them) wherever ``node`` is used, and drops it."""
    for user in list(node.users):
        if user.target is operator.getitem and isinstance(value, tuple) and not _holds_nodes(user.args[1]):
            index: Any = user.args[1]
            _replace(user, value[index])
            continue
        if is_concatenation(user) and isinstance(value, tuple):
            left, right = (value if arg is node else arg for arg in user.args)
            if isinstance(left, (tuple, list)) and isinstance(right, (tuple, list)):
                _replace(user, (*left, *right))
                continue
        new = value
        if user.op == "call_method" and user.args[0] is node:  # size.numel() and the like
            with node.graph.inserting_before(user):
                new = node.graph.call_function(torch.Size, (value,))
        _substitute(user, node, new)
    node.graph.erase_node(node)


def _substitute(user: fx.Node, node: fx.Node, value: Any) -> None:
    args, kwargs = fx.node.map_arg((user.args, user.kwargs), lambda n: value if n is node else n)
    user.args, user.kwargs = args, kwargs


def is_concatenation(node: fx.Node) -> bool:
    """Whether ``node`` is ``a + b``, which joins if they are sequences."""
    return node.op == "call_function" and node.target is operator.add and len(node.args) == 2


def _holds_nodes(arg: Any) -> bool:
    found: list[fx.Node] = []
    fx.node.map_arg(arg, found.append)
    return bool(found)


def _unpack_sequences(graph: fx.Graph) -> None:
    """Where a tuple or list is used whole (``torch.cat(x.chunk(2))``), uses its elements instead, so
    that only they can cross a cut."""
    for node in list(graph.nodes):
        value = fake_value(node)
        if node.op == "placeholder" or type(value) not in (tuple, list, torch.Size):
            continue
        whole = [user for user in node.users if user.target is not operator.getitem]
        if not whole:
            continue
        elements: list[fx.Node] = []
        with graph.inserting_after(node):
            for index in reversed(range(len(value))):
                element = graph.call_function(operator.getitem, (node, index))
                element.meta["example_value"] = value[index]
                elements.insert(0, element)
        sequence = elements if isinstance(value, list) else tuple(elements)
        for user in whole:
            _substitute(user, node, sequence)
