"""Runs a split graph under fake tensors and has each piece compiled on the way.

Implements the article's "PiecewiseCompileInterpreter：边解释边编译" (compiling while interpreting).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from cgkit import torch_hooks
from cgkit.compiling.content_key import ContentKey
from cgkit.compiling.fakes import PieceOutputs, layout_of, storage_groups
from cgkit.compiling.manager import first_line
from cgkit.errors import CompileError

if TYPE_CHECKING:
    from cgkit.splitting import Piece, SplitGraph


@dataclass(frozen=True)
class PieceCall:
    """A capturable piece as the interpreter met it: what it gets, in fakes."""

    piece: Piece
    args: tuple[Any, ...]  # one an input: fakes with symbolic sizes, SymInts, numbers
    #: Where a SymInt stands among ``args``; the first is the token count.
    sym_shape_indices: tuple[int, ...]
    #: Inputs of one storage of which the piece writes one in place, and so maybe the others.
    written_together: tuple[int, ...]
    key: ContentKey


class PiecewiseCompileInterpreter:
    """Walks over the pieces in order, each called on fakes: shapes are computed, nothing else is.

    No tensor is allocated and no kernel runs, however large the sizes. For each capturable piece
    ``on_piece`` is called with a :class:`PieceCall`. Where the article's interpreter runs every
    piece, this one runs each content once and makes the outputs of the others from that run.

    Args:
        split: the split graph; its example inputs are fakes of one fake mode.
        key: the content key of a piece from its graph and inputs.
        on_piece: what to do with a capturable piece (compile it).
    """

    def __init__(
        self,
        split: SplitGraph,
        key: Callable[[fx.GraphModule, Sequence[Any]], ContentKey],
        on_piece: Callable[[PieceCall], None],
    ) -> None:
        self.split = split
        self.fake_mode = _fake_mode(split)
        self._key = key
        self._on_piece = on_piece
        self._nodes = {node.name: node for node in split.graph_module.graph.nodes}
        self._outputs: dict[ContentKey, PieceOutputs] = {}
        self._written: dict[ContentKey, tuple[int, ...]] = {}

    def run(self, *args: Any) -> dict[str, Any]:
        """Runs on ``args`` (default: the split's example inputs); all values between pieces by name.

        Real tensors among ``args`` are faked first.

        Raises:
            CompileError: a piece cannot be run on fakes; names the piece and its operators.
        """
        values = args or tuple(self.split.example_inputs or ())
        names = self.split.inputs
        if len(values) != len(names):
            raise CompileError(f"the graph has {len(names)} inputs and {len(values)} examples were given")
        env: dict[str, Any] = dict(zip(names, map(self._fake, values)))
        for piece in self.split.pieces:
            inputs = [self._value(name, env) for name in piece.input_names]
            call = self.call_splitting if piece.is_splitting else self.call_piece
            env.update(zip(piece.output_names, call(piece, inputs)))
        return env

    def call_splitting(self, piece: Piece, inputs: Sequence[Any]) -> Sequence[Any]:
        """Runs a splitting piece's fake implementation."""
        return self._run(piece, inputs)

    def call_piece(self, piece: Piece, inputs: Sequence[Any]) -> Sequence[Any]:
        """Runs a capturable piece, or repeats an equal one's run, and hands it to ``on_piece``."""
        key = self._key(piece.graph_module, inputs)
        if key not in self._written:
            self._written[key] = self._written_together(piece, inputs)
        symints = tuple(i for i, value in enumerate(inputs) if isinstance(value, torch.SymInt))
        self._on_piece(PieceCall(piece, tuple(inputs), symints, self._written[key], key))
        known = self._outputs.get(key)
        if known is not None and known.repeatable_for(inputs):
            return known.again(self.fake_mode)
        layouts = [layout_of(value) for value in inputs]
        outputs = self._run(piece, inputs)
        self._outputs[key] = PieceOutputs(inputs, layouts, outputs)
        return outputs

    def _value(self, name: str, env: dict[str, Any]) -> Any:
        """The value ``name``; what no piece makes (a size taken of an input up front) is computed here."""
        if name not in env:
            node = self._nodes[name]
            with torch_hooks.running_fake(self.fake_mode):
                take = lambda n: self._value(n.name, env)  # noqa: E731
                env[name] = node.target(*fx.map_arg(node.args, take), **fx.map_arg(node.kwargs, take))
        return env[name]

    def _written_together(self, piece: Piece, inputs: Sequence[Any]) -> tuple[int, ...]:
        """The inputs that share memory with an input that the piece writes in place."""
        groups = storage_groups(inputs).values()
        candidates = sorted(index for group in groups for index in group)
        if not candidates:
            return ()
        with torch_hooks.running_fake(self.fake_mode):
            probe = [v.detach() if isinstance(v, torch.Tensor) else v for v in inputs]
        before = [probe[index]._version for index in candidates]
        self._run(piece, probe)
        written = {i for i, version in zip(candidates, before) if probe[i]._version != version}
        return tuple(sorted(i for group in groups if written & set(group) for i in group))

    def _run(self, piece: Piece, inputs: Sequence[Any]) -> Sequence[Any]:
        try:
            with torch_hooks.running_fake(self.fake_mode):
                return fx.Interpreter(piece.graph_module).run(*inputs)
        except Exception as error:
            raise CompileError(
                f"piece {piece.name} cannot be run on fake tensors: {type(error).__name__}: "
                f"{first_line(error)}\n"
                f"Its operators: {', '.join(piece.ops)}. An operator without a fake implementation gets one "
                "with cgkit.register_op(..., fake_impl=...)"
            ) from error

    def _fake(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and not torch_hooks.is_fake(value):
            return self.fake_mode.from_tensor(value)
        return value


def _fake_mode(split: SplitGraph) -> Any:
    if split.traced is not None and split.traced.fake_mode is not None:
        return split.traced.fake_mode
    return torch_hooks.fake_mode_of(split.example_inputs or ()) or torch_hooks.new_fake_mode()
