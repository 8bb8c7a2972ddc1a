"""A piece's nodes as plain data: what pictures draw and what two pieces are compared by.

A :class:`NodeLine` says what a node is without the graph around it: what it calls, on what, with which
constants, what comes out, and of a weight where the model keeps it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from cgkit.splitting.matching import operator_name
from cgkit.splitting.values import fake_value, is_number
from cgkit.torch_hooks import is_fake
from cgkit.tracing.node_text import constants, leaves, reads_from, shape_text, written_values
from cgkit.tracing.traced_graph import plain_source

if TYPE_CHECKING:
    from cgkit.splitting.pieces import Piece
    from cgkit.splitting.split_graph import SplitGraph

_CALLS = ("call_function", "call_method", "call_module")


@dataclass(frozen=True)
class NodeLine:
    """One node of a piece.

    ``role``: "weight" (parameter, buffer or attribute of the model), "number" (a size), "value" (another
    input), "constant" (held by the graph), "call" or "output". ``arguments``: (where, text, node) for
    each leaf of the call's arguments in order; ``node`` is the name of the node that it is, or "" for a
    constant. ``shape`` is text with the trace's symbols, "(s77, 9, 64)"; "" for what is no tensor.
    ``source``: where the model keeps a weight (``layers.0.q_proj.weight``), or an argument's name.
    ``reads_from``: the nodes that it takes its inputs from, where one was written into the writer.
    """

    name: str
    role: str
    operator: str
    arguments: tuple[tuple[str, str, str], ...]
    shape: str
    dtype: str
    source: str = ""
    reads_from: tuple[str, ...] = ()

    @property
    def constants(self) -> str:
        """The arguments that are no nodes, without those left at None: ``3, dim=-1``."""
        return constants(self.arguments)

    def text(self, called: Mapping[str, str] | None = None) -> str:
        """The call as one would write it: ``linear(mul_3, norm.weight) -> (s77, 576) float32``.

        ``called``: what to call a node instead of its name.
        """
        called = called or {}
        inside = ", ".join(
            ("" if where[0].isdigit() else f"{where}=") + called.get(node, text)
            for where, text, node in self.arguments
        )
        out = " ".join(filter(None, [self.shape, self.dtype]))
        arrow = f" -> {out}" if out else ""
        if self.role == "call":
            return f"{self.operator}({inside}){arrow}"
        if self.role == "output":
            return f"return {inside}"
        return " ".join(filter(None, [self.role, self.source, out]))


def node_lines(split: SplitGraph, piece: Piece) -> list[NodeLine]:
    """The nodes of ``piece`` in order: inputs, then calls, then the output."""
    known = {entry.name: entry for entry in split.traced.inputs} if split.traced is not None else {}
    nodes = list(piece.graph_module.graph.nodes)
    takes = reads_from(nodes)
    return [_line(piece.graph_module, node, known, takes[node.name]) for node in nodes]


def _line(module: fx.GraphModule, node: fx.Node, known: dict[str, Any], takes: list[str]) -> NodeLine:
    value = fake_value(node)
    shape, dtype = shape_text(value)
    operator, source, arguments = "", "", tuple(leaves(node))
    if node.op in _CALLS:
        role, operator = "call", operator_name(node)
    elif node.op == "output":
        role, shape, dtype = "output", "", ""
    elif node.op == "get_attr":
        role = "constant"
        shape, dtype, source = _constant(module, str(node.target))
    else:
        role = "number" if is_number(node) else "value"
        if (entry := known.get(node.name)) is not None:
            role = "weight" if entry.is_weight else role
            source = plain_source(entry.source).removeprefix("L['self'].")
    return NodeLine(node.name, role, operator, arguments, shape, dtype, source, tuple(takes))


def _constant(module: fx.GraphModule, path: str) -> tuple[str, str, str]:
    """Shape, dtype and content (a short hash) of what the graph holds at ``path``."""
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    shape, dtype = shape_text(value)
    if not isinstance(value, torch.Tensor):
        return "", "", type(value).__name__
    if is_fake(value) or value.is_meta or value.layout is not torch.strided:
        return shape, dtype, path
    plain = value.detach().resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format)
    content = plain.flatten().view(torch.uint8).numpy().tobytes()
    return shape, dtype, f"content {hashlib.sha256(content).hexdigest()[:8]}"


def written_inputs(piece: Piece) -> set[str]:
    """The inputs of ``piece`` into which its operators write, as far as that can be told."""
    written: set[str] = set().union(*map(written_values, piece.graph_module.graph.nodes))
    return written & set(piece.input_names)


def content_digest(lines: list[NodeLine]) -> str:
    """16 hexadecimal digits that are equal for nodes that do the same, whatever they are called.

    It goes by the graph alone: unlike the compile stage's key it knows nothing of strides, of inputs
    that share memory, nor of the compiler's settings.
    """
    number = {line.name: index for index, line in enumerate(lines)}
    rows = []
    for line in lines:
        arguments = [(where, number[node] if node else text) for where, text, node in line.arguments]
        held = line.source if line.role == "constant" else ""
        role = "value" if line.role == "weight" else line.role
        rows.append((role, line.operator, arguments, line.shape, line.dtype, held))
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]
