"""``cgkit bench modes``: one decode step through every mode, on a GPU, in one process.

What is compared runs in turn, over and over, because a machine's speed drifts. A turn is a few steps
of one row, the first of which do not count: a server repeats one graph step after step, and the first
replay after another row finds the host's caches cold. Only
``torch.compile(mode="reduce-overhead")`` runs last and apart. Recording its graphs frees the
cuBLAS workspaces whose addresses hand-recorded graphs hold, so that their next replay would read memory
that is no longer theirs; the full graph is measured once more right before it, for the ratio.

All rows have the same weights, the same attention operator and the same KV cache.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from cgkit import events
from cgkit.config import CompilationConfig, CUDAGraphMode
from cgkit.errors import CaptureError
from cgkit.forward_context import BatchDescriptor, set_forward_context
from cgkit.serving.llama import PRESETS
from cgkit.serving.request import Request, Scheduled
from cgkit.serving.runner import Runner
from cgkit.serving.weights import build_model, random_weights
from cgkit.splitting import register_op, registered_ops

Step = Callable[[], Any]
#: One turn of a row: steps that do not count, then steps that do.
UNCOUNTED, COUNTED = 2, 8
SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
ATTENTION = "cgkit::unified_attention_with_output"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``cgkit bench modes``."""
    parser.add_argument("--shape", default="llama-3.2-1b", choices=sorted(PRESETS))
    parser.add_argument("--layers", type=int, default=None, help="fewer layers than the shape has")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--context", type=int, default=256, help="tokens in the KV cache of each request")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--busy-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: emulated, a dry run")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures; returns ``frame`` (a row a mode and batch), ``recording`` and ``ratios``.

    Raises:
        CaptureError: no GPU, and ``--device cpu`` was not given.
    """
    if args.device == "cuda" and not torch.cuda.is_available():
        raise CaptureError("cgkit bench modes measures a GPU, and there is none; --device cpu is a dry run")
    with torch.no_grad():
        busy = busy_in_a_child(args) if args.device == "cuda" else {}
        bench = _Bench(args, busy)
        recording = bench.recording()
        rows = [row for batch in args.batches for row in bench.batch(batch)]
        last = [row for batch in args.batches for row in bench.full_again(batch)]
        last += [row for batch in args.batches for row in bench.reduce_overhead(batch)]
    import pandas as pd

    frame = pd.DataFrame(rows + last)
    return {
        "shape": args.shape,
        "device": bench.device_name,
        "emulated": args.device == "cpu",
        "context_tokens": args.context,
        "recording": recording,
        "ratios": _ratios(rows + last),
        "rows": rows + last,
        "frame": frame,
    }


class _Bench:
    """One model and one runner that holds the piecewise and the full graphs of every size."""

    def __init__(self, args: argparse.Namespace, busy: dict[tuple[str, int], dict[str, Any]]) -> None:
        self.busy = busy
        self.args, self.cuda = args, args.device == "cuda"
        self.device_name = torch.cuda.get_device_name() if self.cuda else "cpu (emulated)"
        shape = PRESETS[args.shape]
        shape = shape.scaled(num_hidden_layers=args.layers) if args.layers else shape
        dtype = torch.bfloat16 if self.cuda else torch.float32
        weights = random_weights(shape, dtype, args.device)
        model = build_model(shape, weights, dtype=dtype, device=args.device)
        config = CompilationConfig(
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
            cudagraph_capture_sizes=tuple(s for s in SIZES if s <= max(64, *args.batches)),
        )
        length = args.context + 64
        self.runner = Runner(
            model,
            config=config,
            max_num_seqs=max(64, *args.batches),
            max_model_len=length,
            kv_cache_tokens=max(args.batches) * (length + 16),
        )
        self.model = model
        self.executor = self.runner.executor

    def recording(self) -> list[dict[str, Any]]:
        """Records PIECEWISE alone, then both modes: seconds, graphs and bytes of the shared pool."""
        started = time.perf_counter()
        self.executor.compile(self.runner.inputs)
        compiled = time.perf_counter() - started
        rows, mode = [], self.executor.mode
        for each in (CUDAGraphMode.PIECEWISE, mode, CUDAGraphMode.PIECEWISE, mode):
            self.executor.release()
            gc.collect()
            self.executor.mode = each
            before = torch.cuda.mem_get_info()[0] if self.cuda else 0
            with events.record(events.GraphCaptured) as log:
                self.runner.capture_model()
            captured = self.executor.captured
            assert captured is not None
            rows.append(
                {
                    "mode": each.name,
                    "graphs": captured.num_graphs,
                    "sizes": len(captured.sizes),
                    "total_s": captured.seconds,
                    "recording_s": sum(event.seconds for event in log),  # type: ignore[attr-defined]
                    "pool_reserved_mib": captured.pool_bytes.reserved / 2**20,
                    "driver_mib": (before - torch.cuda.mem_get_info()[0]) / 2**20 if self.cuda else 0.0,
                    "first_call_s": compiled,
                }
            )
        return rows

    # --- one batch -------------------------------------------------------------------------------

    def _prepared(self, batch: int) -> Any:
        """Fills the buffers once: ``batch`` requests, each with one new token after ``context`` others."""
        runner, length = self.runner, self.args.context
        blocks_each = -(-(length + 1) // runner.kv_cache.block_size)
        scheduled = []
        for index in range(batch):
            start = 1 + index * blocks_each
            blocks = list(range(start, start + blocks_each))
            request = Request([1] * (length + 1), 2, blocks=blocks, num_computed=length)
            scheduled.append(Scheduled(request, 1))
        return runner.inputs.fill(scheduled, batch, decode_only=True)

    def _steps(self, batch: int) -> dict[str, Step]:
        metadata, inputs, forward = self._prepared(batch), self.runner.inputs, self.executor.forward
        ids, positions = inputs.input_ids[:batch], inputs.positions[:batch]
        model = self.model

        def eager() -> Any:
            with set_forward_context(metadata):
                return model(ids, positions)

        def routed(mode: CUDAGraphMode, key: BatchDescriptor | None) -> Step:
            def step() -> Any:
                with set_forward_context(metadata, cudagraph_runtime_mode=mode, batch_descriptor=key):
                    return forward(ids, positions)

            return step

        return {
            "eager": eager,
            "compiled": routed(CUDAGraphMode.NONE, None),
            "PIECEWISE": routed(CUDAGraphMode.PIECEWISE, BatchDescriptor(batch)),
            "FULL": routed(CUDAGraphMode.FULL, BatchDescriptor(batch, True)),
        }

    def batch(self, batch: int) -> list[dict[str, Any]]:
        """All modes but reduce-overhead, in turn; then their host time with an empty attention."""
        pieces = sum(not piece.is_splitting for piece in self.executor.split.pieces)  # type: ignore[union-attr]
        rows = self._measure(batch, self._steps(batch), "in turn", hollow=True)
        for row in rows:
            row["pieces"] = pieces
            if self.busy:
                row.update(self.busy.get((row["mode"], batch), {}))
        return rows

    def full_again(self, batch: int) -> list[dict[str, Any]]:
        """The full graph once more, as close to reduce-overhead in time as it may run."""
        step = self._steps(batch)["FULL"]
        return self._measure(batch, {"FULL": step}, "before reduce-overhead") if self.cuda else []

    def reduce_overhead(self, batch: int) -> list[dict[str, Any]]:
        """``torch.compile(mode="reduce-overhead")`` with the same attention inside; nothing runs after it."""
        if not self.cuda:
            return []
        metadata, inputs = self._prepared(batch), self.runner.inputs
        ids, positions = inputs.input_ids[:batch], inputs.positions[:batch]
        compiled = torch.compile(self.model, mode="reduce-overhead", dynamic=False)

        def step() -> Any:
            with set_forward_context(metadata):
                return compiled(ids, positions)

        for _ in range(5):
            step()
        return self._measure(batch, {"reduce-overhead": step}, "last")

    def _measure(
        self, batch: int, steps: dict[str, Step], order: str, hollow: bool = False
    ) -> list[dict[str, Any]]:
        """Medians of each row; with ``hollow`` also of its host time with an attention that does nothing."""
        wall: dict[str, list[float]] = {name: [] for name in steps}
        cpu: dict[str, list[float]] = {name: [] for name in steps}
        host: dict[str, list[float]] = {name: [] for name in steps if hollow and name != "eager"}
        gc.collect()
        gc.disable()
        try:
            for _ in range(-(-self.args.repeats // COUNTED)):
                for name, step in steps.items():
                    self._turn(step, wall[name], cpu[name])
                with empty_attention():
                    for name, seconds in host.items():
                        self._turn(steps[name], [], seconds)
        finally:
            gc.enable()
        rows = []
        for name in steps:
            row = {"mode": name, "batch": batch, "order": order}
            row["wall_ms"] = statistics.median(wall[name]) * 1e3
            row["wall_p10_ms"] = sorted(wall[name])[len(wall[name]) // 10] * 1e3
            row["cpu_ms"] = statistics.median(cpu[name]) * 1e3
            row["host_empty_attention_us"] = statistics.median(host[name]) * 1e6 if name in host else None
            rows.append(row)
        return rows

    def _turn(self, step: Step, wall: list[float], cpu: list[float]) -> None:
        synchronize = torch.cuda.synchronize if self.cuda else (lambda: None)
        for index in range(UNCOUNTED + COUNTED):
            synchronize()
            started = time.perf_counter()
            step()
            returned = time.perf_counter()
            synchronize()
            if index >= UNCOUNTED:
                wall.append(time.perf_counter() - started)
                cpu.append(returned - started)


@contextmanager
def empty_attention() -> Iterator[None]:
    """The attention operator does nothing in the block: what is left is the host's own work."""
    known = registered_ops()[ATTENTION]

    def nothing(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        scale: float,
        layer_name: str,
    ) -> None:
        pass

    namespace, name = ATTENTION.split("::")
    register_op(name, nothing, known.mutates_args, namespace=namespace, dispatch_key=known.dispatch_key)
    try:
        yield
    finally:
        register_op(
            name, known.op_func, known.mutates_args, namespace=namespace, dispatch_key=known.dispatch_key
        )


