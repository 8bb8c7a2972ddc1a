"""``predict_pool(compiled, sizes)``: how large the graphs' pool will be, before anything is captured.

Implements what the article's "显存账：CUDA Graph 的池化与每档成本" (the memory bill: pooling and what each
size costs) asks for. vLLM captures two graphs and extrapolates, and gets it wrong often enough to crash (its
issues 19186, 49224, 57475). Here every recording is gone through without a device: each piece's own
allocations come from the code that the compiler generated (:mod:`cgkit.measuring.piece_tape`), the
lifetimes between pieces from the very stitching code that will run, and the pool from a model of the
allocator (:mod:`cgkit.measuring.caching_allocator`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from cgkit import torch_hooks
from cgkit.capturing.captured import device_of
from cgkit.capturing.dispatcher import CudagraphDispatcher
from cgkit.capturing.sizes import CaptureSizes
from cgkit.config import CUDAGraphMode
from cgkit.display import Shown
from cgkit.errors import ConfigError
from cgkit.measuring.caching_allocator import (
    CUDA_RULES,
    EMULATED_RULES,
    AllocatorRules,
    PoolsApart,
    PoolSimulator,
)
from cgkit.measuring.piece_tape import OutputSpec, PieceTape, StorageWatch, arguments_at, walk_piece

if TYPE_CHECKING:
    from cgkit.compiling import CompiledGraph, PiecewiseBackend

#: What lies outside of every pool, and why a device has less free memory than the pool explains.
NOT_IN_THE_POOL = (
    "executable graphs (kernel parameters and launch buffers: the driver's memory, outside of torch's allocator)",
    "workspaces of cuBLAS: taken by the warm-ups on the capture stream, before the first recording",
    "the static input buffers, made before the first recording",
    "modules of kernels that are loaded at their first use",
)


def predict_pool(
    compiled: CompiledGraph,
    sizes: CaptureSizes | Sequence[int] | str | None = None,
    *,
    mode: CUDAGraphMode | str | None = None,
    allocator: AllocatorRules | str | None = None,
    largest_first: bool = True,
    weak_outputs: bool = True,
    uniform_sizes: Sequence[int] | None = None,
    shared: bool = True,
) -> PoolPrediction:
    """What :func:`cgkit.capture` with the same arguments would reserve and allocate in its pool.

    Nothing is captured and no device memory is touched. All arguments but these are as for ``capture``:

    Args:
        allocator: ``"cuda"`` or ``"emulated"`` (or rules of your own); None: that of the platform on
            which ``compiled`` would be captured. ``"cuda"`` for a model on the CPU answers for the code that
            Inductor generated for the CPU, whose buffers are not quite those of the GPU's; the result says so.
        largest_first: record from large to small, as ``capture`` does. False: the other way round.
        shared: one pool for all, as ``capture`` has it. False: a pool for each piece (and one for whole steps), to see
            what sharing saves.

    Raises:
        ConfigError: the mode records nothing, or ``allocator`` is unknown.
        CompileError: a piece cannot be run on fake tensors.
    """
    device = device_of(compiled)
    resolved = CaptureSizes.resolve(compiled.config, sizes)
    chosen = compiled.config.mode if mode is None else CUDAGraphMode.parse(mode, "mode")
    if not chosen:
        raise ConfigError("cudagraph_mode is NONE: nothing would be recorded, so there is no pool to predict")
    rules = _rules(allocator, device)
    plan = CudagraphDispatcher(chosen, resolved).planned_keys(
        uniform_sizes=uniform_sizes, largest_first=largest_first
    )
    run = _Prediction(compiled, device.type, rules, weak_outputs, shared)
    for step_mode, key in plan:
        run.record(step_mode, key.num_tokens, key.uniform_decode)
    return PoolPrediction(
        compiled.model_name, chosen.name, resolved.sizes, device.type, rules, largest_first, run
    )


def step_peak_bytes(compiled: CompiledGraph, num_tokens: int) -> int:
    """The most bytes that one compiled step of ``num_tokens`` has allocated at once: its activations, without
    inputs and weights, in blocks of 512 bytes. What splitting operators allocate inside themselves is not seen.

    Raises:
        CompileError: a piece cannot be run on fake tensors.
    """
    rules = AllocatorRules("bytes", 512, 0, 0, 0, 0, 512, 0)
    run = _Prediction(compiled, device_of(compiled).type, rules, weak_outputs=True)
    run.record(CUDAGraphMode.FULL, num_tokens, False)
    return run.rows[-1]["peak_allocated_bytes"]


def _rules(allocator: AllocatorRules | str | None, device: torch.device) -> AllocatorRules:
    if isinstance(allocator, AllocatorRules):
        return allocator
    name = allocator or ("cuda" if device.type == "cuda" else "emulated")
    known = {"cuda": CUDA_RULES, "emulated": EMULATED_RULES}
    if name not in known:
        raise ConfigError(f"allocator={allocator!r} is unknown; use 'cuda', 'emulated', or AllocatorRules")
    return known[name]


class _Prediction:
    """Goes through the recordings one after the other, on one simulated pool."""

    def __init__(
        self,
        compiled: CompiledGraph,
        device: str,
        rules: AllocatorRules,
        weak_outputs: bool,
        shared: bool = True,
    ) -> None:
        self.compiled, self.device, self.weak_outputs = compiled, device, weak_outputs
        self.outputs_only = rules is EMULATED_RULES
        self.pool: PoolSimulator | PoolsApart = PoolSimulator(rules) if shared else PoolsApart(rules)
        self.rows: list[dict[str, Any]] = []
        self.kept: list[Any] = []
        self.fullest = self.pool.to_frame()
        self._most = -1
        self.tapes: dict[tuple[str, int, int], PieceTape] = {}

    def record(self, mode: CUDAGraphMode, num_tokens: int, uniform: bool) -> None:
        """One step in which each piece (PIECEWISE), or the whole (FULL), is recorded."""
        compiled, pool = self.compiled, self.pool
        inputs, fake_mode = arguments_at(
            compiled.split.example_inputs or (), num_tokens, f"{compiled.model_name} at {num_tokens} tokens"
        )
        watch = StorageWatch(self.device, pool.alloc, pool.free, inputs)
        row = {"mode": mode.name, "num_tokens": num_tokens, "uniform_decode": uniform}
        backends = iter(compiled.backends)
        calls: list[Callable[..., Any]] = []
        for piece in compiled.split.pieces:
            if not piece.is_splitting:
                calls.append(self._piece(next(backends), watch, row, mode is CUDAGraphMode.PIECEWISE))
            elif mode is CUDAGraphMode.FULL:
                calls.append(_watched(piece.graph_module, watch))
            else:  # runs eagerly between the recordings: what it allocates lies in no pool
                calls.append(piece.graph_module)
        execute = compiled.split.stitch(calls, inline_splitting=False)
        with torch_hooks.running_fake(fake_mode):
            before = self._before() if mode is CUDAGraphMode.FULL else None
            result = execute(*inputs)
            if before is not None:
                self._note({**row, "name": compiled.model_name, **before})
            if not self.weak_outputs:
                self.kept.append((result, watch))
        del result
        watch.sweep()

    def _piece(
        self, backend: PiecewiseBackend, watch: StorageWatch, row: dict[str, Any], alone: bool
    ) -> Callable[..., Any]:
        def call(*args: Any) -> Sequence[Any]:
            watch.sweep()
            if isinstance(self.pool, PoolsApart):
                self.pool.use(backend.name if alone else "")
            before = self._before() if alone else None
            tape = self._tape(backend, row["num_tokens"])
            outputs = _play(tape, args, self.pool, watch)
            if before is not None:
                self._note({**row, "name": backend.name, "found_in": tape.source, **before})
            if not self.weak_outputs and alone:
                self.kept.append((outputs, watch))
            elif backend.is_last_graph and alone:
                return _let_go(outputs, watch)
            return outputs

        return call

    def _tape(self, backend: PiecewiseBackend, num_tokens: int) -> PieceTape:
        """Equal pieces have equal tapes, unless what they are given shares memory."""
        aliased = bool(backend.call.written_together)
        key = (backend.general.key.digest, num_tokens, id(backend) if aliased else 0)
        if key not in self.tapes:
            self.tapes[key] = walk_piece(backend, num_tokens, self.device, self.outputs_only)
        return self.tapes[key]

    def _before(self) -> dict[str, int]:
        self.pool.reset_peak()
        return {"reserved_before_bytes": self.pool.reserved, "allocated_before_bytes": self.pool.allocated}

    def _note(self, row: dict[str, Any]) -> None:
        row["reserved_after_bytes"] = self.pool.reserved
        row["allocated_after_bytes"] = self.pool.allocated
        row["peak_allocated_bytes"] = self.pool.peak_allocated
        self.rows.append(row)
        if self.pool.allocated > self._most:
            self._most, self.fullest = self.pool.allocated, self.pool.to_frame()


def _watched(graph_module: Callable[..., Any], watch: StorageWatch) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with watch:
            return graph_module(*args)

    return call


def _play(
    tape: PieceTape, args: Sequence[Any], pool: PoolSimulator | PoolsApart, watch: StorageWatch
) -> Sequence[Any]:
    """Does to ``pool`` what the tape holds; outputs are new fakes on the blocks that stay."""
    numbers: dict[int, int] = {}
    for block, nbytes in tape.events:
        if nbytes >= 0:
            numbers[block] = pool.alloc(nbytes)
        else:
            pool.free(numbers.pop(block))
    bases: dict[int, torch.Tensor] = {}
    outputs: list[Any] = []
    for spec in tape.outputs:
        if not isinstance(spec, OutputSpec):
            outputs.append(spec)
            continue
        if spec.block >= 0 and spec.block not in bases:
            length = -(-tape.sizes[spec.block] // spec.dtype.itemsize)
            bases[spec.block] = torch.empty(length, dtype=spec.dtype, device=spec.device)
            watch.adopt(bases[spec.block], numbers.pop(spec.block))
        base = bases[spec.block] if spec.block >= 0 else args[-1 - spec.block]
        base = base if base.dtype == spec.dtype else base.view(spec.dtype)
        outputs.append(torch.as_strided(base, spec.size, spec.stride, spec.offset))
    for number in numbers.values():  # blocks that the code left alive and returned nothing of
        pool.free(number)
    return tuple(outputs)


def _let_go(outputs: Sequence[Any], watch: StorageWatch) -> Sequence[Any]:
    """What the last piece returns is weak: its memory is free for the next recording at once."""
    for output in outputs:
        if isinstance(output, torch.Tensor):
            entry = watch.live.pop(torch_hooks.storage_key(output), None)
            if entry is not None:
                watch._ended(entry[1])
    return outputs


class PoolPrediction(Shown):
    """What a capture would take, recording by recording; made by :func:`predict_pool`.

    Attributes:
        model, mode, sizes, device, rules, largest_first: what was asked.
        reserved_bytes, peak_allocated_bytes: of the pool, once all is recorded, and the most at once.
        notes: what makes the figures less certain (code that could not be walked, another device's code).
    """

    def __init__(
        self,
        model: str,
        mode: str,
        sizes: Sequence[int],
        device: str,
        rules: AllocatorRules,
        largest_first: bool,
        run: _Prediction,
    ) -> None:
        self.model, self.mode, self.sizes, self.device = model, mode, tuple(sizes), device
        self.rules, self.largest_first = rules, largest_first
        self.reserved_bytes = run.pool.reserved
        self.allocated_after_bytes = run.pool.allocated
        self.peak_allocated_bytes = max((row["peak_allocated_bytes"] for row in run.rows), default=0)
        self._rows = run.rows
        self._segments = run.fullest
        self.notes = list(dict.fromkeys(tape.note for tape in run.tapes.values() if tape.note))
        settings = [
            name for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF") if os.environ.get(name)
        ]
        if rules is CUDA_RULES and settings:
            self.notes.append(
                f"{settings[0]}={os.environ[settings[0]]} changes the allocator, which is not modelled"
            )
        if rules is CUDA_RULES and device != "cuda":
            self.notes.append(
                f"the code walked was generated for {device}: on a GPU Inductor fuses otherwise, so its buffers differ"
            )
        if "FULL" in mode:
            self.notes.append(
                "what splitting operators allocate inside themselves is not seen (only their outputs)"
            )

    def to_frame(self) -> Any:
        """A row a recording, in order: ``name, mode, num_tokens, uniform_decode``, reserved and allocated bytes
        of the pool before and after it (with its outputs still owned), the peak inside it, and ``found_in``."""
        import pandas as pd

        columns = [
            "name",
            "mode",
            "num_tokens",
            "uniform_decode",
            "reserved_before_bytes",
            "reserved_after_bytes",
        ]
        columns += ["allocated_before_bytes", "allocated_after_bytes", "peak_allocated_bytes", "found_in"]
        return pd.DataFrame(self._rows, columns=columns)

    def segments(self) -> Any:
        """The pool's segments and blocks (:meth:`PoolSimulator.to_frame`) after the recording that leaves the most
        allocated."""
        return self._segments

    def plot_segments(self, about: Any = None, *, ax: Any = None) -> Any:
        """The segments, as :meth:`segments` gives them."""
        from cgkit.plotting.memory_charts import segments

        return segments(self._segments, about or self._about(), ax=ax)

    def _about(self) -> Any:
        from cgkit.plotting.style import About

        emulated = self.rules is EMULATED_RULES
        what = f"predicted, {self.rules.name}"
        return About(
            self.model, self.mode, f"{len(self.sizes)} sizes to {self.sizes[-1]} tokens", what, emulated
        )

    def compare(self, ledger: Any, after: Any = None) -> Any:
        """Predicted beside measured, a row a size and mode, with the reason of each difference.

        Args:
            ledger: of the capture that was predicted (:class:`cgkit.measuring.memory.Ledger`, or its frame).
            after: the pool's blocks after the capture, if known (``segments.pool_segments``): live blocks are
                then named in the reason.
        """
        from cgkit.measuring.pool_comparison import compare

        return compare(self.to_frame(), ledger.to_frame() if hasattr(ledger, "to_frame") else ledger, after)

    def plot(self, ledger: Any = None, about: Any = None, *, ax: Any = None) -> Any:
        """Predicted peak and reserved bytes by recording; with ``ledger`` the measured ones beside them."""
        from cgkit.plotting.memory_charts import prediction

        measured = ledger.to_frame() if hasattr(ledger, "to_frame") else ledger
        return prediction(self.to_frame(), measured, about or self._about(), ax=ax)

    def __repr__(self) -> str:
        order = "large to small" if self.largest_first else "small to large"
        sizes = f"{self.sizes[0]} to {self.sizes[-1]}" if len(self.sizes) > 1 else str(self.sizes[0])
        lines = [
            f"PoolPrediction of {self.model}: {len(self._rows)} recordings, mode {self.mode}, {len(self.sizes)} sizes "
            f"({sizes}, {order}), {self.rules.name}",
            f"  {self.reserved_bytes:,} bytes reserved at the end, {self.peak_allocated_bytes:,} allocated at most",
        ]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)
