"""``compile_model``: stages 1 to 3 in one call, from the trace cache where nothing has changed.

A compile cache saves the compiler's time, and leaves a second process to trace the model again: half of its
start, for want of nothing but the list of files that Dynamo inlined. Here that list, and all else that a
trace depends on, is kept with what the trace gave. Nothing is taken for granted: whatever cannot be described,
or is not what it was, has the model traced, and the reason is said (``traced.origin``, the log,
:func:`cgkit.why_miss`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from cgkit import events
from cgkit.compiling.adaptors import CompilerInterface, make_adaptor
from cgkit.compiling.cache import CacheKey, cache_key
from cgkit.compiling.cache import folder as places
from cgkit.compiling.cache import traces as store
from cgkit.compiling.compiled_graph import CompiledGraph, compile_pieces
from cgkit.compiling.plan import PlanError
from cgkit.compiling.warm import entry
from cgkit.compiling.warm.assumed import Call, Reads, facts_before, reads_of
from cgkit.compiling.warm.describe import Describer, UndescribableError
from cgkit.config import CompilationConfig, CompilationLevel
from cgkit.forward_context import current_forward_context, set_forward_context
from cgkit.splitting import split_graph
from cgkit.tracing import Arguments, TorchCompileWrapperWithCustomDispatcher, TracedGraph, trace
from cgkit.tracing.arguments import signature_of, stand_ins
from cgkit.tracing.trace import dims_of_call
from cgkit.tracing.wrapper import function_of

logger = logging.getLogger(__name__)


def compile_model(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    config: CompilationConfig | None = None,
    *,
    dynamic_arg_dims: Any = None,
    check_buffer_writes: bool = False,
) -> CompiledGraph:
    """Traces, cuts and compiles ``model``, or loads what another process made of it.

    The artefacts of the stages are ``compiled``, ``compiled.split`` and ``compiled.split.traced``. Of a model that
    was loaded, graphs are made when somebody looks at them; running, recording and serving it needs none.

    Args:
        model, args, kwargs, dynamic_arg_dims, check_buffer_writes: as :func:`cgkit.trace`.
        config: default :class:`CompilationConfig`; at level 2 nothing is cut.

    Raises:
        What :func:`cgkit.trace`, :func:`cgkit.split_graph` and :func:`cgkit.compile_pieces` raise. The trace
        cache itself raises nothing.
    """
    config = config or CompilationConfig()
    kwargs = dict(kwargs or {})
    options = {"dynamic_arg_dims": dynamic_arg_dims, "dispatch": config.dispatch}

    def traced() -> TracedGraph:
        return trace(model, *args, **options, check_buffer_writes=check_buffer_writes, **kwargs)

    start = _Start(config)
    with start.in_doubt("not asked"):
        start.prepare(model, args, kwargs, dynamic_arg_dims, check_buffer_writes)
    if start.ready and (loaded := start.load(_in_this_context(traced))) is not None:
        return loaded
    graph = traced()
    whole = config.level is CompilationLevel.DYNAMO_ONCE
    compiled = compile_pieces(split_graph(graph, () if whole else config.splitting_ops), config)
    start.save(compiled)
    graph.codes = ()
    if not config.debug:  # which replays them
        graph.guards = ()
    return compiled


def cache_is_on() -> bool:
    """Whether traces are kept and loaded: as the compile cache."""
    return not places.disabled()


def _in_this_context(traced: Callable[[], TracedGraph]) -> Callable[[], TracedGraph]:
    """``traced``, to be called later, in the forward context of now."""
    context = current_forward_context()

    def again() -> TracedGraph:
        if context is None:
            return traced()
        with set_forward_context(
            context.attn_metadata,
            cudagraph_runtime_mode=context.cudagraph_runtime_mode,
            batch_descriptor=context.batch_descriptor,
        ):
            return traced()

    return again


class _Start:
    """One model's way through the cache: described, looked up, and stored if it had to be traced."""

    def __init__(self, config: CompilationConfig) -> None:
        self.config = config
        self.ready = False
        self.why = ""  # it was traced, or is not stored
        self.started = time.perf_counter()

    @contextlib.contextmanager
    def in_doubt(self, what: str) -> Iterator[None]:
        """Whatever goes wrong in the block, the model is traced: a cache must not break what works without it."""
        try:
            yield
        except UndescribableError as error:
            self._say(f"{what}: {error}")
        except Exception as error:
            self._say(f"{what}: {type(error).__name__}: {error}")
            logger.debug("trace cache", exc_info=True)

    def _say(self, why: str) -> None:
        self.why = why
        logger.info("trace cache: %s", why)

    # --- describing ---

    def prepare(
        self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dims: Any, checked: bool
    ) -> None:
        """Describes the model and the call."""
        if not cache_is_on():
            self.why = "the compile cache is off"
            return
        if self.config.dispatch != "bytecode":
            self._say(f"not asked: dispatch={self.config.dispatch!r} leaves the graph with Dynamo")
            return
        signature = signature_of(model.forward, args, kwargs)
        self.arguments = Arguments(type(model).__name__, signature, args, kwargs)
        given = dims_of_call(model, self.arguments, dims)
        traced_args, traced_kwargs, _ = stand_ins(signature, args, kwargs, given, lambda tensor, dim: None)
        self.passed = tuple(signature.bind(*args, **kwargs).arguments)
        function, owner = function_of(model)
        self.wrapper = TorchCompileWrapperWithCustomDispatcher(model, signature=signature, passed=self.passed)
        bound = signature.bind(*traced_args, **traced_kwargs)
        bound.apply_defaults()
        self.call = Call(model, function, self.passed, dict(bound.arguments), given, self.wrapper.self_name)
        if owner is not model:
            raise UndescribableError("forward is not a method of the model")
        self.model = f"{type(model).__module__}.{type(model).__qualname__}"
        self.adaptor = self._adaptor(model, args, kwargs)
        if not self.adaptor.loads_alone:
            self.why = f"not asked: the adaptor {self.adaptor.name} needs the graph itself"
            return
        self.before = facts_before(self.call, self.config, self.adaptor.settings(None), checked)
        self.facts = dict(self.before.facts)
        self.name = store.file_name(self.model, self.facts)
        self.ready = True

    def _adaptor(
        self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CompilerInterface:
        tensors = [*model.parameters(), *model.buffers()]
        tensors += [value for value in self.arguments.values.values() if isinstance(value, torch.Tensor)]
        with warnings.catch_warnings():  # said by the compile stage, if it comes to it
            warnings.simplefilter("ignore")
            return make_adaptor(self.config, {tensor.device for tensor in tensors})

    # --- loading ---

    def load(self, remake: Callable[[], TracedGraph]) -> CompiledGraph | None:
        """The compiled model from the newest entry that holds here; None if there is none."""
        for path in store.candidates(self.name):
            compiled = None
            with self.in_doubt(f"{path.name} is not used"):
                compiled = self._try(path, remake)
            if compiled is not None:
                return compiled
        if not self.why:
            with self.in_doubt("nothing fits"):
                self._explain_miss()
        return None

    def _try(self, path: Path, remake: Callable[[], TracedGraph]) -> CompiledGraph | None:
        try:
            stored = store.read(path)
        except (ValueError, OSError) as error:
            warnings.warn(f"trace cache: {path} is not loaded ({error}); the model is traced", stacklevel=5)
            raise
        paths, texts, changed = store.changed_files(stored.about["code"])
        if changed:
            self._miss([(f"code {name}", "another text", "what it is") for name in changed])
            return None
        reads = Reads(**stored.about["reads"])
        now = reads.facts(self.call, self.before.fork())
        if different := store.differences(stored.about["after"], now):
            self._miss(different)
            return None
        key = self._key(stored, texts)
        if key.digest != stored.key_digest:
            self._miss([("the key of its folder", stored.key_digest, key.digest)])
            return None
        content = entry.decode(stored.payload)
        files = sorted(paths.values())
        traced = entry.loaded_trace(content, self.call, (self.arguments, self.wrapper), files, remake)
        split = entry.loaded_split(content, traced)
        plan = entry.plan_of(content, split)
        try:
            compiled = CompiledGraph(split, self.config, self.adaptor, plan=plan, key=key)
        except PlanError:
            self.wrapper.compiled_codes.clear()
            raise
        traced.seconds = max(0.0, time.perf_counter() - self.started - compiled.seconds)
        traced.origin = f"loaded from {path}"
        logger.info("trace cache: %s was loaded in %.2f s", traced.model_name, traced.seconds)
        events.emit(
            events.TraceLoaded(
                traced.model_name, len(split.pieces), split.num_capturable, str(path), traced.seconds
            )
        )
        return compiled

    def _key(self, stored: store.Stored, texts: Mapping[str, str]) -> CacheKey:
        devices = {torch.device(name) for name in stored.about["devices"]}
        key = self.before.key
        if key is None or devices != self.before.devices:
            key = cache_key(self.config, (), devices, self.adaptor.settings(None))
        return replace(key, code=dict(stored.about["code"]), sources=dict(texts))

    def _miss(self, different: Sequence[store.FactDifference]) -> None:
        store.note_miss(self.model, different)
        more = f", and {len(different) - 1} more" if len(different) > 1 else ""
        self._say(
            f"traced: {store.said(different[0])}{more}" if different else "traced: nothing is stored for it"
        )

    def _explain_miss(self) -> None:
        """Names the entry of this class that is nearest, and what is other there."""
        found = []
        for path in store.entries_of(self.model)[:8]:
            with contextlib.suppress(ValueError, OSError):
                found.append(store.differences(store.read(path).about["before"], self.facts))
        self._miss(min(found, key=len) if found else [])

    # --- storing ---

    def save(self, compiled: CompiledGraph) -> None:
        """Stores what was traced and compiled; says why where it cannot be."""
        traced = compiled.split.traced
        assert traced is not None
        cache = compiled.manager.cache
        if self.ready and cache is not None and cache.writable:
            why = self.why
            with self.in_doubt("not stored"):
                path = self._write(compiled, traced, cache.directory)
                events.emit(events.TraceSaved(traced.model_name, str(path)))
                self.why = f"{why or 'traced'}; stored in {path.parent.parent.name}"
        traced.origin = self.why

    def _write(self, compiled: CompiledGraph, traced: TracedGraph, folder: Path) -> Path:
        graph = traced.graph_module.graph
        reads = reads_of(self.call, self.before, traced.codes, graph, traced.guards)
        walk = self.before.fork()
        after = reads.facts(self.call, walk)
        _check_covered(walk, traced)
        payload = entry.encode(compiled, reads.guards)
        about = {
            "model": self.model,
            "before": self.facts,
            "after": after,
            "code": dict(compiled.cache_key.code),
            "reads": asdict(reads),
            "devices": sorted({str(i.device) for i in traced.inputs if i.device is not None}),
        }
        for name in about["code"]:
            if store.find_file(name) is None:
                raise UndescribableError(f"the file of {name} cannot be found by its name")
        return store.write(folder, self.name, about, payload)


def _check_covered(walk: Describer, traced: TracedGraph) -> None:
    """Each function that was inlined lies in a file whose text counts, or was described itself."""
    for code in traced.codes:
        frozen = code.co_filename.startswith("<frozen ")
        if not frozen and not os.path.isfile(code.co_filename) and not walk.covers(code):
            raise UndescribableError(f"the function {code.co_name} at {code.co_filename} lies in no file")
