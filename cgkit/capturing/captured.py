"""The artefact of stage 4: every recorded graph of a model, behind one call.

Implements the run-time half of the article's "运行时包装：copy inputs 到静态缓冲区" (copying inputs to
static buffers) and of "两层封装" (FULL wrappers around PIECEWISE ones: only the one whose mode the
step names is awake).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from cgkit import forward_context, marks
from cgkit.capturing.addresses import WeightLedger
from cgkit.capturing.debugging import Debugging
from cgkit.capturing.dispatcher import CudagraphDispatcher
from cgkit.capturing.ledgers import Ledgers
from cgkit.capturing.model_inputs import ModelInputs
from cgkit.capturing.plan_reader import BUILT_OTHERWISE
from cgkit.capturing.plans import ReplayPlans
from cgkit.capturing.platform import GraphPlatform, PoolBytes
from cgkit.capturing.sizes import CaptureSizes
from cgkit.capturing.static_inputs import StaticInputs
from cgkit.capturing.wrapper import CUDAGraphOptions, CUDAGraphWrapper
from cgkit.config import CUDAGraphMode
from cgkit.display import Shown
from cgkit.errors import CaptureError, ReplayError
from cgkit.forward_context import CaptureLock, current_forward_context, set_forward_context
from cgkit.tensor_trees import number_leaves, replace_tensors, tensor_leaves

if TYPE_CHECKING:
    from cgkit.compiling import CompiledGraph, PiecewiseBackend

_alive: weakref.WeakSet[CapturedGraphs] = weakref.WeakSet()


class CapturedGraphs(Shown):
    """A compiled model with its recorded graphs; made by :func:`cgkit.capture`. Call it like the model.

    Two ways in. **Calling it** is the safe one: arguments of any size are copied into the static
    buffers, padded to a recorded size, dispatched and replayed, and the outputs are cut back and (with
    ``clone_outputs``) copied out, because the next replay overwrites them. Above the largest size the
    model runs compiled, without a graph. :attr:`run` is the bare one, for a runner that owns its
    buffers, pads, and sets the forward context itself: nothing stands between it and the replays.

    Calls from several threads take turns: the buffers are shared by all of them. :attr:`run` leaves that
    to its caller.

    Attributes:
        compiled, platform, pool, sizes, mode, dispatcher, lock: what it is made of.
        run: like the model, without copying, padding or gradients; takes mode and key from the
            forward context; its outputs are overwritten by the next replay.
        run_module: the same, and PIECEWISE steps piece by piece, whatever ``config.replay_path`` says.
        plans: the replay plans by which PIECEWISE steps run, or why they do not (:class:`ReplayPlans`).
        pieces: the PIECEWISE wrappers in order (empty if that mode is not recorded).
        full: the FULL wrapper around them all, or None.
        debugging: what ``debug=True`` checks and has found (:class:`~cgkit.capturing.debugging.Debugging`), else None.
        clone_outputs: copy outputs out of the graphs' memory (default). False shows the hazard.
        seconds: what recording took, warm-ups included (clearing the device's caches before it not, nor
            laying out the plans: ``plans.seconds``).
        peak_allocated_bytes: the most memory in use at once meanwhile.
    """

    def __init__(
        self,
        compiled: CompiledGraph,
        sizes: CaptureSizes,
        mode: CUDAGraphMode,
        platform: GraphPlatform,
        pool: Any,
        options: CUDAGraphOptions,
    ) -> None:
        self.compiled, self.sizes, self.mode, self.platform = compiled, sizes, mode, platform
        self.pool = platform.new_pool() if pool is None else pool
        self._own_pool = pool is None
        self.lock: CaptureLock = compiled.lock
        self.dispatcher = CudagraphDispatcher(mode, sizes)
        self.model_inputs = ModelInputs(compiled)
        self.inputs: StaticInputs | None = None
        self.weights: WeightLedger | None = None
        self.clone_outputs = True
        self.seconds = 0.0
        self.peak_allocated_bytes = 0
        self.pieces: list[CUDAGraphWrapper] = []
        self.full: CUDAGraphWrapper | None = None
        self._options = options
        self._turn = threading.RLock()
        self.check_arguments = self.model_inputs.checker()
        self._shapes: dict[int, dict[str, tuple[int, ...]]] = {}
        self._output_dims: dict[str, tuple[int, ...]] = {}
        self._numbers: dict[int, dict[str, Any]] = {}
        self._uncuttable = ""
        self._fixed: Callable[..., Any] | None = None
        self._fixed_count = 0
        self.plans = ReplayPlans(self)
        self.debugging: Debugging | None = None
        self.run_module: Callable[..., Any] = self._wrap()
        self.run: Callable[..., Any] = self._planned(self.run_module)
        if self.debugging is not None:  # piece by piece, and each plan beside it
            self.run = self.debugging.around(self.run_module)
        _alive.add(self)
        marks.register(self)

    # --- wrapping --------------------------------------------------------------------------------

    def _wrap(self) -> Callable[..., Any]:
        """The model's callable with PIECEWISE wrappers inside and a FULL one around, as the mode wants."""
        piecewise = self.mode.has_mode(CUDAGraphMode.PIECEWISE)
        self._execute = self.compiled.stitch(self._wrap_piece if piecewise else None)
        if self._options.debug:
            self.debugging = Debugging(self, self._execute)
            self._execute = self.debugging.steps.execute
            self.check_arguments = self.debugging.checking(self.check_arguments)
        run = self._choosing(self.compiled.bind(self._execute))
        if self.mode.has_mode(CUDAGraphMode.FULL):
            options = self._with(weak_ref_output=True, check_metadata=True)
            self.full = CUDAGraphWrapper(
                run, CUDAGraphMode.FULL, self.platform, self.pool,
                name=self.compiled.model_name, lock=self.lock, options=options,
            )  # fmt: skip
            run = self.full
        return run

    def _planned(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        """``usual``, and PIECEWISE steps by their plans: what a step costs on the host is this closure and its calls.

        Everything was decided at capture. What is left is to see that this is the step that was laid out: one key
        looked up, one tuple compared (:mod:`cgkit.capturing.plan_reader`).
        """
        current, piecewise, full_mode = forward_context._current, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
        plans, find = self.plans, self.plans.ready.get
        gradients_on, no_grad = torch.is_grad_enabled, torch.no_grad
        full_call = self.full.call if self.full is not None else usual

        def run(*args: Any, **kwargs: Any) -> Any:
            context = current.context
            mode = context.cudagraph_runtime_mode if context is not None else None
            if mode is not piecewise:
                return full_call(*args) if mode is full_mode and not kwargs else usual(*args, **kwargs)
            assert context is not None
            found = find(context.batch_descriptor)
            if found is not None:
                read, choices, _ = found
                try:
                    now = read(args, kwargs, context.attn_metadata)
                except BUILT_OTHERWISE:
                    choices = ()
                for recorded, calls, result in choices:
                    if now == recorded:
                        if gradients_on():
                            with no_grad():
                                for call in calls:
                                    call()
                        else:
                            for call in calls:
                                call()
                        return result
            if plans.active:
                plans.pass_over(context.batch_descriptor, args, kwargs, context.attn_metadata)
            return usual(*args, **kwargs)

        return run

    def _choosing(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        """``usual``, and from :meth:`fix_weights` on the shorter way for steps that replay."""
        current, none = forward_context._current, CUDAGraphMode.NONE

        def run(*args: Any, **kwargs: Any) -> Any:
            context, fixed = current.context, self._fixed
            if (
                fixed is None
                or kwargs
                or context is None
                or context.cudagraph_runtime_mode is none
                or len(args) != self._fixed_count
            ):
                return usual(*args, **kwargs)
            return fixed(*args)

        return run

    def fix_weights(self) -> None:
        """From now on replaying steps fetch no weights: the graphs read those of the recording anyway."""
        traced = self.compiled.split.traced
        if traced is None or self.inputs is None:
            return
        args, kwargs = self.inputs.at(self.inputs.largest)
        if not kwargs:
            self._fixed, self._fixed_count = traced.bind_fixed(self._execute, args), len(args)

    def _wrap_piece(self, backend: PiecewiseBackend) -> Callable[..., Any]:
        names = backend.piece.input_names
        options = self._with(
            weak_ref_output=backend.is_last_graph,
            checked=self.model_inputs.activations(names),
            arg_names=tuple(names),
        )
        wrapper = CUDAGraphWrapper(
            backend, CUDAGraphMode.PIECEWISE, self.platform, self.pool,
            name=backend.name, lock=self.lock, options=options,
        )  # fmt: skip
        self.pieces.append(wrapper)
        return wrapper.call

    def _with(self, **changes: Any) -> CUDAGraphOptions:
        return replace(self._options, **changes)

    @property
    def wrappers(self) -> list[CUDAGraphWrapper]:
        """All wrappers: those of the pieces, then the one around them."""
        return [*self.pieces, *([self.full] if self.full else [])]

    # --- calling ---------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model on arguments of any size; see the class.

        The attention metadata, and whether the batch is uniform decode, are taken from the forward
        context around the call, if there is one. What padded rows compute is cut off; a model whose
        operators mix rows must mask them through that metadata.

        Raises:
            ReplayError: the arguments do not fit what was recorded, or the graphs were freed.
            MovedInputError: without ``cudagraph_copy_inputs``, a buffer is not where it was.
        """
        if self.inputs is None:
            return self.run(*args, **kwargs)
        args, kwargs = self.model_inputs.canonical(args, kwargs)
        self.check_arguments(args, kwargs)
        tensors = self.inputs.tensors(args, kwargs)
        num_tokens = self.inputs.num_tokens(args, kwargs)
        outer = current_forward_context()
        metadata, described = (outer.attn_metadata, outer.batch_descriptor) if outer else (None, None)
        uniform = described is not None and described.uniform_decode
        mode, key, padded = self.dispatcher.route(num_tokens, uniform)
        with self._turn, torch.no_grad():
            if key is None:
                if num_tokens > self.sizes.largest:
                    self.dispatcher.warn_off_ladder(num_tokens, "a call")
                self.inputs.check_static(tensors)
                with set_forward_context(metadata):
                    return self.run(*args, **kwargs)
            if self.inputs.copy_inputs:
                args, kwargs = self.inputs.fill(padded, tensors)
            elif padded != num_tokens:
                raise ReplayError(
                    f"{num_tokens} tokens are no recorded size ({padded} is the next), and with "
                    "cudagraph_copy_inputs=False cgkit has no buffers to pad in: pass your own "
                    f"buffers' first {padded} rows, or leave cudagraph_copy_inputs on"
                )
            with set_forward_context(metadata, cudagraph_runtime_mode=mode, batch_descriptor=key):
                output = self.run(*args, **kwargs)
            if self.inputs.written:
                self.inputs.write_back(padded, tensors)
            return self._cut(output, num_tokens, padded)

    def _cut(self, output: Any, num_tokens: int, padded: int) -> Any:
        """The outputs without their padded rows, copied out of the graphs' memory if wanted."""
        into = {}
        if num_tokens < padded and self._uncuttable:
            raise ReplayError(
                f"{num_tokens} tokens were padded to {padded}, and {self._uncuttable}: what belongs to the padding "
                "cannot be told from the rest. Return what has a row a token, record this very size, or call "
                "`run` and cut the output yourself"
            )
        for path, tensor in tensor_leaves(output, "output"):
            cut = tensor
            if num_tokens < padded:
                for dim in self._dims_at(path, tensor, padded):
                    cut = cut.narrow(dim, 0, num_tokens)
            into[id(tensor)] = cut.clone() if self.clone_outputs else cut
        return replace_tensors(output, into)

    def _dims_at(self, path: str, tensor: torch.Tensor, padded: int) -> tuple[int, ...]:
        if self._output_dims:
            return self._output_dims.get(path, ())
        return tuple(dim for dim, size in enumerate(tensor.shape) if size == padded)[:1]

    def note_output(self, num_tokens: int, output: Any) -> None:
        """Learns from one size's output; two sizes tell which dimensions follow the token count.

        With one size only, the first dimension of that size is taken for it.
        """
        self._shapes[num_tokens] = {
            path: tuple(tensor.shape) for path, tensor in tensor_leaves(output, "output")
        }
        self._numbers[num_tokens] = dict(number_leaves(output, "output"))
        if len(self._shapes) > 1:
            self._uncuttable = self._find_uncuttable()
            self._output_dims = {
                path: tuple(
                    dim
                    for dim in range(len(shape))
                    if all(dim < len(s.get(path, ())) and s[path][dim] == n for n, s in self._shapes.items())
                )
                for path, shape in self._shapes[num_tokens].items()
            }

    def _find_uncuttable(self) -> str:
        """The output that changes with the token count otherwise than by having a row a token, or ""."""
        m = next(reversed(self._shapes))
        for n in self._shapes:  # every size: what is rounded up is alike for two that lie close together
            if n != m and (found := self._differs_from(n, m)):
                return found
        return ""

    def _differs_from(self, n: int, m: int) -> str:
        """The output that is another for ``n`` tokens than for ``m``, but for its rows, or ""."""
        for path, shape in self._shapes[n].items():
            for dim, (a, b) in enumerate(zip(shape, self._shapes[m].get(path, ()))):
                if a != b and (a, b) != (n, m):
                    return f"dimension {dim} of {path} is {a} for {n} tokens and {b} for {m}"
        for path, number in self._numbers[n].items():
            now = self._numbers[m].get(path)
            if now != number:
                return f"{path} is the number {number} for {n} tokens and {now} for {m}"
        return ""

    # --- checking --------------------------------------------------------------------------------

    def open_ledger(self) -> None:
        """Notes where the weights lie, before anything is recorded."""
        self.weights = WeightLedger(self._find_weights)

    def _find_weights(self) -> list[tuple[str, torch.Tensor]]:
        if self.inputs is None:
            return []
        args, kwargs = self.inputs.at(self.inputs.largest)
        return self.model_inputs.weights(args, kwargs)

    def check_weights(self) -> None:
        """Raises MovedInputError if a weight is no longer where the graphs read it."""
        if self.weights is not None:
            self.weights.check(f"{self.compiled.model_name}, weights of the recorded graphs")

    # --- marking ---------------------------------------------------------------------------------

    def put_marks(self, marker: marks.Marker, undo: ExitStack) -> None:
        """Marks what a call copies in and out; the wrappers mark their replays. See :mod:`cgkit.marks`."""
        facts: dict[str, Any] = {"model": self.compiled.model_name, "emulated": self.platform.emulated}
        if (inputs := self.inputs) is not None:
            marks.swap_attribute(inputs, "fill", marker.function(inputs.fill, "copy_inputs", **facts), undo)
            back = marker.function(inputs.write_back, "copy_outputs", **facts)
            marks.swap_attribute(inputs, "write_back", back, undo)
        marks.swap_attribute(self, "_cut", marker.function(self._cut, "copy_outputs", **facts), undo)

    # --- ending ----------------------------------------------------------------------------------

    def free(self) -> None:
        """Drops the graphs and gives the pool back (one that was handed in stays with its owner).

        Calls raise afterwards; the compiled model works on.
        """
        for wrapper in self.wrappers:
            wrapper.clear()
        self.dispatcher.clear()
        self.plans.clear()
        if self.debugging is not None:
            self.debugging.clear()
        self.inputs = self.weights = self._fixed = None
        if self._own_pool:
            self.platform.free(self.pool)
        self.run = self.run_module = _freed(self.compiled.model_name)
        _alive.discard(self)

    # --- showing ---------------------------------------------------------------------------------

    @property
    def ledgers(self) -> Ledgers:
        """What is noted for free: addresses, dispatch decisions, modes, and what came after the lock."""
        return Ledgers(self)

    @property
    def num_graphs(self) -> int:
        """How many graphs are recorded."""
        return sum(len(wrapper.entries) for wrapper in self.wrappers)

    @property
    def pool_bytes(self) -> PoolBytes:
        """What the pool takes now."""
        return self.platform.pool_bytes(self.pool)

    def to_frame(self) -> Any:
        """A row a graph: name, mode, num_tokens, uniform_decode, nodes, checked_inputs, seconds,
        pool_growth_bytes, emulated."""
        import pandas as pd

        rows = [wrapper.row(entry) for wrapper in self.wrappers for entry in wrapper.entries.values()]
        return pd.DataFrame(rows)

    def __repr__(self) -> str:
        kind = "emulated" if self.platform.emulated else self.platform.name
        lines = [
            f"CapturedGraphs of {self.compiled.model_name}: {self.num_graphs} {kind} graphs in mode "
            f"{self.mode.name}, recorded in {self.seconds:.2f} s",
            f"  {self.sizes!r}",
        ]
        if self.num_graphs:
            pool = self.pool_bytes
            lines.append(f"  one pool: {pool.reserved:,} bytes reserved, {pool.allocated:,} allocated")
        if self.plans.rows:
            lines += [f"  {line}" for line in repr(self.plans).splitlines()]
        return "\n".join(lines)


def _freed(model: str) -> Callable[..., Any]:
    def raise_freed(*args: Any, **kwargs: Any) -> Any:
        raise ReplayError(f"the graphs of {model} were freed: capture again")

    return raise_freed


def free_all() -> int:
    """Frees every :class:`CapturedGraphs` that is alive; returns how many there were."""
    captured = list(_alive)
    for each in captured:
        each.free()
    return len(captured)


def device_of(compiled: CompiledGraph) -> torch.device:
    """Where the compiled model lies.

    Raises:
        CaptureError: it has no tensor input at all, so there is nothing to record.
    """
    device = ModelInputs(compiled).device
    if device is None:
        raise CaptureError("the graph has no tensor among its inputs: there is nothing to record")
    return device
