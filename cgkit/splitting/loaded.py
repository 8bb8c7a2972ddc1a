"""A split graph that another process cut: its pieces by name, its stitching code, and the graphs on demand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cgkit.errors import SplitError
from cgkit.splitting.piece_code import PieceCode
from cgkit.splitting.pieces import Piece
from cgkit.splitting.split_graph import SplitGraph, cut
from cgkit.splitting.stitch import Stitching, StitchingCode

if TYPE_CHECKING:
    from cgkit.tracing.loaded import LoadedTrace


class LoadedPiece(Piece):
    """A piece whose graph is made when it is first asked for."""

    def __init__(
        self,
        index: int,
        is_splitting: bool,
        input_names: Sequence[str],
        output_names: Sequence[str],
        ops: Sequence[str],
        code: PieceCode | None = None,
    ) -> None:
        for name, value in (
            ("index", index),
            ("is_splitting", is_splitting),
            ("input_names", tuple(input_names)),
            ("output_names", tuple(output_names)),
            ("ops", tuple(ops)),
            ("_code", code),
        ):
            object.__setattr__(self, name, value)

    def belongs_to(self, split: LoadedSplit) -> None:
        """Says where the graph comes from."""
        object.__setattr__(self, "_split", split)

    @property
    def on_fakes(self) -> Callable[..., Any]:
        """The stored code; the graph of a piece whose code could not be stored."""
        return self._code or self.graph_module  # type: ignore[attr-defined]

    @property
    def graph_module(self) -> Any:  # type: ignore[override]
        """The piece's graph; the model is traced and cut for it, once."""
        return self._split.again.pieces[self.index].graph_module  # type: ignore[attr-defined]


class LoadedSplit(SplitGraph):
    """A :class:`SplitGraph` out of the trace cache.

    It stitches and binds without a graph. What shows graphs (:meth:`to_frame`, :meth:`draw`, a piece's
    ``graph_module``) has the model traced and cut once (:attr:`again`).
    """

    def __init__(
        self,
        traced: LoadedTrace,
        pieces: list[LoadedPiece],
        splitting_ops: Sequence[str],
        inputs: Sequence[str],
        stitching: StitchingCode,
    ) -> None:
        self.traced = traced
        self.pieces = list(pieces)
        self.splitting_ops = tuple(splitting_ops)
        self.inputs = list(inputs)
        self.model_name = traced.model_name
        self.seconds = 0.0
        self._stitchings = {True: stitching}
        self._default = None
        self._lines = {}
        for piece in pieces:
            piece.belongs_to(self)

    @functools.cached_property
    def again(self) -> SplitGraph:
        """The model traced and cut in this process.

        Raises:
            SplitError: the pieces are not those that were stored.
        """
        assert self.traced is not None
        again = cut(self.traced.again, self.splitting_ops)  # type: ignore[attr-defined]
        if _outline(again) != _outline(self):
            raise SplitError(
                f"{self.model_name} was loaded from the trace cache, and traced again it falls into other pieces: "
                "something that it depends on was changed after the model's first call. Make a new instance, or "
                "set CGKIT_DISABLE_COMPILE_CACHE=1"
            )
        return again

    @property
    def graph_module(self) -> Any:  # type: ignore[override]
        """The whole graph, made again."""
        return self.again.graph_module

    @property
    def assignment(self) -> Any:  # type: ignore[override]
        return self.again.assignment

    @property
    def example_inputs(self) -> Any:  # type: ignore[override]
        """The fakes of the trace, made again."""
        return self.again.example_inputs

    def _stitching(self, inline: bool) -> StitchingCode:
        if inline not in self._stitchings:
            again = self.again
            self._stitchings[inline] = Stitching(again.graph_module, again.assignment, again.pieces, inline)
        return self._stitchings[inline]

    def __repr__(self) -> str:
        head, *rows = super().__repr__().splitlines()
        return "\n".join([head.rpartition(",")[0] + ", loaded from the trace cache", *rows])


def _outline(split: SplitGraph) -> list[tuple[Any, ...]]:
    return [(p.is_splitting, p.input_names, p.output_names, p.ops) for p in split.pieces]
