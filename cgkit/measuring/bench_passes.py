"""``cgkit bench passes``: an FP8 Llama with each graph pass off and on.

One process, one model; each variant traces and compiles it for itself, without any cache, and records one full
graph. Steps are timed in turn (:mod:`cgkit.measuring.decode_bench`); the profiler runs last, since it makes later
launches dearer. The article gives no figure for its passes; vLLM's blog
(2025-08-20) says up to 8 % for SiLU + quantisation.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cgkit import torch_hooks
from cgkit.compiling.cache.folder import turned_off
from cgkit.config import CompilationConfig, CUDAGraphMode
from cgkit.errors import CaptureError
from cgkit.forward_context import BatchDescriptor, set_forward_context
from cgkit.measuring.decode_bench import PROFILED, Step, shape_of, timed
from cgkit.serving.llama import PRESETS, Llama
from cgkit.serving.llama_fp8 import SCHEMES, quantize
from cgkit.serving.request import Request, Scheduled
from cgkit.serving.runner import Runner
from cgkit.serving.weights import build_model, random_weights

#: What is compared: name -> the passes.
VARIANTS: dict[str, tuple[str, ...]] = {
    "off": (),
    "noop": ("noop",),
    "norm": ("noop", "fuse_norm_quant"),
    "norm + act": ("noop", "fuse_norm_quant", "fuse_act_quant"),
    "norm, no noop": ("fuse_norm_quant",),
}
#: The same without a cut at attention, so that it can be fused as well.
WHOLE: dict[str, tuple[str, ...]] = {
    "whole, off": (),
    "whole, all": ("noop", "fuse_norm_quant", "fuse_act_quant", "fuse_attn_quant"),
}


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that ``passes`` and ``custom-ops`` share."""
    parser.add_argument("--shape", default="llama-3.2-1b", choices=sorted(PRESETS))
    parser.add_argument("--layers", type=int, default=None, help="fewer layers than the shape has")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--context", type=int, default=256, help="tokens in the KV cache of each request")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: emulated, a dry run")
    parser.add_argument("--csv", default=None, metavar="FILE", help="write the table there too")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``cgkit bench passes``."""
    add_common_arguments(parser)
    parser.add_argument("--scheme", default="static", choices=SCHEMES)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures; returns ``frame`` (a row a variant and batch: see :func:`measure`) and what it was measured on.

    Raises:
        CaptureError: no GPU, and ``--device cpu`` was not given.
    """
    configs = {name: {"passes": passes} for name, passes in VARIANTS.items()}
    configs |= {name: {"passes": passes, "splitting_ops": ()} for name, passes in WHOLE.items()}
    return measure(args, configs, scheme=args.scheme)


def measure(
    args: argparse.Namespace, configs: Mapping[str, Mapping[str, Any]], scheme: str | None
) -> dict[str, Any]:
    """One model under several configurations.

    Rows: ``variant``, ``batch``, ``wall_ms`` and ``cpu_ms`` (a step up to the last norm, one full graph), ``compile_s``
    (tracing included), ``generated_kernels`` (of all pieces), ``bytes_at_16_tokens`` (what Inductor's kernels read and
    write, by its own count, at the size of the traced example), matches by pass, ``max_difference`` to the first
    variant; on a GPU ``kernels_a_layer`` and ``gpu_busy_ms``.
    """
    if args.device == "cuda" and not torch.cuda.is_available():
        raise CaptureError("this measures a GPU, and there is none; --device cpu is a dry run")
    cuda = args.device == "cuda"
    shape = shape_of(args.shape, args.layers)
    dtype = torch.bfloat16 if cuda else torch.float32
    model = build_model(shape, random_weights(shape, dtype, args.device), dtype=dtype, device=args.device)
    if scheme is not None:
        model = quantize(model, scheme)
    with torch.no_grad(), turned_off():
        variants = [_Variant(name, model, args, dict(fields)) for name, fields in configs.items()]
        rows = _timed_rows(variants, args, cuda)
    import pandas as pd

    frame = pd.DataFrame(rows)
    if args.csv:
        frame.to_csv(args.csv, index=False)
    about = {
        "shape": shape.name,
        "layers": shape.num_hidden_layers,
        "scheme": scheme,
        "device": torch.cuda.get_device_name() if cuda else "cpu (emulated)",
        "emulated": not cuda,
        "torch": torch.__version__,
        "context_tokens": args.context,
    }
    return {**about, "rows": rows, "frame": frame}


