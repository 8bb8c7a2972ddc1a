"""A capturable piece as code that can be kept: what says, under fake tensors, which outputs the piece gives.

A compiled piece does not tell the shapes of its outputs before it runs, nor which of them share memory; its graph
does, run on fakes. A model out of the trace cache has no graph, and this instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cgkit.splitting.assign import Assignment
from cgkit.splitting.pieces import Piece
from cgkit.splitting.stitch import Stitching


class PieceCode:
    """``source`` defines ``execute(*inputs) -> outputs``, and ``constants`` are its globals. Call it like the piece."""

    def __init__(self, source: str, constants: dict[str, Any]) -> None:
        self.source, self.constants = source, constants
        self._execute: Callable[..., Any] | None = None

    def __call__(self, *inputs: Any) -> Any:
        """Runs the piece, operator by operator."""
        if self._execute is None:
            names = dict(self.constants)
            exec(compile(self.source, "<cgkit piece>", "exec"), names)  # the source is ours, from the graph
            self._execute = names["execute"]
        return self._execute(*inputs)


def piece_code(piece: Piece) -> PieceCode:
    """The code of ``piece``'s graph."""
    written = _Writer(piece.graph_module, Assignment(), [], inline=True)
    return PieceCode(written.source, written.constants)


class _Writer(Stitching):
    """A whole graph, a line a node."""

    def _write(self, ranges: dict[int, str] | None = None) -> str:
        lines = [f"def execute({', '.join(self._parameters())}):"]
        for node in self._graph.nodes:
            if node.op in ("call_function", "call_method", "call_module"):
                lines.append(f"    {self._statement(node)}")
        lines.append(f"    return {self._expression(self._graph.output_node().args[0])}")
        return "\n".join(lines) + "\n"

    def _function(self, target: Any, label: str) -> str:
        """Operators through torch's dispatcher: only so do fakes reach their fake implementations."""
        return self._constant(target, label)
