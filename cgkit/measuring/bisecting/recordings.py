"""Stage 4: what one recording holds, beside a recording of the same call that is made now.

A recording is a list of calls with the numbers and addresses that they had. What two of them may differ in is where
each has its own memory (its pool, its static inputs). Any other difference is something that was so then and is
otherwise now. Emulated graphs can be read so; the nodes of CUDA's are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from cgkit.capturing import CapturedGraphs
from cgkit.capturing.emulated_tape import EmulatedGraph, TapedCall
from cgkit.forward_context import BatchDescriptor
from cgkit.numerics import same_bits
from cgkit.splitting import Piece
from cgkit.tensor_trees import number_leaves, tensor_leaves
from cgkit.torch_hooks import OpOverload


class Held(NamedTuple):
    """What a recording holds and one made now would not, in words; and where: the piece, its operator."""

    piece: str
    operator: str
    what: str


def held_otherwise(old: CapturedGraphs, new: CapturedGraphs, key: BatchDescriptor | None) -> Held | None:
    """The first thing that the recording ``old`` holds otherwise than ``new``; None where nothing is found."""
    for one, other, pieces in _pairs(old, new, key):
        calls = one.calls, other.calls
        done = 0  # compiled pieces before this call
        for a, b in zip(*calls):
            what = _difference(a, b, _Own(one, old), _Own(other, new))
            compiled = not isinstance(a.function, OpOverload)
            if what:
                return _located(pieces, done, compiled, a, what)
            done += compiled
        if len(calls[0]) != len(calls[1]):
            return Held(
                *_place(pieces, done, False), f"{len(calls[0])} calls, and one made now {len(calls[1])}"
            )
    return None


def _pairs(
    old: CapturedGraphs, new: CapturedGraphs, key: BatchDescriptor | None
) -> Iterator[tuple[EmulatedGraph, EmulatedGraph, list[Piece]]]:
    """Emulated graphs of one key in both, with the pieces that they hold."""
    split = old.compiled.split
    names = {backend.name: backend.piece for backend in old.compiled.backends}
    for one, other in zip(old.wrappers, new.wrappers):
        entries = [wrapper.entries.get(key) for wrapper in (one, other)]  # type: ignore[arg-type]
        graphs = [entry.graph for entry in entries if entry is not None]
        if len(graphs) == 2 and all(isinstance(graph, EmulatedGraph) for graph in graphs):
            own = names.get(one.name)
            yield graphs[0], graphs[1], [own] if own is not None else list(split.pieces)  # type: ignore[misc]


class _Own:
    """What belongs to one recording itself: its pool, its static inputs."""

    def __init__(self, graph: EmulatedGraph, captured: CapturedGraphs) -> None:
        self.graph = graph
        inputs = captured.inputs
        given = inputs.at(inputs.largest) if inputs is not None and inputs.copy_inputs else ()
        self.storages = {tensor.untyped_storage().data_ptr() for _, tensor in tensor_leaves(given)}

    def holds(self, tensor: torch.Tensor) -> bool:
        return self.graph.owns(tensor) or tensor.untyped_storage().data_ptr() in self.storages


def _difference(a: TapedCall, b: TapedCall, own: _Own, others: _Own) -> str:
    """ "" or what ``a`` holds, and what ``b``."""
    if isinstance(a.function, OpOverload) and a.function is not b.function:
        return f"a call of {a.name}, and one made now calls {b.name} there: Python took another branch"
    given = [*a.args], dict(a.kwargs)
    now = [*b.args], dict(b.kwargs)
    numbers = [dict(number_leaves(each)) for each in (given, now)]
    for path, value in numbers[0].items():
        if path in numbers[1] and _unlike(value, numbers[1][path]):
            return (
                f"the number {value!r} in its call of {a.name}, and one made now holds {numbers[1][path]!r}"
            )
    tensors = dict(tensor_leaves(now))
    for path, tensor in tensor_leaves(given):
        other = tensors.get(path)
        if other is None or own.holds(tensor) or others.holds(other) or tensor.data_ptr() == other.data_ptr():
            continue
        if not same_bits(tensor, other):
            return (
                f"the address {tensor.data_ptr():#x} in its call of {a.name}, and what is to be read lies at "
                f"{other.data_ptr():#x} now: the tensor was replaced"
            )
    return ""


def _unlike(one: Any, other: Any) -> bool:
    return type(one) is not type(other) or (one != other and not (one != one and other != other))


def _located(pieces: list[Piece], done: int, compiled: bool, call: TapedCall, what: str) -> Held:
    piece, operator = _place(pieces, done, compiled)
    return Held(piece, operator or call.name, what)


def _place(pieces: list[Piece], done: int, compiled: bool) -> tuple[str, str]:
    """The piece in which a call lies that stands after ``done`` compiled pieces, and its operator if it is one."""
    recorded = [piece for piece in pieces if not piece.is_splitting]
    if compiled:
        return (recorded[done].name, "") if done < len(recorded) else ("", "")
    first = recorded[done - 1].index if done else -1
    between = [piece for piece in pieces if piece.is_splitting and piece.index > first]
    if not between:
        return "", ""
    ops = dict.fromkeys(between[0].ops)
    return between[0].name, next(iter(ops)) if len(ops) == 1 else ""
