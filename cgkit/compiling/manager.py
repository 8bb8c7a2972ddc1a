"""Compiles each different piece once.

Implements the part of the article's "split_graph 的切图算法" (the cutting algorithm) that shares one
compilation between equal pieces. vLLM 0.10.1 leaves that to Inductor's cache, which is asked once a
piece and answers late; vLLM 0.33 and cgkit share before Inductor is called.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from cgkit import events, torch_hooks
from cgkit.compiling.adaptors import CompilerInterface, Runnable
from cgkit.compiling.assumptions import NOTHING, Held, assumed_in
from cgkit.compiling.cache import CompileCache
from cgkit.compiling.cache.store import Loaded
from cgkit.compiling.content_key import ContentKey, content_key, process_settings
from cgkit.compiling.passes import PassReports
from cgkit.config import Shape
from cgkit.errors import CgkitError, CompileError
from cgkit.splitting.matching import operator_names


@dataclass(frozen=True)
class CompiledPiece:
    """What one request got: a callable, and where it came from."""

    piece: str
    shape: Shape
    runnable: Runnable
    key: ContentKey
    owner: str  # the piece that was really compiled: ``piece`` itself, or the first with this content
    adaptor: str
    seconds: float  # 0.0 if shared
    kernels: int | None  # kernels that Inductor generated; None with another adaptor
    #: What was taken for granted of the symbols on top, here and when the trace's earlier pieces were compiled.
    held: Held = NOTHING
    reports: PassReports = field(default_factory=PassReports)  # what the graph passes did to it
    loaded: bool = False  # read from the compile cache; ``seconds`` is what that took

    @property
    def shared(self) -> bool:
        """Whether another piece's callable is used."""
        return self.owner != self.piece


class CompilerManager:
    """Asks ``adaptor`` for each content once. One a model: what it holds lives as long."""

    def __init__(self, adaptor: CompilerInterface, cache: CompileCache | None = None) -> None:
        """``cache``: where compiled pieces are kept for other processes; None: nowhere."""
        self.adaptor = adaptor
        self.cache = cache
        self._by_key: dict[ContentKey, CompiledPiece] = {}
        self._ready: dict[ContentKey, tuple[Loaded, float]] = {}  # read already, asked for by no piece yet

    def __len__(self) -> int:
        """How many compilations there were."""
        return len(self._by_key)

    def key(self, graph_module: fx.GraphModule, inputs: Sequence[Any], shape: Shape) -> ContentKey:
        """The content key of a piece as this manager's adaptor would compile it."""
        compiler = {**process_settings(), **self.adaptor.settings(shape)}
        return content_key(graph_module, inputs, shape=shape, compiler=compiler)

    def compile(
        self,
        name: str,
        graph_module: fx.GraphModule,
        inputs: Sequence[Any],
        fake_mode: Any,
        shape: Shape = None,
        *,
        key: ContentKey | None = None,
        adaptor: CompilerInterface | None = None,
    ) -> CompiledPiece:
        """The callable of the piece ``name`` at ``shape`` (None: general), compiled or shared.

        ``inputs`` are fakes of ``fake_mode``, SymInts and numbers. ``key`` if it is known already;
        ``adaptor`` in place of the manager's (the same one for equal content).

        Raises:
            CompileError: the compiler failed; names the piece, its operators and the way out.
        """
        events.emit(events.CompileRequested(name, shape))
        with torch_hooks.compile_lock():
            key = key or self.key(graph_module, inputs, shape)
            if (known := self._shared(name, shape, key)) is not None:
                return known
            by = adaptor or self.adaptor
            request = (by, name, graph_module, inputs, fake_mode, shape, key)
            with self.cache.active() if self.cache is not None else nullcontext():
                piece = self._load(by, name, inputs, shape, key) if by.saves else None
                if piece is None:
                    with self.cache.compiling() if self.cache is not None else nullcontext(False) as waited:
                        if waited and by.saves:
                            piece = self._load(by, name, inputs, shape, key)
                        piece = piece or self._compile_and_keep(request)
            self._by_key[key] = piece
        return piece

    def read(self, keys: Sequence[ContentKey]) -> bool:
        """Reads the pieces of ``keys`` from the cache, for :meth:`take`. False if one of them is not to be had."""
        if self.cache is None:
            return False
        with torch_hooks.compile_lock(), self.cache.active():
            for key in keys:
                started = time.perf_counter()
                found = self.cache.load(key, lambda content: self.adaptor.load(content, ()))
                if found is None:
                    return False
                self._ready[key] = (found, time.perf_counter() - started)
        return True

    def take(self, name: str, key: ContentKey, shape: Shape = None) -> CompiledPiece | None:
        """The piece ``name`` by its key alone: shared, or what :meth:`read` has read; None if it is neither."""
        if key not in self._by_key and key not in self._ready:
            return None
        events.emit(events.CompileRequested(name, shape))
        if (known := self._shared(name, shape, key)) is not None:
            return known
        piece = self._by_key[key] = self._loaded(self.adaptor, name, shape, key, *self._ready.pop(key))
        return piece

    def _shared(self, name: str, shape: Shape, key: ContentKey) -> CompiledPiece | None:
        known = self._by_key.get(key)
        if known is None:
            return None
        events.emit(events.PieceShared(name, shape, known.owner, key.digest))
        return replace(known, piece=name, seconds=0.0)

    def _compile_and_keep(self, request: tuple[Any, ...]) -> CompiledPiece:
        """Compiles; where the cache's disk is at fault, once more without the cache."""
        try:
            piece = _compile(*request)
        except CompileError as error:
            if self.cache is None or not self.cache.gives_way(error):
                raise
            with torch_hooks.inductor_cache_dir(None):
                piece = _compile(*request)
        self._save(request[0], piece)
        return piece

    def _load(
        self, by: CompilerInterface, name: str, inputs: Sequence[Any], shape: Shape, key: ContentKey
    ) -> CompiledPiece | None:
        """The piece from the cache, if it is there and whole."""
        if self.cache is None:
            return None
        started = time.perf_counter()
        found = self.cache.load(key, lambda content: by.load(content, inputs))
        if found is None:
            return None
        return self._loaded(by, name, shape, key, found, time.perf_counter() - started)

    def _loaded(
        self, by: CompilerInterface, name: str, shape: Shape, key: ContentKey, found: Loaded, seconds: float
    ) -> CompiledPiece:
        events.emit(events.ArtifactLoaded(name, shape, key.digest, str(found.path), seconds))
        return CompiledPiece(
            name,
            shape,
            found.runnable,
            key,
            name,
            by.name,
            seconds,
            found.kernels,
            reports=PassReports.from_dicts(found.reports),
            held=Held((), found.largest, False),
            loaded=True,
        )

    def _save(self, by: CompilerInterface, piece: CompiledPiece) -> None:
        """Reports a compilation, and keeps what came of it for other processes."""
        digest = piece.key.digest
        events.emit(events.PieceCompiled(piece.piece, piece.shape, piece.adaptor, digest, piece.seconds))
        if self.cache is None or piece.held.more:  # of this process's symbols
            return
        path = self.cache.save(
            piece.key, by.save(piece.runnable), piece.kernels, piece.reports.as_dicts(), piece.held.largest
        )
        if path is not None:
            events.emit(events.ArtifactSaved(digest, str(path)))
            events.emit(events.CacheEntryUpdated(digest))


