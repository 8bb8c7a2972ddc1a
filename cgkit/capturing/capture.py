"""Stage 4: ``capture(compiled, sizes) -> CapturedGraphs``.

Implements the article's "capture_model：runner 侧的编排" (capture_model: orchestration on the runner's
side), without the runner: large to small, so that small graphs live in the memory of the large;
warm-ups that record nothing first; the garbage collector held off; the lock at the end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from cgkit import events
from cgkit.capturing.captured import CapturedGraphs, device_of
from cgkit.capturing.debugging.whole_call import CheckedGraphs
from cgkit.capturing.out_of_memory import capture_out_of_memory, is_out_of_memory
from cgkit.capturing.platform import GraphPlatform, get_platform, peak_bytes, reserved_bytes, session
from cgkit.capturing.sizes import CaptureSizes
from cgkit.capturing.static_inputs import StaticInputs, as_call
from cgkit.capturing.wrapper import CUDAGraphOptions, gc_held_off
from cgkit.config import CUDAGraphMode
from cgkit.errors import CaptureError, CaptureOutOfMemoryError, CgkitError
from cgkit.forward_context import BatchDescriptor, current_forward_context, set_forward_context

if TYPE_CHECKING:
    from cgkit.compiling import CompiledGraph

logger = logging.getLogger(__name__)

Plan = list[tuple[CUDAGraphMode, BatchDescriptor]]


def capture(
    compiled: CompiledGraph,
    sizes: CaptureSizes | Sequence[int] | str | None = None,
    *,
    mode: CUDAGraphMode | str | None = None,
    platform: GraphPlatform | str | None = None,
    pool: Any = None,
    make_inputs: Callable[[int], Any] | None = None,
    context: Any = None,
    num_warmups: int | None = None,
    uniform_sizes: Sequence[int] | None = None,
    clone_outputs: bool = True,
    weak_outputs: bool = True,
    largest_first: bool = True,
) -> CapturedGraphs:
    """Records ``compiled`` at each size and locks it.

    Nothing of the model's result is computed while recording, but warm-ups run it, and in PIECEWISE
    mode the splitting operators between the recorded pieces run too, on outputs that hold no result
    yet. So ``context`` must give them metadata that points at no real state (no real KV slot).

    Args:
        sizes: token counts, a ladder's name, or None: what ``compiled.config`` says.
        mode: None: what ``compiled.config`` says. A composite records both of its modes.
        platform: a platform, its name, or None: what ``compiled.config`` says.
        pool: share the pool of other graphs of the same platform; None: a pool of its own.
        make_inputs: ``num_tokens`` -> the model's arguments (a tensor, a tuple, or a dict of keywords).
            None: zeros shaped like the first call's. With ``cudagraph_copy_inputs=False`` these are
            the very buffers that later calls pass.
        context: the ``attn_metadata`` while recording: a function of the :class:`BatchDescriptor`, or a
            value. None: that of the forward context around this call. In FULL mode its tensors are
            recorded too: later steps must pass the same ones.
        num_warmups: unrecorded runs before each recording; None: what the config says.
        uniform_sizes: limits the sizes of uniform decode batches where they are recorded apart.
        clone_outputs, weak_outputs: see :class:`CapturedGraphs` and :class:`CUDAGraphOptions`.
        largest_first: the order of sizes. False records from small to large, to see what that costs.

    Raises:
        CaptureError: something cannot be recorded; what was recorded is freed.
        CaptureOutOfMemoryError: memory ran out; says how far it came and what would fit.
        ConfigError: sizes, mode or platform make no sense here.
        MovedInputError: a weight was moved between the first recording and the lock.
    """
    config = compiled.config
    resolved = CaptureSizes.resolve(config, sizes)
    chosen = config.mode if mode is None else CUDAGraphMode.parse(mode, "mode")
    if platform is None or isinstance(platform, str):
        platform = get_platform(platform or config.graph_platform, device_of(compiled))
    options = CUDAGraphOptions(debug=config.debug, weak_outputs=weak_outputs)
    kind = CheckedGraphs if config.debug else CapturedGraphs
    captured = kind(compiled, resolved, chosen, platform, pool, options)
    captured.clone_outputs = clone_outputs
    warmups = config.cudagraph_num_of_warmups if num_warmups is None else num_warmups
    if not chosen:
        return captured
    outer = current_forward_context()
    metadata = outer.attn_metadata if context is None and outer is not None else context
    was_locked = captured.lock.locked
    captured.lock.reopen()
    try:
        _Capture(captured, metadata, warmups).run(make_inputs, uniform_sizes, largest_first)
    except BaseException:
        captured.lock.locked = was_locked
        captured.free()
        raise
    return captured


class _Capture:
    """One pass over all modes and sizes."""

    def __init__(self, captured: CapturedGraphs, metadata: Any, num_warmups: int) -> None:
        self.captured, self.metadata, self.num_warmups = captured, metadata, num_warmups
        self.model = captured.compiled.model_name

    def run(
        self,
        make_inputs: Callable[[int], Any] | None,
        uniform_sizes: Sequence[int] | None,
        largest_first: bool,
    ) -> None:
        captured, platform, pool = self.captured, self.captured.platform, self.captured.pool
        plan = captured.dispatcher.planned_keys(uniform_sizes=uniform_sizes, largest_first=largest_first)
        if platform.emulated:  # asks for each piece uncompiled, and no model can be traced while it records
            for backend in captured.compiled.backends:
                backend.piece.on_fakes  # noqa: B018
        with ExitStack() as stack, torch.no_grad(), gc_held_off():
            started = time.perf_counter()
            with self._naming_what_fitted(plan, 0):
                stack.enter_context(session(platform))
                inputs = captured.inputs = self._make_inputs(make_inputs)
                captured.open_ledger()
                self._learn_output_dims(plan)
            self._record_all(plan)
            platform.synchronize()
            self._lay_out_plans(plan, uniform_sizes)
            inputs.restore()
            captured.check_weights()
            captured.fix_weights()
            captured.dispatcher.initialize_cudagraph_keys(plan)
            captured.lock.locked = True
            platform.synchronize()
            captured.seconds = time.perf_counter() - started - captured.plans.seconds
        captured.peak_allocated_bytes = peak_bytes(platform, pool)
        events.emit(
            events.CaptureFinished(
                self.model,
                captured.num_graphs,
                platform.emulated,
                captured.seconds,
                platform.pool_bytes(pool).reserved,
                captured.peak_allocated_bytes,
            )
        )

    def _make_inputs(self, make_inputs: Callable[[int], Any] | None) -> StaticInputs:
        captured, model_inputs = self.captured, self.captured.model_inputs
        copying = captured.compiled.config.cudagraph_copy_inputs
        if make_inputs is None and not copying:
            raise CaptureError(
                "cudagraph_copy_inputs=False: the graphs read the caller's own buffers, so give them with "
                "make_inputs=lambda num_tokens: (buffer[:num_tokens], ...)"
            )
        make = make_inputs or model_inputs.default_inputs
        largest = captured.sizes.largest
        debugging = captured.debugging
        return StaticInputs(
            make,
            model_inputs.dims_of,
            model_inputs.canonical,
            largest,
            copying,
            model_inputs.written,
            None if debugging is None else debugging.guarded_buffer,
        )

    def _learn_output_dims(self, plan: Plan) -> None:
        """With a single size, one more run at another size tells which output dimensions follow it."""
        size = self.captured.sizes.largest
        copying = self.captured.compiled.config.cudagraph_copy_inputs
        if len({key.num_tokens for _, key in plan}) != 1 or not copying:
            return
        other = BatchDescriptor(size - 1 if size > 1 else 2)
        assert self.captured.inputs is not None
        try:
            made = self.captured.inputs.make_inputs(other.num_tokens)
        except Exception:  # it need not know other sizes: then the first dimension of that size is taken
            return
        args, kwargs = self.captured.model_inputs.canonical(*as_call(made))
        try:
            with set_forward_context(self._metadata_for(other)):
                output = self.captured.run(*args, **kwargs)
        except Exception as error:  # nor need the model (an even number of rows): nobody asked for that size
            if is_out_of_memory(error) or isinstance(error, torch.AcceleratorError):
                raise  # that is no matter of the size
            logger.debug("a run of %d tokens", other.num_tokens, exc_info=True)
            return
        self.captured.note_output(other.num_tokens, output)

    def _record_all(self, plan: Plan) -> None:
        for done, (mode, key) in enumerate(plan):
            events.emit(events.Progress("capturing", done, len(plan), f"{mode.name} {key.num_tokens}"))
            with self._naming_what_fitted(plan, done):
                self._record(mode, key, first=done == 0)
        events.emit(events.Progress("capturing", len(plan), len(plan)))

    def _lay_out_plans(self, plan: Plan, uniform_sizes: Sequence[int] | None) -> None:
        """Each PIECEWISE step as a flat tuple of calls."""
        if self.captured.compiled.config.replay_path != "plan":
            return
        keys = [key for mode, key in plan if mode is CUDAGraphMode.PIECEWISE]
        with self._naming_what_fitted(plan, len(plan) - 1):
            self.captured.plans.lay_out(keys, self._metadata_for, uniform_sizes)

    @contextmanager
    def _naming_what_fitted(self, plan: Plan, done: int) -> Iterator[None]:
        """Turns running out of memory before ``plan[done]`` is complete into the error that helps."""
        try:
            yield
            return
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # Without its traceback, whose frames hold what was allocated last.
            failed = error.with_traceback(None)
            failed.__context__ = None
        raise self._out_of_memory(failed, plan, done) from failed

    def _record(self, mode: CUDAGraphMode, key: BatchDescriptor, first: bool) -> None:
        captured = self.captured
        assert captured.inputs is not None
        args, kwargs = captured.inputs.at(key.num_tokens)
        metadata = self._metadata_for(key)
        for _ in range(self._runs_before(key, first)):
            with set_forward_context(metadata, batch_descriptor=key), self._naming_a_warm_up(key):
                captured.run(*args, **kwargs)
        events.emit(events.CaptureTriggered(mode.name, key.num_tokens, key.uniform_decode))
        with set_forward_context(metadata, cudagraph_runtime_mode=mode, batch_descriptor=key):
            output = captured.run(*args, **kwargs)
        captured.note_output(key.num_tokens, output)

    @contextmanager
    def _naming_a_warm_up(self, key: BatchDescriptor) -> Iterator[None]:
        """An error of the model's own in a run whose values nobody chose."""
        try:
            yield
        except Exception as error:
            if isinstance(error, CgkitError) or is_out_of_memory(error):
                raise
            raise CaptureError(
                f"{self.model} fails in a run of {key.num_tokens} tokens before it is recorded "
                f"({type(error).__name__}: {' '.join(str(error).split())}). Without make_inputs such a run gets zeros: "
                "if the model does not work with those, give capture a make_inputs=lambda num_tokens: (...) with "
                "values that it works with"
            ) from error

    def _runs_before(self, key: BatchDescriptor, first: bool) -> int:
        """The warm-ups, and what a compile size needs beside: a backend's very first run takes the general shape
        always, so it warms nothing that is recorded (kernels that tune themselves when they first run would do it
        in the recording), and a size that compiles at first hit must be hit."""
        backends = self.captured.compiled.backends
        unrun = first and any(b.has_choice and not b.first_run_finished for b in backends)
        return unrun + max(self.num_warmups, any(b.compiles_when_hit(key.num_tokens) for b in backends))

    def _metadata_for(self, key: BatchDescriptor) -> Any:
        return self.metadata(key) if callable(self.metadata) else self.metadata

    def _out_of_memory(self, error: BaseException, plan: Plan, done: int) -> CaptureOutOfMemoryError:
        captured = self.captured
        free_bytes = getattr(captured.platform, "free_bytes", None)
        return capture_out_of_memory(
            error,
            plan[done],
            plan[:done],
            captured.sizes.sizes,
            reserved_bytes(captured.platform, captured.pool),
            free_bytes() if free_bytes is not None else None,
        )
