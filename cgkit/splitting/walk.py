"""Going through a split graph once, with values: what its stitching code would do, piece by piece.

The stitching code is what runs; this is for whoever wants to know what it *would* run, and hand in something
else: a replay plan is laid out so. It is the same code with its calls handed over, so that it needs no graph: a
model out of the trace cache has none.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from cgkit.splitting.pieces import Piece
from cgkit.splitting.register import DirectCall, overload_of
from cgkit.splitting.values import SYM_SIZE, is_number_function
from cgkit.tensor_trees import tensor_leaves

if TYPE_CHECKING:
    from cgkit.splitting.split_graph import SplitGraph

#: (piece, inputs in the order of ``piece.input_names``) -> outputs as ``piece.output_names``.
RunPiece = Callable[[Piece, Sequence[Any]], Sequence[Any]]
#: (piece, what is called, args, kwargs) -> its result.
RunCall = Callable[[Piece, Any, tuple[Any, ...], dict[str, Any]], Any]
#: What the rewritten code calls. No identifiers, so that no value of the graph has these names.
_CALL, _METHOD, _ELEMENT = "<call>", "<method>", "<element>"


def walk(split: SplitGraph, inputs: Sequence[Any], run_piece: RunPiece, run_call: RunCall) -> Any:
    """Goes through ``split`` in order and returns the graph's outputs.

    Args:
        inputs: the graph's, in order.
        run_piece: called for each capturable piece.
        run_call: called for whatever a splitting piece does that is neither arithmetic on numbers, nor the size of a
            tensor, nor an element of a tuple. What is called is an overload where that can be told, else the node's
            target, the name of a tensor's method for a method.
    """
    stitching, calls = split.stitching(), _Calls(split.pieces, run_call)
    source, ranges = stitching.marked_source()
    names = {**stitching.constants, _CALL: calls.call, _METHOD: calls.method, _ELEMENT: calls.element}
    for piece in split.capturable:
        names[stitching.callable_names[piece.index]] = partial(_run_piece, run_piece, piece)
    exec(compile(_handed_over(source, ranges), "<cgkit walk>", "exec"), names)  # ours, from the graph
    return names["execute"](*inputs)


def _run_piece(run_piece: RunPiece, piece: Piece, *given: Any) -> Sequence[Any]:
    return run_piece(piece, given)


# --- the code ------------------------------------------------------------------------------------


def _handed_over(source: str, ranges: dict[str, int]) -> ast.Module:
    """The marked stitching code; in place of each range its lines, with their calls handed over."""
    module = ast.parse(source)
    (execute,) = (node for node in module.body if isinstance(node, ast.FunctionDef))
    lines: list[ast.stmt] = []
    for line in execute.body:
        if isinstance(line, ast.With):
            (name,) = (node.id for node in ast.walk(line.items[0].context_expr) if isinstance(node, ast.Name))
            lines += map(_HandOver(ranges[name]).visit, line.body)
        else:
            lines.append(line)
    execute.body = lines
    return ast.fix_missing_locations(module)


class _HandOver(ast.NodeTransformer):
    """``f(x)``, ``x.f(y)`` and ``x[i]`` of one splitting piece as calls of :class:`_Calls`."""

    def __init__(self, index: int) -> None:
        self.index = index

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute):
            what = [node.func.value, ast.Constant(node.func.attr)]
            return self.ours(_METHOD, [*what, *node.args], node.keywords)
        return self.ours(_CALL, [node.func, *node.args], node.keywords)

    def visit_Subscript(self, node: ast.Subscript) -> ast.Call:
        self.generic_visit(node)
        return self.ours(_ELEMENT, [node.value, node.slice], [])

    def ours(self, name: str, args: list[ast.expr], keywords: list[ast.keyword]) -> ast.Call:
        return ast.Call(ast.Name(name, ast.Load()), [ast.Constant(self.index), *args], keywords)


# --- its calls -----------------------------------------------------------------------------------


class _Calls:
    def __init__(self, pieces: Sequence[Piece], run_call: RunCall) -> None:
        self.pieces, self.run_call = pieces, run_call

    def call(self, index: int, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        if _of_numbers(target, args, kwargs):
            return target(*args, **kwargs)
        return self.run_call(self.pieces[index], target, args, kwargs)

    def method(self, index: int, owner: Any, name: str, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(owner, DirectCall):
            return self.run_call(self.pieces[index], overload_of(owner), args, kwargs)
        return self.run_call(self.pieces[index], name, (owner, *args), kwargs)

    def element(self, index: int, value: Any, at: Any, /) -> Any:
        if isinstance(value, (tuple, list)):
            return value[at]
        return self.run_call(self.pieces[index], operator.getitem, (value, at), {})


def _of_numbers(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the call only makes a number of numbers, or puts together an argument (a slice, a named tuple)."""
    if target is SYM_SIZE:
        return True
    if not is_number_function(target):
        return isinstance(target, type)
    return not any(True for _ in tensor_leaves((args, kwargs)))
