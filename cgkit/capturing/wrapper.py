"""``CUDAGraphWrapper``: records a callable at the first call with a key, and replays it afterwards.

Implements the article's "两层封装：为什么是 PiecewiseBackend 套着 CUDAGraphWrapper" (two layers: why a
PiecewiseBackend inside a CUDAGraphWrapper) and "捕获一次的成本与 weak ref 技巧" (the cost of one capture and
the weak-ref trick). A wrapper decides nothing: it compares the mode in the forward context with its
own, and records, replays or passes through. It keeps no buffers and copies no inputs.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from cgkit import events, forward_context, marks
from cgkit.capturing.addresses import Addresses, AddressReader
from cgkit.capturing.out_of_memory import is_out_of_memory
from cgkit.capturing.platform import GraphPlatform, RecordedGraph, RecordingMemory, reserved_bytes
from cgkit.config import CUDAGraphMode
from cgkit.display import Shown
from cgkit.errors import CaptureError, CgkitError, ReplayError
from cgkit.forward_context import BatchDescriptor, CaptureLock
from cgkit.tensor_trees import tensor_leaves


@dataclass(frozen=True)
class CUDAGraphOptions:
    """How a wrapper records and what it checks.

    ``weak_outputs``: entries keep their outputs without owning the memory, so that later recordings
    in the pool may reuse it. Safe because all graphs of a pool replay on one stream, in the order in
    which they were recorded: whoever consumes an output did so before the memory was given out again,
    at capture and therefore at each replay. Outputs that do not lie in the pool (views of inputs,
    weights) stay strong always.
    """

    #: Hold Python's garbage collector off while recording: a collection may free or synchronise.
    gc_disable: bool = True
    #: See above. False keeps every output for good (simple, and several times the memory).
    weak_outputs: bool = True
    #: Return the weak output already from the recording call. Only for the last piece: an output
    #: that another piece still consumes during capture must stay owned until then.
    weak_ref_output: bool = False
    #: Check every tensor argument at each replay, weights included.
    debug: bool = False
    #: Which positional arguments' addresses are checked at each replay; None: every tensor.
    checked: tuple[int, ...] | None = None
    #: The arguments' names, for errors.
    arg_names: tuple[str, ...] = ()
    #: Also check the tensors in the forward context's metadata: a whole step that was recorded
    #: with attention inside reads them at their old addresses.
    check_metadata: bool = False


@dataclass(slots=True)
class GraphEntry:
    """One recording: its key, the graph, the outputs it writes, and where its inputs lay."""

    key: BatchDescriptor
    graph: RecordedGraph
    output: Any
    reader: AddressReader
    addresses: Addresses
    seconds: float
    pool_reserved_before_bytes: int
    pool_reserved_after_bytes: int


class CUDAGraphWrapper(Shown):
    """Wraps ``runnable`` so that it is recorded once a key and then replayed.

    Calling it outside of a step, or in a step of another mode, runs ``runnable``. In a step of
    ``runtime_mode`` it replays the entry of the step's ``batch_descriptor``, or records one if
    ``lock`` still allows it. A replay returns the same output object every time; its content is
    overwritten by the next replay in the pool.

    ``call`` is the same without keywords and without the look-up of ``__call__``: generated code binds it.

    Raises (when called):
        MovedInputError: a checked input lies elsewhere than when the graph was recorded.
        CaptureLockedError: the key was never recorded and capturing is over.
        CaptureError: ``runnable`` cannot be recorded; the wrapper is as it was before.
    """

    def __init__(
        self,
        runnable: Callable[..., Any],
        runtime_mode: CUDAGraphMode | str,
        platform: GraphPlatform,
        pool: Any,
        *,
        name: str = "graph",
        lock: CaptureLock | None = None,
        options: CUDAGraphOptions | None = None,
    ) -> None:
        mode = CUDAGraphMode.parse(runtime_mode, "runtime_mode")
        if mode not in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
            raise CaptureError(f"runtime_mode={mode.name} of {name}: a wrapper is PIECEWISE or FULL")
        self.runnable, self.runtime_mode, self.name = runnable, mode, name
        self.platform, self.pool = platform, pool
        self.lock = lock or CaptureLock(name)
        self.options = options or CUDAGraphOptions()
        self.entries: dict[BatchDescriptor, GraphEntry] = {}
        self._replays: dict[BatchDescriptor | None, tuple[Any, ...]] = {}
        #: Replays that were refused, the last ones: key, input, and where it lay.
        self.moved: deque[tuple[BatchDescriptor, str, int]] = deque(maxlen=200)
        self.call = self._make_call()
        marks.register(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not kwargs:
            return self.call(*args)
        context = forward_context.current_forward_context()
        if context is None or context.cudagraph_runtime_mode is not self.runtime_mode:
            return self.runnable(*args, **kwargs)
        entry = self._replays.get(context.batch_descriptor)
        if entry is None:
            return self._record(context, args, kwargs)
        replay, output, read, addresses = entry
        try:
            if read(args, kwargs, context.attn_metadata) != addresses:
                self._blame(context, args, kwargs)
        except _BUILT_OTHERWISE as error:
            self._blame(context, args, kwargs, error)
        replay()
        return output

    def _make_call(self) -> Callable[..., Any]:
        """The call without keywords as a closure: every name on the replay path is a local or a cell.

        About 0.7 us with three checked inputs, of which reading addresses is half. A hash of the key
        (two small integers) costs as much as comparing it with the last one: no shortcut for that.
        """
        runnable, mode, record, find = self.runnable, self.runtime_mode, self._record, self._replays.get
        current, blame = forward_context._current, self._blame
        no_keywords: dict[str, Any] = {}

        def call(*args: Any) -> Any:
            context = current.context
            if context is None or context.cudagraph_runtime_mode is not mode:
                return runnable(*args)
            entry = find(context.batch_descriptor)
            if entry is None:
                return record(context, args, no_keywords)
            replay, output, read, addresses = entry
            try:
                if read(args, no_keywords, context.attn_metadata) != addresses:
                    blame(context, args, no_keywords)
            except _BUILT_OTHERWISE as error:
                blame(context, args, no_keywords, error)
            replay()
            return output

        return call

    def _blame(self, context: Any, args: tuple, kwargs: dict, error: Exception | None = None) -> None:
        """Raises what the replay path noticed."""
        entry = self.entries[context.batch_descriptor]
        self._note_moved(entry, args, kwargs, context.attn_metadata)
        where = f"replaying {self.name} at {tuple(entry.key)}"
        if error is not None:
            raise entry.reader.changed(where, error) from error
        raise entry.reader.moved(where, entry.addresses, args, kwargs, context.attn_metadata)

    def _note_moved(self, entry: GraphEntry, args: tuple, kwargs: dict, metadata: Any) -> None:
        try:
            now = entry.reader.read(args, kwargs, metadata)
        except _BUILT_OTHERWISE:
            return
        for name, old, new in zip(entry.reader.names, entry.addresses, now):
            if old != new:
                self.moved.append((entry.key, name, new))

    def _record(self, context: Any, args: tuple, kwargs: dict) -> Any:
        key = context.batch_descriptor
        if not isinstance(key, BatchDescriptor):
            raise ReplayError(
                f"{self.name}: the step's mode is {self.runtime_mode.name} but its batch_descriptor "
                f"is {key!r}; take both from CudagraphDispatcher.dispatch"
            )
        self.lock.check(f"{self.name} would be recorded at {tuple(key)} in mode {self.runtime_mode.name}")
        watched = (
            RecordingMemory(self.platform, self.pool) if events.has_readers(events.GraphMemory) else None
        )
        before = reserved_bytes(self.platform, self.pool)
        started = time.perf_counter()
        with gc_held_off(self.options.gc_disable):
            graph, output = self._capture(key, args, kwargs)
        weak = self.platform.weak_ref(output, self.pool) if self.options.weak_outputs else output
        seconds = time.perf_counter() - started
        after = reserved_bytes(self.platform, self.pool)
        reader = self._reader(args, kwargs, context.attn_metadata)
        addresses = reader.read(args, kwargs, context.attn_metadata)
        self.entries[key] = GraphEntry(key, graph, weak, reader, addresses, seconds, before, after)
        self._replays[key] = (graph.replay, weak, reader.read, addresses)
        mode, emulated = self.runtime_mode.name, self.platform.emulated
        events.emit(
            events.GraphCaptured(
                self.name, mode, key.num_tokens, key.uniform_decode, emulated, seconds, before, after
            )
        )
        if watched is not None:
            about = (
                self.name,
                mode,
                key.num_tokens,
                key.uniform_decode,
                emulated,
                seconds,
                graph.num_nodes(),
            )
            events.emit(events.GraphMemory(*about, *watched.found(), self.platform, self.pool))
        return weak if self.options.weak_ref_output else output

    def _capture(self, key: BatchDescriptor, args: tuple, kwargs: dict) -> tuple[RecordedGraph, Any]:
        runnable = self.runnable
        try:
            return self.platform.record(lambda: runnable(*args, **kwargs), self.pool)
        except CgkitError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise CaptureError(
                f"{self.name} could not be recorded at {tuple(key)} on the {self.platform.name} platform: "
                f"{type(error).__name__}: {error}. What waits for the device or reads a value on "
                "the host must stay outside: make its operator a splitting operator, or move it out of forward"
            ) from error

    def _reader(self, args: tuple, kwargs: dict, metadata: Any) -> AddressReader:
        """Finds the tensors whose addresses are compared at each replay."""
        checked = self.options.checked
        indices = range(len(args)) if checked is None or self.options.debug else checked
        found = [leaf for index in indices for leaf in tensor_leaves(args[index], f"args[{index}]")]
        found += tensor_leaves(kwargs, "kwargs")
        if self.options.check_metadata:
            found += tensor_leaves(metadata, "metadata")
        if not self.platform.emulated:  # what lies on the host is not read by a recorded kernel
            found = [(path, tensor) for path, tensor in found if tensor.device.type != "cpu"]
        paths = [path for path, _ in found]
        absent = "metadata" if self.options.check_metadata and metadata is None else ""
        names = [self._shown(path) for path in paths]
        return AddressReader(("args", "kwargs", "metadata"), paths, names, absent)

    def _shown(self, path: str) -> str:
        """``args[3]`` with the argument's name, where it is known."""
        for index, name in enumerate(self.options.arg_names):
            if path.startswith(f"args[{index}]"):
                return f"{name!r} ({path})"
        return path

    def put_marks(self, marker: marks.Marker, undo: ExitStack) -> None:
        """Marks each replay, while a profiler runs; see :mod:`cgkit.marks`."""
        full = self.runtime_mode is CUDAGraphMode.FULL
        stage, piece = ("full", "whole step") if full else ("replay", self.name)
        facts = {
            "model": self.lock.model,
            "mode": self.runtime_mode.name,
            "emulated": self.platform.emulated,
        }
        for key, (replay, *rest) in list(self._replays.items()):
            batch = None if key is None else key.num_tokens
            marked = marker.function(replay, stage, piece, batch=batch, **facts)
            marks.swap_item(self._replays, key, (marked, *rest), undo)

    def clear(self) -> None:
        """Drops every entry. The pool is the platform's to free."""
        self.entries.clear()
        self._replays.clear()

    def to_frame(self) -> Any:
        """A row a recorded graph: name, mode, key, nodes, seconds and the pool's growth in bytes."""
        import pandas as pd

        return pd.DataFrame([self.row(entry) for entry in self.entries.values()])

    def row(self, entry: GraphEntry) -> dict[str, Any]:
        """One entry as plain data."""
        return {
            "name": self.name,
            "mode": self.runtime_mode.name,
            "num_tokens": entry.key.num_tokens,
            "uniform_decode": entry.key.uniform_decode,
            "nodes": entry.graph.num_nodes(),
            "checked_inputs": len(entry.addresses),
            "seconds": entry.seconds,
            "pool_growth_bytes": entry.pool_reserved_after_bytes - entry.pool_reserved_before_bytes,
            "emulated": self.platform.emulated,
        }

    def __repr__(self) -> str:
        kind = "emulated " if self.platform.emulated else ""
        return f"CUDAGraphWrapper({self.name}: {self.runtime_mode.name}, {len(self.entries)} {kind}graphs)"


# What reading an address raises where the recording had a tensor and this call has something else.
_BUILT_OTHERWISE = (AttributeError, TypeError, LookupError)


@contextmanager
def gc_held_off(wanted: bool = True) -> Iterator[None]:
    """No garbage collection in the block: during a stream capture it may free memory or synchronise."""
    on = wanted and gc.isenabled()
    if on:
        gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
