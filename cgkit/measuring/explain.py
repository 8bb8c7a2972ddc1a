"""``explain(compiled)``: what became of each piece, down to the generated code and Dynamo's bytecode.

Implements the article's "调试与观测：两个官方入口" (debugging and observing) as an object to hold: nodes
before and after Inductor, the kernels that it made, its code, the bytecode around the graph, and why two
pieces did not share a compilation. Everything is worked out when it is asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgkit.compiling import CompiledGraph, diff_keys
from cgkit.compiling.debug_dump import dump_pieces
from cgkit.compiling.generated import GeneratedCode, Kernel, generated_code
from cgkit.display import Shown
from cgkit.errors import CgkitError
from cgkit.measuring.piece_diff import PieceDiff, diff_nodes
from cgkit.tracing.decompile import decompile

if TYPE_CHECKING:
    import pandas as pd

    from cgkit.compiling.manager import CompiledPiece
    from cgkit.splitting import Piece

FRAME = [
    *("piece", "shape", "adaptor", "shared_with", "calls_before", "calls_after", "kernels"),
    *("own_kernels", "extern_kernels", "operators", "code_lines", "code_path"),
]


def explain(compiled: Any) -> Explanation:
    """What became of the pieces of ``compiled``.

    Args:
        compiled: what :func:`cgkit.compile_pieces` gave, or anything that has it as ``.compiled`` (recorded
            graphs, ``compiled_model(model)``, a runner's executor).

    Raises:
        CgkitError: it is none of these, or nothing is compiled yet.
    """
    found = compiled if isinstance(compiled, CompiledGraph) else getattr(compiled, "compiled", None)
    if not isinstance(found, CompiledGraph):
        raise CgkitError(
            f"explain() was given {type(compiled).__name__}, which holds no compiled pieces; pass what "
            "cgkit.compile_pieces or cgkit.capture gave, or compiled_model(model) after its first call"
        )
    return Explanation(found)


class Explanation(Shown):
    """A compiled model, explained; ``explanation["submod_2"]`` is one piece.

    Attributes:
        compiled: what is explained.
        pieces: one entry a compiled piece and shape, in order.
    """

    def __init__(self, compiled: CompiledGraph) -> None:
        self.compiled = compiled
        self.model_name = compiled.model_name
        self.pieces = [
            PieceExplanation(self, backend.piece, one)
            for backend in compiled.backends
            for one in backend.compiled
        ]

    def __getitem__(self, which: str | int) -> PieceExplanation:
        """One piece (general shape) by name or by its number in the split graph.

        Raises:
            CgkitError: no piece of that name was compiled; says which were.
        """
        name = self.compiled.split.piece(which).name
        for piece in self.pieces:
            if piece.name == name:
                return piece
        raise CgkitError(
            f"{name} is not compiled: it holds a splitting operator "
            f"({', '.join(self.compiled.split.piece(which).ops)}). Compiled are "
            f"{', '.join(dict.fromkeys(piece.name for piece in self.pieces)) or 'none'}"
        )

    def __iter__(self) -> Iterator[PieceExplanation]:
        return iter(self.pieces)

    def __len__(self) -> int:
        return len(self.pieces)

    def why_different(self, one: str | int, other: str | int) -> PieceDiff:
        """Two pieces (of any kind) node by node, and the first thing in which they differ.

        Raises:
            SplitError: there is no such piece.
        """
        split = self.compiled.split
        a, b = split.piece(one), split.piece(other)
        keys = {backend.name: backend.general.key for backend in self.compiled.backends}
        lines = diff_keys(keys[a.name], keys[b.name]) if a.name in keys and b.name in keys else []
        shared = a.name in keys and keys[a.name] == keys.get(b.name)
        names = {
            repr(name)
            for backend in self.compiled.backends
            if backend.name in (a.name, b.name)
            for name in backend.lifted.names
        }
        return diff_nodes(
            split.lines(a), split.lines(b), (a.name, b.name), lines, shared=shared, looked_up=names
        )

    @functools.cached_property
    def bytecode(self) -> Bytecode | None:
        """Dynamo's bytecode before and after, as text; None for a bare fx graph, which Dynamo never saw."""
        traced = self.compiled.split.traced
        if traced is None:
            return None
        return Bytecode(*decompile(traced.original_code), *decompile(traced.code))

    def dump(self, folder: str | Path) -> Path:
        """Writes it all to a folder with an index page; see :func:`cgkit.compiling.debug_dump.dump_pieces`.

        Raises:
            ConfigError: the folder cannot be written, or holds something else.
        """
        return dump_pieces(self.compiled, str(folder))

    def draw(self, open: Any = (), engine: str = "auto") -> Any:
        """The split graph (:meth:`cgkit.SplitGraph.draw`)."""
        return self.compiled.split.draw(open, engine)

    def to_frame(self) -> pd.DataFrame:
        """One row a piece and shape.

        ``calls_before`` / ``calls_after``: operators called in the graph that went in, and in the one after
        Inductor's passes; ``own_kernels``: generated by Inductor, ``extern_kernels``: of a library,
        ``operators``: of torch, called as they are; ``kernels``: all that one run starts. What a piece
        shares stands in its own row too. Missing where Inductor did not compile.
        """
        import pandas as pd

        return pd.DataFrame([piece.row() for piece in self.pieces], columns=FRAME)

    def __repr__(self) -> str:
        own = [piece for piece in self.pieces if not piece.shared_with]
        lines = [f"{self.model_name}: {len(self.pieces)} compiled pieces, {len(own)} different"]
        for piece in own[:12]:
            lines.append(f"  {piece.summary()}")
        if len(own) > 12:
            lines.append(f"  ... {len(own) - 12} more: .to_frame()")
        traced = self.compiled.split.traced
        if traced is not None and traced.origin:
            lines.append(f"  trace cache: {traced.origin}")
        lines.append("  .why_different(a, b), [piece].code, .bytecode, .dump(folder), .draw(open=[piece])")
        return "\n".join(lines)


@dataclass(frozen=True, eq=False, repr=False)
class PieceExplanation(Shown):
    """One piece at one shape."""

    of: Explanation
    piece: Piece
    compiled: CompiledPiece

    @property
    def name(self) -> str:
        """The piece's name."""
        return self.piece.name

    @property
    def shape(self) -> str:
        """ "general", or the token count that it was compiled for."""
        return "general" if self.compiled.shape is None else str(self.compiled.shape)

    @property
    def shared_with(self) -> str:
        """The piece whose compilation it uses, or ""."""
        return self.compiled.owner if self.compiled.shared else ""

    @functools.cached_property
    def calls_before(self) -> int:
        """Operators that the piece's graph calls."""
        return sum(line.role == "call" for line in self.of.compiled.split.lines(self.piece))

    @functools.cached_property
    def generated(self) -> GeneratedCode | None:
        """What Inductor wrote; None where it did not compile."""
        return generated_code(self.compiled)

    @property
    def calls_after(self) -> int | None:
        """Operators called after Inductor's passes, before it fuses them into kernels."""
        return self.generated.calls_after if self.generated else None

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels that a run starts; empty where Inductor did not compile."""
        return self.generated.kernels if self.generated else ()

    @property
    def code(self) -> str:
        """Inductor's generated code; without it the piece's own graph as Python."""
        return self.generated.code if self.generated else self.piece.graph_module.code.strip() + "\n"

    def started(self, *kinds: str) -> int | None:
        """How many kernels of ``kinds`` (default: all) one run starts."""
        if self.generated is None:
            return None
        return sum(kernel.calls for kernel in self.kernels if not kinds or kernel.kind in kinds)

    def row(self) -> tuple[Any, ...]:
        """As in the table."""
        total, extern, operators = self.started(), self.started("extern"), self.started("operator")
        own = None if total is None else total - (extern or 0) - (operators or 0)
        return (
            *(self.name, self.shape, self.compiled.adaptor, self.shared_with),
            *(self.calls_before, self.calls_after, total, own, extern, operators),
            *(len(self.code.splitlines()), self.generated.path if self.generated else ""),
        )

    def kernels_frame(self) -> pd.DataFrame:
        """One row a kernel: ``kernel``, ``kind``, ``calls``."""
        import pandas as pd

        rows = [(kernel.name, kernel.kind, kernel.calls) for kernel in self.kernels]
        return pd.DataFrame(rows, columns=["kernel", "kind", "calls"])

    def summary(self) -> str:
        """The piece in a line."""
        shape = "" if self.shape == "general" else f" at {self.shape} tokens"
        if self.generated is None:
            done = f"{self.compiled.adaptor}: runs its {self.calls_before} calls one by one"
            return f"{self.name}{shape}: {done}"
        after = f" → {self.calls_after}" if self.calls_after is not None else ""
        kinds = dict.fromkeys(kernel.kind for kernel in self.kernels)
        parts = ", ".join(f"{self.started(kind)} {kind}" for kind in kinds)
        return (
            f"{self.name}{shape}: {self.calls_before}{after} calls, {self.started()} kernels a run ({parts})"
        )

    def __repr__(self) -> str:
        shared = f", shared with {self.shared_with}" if self.shared_with else ""
        lines = [self.summary() + shared]
        for kernel in self.kernels:
            times = f" ×{kernel.calls}" if kernel.calls != 1 else ""
            lines.append(f"  {kernel.kind:<9} {kernel.name}{times}")
        if self.generated and self.generated.path:
            lines.append(f"  code: {self.generated.path}")
        return "\n".join(lines)


@dataclass(frozen=True, repr=False)
class Bytecode(Shown):
    """Dynamo's input and output as text. ``how_*`` says what each text is: "depyf" (Python source, decompiled) or
    "dis" (a listing)."""

    how_before: str
    before: str
    how_after: str
    after: str

    def __repr__(self) -> str:
        return (
            f"# before Dynamo ({self.how_before})\n{self.before.rstrip()}\n\n"
            f"# after Dynamo ({self.how_after})\n{self.after.rstrip()}"
        )