def busy_in_a_child(args: argparse.Namespace) -> dict[tuple[str, int], dict[str, Any]]:
    """Kernels of a step and the sum of their times, from the profiler, by mode and batch.

    In a process of its own: once the profiler has run, every later graph launch of the process costs more.
    """
    command = [sys.executable, "-m", "cgkit.measuring.bench_modes", "--shape", args.shape, "--busy-only"]
    command += ["--context", str(args.context), "--batches", *map(str, args.batches)]
    command += ["--layers", str(args.layers)] if args.layers else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise CaptureError(
            f"the profiling child failed with exit status {done.returncode}; see its output above"
        )
    return {(row.pop("mode"), row.pop("batch")): row for row in json.loads(done.stdout.splitlines()[-1])}


def _busy(bench: _Bench) -> list[dict[str, Any]]:
    """What the child measures: the median of five profiled steps of each row."""
    from torch.profiler import ProfilerActivity, profile

    rows = []
    bench.executor.compile(bench.runner.inputs)
    bench.runner.capture_model()
    for batch in bench.args.batches:
        for name, step in bench._steps(batch).items():
            found = []
            for _ in range(6):
                with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
                    step()
                    torch.cuda.synchronize()
                kernels = [e for e in profiler.events() if str(e.device_type).endswith("CUDA")]
                found.append((sum(e.time_range.elapsed_us() for e in kernels), len(kernels)))
            busy, count = sorted(found[1:])[2]
            rows.append({"mode": name, "batch": batch, "gpu_busy_ms": busy / 1e3, "gpu_nodes": count})
    return rows


def _ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the table is for: a mode's wall time over another's, and host time a piece."""
    found = []
    for batch in dict.fromkeys(row["batch"] for row in rows):
        by = {(row["mode"], row["order"]): row for row in rows if row["batch"] == batch}
        full, piecewise = by["FULL", "in turn"], by["PIECEWISE", "in turn"]
        one = {
            "batch": batch,
            "piecewise_over_full": piecewise["wall_ms"] / full["wall_ms"],
            "host_us_a_piece": piecewise["host_empty_attention_us"] / piecewise["pieces"],
        }
        if last := by.get(("reduce-overhead", "last")):
            before = by["FULL", "before reduce-overhead"]
            one["full_over_reduce_overhead"] = before["wall_ms"] / last["wall_ms"]
        found.append(one)
    return found


def _child() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with torch.no_grad():
        print(json.dumps(_busy(_Bench(parser.parse_args(), {}))))


if __name__ == "__main__":
    _child()