class _Variant:
    """The model, compiled in one way and recorded."""

    def __init__(self, name: str, model: Llama, args: argparse.Namespace, fields: dict[str, Any]) -> None:
        self.name, self.args = name, args
        config = CompilationConfig(
            cudagraph_mode=CUDAGraphMode.FULL, cudagraph_capture_sizes=tuple(args.batches), **fields
        )
        length = args.context + 64
        self.runner = Runner(
            model,
            config=config,
            max_num_seqs=max(args.batches),
            max_model_len=length,
            kv_cache_tokens=max(args.batches) * (length + 16),
        )
        self.executor = self.runner.executor
        started = time.perf_counter()
        with torch_hooks.bytes_accessed() as moved:
            self.executor.compile(self.runner.inputs)
        self.compile_s = time.perf_counter() - started
        self.owned_bytes = moved()
        compiled = self.executor.compiled
        assert compiled is not None
        self.generated_kernels = sum(backend.general.kernels or 0 for backend in compiled.backends)
        frame = compiled.passes_frame()
        self.matched = dict(frame.groupby("pass")["matched"].sum()) if len(frame) else {}
        self.pieces, self.different = len(compiled.backends), compiled.num_unique
        device = model.lm_head.weight.device
        ids = torch.arange(4, device=device)
        with set_forward_context(None):
            self.hidden = compiled(ids, ids).to(torch.float32)
        self.runner.capture_model()

    def step(self, batch: int) -> Step:
        """One decode step of ``batch`` requests as the full graph."""
        runner, length = self.runner, self.args.context
        each = -(-(length + 1) // runner.kv_cache.block_size)
        scheduled = [
            Scheduled(
                Request(
                    [1] * (length + 1),
                    2,
                    blocks=list(range(1 + i * each, 1 + (i + 1) * each)),
                    num_computed=length,
                ),
                1,
            )
            for i in range(batch)
        ]
        metadata = runner.inputs.fill(scheduled, batch, decode_only=True)
        mode, key, _ = self.executor.route(batch, True)
        (ids, positions), forward = runner.inputs.front(batch), self.executor.forward
        key = key or BatchDescriptor(batch, True)

        def step() -> Any:
            with set_forward_context(metadata, cudagraph_runtime_mode=mode, batch_descriptor=key):
                return forward(ids, positions)

        return step

    def row(self, first: _Variant) -> dict[str, Any]:
        """What was learnt while compiling."""
        return {
            "compile_s": self.compile_s,
            "pieces": self.pieces,
            "different": self.different,
            "generated_kernels": self.generated_kernels,
            "bytes_at_16_tokens": self.owned_bytes,
            "max_difference": float((self.hidden - first.hidden).abs().max()),
            **{f"matched_{name}": int(count) for name, count in self.matched.items()},
        }


def _timed_rows(variants: Sequence[_Variant], args: argparse.Namespace, cuda: bool) -> list[dict[str, Any]]:
    rows, layers = [], variants[0].runner.model.config.num_hidden_layers
    for batch in args.batches:
        steps = {variant.name: variant.step(batch) for variant in variants}
        measured = timed(steps, args.repeats, cuda)
        for variant in variants:
            row: dict[str, Any] = {"variant": variant.name, "batch": batch, **measured[variant.name].row()}
            rows.append({**row, **variant.row(variants[0])})
    if cuda:
        busy = {
            (variant.name, batch): _busy(variant.step(batch), layers)
            for variant in variants
            for batch in args.batches
        }
        for row in rows:
            row.update(busy[row["variant"], row["batch"]])
    return rows


def _busy(step: Step, layers: int) -> dict[str, float]:
    """Kernels a layer (those outside of layers spread over them) and busy time of a step, from a profile."""
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        for _ in range(PROFILED):
            step()
            torch.cuda.synchronize()
    kernels = [event for event in profiler.events() if str(event.device_type).endswith("CUDA")]
    ms = sum(event.time_range.elapsed_us() for event in kernels) / PROFILED / 1e3
    return {"gpu_busy_ms": ms, "kernels_a_layer": len(kernels) / PROFILED / layers}