def first_line(error: Exception) -> str:
    """The first line of an error's message that says something, at most 500 characters of it."""
    return next((line[:500] for line in str(error).splitlines() if line.strip()), "")


def _failed(
    adaptor: str, name: str, graph_module: fx.GraphModule, shape: Shape, error: Exception
) -> CompileError:
    at = "for the general shape" if shape is None else f"for {shape} tokens"
    return CompileError(
        f"{adaptor} could not compile piece {name} {at}: {type(error).__name__}: {first_line(error)}\n"
        f"The piece's operators: {', '.join(operator_names(graph_module.graph))}\n"
        "Ways out: CompilationConfig(compiler='eager') runs the pieces uncompiled; splitting_ops with the "
        "operator at fault leaves it out of the pieces"
    )


def _numbers(fixed: Mapping[Any, int], between: str) -> str:
    return ", ".join(f"{symbol}{between}{number}" for symbol, number in fixed.items())


def _compile(
    adaptor: CompilerInterface,
    name: str,
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    fake_mode: Any,
    shape: Shape,
    key: ContentKey,
) -> CompiledPiece:
    start = time.perf_counter()
    kernels = torch_hooks.generated_kernels() if adaptor.generates else 0
    adaptor.take_reports()  # of a compilation that failed
    assumed = assumed_in(fake_mode)
    count, fixed = len(assumed.guards), dict(assumed.fixed)
    if fixed and adaptor.generates and not isinstance(shape, int):
        raise CompileError(
            f"{_numbers(fixed, ' was fixed to ')} when this trace was compiled before: piece {name} can no longer be "
            f"compiled for {shape or 'any'} tokens. Trace the model again, or use compiler='eager'"
        )
    try:
        with assumed.noted(fake_mode):
            runnable = adaptor.compile(graph_module, inputs, fake_mode, shape)
    except CgkitError:
        raise
    except Exception as error:
        if isinstance(inner := getattr(error, "inner_exception", None), CgkitError):
            raise inner from error  # a graph pass of ours, inside Inductor
        raise _failed(adaptor.name, name, graph_module, shape, error) from error
    seconds = time.perf_counter() - start
    newly = {symbol: number for symbol, number in assumed.fixed.items() if symbol not in fixed}
    if not isinstance(shape, int) and newly:
        raise CompileError(
            f"{adaptor.name} fixed {_numbers(newly, ' to ')} while it compiled piece {name} for {shape or 'any'} "
            "tokens: other sizes would compute nonsense.\n"
            f"The piece's operators: {', '.join(operator_names(graph_module.graph))}\n"
            "Ways out: cut the operator at fault out with splitting_ops, or use compiler='eager'"
        )
    return CompiledPiece(
        name,
        shape,
        runnable,
        key,
        owner=name,
        adaptor=adaptor.name,
        seconds=seconds,
        kernels=torch_hooks.generated_kernels() - kernels if adaptor.generates else None,
        held=assumed.held(fake_mode, inputs, 0 if adaptor.generates else count),
        reports=adaptor.take_reports(),
    )
