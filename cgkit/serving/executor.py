"""Strings the stages together for a runner: an undecorated model -> what a step calls.

The runner's counterpart of ``@support_torch_compile`` (which stands above this stage and serves
callers without buffers of their own). Same functions, same order: trace, split, compile, capture.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from cgkit import events, marks
from cgkit.capturing import CapturedGraphs, CaptureSizes, capture
from cgkit.capturing.debugging.whole_call import Parts, beside_forward
from cgkit.capturing.dispatcher import Route
from cgkit.capturing.modes import resolve_cudagraph_mode
from cgkit.capturing.platform import GraphPlatform
from cgkit.compiling import CompiledGraph, compile_model
from cgkit.config import AttentionCGSupport, CompilationConfig, CompilationLevel, CUDAGraphMode
from cgkit.errors import CaptureError
from cgkit.forward_context import set_forward_context
from cgkit.kernels.custom_op import custom_ops_as, with_custom_ops
from cgkit.serving.input_batch import InputBatch
from cgkit.serving.weights import ServedModel
from cgkit.splitting import SplitGraph
from cgkit.tracing import TracedGraph

logger = logging.getLogger(__name__)

#: Ours launches by the sizes of the buffers and reads every length on the device, so a recording
#: of it serves any batch (:mod:`cgkit.kernels`). FlashAttention 2, for one, is only UNIFORM_BATCH.
ATTENTION_SUPPORT = AttentionCGSupport.ALWAYS


class Executor:
    """What a runner's step calls, at any level.

    The model may be held by others too (two runners at two levels, a reference beside them), so nothing of it is
    changed for good: layers with two forms take this configuration's while they are traced, or, where Python runs at
    each step, while a step runs.

    Attributes:
        mode: the configured mode, after what the attention supports was taken into account.
        resolution: how it came to that: asked, given, and the sentence that says why.
        support, attention_cut: what the attention supports, and whether it is cut out of the pieces.
        forward: ``(input_ids, positions) -> hidden``; the forward context is the caller's.
        traced, split, compiled, captured: the artefacts of the stages, None where the level has none.
    """

    def __init__(
        self, model: ServedModel, config: CompilationConfig, support: AttentionCGSupport = ATTENTION_SUPPORT
    ) -> None:
        self.model, self.config = model, config
        self.support, self.attention_cut = support, cuts_attention(config)
        self.resolution = resolve_cudagraph_mode(config.mode, support, self.attention_cut)
        self.mode = self.resolution.mode
        if self.resolution.changed or self.resolution.unsafe:
            logger.warning("cudagraph_mode: %s", self.resolution.said)
        self.sizes = CaptureSizes.resolve(config) if self.mode else None
        self.traced: TracedGraph | None = None
        self.split: SplitGraph | None = None
        self.compiled: CompiledGraph | None = None
        self.captured: CapturedGraphs | None = None
        self.forward: Callable[..., torch.Tensor] = model
        self.is_compiled = config.level is CompilationLevel.NO_COMPILATION
        if self.is_compiled:
            self.forward = with_custom_ops(model, model, config)
        self._without_pieces = self.forward  # what serves a level that has none
        marks.register(self)

    def __repr__(self) -> str:
        recorded = f", {self.captured.num_graphs:,} graphs recorded" if self.captured is not None else ""
        ready = "compiled" if self.is_compiled else "not compiled yet (capture_model(), or the first step)"
        if self.config.level is CompilationLevel.NO_COMPILATION:
            ready = "eager"
        return f"Executor(level {self.config.level.value}, {self.mode.name}: {ready}{recorded})"

    # --- sizes -----------------------------------------------------------------------------------

    @property
    def largest_size(self) -> int:
        """The largest number of tokens that is recorded; 0 without graphs."""
        return self.sizes.largest if self.sizes else 0

    def pad(self, num_tokens: int) -> int:
        """What a batch of ``num_tokens`` is padded to if there is a graph for it."""
        return self.sizes.pad(num_tokens) if self.sizes else num_tokens

    def route(self, num_tokens: int, uniform: bool) -> Route:
        """Mode, key and padded size of a step. Without a graph: as many tokens as there are."""
        if self.captured is None:
            return Route(CUDAGraphMode.NONE, None, num_tokens)
        return self.captured.dispatcher.route(num_tokens, uniform)

    # --- the road --------------------------------------------------------------------------------

    def compile(self, inputs: InputBatch) -> None:
        """Goes the road up to the compiled pieces; nothing if that was done. Runs nothing of the model."""
        if self.is_compiled:
            return
        name = type(self.model).__name__
        events.emit(events.ModelSeen(name))
        if self.config.level is CompilationLevel.DYNAMO_AS_IS:
            events.emit(events.DynamoAsIs(name))
            compiled = torch.compile(self.model.forward, backend=self.config.dynamo_backend)
            self.forward = self._without_pieces = with_custom_ops(compiled, self.model, self.config)
            self.is_compiled = True
            return
        # The size of the example leaves no trace in the graph: the dimension is symbolic.
        example = max(2, min(inputs.max_tokens, 16))
        metadata = inputs.fill_dummy(example, decode_only=False)
        with set_forward_context(metadata), custom_ops_as(self.model, self.config):
            self.compiled = compile_model(
                self.model,
                (inputs.input_ids[:example], inputs.positions[:example]),
                config=self.config,
                check_buffer_writes=bool(self.mode),
            )
        self.split = self.compiled.split
        self.traced = self.split.traced
        self.forward = self._checked(self.compiled.bind())
        self.is_compiled = True

    def _checked(self, run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """``run``; under ``debug=True`` beside the model's own forward, on the padded inputs of the step."""
        if not self.config.debug or self.compiled is None:
            return run
        return with_custom_ops(beside_forward(Parts(self.model, self.compiled), run), self.model, self.config)

    def capture_model(
        self, inputs: InputBatch, *, largest_first: bool = True, platform: GraphPlatform | None = None
    ) -> None:
        """Records every size in every mode, large to small (``largest_first=False``: the other way), and locks.

        ``platform``: None: what the configuration says.

        The dummy inputs lie in the runner's own buffers, at the addresses that every later step uses.
        No token of them has a KV slot, so the cache is after this as it was before. A decode batch is
        given as one (``max_query_len`` 1), so that a FULL graph freezes the attention's decode kernel and
        not the slower one for any batch.
        """
        if not self.mode:
            self.compile(inputs)
            logger.info("cudagraph_mode is NONE: nothing is recorded")
            return
        if self.captured is not None:  # again, in a notebook
            self.release()
        self.use(self.record(inputs, largest_first=largest_first, platform=platform))

    def record(
        self,
        inputs: InputBatch,
        *,
        mode: CUDAGraphMode | None = None,
        largest_first: bool = True,
        platform: GraphPlatform | None = None,
    ) -> CapturedGraphs:
        """The recording of :meth:`capture_model`, without sending steps through it (see :meth:`use`).

        ``mode``: None: :attr:`mode`. Several recordings of one compiled model live side by side, each with a pool
        of its own.

        Raises:
            CaptureError: the mode is NONE, or something cannot be recorded.
        """
        self.compile(inputs)
        mode = self.mode if mode is None else mode
        if self.compiled is None or not mode:
            raise CaptureError(
                f"nothing to record: cudagraph_mode={mode.name} at level {self.config.level.value}"
            )
        sizes = self.sizes or CaptureSizes.resolve(self.config)
        started = time.perf_counter()
        with frozen_gc():
            captured = capture(
                self.compiled,
                sizes,
                mode=mode,
                make_inputs=lambda size: inputs.front(size, keep=True),
                context=lambda key: inputs.fill_dummy(key.num_tokens, key.uniform_decode),
                uniform_sizes=[size for size in sizes if size <= inputs.max_reqs],
                largest_first=largest_first,
                platform=platform,
            )
        for reason, count in captured.plans.refused.items():
            logger.warning("%d steps have no replay plan and take the module path: %s", count, reason)
        logger.info(
            "capturing finished in %.1f s: %d %s graphs of %d sizes, %.1f MiB reserved, peak %.1f MiB",
            time.perf_counter() - started,
            captured.num_graphs,
            "emulated" if captured.platform.emulated else captured.platform.name,
            len(sizes),
            captured.pool_bytes.reserved / 2**20,
            captured.peak_allocated_bytes / 2**20,
        )
        return captured

    def use(
        self, captured: CapturedGraphs | None, forward: Callable[..., torch.Tensor] | None = None
    ) -> None:
        """Sends the steps that follow through ``captured``; None: through ``forward``, without graphs.

        ``forward``: None: what the level compiled. Whose graphs were used before keeps them.
        """
        self.captured = captured
        if captured is not None:
            self.forward = self._checked(captured.run)
        else:
            bound = self._without_pieces if self.compiled is None else self._checked(self.compiled.bind())
            self.forward = bound if forward is None else forward

    def put_marks(self, marker: marks.Marker, undo: ExitStack) -> None:
        """Marks the levels that have no pieces, and what lies between pieces; see :mod:`cgkit.marks`."""
        level, facts = self.config.level, {"model": type(self.model).__name__}
        if level is CompilationLevel.NO_COMPILATION:
            marks.mark_modules(self.model, marker, undo, **facts, mode="eager")
        stage = "forward"
        if level is CompilationLevel.DYNAMO_AS_IS and self.is_compiled:
            stage, facts["mode"] = "compiled", "torch.compile"
        marks.swap_attribute(self, "forward", marker.function(self.forward, stage, **facts), undo)

    def release(self) -> None:
        """Frees the recorded graphs; steps run compiled, without graphs, until they are recorded again."""
        if self.captured is not None:
            assert self.compiled is not None
            self.captured.free()
            self.captured.lock.reopen()
            self.captured, self.forward = None, self._checked(self.compiled.bind())


def cuts_attention(config: CompilationConfig) -> bool:
    """Whether ``config`` leaves attention between the pieces: level 3, and an attention among the splitting
    operators (None: the default ones, which are attention)."""
    ops = config.splitting_ops
    return config.level is CompilationLevel.PIECEWISE and (
        ops is None or any("attention" in op for op in ops)
    )


@contextmanager
def frozen_gc() -> Iterator[None]:
    """Everything that is alive is put out of the collector's sight while the block runs.

    A collection in the middle of a recording costs time for each of many graphs and may free device
    memory, which a recording must not. What the block itself leaves behind is collected after it.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
