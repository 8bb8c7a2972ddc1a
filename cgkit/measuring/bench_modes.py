"""``cgkit bench modes``: one decode step through every mode, on a GPU, in one process.

What is compared runs in turn (:mod:`cgkit.measuring.decode_bench`). Only
``torch.compile(mode="reduce-overhead")`` runs last and apart. Recording its graphs frees the
cuBLAS workspaces whose addresses hand-recorded graphs hold, so that their next replay would read memory
that is no longer theirs; the full graph is measured once more right before it, for the ratio.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from cgkit import events
from cgkit.config import CUDAGraphMode
from cgkit.errors import CaptureError
from cgkit.measuring.decode_bench import DecodeBench, Step, Times, busy_in_a_child, shape_of, timed
from cgkit.measuring.first_call import first_calls
from cgkit.measuring.hollow import empty_attention
from cgkit.measuring.tuning import add_tuning_arguments, tuned_fields
from cgkit.serving.llama import PRESETS

SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``cgkit bench modes``."""
    parser.add_argument("--shape", default="llama-3.2-1b", choices=sorted(PRESETS))
    parser.add_argument("--layers", type=int, default=None, help="fewer layers than the shape has")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--context", type=int, default=256, help="tokens in the KV cache of each request")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument(
        "--no-first-call",
        action="store_true",
        help="no cold and warm first call, each in a process of its own",
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: emulated, a dry run")
    add_tuning_arguments(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures; returns ``frame`` (a row a mode and batch), ``recording``, ``ratios`` and ``first_call``: seconds of a
    cold and a warm start, each in a process of its own (:mod:`cgkit.measuring.first_call`).

    Raises:
        CaptureError: no GPU, and ``--device cpu`` was not given.
    """
    if args.device == "cuda" and not torch.cuda.is_available():
        raise CaptureError("cgkit bench modes measures a GPU, and there is none; --device cpu is a dry run")
    first: dict[str, Any] = {}
    if not args.no_first_call:
        asked = {"device": args.device, "layers": args.layers, "context": args.context}
        first = first_calls([args.shape], **asked)[args.shape]
    with torch.no_grad():
        busy: dict[tuple[str, int], dict[str, Any]] = {}
        if args.device == "cuda":
            found = busy_in_a_child(
                shape_of(args.shape, args.layers),
                args.batches,
                context=args.context,
                compilation=_tuning(args),
            )
            busy = {(row["mode"], row["batch"]): row for row in found}
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
        "first_call": first,
        "tuned": args.tuned,
        "inductor": dict(bench.runner.config.inductor_compile_config),
        "recording": recording,
        "ratios": _ratios(rows + last),
        "rows": rows + last,
        "frame": frame,
    }


def _tuning(args: argparse.Namespace) -> dict[str, Any]:
    return tuned_fields(args.tuned, args.batches, args.combo_kernels)


class _Bench(DecodeBench):
    """The model and its runner, with what only this benchmark asks of them."""

    def __init__(self, args: argparse.Namespace, busy: dict[tuple[str, int], dict[str, Any]]) -> None:
        sizes = [size for size in SIZES if size <= max(64, *args.batches)]
        shape = shape_of(args.shape, args.layers)
        super().__init__(
            shape,
            args.batches,
            device=args.device,
            context=args.context,
            sizes=sizes,
            compilation=_tuning(args),
        )
        self.args, self.busy = args, busy

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
                    "compile_s": compiled,  # here, where the compile cache may know the pieces already
                }
            )
        return rows

    # --- one batch -------------------------------------------------------------------------------

    def batch(self, batch: int) -> list[dict[str, Any]]:
        """All modes but reduce-overhead, in turn; then their host time with an empty attention."""
        pieces = sum(not piece.is_splitting for piece in self.executor.split.pieces)  # type: ignore[union-attr]
        rows = self._measure(batch, self.steps(batch), "in turn", hollow=True)
        for row in rows:
            row["pieces"] = pieces
            if self.busy:
                row.update(self.busy.get((row["mode"], batch), {}))
        return rows

    def full_again(self, batch: int) -> list[dict[str, Any]]:
        """The recorded modes once more, in turn with one another alone: as close to reduce-overhead in time as they
        may run, and without an eager step between them, in which the GPU idles and slows down."""
        steps = self.steps(batch)
        both = {mode: steps[mode] for mode in ("PIECEWISE", "FULL")}
        return self._measure(batch, both, "before reduce-overhead") if self.cuda else []

    def reduce_overhead(self, batch: int) -> list[dict[str, Any]]:
        """``torch.compile(mode="reduce-overhead")`` with the same attention inside; nothing runs after it."""
        if not self.cuda:
            return []
        return self._measure(batch, {"reduce-overhead": self.reduce_overhead_step(batch)}, "last")

    def _measure(
        self, batch: int, steps: dict[str, Step], order: str, hollow: bool = False
    ) -> list[dict[str, Any]]:
        """Medians of each row; with ``hollow`` also of its host time with an attention that does nothing."""
        host = {name: Times() for name in steps if hollow and name != "eager"}

        def host_turns() -> None:
            captured = self.executor.captured
            with empty_attention(*([] if captured is None else [captured])):
                for name, times in host.items():
                    times.turn(steps[name], self.cuda)

        measured = timed(steps, self.args.repeats, self.cuda, host_turns if host else None)
        rows = []
        for name, times in measured.items():
            row: dict[str, Any] = {"mode": name, "batch": batch, "order": order, **times.row()}
            row["host_empty_attention_us"] = (
                statistics.median(host[name].cpu_s) * 1e6 if name in host else None
            )
            rows.append(row)
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
        if again := by.get(("PIECEWISE", "before reduce-overhead")):
            alone = by["FULL", "before reduce-overhead"]
            one["piecewise_over_full_alone"] = again["wall_ms"] / alone["wall_ms"]
        if last := by.get(("reduce-overhead", "last")):
            before = by["FULL", "before reduce-overhead"]
            one["full_over_reduce_overhead"] = before["wall_ms"] / last["wall_ms"]
        found.append(one)
    return found
