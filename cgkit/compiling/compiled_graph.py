"""Stage 3: each piece becomes a callable.

``compile_pieces(split, config) -> CompiledGraph``. Implements the article's chapters from
"PiecewiseCompileInterpreter：边解释边编译" (compiling while interpreting) to "两层封装" (two layers).
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from cgkit import events, torch_hooks
from cgkit.compiling.adaptors import CompilerInterface, EagerAdaptor, make_adaptor
from cgkit.compiling.assumptions import assumed_in
from cgkit.compiling.cache import CacheKey, cache_key
from cgkit.compiling.cache.store import open_cache
from cgkit.compiling.content_key import ContentKey
from cgkit.compiling.debug_dump import dump_pieces
from cgkit.compiling.fakes import ranged_version, static_version, unread_offsets
from cgkit.compiling.interpreter import PieceCall, PiecewiseCompileInterpreter
from cgkit.compiling.lifting import Lifted, lift_names, number_inputs, number_of, sibling_of
from cgkit.compiling.manager import CompiledPiece, CompilerManager
from cgkit.compiling.passes import PassReports
from cgkit.compiling.piecewise_backend import PiecewiseBackend
from cgkit.compiling.plan import Plan, PlanError, PlannedCall, PlannedLift
from cgkit.config import CompilationConfig, TokenRange
from cgkit.display import Shown
from cgkit.forward_context import CaptureLock
from cgkit.splitting.register import registered_ops

if TYPE_CHECKING:
    from cgkit.splitting import SplitGraph


def compile_pieces(
    split: SplitGraph, config: CompilationConfig | None = None, *, adaptor: CompilerInterface | None = None
) -> CompiledGraph:
    """Compiles every piece of ``split`` that holds no splitting operator; equal pieces once.

    Each gets a callable for any token count and, with ``config.compile_at == "start"``, one for
    each of ``config.compile_sizes`` and ``config.compile_ranges``. Nothing runs and nothing is allocated on the way.

    Args:
        split: from :func:`cgkit.split_graph`, with example inputs.
        config: default :class:`CompilationConfig`.
        adaptor: the compiler; default what ``config.compiler`` names.

    Raises:
        CompileError: a piece cannot be compiled; names it, its operators and the way out.
        ConfigError: an Inductor option that does not exist.
    """
    return CompiledGraph(split, config or CompilationConfig(), adaptor)


class CompiledGraph(Shown):
    """A split graph whose capturable pieces are compiled. Call it like the model.

    Attributes:
        split, config: what it was made from.
        backends: a :class:`PiecewiseBackend` for each capturable piece, in order.
        lock: when set, no size is compiled any more (set by the capture stage at its end).
        seconds: what compiling took, first hits included.
    """

    def __init__(
        self,
        split: SplitGraph,
        config: CompilationConfig,
        adaptor: CompilerInterface | None = None,
        *,
        plan: Plan | None = None,
        key: CacheKey | None = None,
    ) -> None:
        """``plan``: what another process found out, to be followed instead of the graphs; with it the ``key``.

        Raises:
            PlanError: a piece of the plan is not in the compile cache.
        """
        self.split = split
        self.config = config
        self.lock = CaptureLock(split.model_name)
        self.backends: list[PiecewiseBackend] = []
        self.seconds = 0.0
        self._finished = False
        self._bound: Callable[..., Any] | None = None
        devices = _devices(split)
        adaptor = adaptor or make_adaptor(config, devices)
        self._make_key = functools.partial(
            cache_key, config, _traced_files(split), devices, adaptor.settings(None)
        )
        if key is not None:
            self.cache_key = key
        self.manager = CompilerManager(adaptor, open_cache(self.cache_key) if adaptor.saves else None)
        self._told: set[ContentKey] = set()
        self._lifts: dict[fx.GraphModule, Lifted] = {}
        self._again: dict[int, PieceCall] = {}
        self._numbers: list[Any] = []
        self._total = sum(not piece.is_splitting for piece in split.pieces)
        self._done = 0
        self._shapes = plan.shapes if plan is not None else {}
        start = time.perf_counter()
        with torch_hooks.compile_lock():
            if plan is not None:
                self._follow(plan)
            else:
                self._interpret(self._compile_general)
        self.seconds = time.perf_counter() - start
        if config.compile_at == "start":
            self.compile_static_sizes()
        self._check_finished()
        if config.debug_dump_path is not None:
            dump_pieces(self, config.debug_dump_path)

    @property
    def model_name(self) -> str:
        """The model's class, or the fx graph's."""
        return self.split.model_name

    @functools.cached_property
    def cache_key(self) -> CacheKey:
        """The key of these compilations: what they depend on, by name. See :mod:`cgkit.compiling.cache`.

        With an adaptor that keeps nothing it is made when it is first asked for: it asks Inductor and the
        C++ compiler, which an eager start has no other need for.
        """
        return self._make_key()

    @property
    def num_unique(self) -> int:
        """How many different pieces there are (general shape): what was really compiled."""
        return len({backend.general.key for backend in self.backends})

    # --- compiling ---

    def compile_static_sizes(self, sizes: Sequence[int] | None = None) -> None:
        """Compiles ``sizes`` for every piece, as far as missing (default: all of ``config.compile_sizes``, and
        the ranges).

        Raises:
            CaptureLockedError: one is missing and capturing is finished.
            CompileError: as :func:`compile_pieces`.
        """
        for size in self.config.compile_sizes if sizes is None else sizes:
            for backend in self.backends:
                if backend.sym_shape_indices:
                    backend.compile_size(size)
        for backend in self.backends if sizes is None else ():
            for tokens in backend.range_entries:
                backend.compile_range(tokens)

    def _lifted(self, graph_module: fx.GraphModule) -> Lifted:
        """The graph as it is compiled: without the names that its operators look things up by."""
        if graph_module not in self._lifts:
            self._lifts[graph_module] = lift_names(graph_module)
        return self._lifts[graph_module]

    def _key_of(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> ContentKey:
        lifted = self._lifted(graph_module)
        return self.manager.key(lifted.graph_module, self._with_numbers(lifted, inputs), None)

    def _with_numbers(self, lifted: Lifted, inputs: Sequence[Any]) -> list[Any]:
        """``inputs`` of the general shape, and a SymInt for each lifted name (the same ones for all pieces)."""
        self._numbers = number_inputs(
            self._fake_mode, max(len(lifted.numbers), len(self._numbers)), self._numbers
        )
        return [*inputs, *self._numbers[: len(lifted.numbers)]]

    def _interpret(self, on_piece: Callable[[PieceCall], None]) -> None:
        interpreter = PiecewiseCompileInterpreter(self.split, self._key_of, on_piece)
        self._fake_mode = interpreter.fake_mode
        interpreter.run()

    def _follow(self, plan: Plan) -> None:
        """Takes the pieces from the cache, by their keys."""
        operators = registered_ops()
        for name in plan.siblings:
            if name not in operators:
                raise PlanError(f"the operator {name} is not registered")
            sibling_of(operators[name])
        if not self.manager.read(plan.keys):
            raise PlanError("a compiled piece is not in the compile cache, or cannot be loaded")
        for call in plan.calls:
            self._progress(call.piece.name)
            general = self.manager.take(call.piece.name, call.key)
            assert general is not None
            call.find = functools.partial(self._call_again, call.piece.index)
            self._done += 1
            self._add(call, general, PlannedLift(call.piece, tuple(map(number_of, call.names))))

    def _call_again(self, index: int) -> PieceCall:
        """A piece's call with its fakes, for a model that was loaded: it is traced and walked over once."""
        if not self._again:
            self._interpret(lambda call: self._again.__setitem__(call.piece.index, call))
        return self._again[index]

    def _compile_general(self, call: PieceCall) -> None:
        self._progress(call.piece.name)
        lifted = self._lifted(call.piece.graph_module)
        general = self.manager.compile(
            call.piece.name,
            lifted.graph_module,
            self._with_numbers(lifted, call.args),
            self._fake_mode,
            key=call.key,
            adaptor=self._adaptor_for(call),
        )
        self._done += 1
        self._add(call, general, lifted)

    def _add(self, call: PieceCall | PlannedCall, general: CompiledPiece, lifted: Lifted) -> None:
        self.backends.append(
            PiecewiseBackend(
                call,
                general,
                piecewise_compile_index=len(self.backends),
                total_piecewise_compiles=self._total,
                compile_sizes=self.config.compile_sizes,
                compile_ranges=self.config.token_ranges,
                compile_for_shape=self._compile_for_shape,
                lock=self.lock,
                first_hit=self.config.compile_at == "first_hit",
                on_finished=self._check_finished,
                lifted=lifted,
            )
        )
        self._progress(call.piece.name)

    def _compile_for_shape(self, backend: PiecewiseBackend, shape: int | TokenRange) -> CompiledPiece:
        start = time.perf_counter()
        what = f"{backend.name} at {shape} tokens"
        known = self._shapes.get((backend.name, str(shape)))
        if known is not None and (taken := self.manager.take(backend.name, known, shape)) is not None:
            self._done += 1
            self._progress(what)
            return taken
        call = backend.call
        with torch_hooks.compile_lock():
            symbol = torch_hooks.symbolic_expression(call.args[call.sym_shape_indices[0]])
            offsets = dict.fromkeys(unread_offsets(backend.graph, call.args), 0)
            if isinstance(shape, int):
                inputs, mode = static_version(call.args, {**offsets, symbol: shape}, what)
            else:
                inputs, mode = ranged_version(call.args, symbol, shape, what, offsets)
            lifted = self._lifted(backend.graph)
            inputs = [*inputs, *number_inputs(mode, len(lifted.numbers))]
            compiled = self.manager.compile(
                backend.name, lifted.graph_module, inputs, mode, shape, adaptor=self._adaptor_for(call)
            )
            self.seconds += time.perf_counter() - start
        self._done += 1
        self._progress(what)
        return compiled

    def compile_part(self, backend: PiecewiseBackend, part: fx.GraphModule) -> Callable[..., Any]:
        """A callable for ``part``, a graph with the placeholders of the piece ``backend`` (of its lifted graph), made
        by the same adaptor for any token count. To look into a piece: nothing is kept, shared or counted.

        Raises whatever the adaptor raises.
        """
        with torch_hooks.compile_lock():
            call = backend.call
            inputs = self._with_numbers(backend.lifted, call.args)
            adaptor = self._adaptor_for(call)
            with assumed_in(self._fake_mode).noted(self._fake_mode):
                made = adaptor.compile(part, inputs, self._fake_mode, None)
            adaptor.take_reports()
            return made

    def _adaptor_for(self, call: PieceCall | PlannedCall) -> CompilerInterface:
        """The adaptor for this piece: eager where it writes memory that several of its inputs share.

        Inductor is given such inputs as one; how, depends on which of them is a view of which, and
        that is not the same for fakes and for what another compiled piece returns.
        """
        if not call.written_together or self.manager.adaptor.name == "eager":
            return self.manager.adaptor
        if call.key not in self._told:
            self._told.add(call.key)
            names = ", ".join(call.piece.input_names[index] for index in call.written_together)
            warnings.warn(
                f"piece {call.piece.name} writes one of {names} in place, and they share memory: it is not "
                "compiled but runs operator by operator. Write into a tensor of its own to have it compiled",
                stacklevel=2,
            )
        return EagerAdaptor()

    def _progress(self, what: str) -> None:
        if events.has_readers(events.Progress):
            more = len(self.config.compile_sizes) + len(self.config.compile_ranges)
            shapes = 1 + (more if self.config.compile_at == "start" else 0)
            events.emit(events.Progress("compiling", self._done, max(self._total * shapes, self._done), what))

    def _check_finished(self) -> None:
        """Says once, for the whole model, that nothing is left to compile."""
        complete = len(self.backends) == self._total
        if not self._finished and complete and not any(b.unfinished for b in self.backends):
            self._finished = True
            events.emit(events.CompilationFinished(self.model_name, self.seconds))

    # --- running ---

    def stitch(
        self, wrap: Callable[[PiecewiseBackend], Callable[..., Any]] | None = None
    ) -> Callable[..., Any]:
        """The graph's straight-line code with compiled pieces; ``wrap`` puts each inside a callable."""
        return self.split.stitch([wrap(backend) if wrap else backend for backend in self.backends])

    def bind(self, execute: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """A callable with the model's own signature that runs ``execute`` (default: :meth:`stitch`)."""
        return self.split.bind(execute or self.stitch())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model with compiled pieces, without recorded graphs."""
        if self._bound is None:
            self._bound = self.bind()
        return self._bound(*args, **kwargs)

    # --- showing ---

    @property
    def pass_reports(self) -> dict[str, PassReports]:
        """What the graph passes did to each piece at the general shape, by the piece's name; an equal piece has the
        reports of the one that was compiled. Empty where no passes were asked for."""
        return {b.name: b.general.reports for b in self.backends if len(b.general.reports)}

    def passes_frame(self) -> Any:
        """A DataFrame with a row a piece, shape and graph pass: how often it matched, nodes before and after."""
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "piece": backend.name,
                    "shape": "general" if one.shape is None else str(one.shape),
                    "shared_with": one.owner if one.shared else "",
                    "pass": report.name,
                    "matched": report.matched,
                    "nodes_before": report.nodes_before,
                    "nodes_after": report.nodes_after,
                }
                for backend in self.backends
                for one in backend.compiled
                for report in one.reports
            ]
        )

    def to_frame(self) -> Any:
        """A DataFrame with a row a piece and shape: how it came by its callable, and what that took."""
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "piece": backend.name,
                    "shape": "general" if one.shape is None else str(one.shape),
                    "key": one.key.digest,
                    "shared_with": one.owner if one.shared else "",
                    "loaded": one.loaded,
                    "adaptor": one.adaptor,
                    "compile_s": one.seconds,
                    "generated_kernels": one.kernels,
                    "nodes": len(backend.graph.graph.nodes),
                }
                for backend in self.backends
                for one in backend.compiled
            ]
        )

    def serving_frame(self) -> Any:
        """A DataFrame with a row a piece and run of token counts: which callable serves them.

        Columns ``piece``, ``from_tokens``, ``to_tokens`` (missing: without end), ``callable`` ("general", "size 4",
        "range 9-64"), ``compiled`` (False: the general callable stands in until it is), ``key``, ``adaptor``.
        """
        import pandas as pd

        rows = [{"piece": backend.name, **row} for backend in self.backends for row in backend.serving()]
        return pd.DataFrame(rows).astype({"to_tokens": "Int64"})

    def __repr__(self) -> str:
        static = sum(len(backend.compiled) - 1 for backend in self.backends)
        lines = [
            f"CompiledGraph of {self.model_name}: {len(self.backends)} pieces, {self.num_unique} different, "
            f"compiled with {self.manager.adaptor.name} in {self.seconds:.1f} s"
            + (f", {static} static" if static else "")
        ]
        for key in dict.fromkeys(backend.general.key for backend in self.backends):
            same = [backend for backend in self.backends if backend.general.key == key]
            names = ", ".join(backend.name for backend in same[:4]) + (", ..." if len(same) > 4 else "")
            lines.append(f"  {key.digest}  x {len(same):<3} {same[0].general.seconds:6.2f} s  {names}")
        return "\n".join(lines)


def _traced_files(split: SplitGraph) -> tuple[str, ...]:
    return split.traced.traced_files if split.traced is not None else ()


def _devices(split: SplitGraph) -> set[torch.device]:
    if split.traced is not None:
        return {entry.device for entry in split.traced.inputs if entry.device is not None}
    return {value.device for value in split.example_inputs or () if isinstance(value, torch.Tensor)}
