"""One piece at run time: which of its callables serves this batch.

Implements the article's "两层封装：为什么是 PiecewiseBackend 套着 CUDAGraphWrapper" (two layers: why
a PiecewiseBackend inside a CUDAGraphWrapper), the inner layer. The article's version compiles a
static size at first hit, and calls that "in the background", which it is not: the request waits.
Ours compiles all of them before capture unless ``compile_at="first_hit"`` is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from cgkit import marks, torch_hooks
from cgkit.compiling.adaptors import Runnable
from cgkit.compiling.interpreter import PieceCall
from cgkit.compiling.lifting import Lifted
from cgkit.compiling.manager import CompiledPiece
from cgkit.compiling.plan import PlannedCall
from cgkit.config import TokenRange
from cgkit.errors import CompileError
from cgkit.forward_context import CaptureLock
from cgkit.recording import active

if TYPE_CHECKING:
    from cgkit.splitting import Piece

#: Compiles a piece for a token count or a range of them.
CompileForShape = Callable[["PiecewiseBackend", "int | TokenRange"], CompiledPiece]


@dataclass(slots=True)
class RangeEntry:
    """One range of token counts of one piece. ``runnable`` is the general callable until it is compiled."""

    tokens: TokenRange
    runnable: Runnable
    compiled: CompiledPiece | None = None


@dataclass(slots=True)
class ConcreteSizeEntry:
    """One compile size of one piece. ``runnable`` is the general callable until it is compiled."""

    runtime_shape: int
    runnable: Runnable
    compiled: CompiledPiece | None = None


class PiecewiseBackend:
    """A capturable piece: call it with the piece's inputs, it returns its outputs as a sequence.

    The names are the article's: ``graph`` (the piece's graph module), ``compiled_graph_for_general_shape``,
    ``compile_sizes``, ``concrete_size_entries``, ``to_be_compiled_sizes``, ``first_run_finished``,
    ``sym_shape_indices``, ``piecewise_compile_index`` of ``total_piecewise_compiles``. ``range_entries`` is
    vLLM's of today.

    Which callable serves a token count: that of the compile size, else that of the range it lies in, else the
    general one; the first run takes the general one always.
    """

    def __init__(
        self,
        call: PieceCall | PlannedCall,
        general: CompiledPiece,
        *,
        piecewise_compile_index: int,
        total_piecewise_compiles: int,
        compile_sizes: Sequence[int],
        compile_for_shape: CompileForShape,
        lock: CaptureLock,
        first_hit: bool,
        on_finished: Callable[[], None],
        compile_ranges: Sequence[TokenRange] = (),
        lifted: Lifted | None = None,
    ) -> None:
        """``on_finished`` is called when this piece's last compile size or range is compiled."""
        self.call = call
        self.piece: Piece = call.piece
        self.general = general
        self.sym_shape_indices = call.sym_shape_indices
        self.piecewise_compile_index = piecewise_compile_index
        self.total_piecewise_compiles = total_piecewise_compiles
        #: The graph that was compiled, and the numbers that its callables take behind the piece's inputs.
        self.lifted = lifted or Lifted(self.graph)
        self.compiled_graph_for_general_shape = self._runnable(general)
        # A piece without a symbolic size is static already.
        sizes = tuple(compile_sizes) if self.sym_shape_indices else ()
        self.compile_sizes: set[int] = set(sizes)
        self.to_be_compiled_sizes: set[int] = set(sizes)
        self.concrete_size_entries: dict[int, ConcreteSizeEntry] = {
            size: ConcreteSizeEntry(size, self.compiled_graph_for_general_shape) for size in sizes
        }
        self.range_entries: dict[TokenRange, RangeEntry] = {
            tokens: RangeEntry(tokens, self.compiled_graph_for_general_shape)
            for tokens in (compile_ranges if self.sym_shape_indices else ())
        }
        self.first_run_finished = False
        self.lock = lock
        self._first_hit = first_hit
        self._compile_for_shape = compile_for_shape
        self._on_finished = on_finished
        self._plain = False  # after the first run, if there is nothing to choose from
        self._token_index = self.sym_shape_indices[0] if self.sym_shape_indices else -1
        marks.register(self)

    @property
    def graph(self) -> fx.GraphModule:
        """The piece's graph module."""
        return self.piece.graph_module

    @property
    def name(self) -> str:
        """The piece's name, as in the split graph."""
        return self.piece.name

    @property
    def is_first_graph(self) -> bool:
        """Whether this is the first capturable piece of its model."""
        return self.piecewise_compile_index == 0

    @property
    def is_last_graph(self) -> bool:
        """Whether this is the last capturable piece of its model."""
        return self.piecewise_compile_index == self.total_piecewise_compiles - 1

    @property
    def compiled(self) -> list[CompiledPiece]:
        """What was compiled or shared for this piece: the general shape, then sizes and ranges in order."""
        entries = (self.concrete_size_entries[size] for size in sorted(self.concrete_size_entries))
        return [
            self.general,
            *(entry.compiled for entry in entries if entry.compiled is not None),
            *(entry.compiled for entry in self.range_entries.values() if entry.compiled is not None),
        ]

    @property
    def has_choice(self) -> bool:
        """Whether another callable than the general one serves some token count."""
        return bool(self.concrete_size_entries or self.range_entries)

    @property
    def unfinished(self) -> bool:
        """Whether a compile size or a range is not compiled yet."""
        ranges = (entry.compiled is None for entry in self.range_entries.values())
        return bool(self.to_be_compiled_sizes) or any(ranges)

    def __call__(self, *args: Any) -> Sequence[Any]:
        """Runs the piece. ``args`` as ``piece.input_names``, token count (an int) first."""
        runnable = self.compiled_graph_for_general_shape if self._plain else self._choose(args)
        recorder = active.recorder
        if recorder is None:
            return runnable(*args)
        return recorder.opaque_call(runnable, self.piece.on_fakes, args)

    def compiles_when_hit(self, num_tokens: int) -> bool:
        """Whether a run of ``num_tokens`` would be compiled first (``compile_at="first_hit"``)."""
        entry = self._entry(num_tokens)
        return self._first_hit and entry is not None and entry.compiled is None

    def runnable_for(self, num_tokens: int) -> Runnable:
        """The callable that serves ``num_tokens`` as things stand; compiles nothing."""
        entry = self._entry(num_tokens)
        return self.compiled_graph_for_general_shape if entry is None else entry.runnable

    def serving(self) -> list[dict[str, Any]]:
        """Which callable serves which token counts: rows of :meth:`CompiledGraph.serving_frame`."""
        starts = {1} | {size + more for size in self.concrete_size_entries for more in (0, 1)}
        starts |= {edge for tokens in self.range_entries for edge in (tokens.start, tokens.end + 1)}
        rows: list[dict[str, Any]] = []
        for start, after in pairwise([*sorted(starts), None]):
            assert start is not None
            entry = self._entry(start)
            one = self.general if entry is None or entry.compiled is None else entry.compiled
            rows.append(
                {
                    "from_tokens": start,
                    "to_tokens": None if after is None else after - 1,
                    "callable": "general" if entry is None else _name_of(entry),
                    "compiled": entry is None or entry.compiled is not None,
                    "key": one.key.digest,
                    "adaptor": one.adaptor,
                }
            )
        return rows

    def _entry(self, num_tokens: int) -> ConcreteSizeEntry | RangeEntry | None:
        """The entry that serves ``num_tokens``: the exact size's, else the range's, else None."""
        exact = self.concrete_size_entries.get(num_tokens)
        if exact is not None:
            return exact
        for tokens, entry in self.range_entries.items():
            if num_tokens <= tokens.end:  # in order, and without gaps
                return entry
        return None

    def compile_size(self, size: int) -> CompiledPiece:
        """Compiles ``size`` (one of ``compile_sizes``) if that has not happened yet.

        Raises:
            CaptureLockedError: capturing is finished; nothing is compiled while serving.
            CompileError: the compiler failed, or ``size`` is none of the compile sizes.
        """
        entry = self.concrete_size_entries.get(size)
        if entry is None:
            known = sorted(self.compile_sizes) or "none"
            raise CompileError(
                f"piece {self.name} has no compile size {size} (it has {known}); add it to compile_sizes"
            )
        with torch_hooks.compile_lock():
            if entry.compiled is None:
                self.lock.check(f"piece {self.name} would be compiled for {size} tokens")
                entry.compiled = self._compile_for_shape(self, size)
                entry.runnable = self._runnable(entry.compiled)
                self.to_be_compiled_sizes.discard(size)
                self.check_for_ending_compilation()
        return entry.compiled

    def compile_range(self, tokens: TokenRange) -> CompiledPiece:
        """Compiles the range ``tokens`` (a key of ``range_entries``) if that has not happened yet.

        Raises:
            CaptureLockedError: capturing is finished; nothing is compiled while serving.
            CompileError: the compiler failed, or ``tokens`` is none of the ranges.
        """
        entry = self.range_entries.get(tokens)
        if entry is None:
            known = ", ".join(map(str, self.range_entries)) or "none"
            raise CompileError(
                f"piece {self.name} has no range {tokens} (it has {known}); add its end to compile_ranges"
            )
        with torch_hooks.compile_lock():
            if entry.compiled is None:
                self.lock.check(f"piece {self.name} would be compiled for {tokens} tokens")
                entry.compiled = self._compile_for_shape(self, tokens)
                entry.runnable = self._runnable(entry.compiled)
                self.check_for_ending_compilation()
        return entry.compiled

    def _runnable(self, compiled: CompiledPiece) -> Runnable:
        """What is called for the piece: takes its inputs, and refuses sizes that the code cannot count."""
        runnable = compiled.runnable
        if compiled.held.largest:
            runnable = _bounded(runnable, compiled.held.largest, self.name)
        return self.lifted.bind(runnable)

    def put_marks(self, marker: marks.Marker, undo: ExitStack) -> None:
        """Marks the piece where it runs compiled, without a graph; see :mod:`cgkit.marks`."""

        def marked(runnable: Runnable) -> Runnable:
            facts = {"model": self.lock.model, "mode": "compiled"}
            return marker.function(runnable, "piece", self.name, **facts)

        general = marked(self.compiled_graph_for_general_shape)
        marks.swap_attribute(self, "compiled_graph_for_general_shape", general, undo)
        for size, entry in list(self.concrete_size_entries.items()):
            if entry.compiled is not None:
                swapped = ConcreteSizeEntry(size, marked(entry.runnable), entry.compiled)
                marks.swap_item(self.concrete_size_entries, size, swapped, undo)
        for tokens, ranged in list(self.range_entries.items()):
            if ranged.compiled is not None:
                again = RangeEntry(tokens, marked(ranged.runnable), ranged.compiled)
                marks.swap_item(self.range_entries, tokens, again, undo)

    def check_for_ending_compilation(self) -> None:
        """Reports when nothing is left to compile here; the model reports when all pieces have."""
        if not self.unfinished:
            self._on_finished()

    def _choose(self, args: Sequence[Any]) -> Runnable:
        """The callable for this call, compiling at first hit where that is asked for and allowed."""
        if not self.first_run_finished:
            self.first_run_finished = True
            self._plain = not self.has_choice
            return self.compiled_graph_for_general_shape
        entry = self._entry(args[self._token_index])
        if entry is None:
            return self.compiled_graph_for_general_shape
        if entry.compiled is None and self._first_hit and not self.lock.locked and not _recording():
            if isinstance(entry, RangeEntry):
                self.compile_range(entry.tokens)
            else:
                self.compile_size(entry.runtime_shape)
        return entry.runnable

    def __repr__(self) -> str:
        sizes = sorted(self.compile_sizes - self.to_be_compiled_sizes)
        shared = f", shared with {self.general.owner}" if self.general.shared else ""
        return (
            f"PiecewiseBackend({self.name}, {self.piecewise_compile_index + 1} of "
            f"{self.total_piecewise_compiles}, {self.general.adaptor}, key {self.general.key.digest}"
            f"{shared}, static sizes {sizes})"
        )


def _bounded(runnable: Runnable, largest: Mapping[int, int], name: str) -> Runnable:
    """``runnable``, refusing what its code cannot count. A replay does not come through here: a size that was
    recorded has been run."""
    bounds = tuple(largest.items())

    def run(*args: Any) -> Sequence[Any]:
        for place, most in bounds:
            if args[place] > most:
                raise CompileError(
                    f"piece {name} was compiled to count in 32 bits, for at most {most:,} tokens, and got "
                    f"{args[place]:,}: it would read and write elsewhere. Serve smaller batches"
                )
        return runnable(*args)

    return run


def _name_of(entry: ConcreteSizeEntry | RangeEntry) -> str:
    return f"range {entry.tokens}" if isinstance(entry, RangeEntry) else f"size {entry.runtime_shape}"


def _recording() -> bool:
    """Whether a graph is being recorded: compiling measures and allocates, and that would be recorded."""
    if active.recorder is not None:
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
