"""What the compile stage found out about a model's pieces, to be followed without their graphs.

The trace cache keeps it: which piece has which content, where its token count stands, which names were
lifted out of it. With the compiled pieces in the compile cache that is all that a second process needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cgkit.compiling.content_key import ContentKey
from cgkit.compiling.lifting import Lifted
from cgkit.errors import CompileError

if TYPE_CHECKING:
    from cgkit.compiling.interpreter import PieceCall
    from cgkit.splitting import Piece


class PlanError(CompileError):
    """A plan cannot be followed here: the model is traced instead."""


class PlannedCall:
    """A :class:`~cgkit.compiling.interpreter.PieceCall` without its fakes: ``args`` are made when asked for."""

    def __init__(
        self,
        piece: Piece,
        key: ContentKey,
        sym_shape_indices: Sequence[int],
        names: Sequence[str],
    ) -> None:
        """``names``: those that were lifted out of the piece."""
        self.piece, self.key = piece, key
        self.sym_shape_indices = tuple(sym_shape_indices)
        self.written_together: tuple[int, ...] = ()  # such a piece runs uncompiled, and is never kept
        self.names = tuple(names)
        self.find: Callable[[], PieceCall] | None = None

    @property
    def args(self) -> tuple[Any, ...]:
        """The piece's inputs in fakes; the model is traced for them, once."""
        assert self.find is not None
        return self.find().args


class PlannedLift(Lifted):
    """The numbers of a piece's lifted names; the graph without them is made again where it is needed."""

    def __init__(self, piece: Piece, numbers: tuple[int, ...]) -> None:
        object.__setattr__(self, "_piece", piece)
        object.__setattr__(self, "numbers", numbers)

    @property
    def graph_module(self) -> Any:  # type: ignore[override]
        """The graph as it was compiled."""
        from cgkit.compiling.lifting import lift_names

        return lift_names(self._piece.graph_module).graph_module  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Plan:
    """All calls of one model in order, and the keys of further shapes by (piece, shape as text)."""

    calls: Sequence[PlannedCall]
    shapes: dict[tuple[str, str], ContentKey]
    #: Operators whose names were lifted: their siblings must exist before a piece calls them.
    siblings: Sequence[str] = ()

    @property
    def keys(self) -> list[ContentKey]:
        """The different contents, general shapes first."""
        return list(dict.fromkeys([*(call.key for call in self.calls), *self.shapes.values()]))
