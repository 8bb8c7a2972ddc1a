"""``cgkit bench passes``: an FP8 Llama with each graph pass off and on.

One process, one model; each variant traces and compiles it for itself, without any cache, and records one full
graph. Steps are timed in turn (:mod:`cgkit.measuring.decode_bench`); the profiler runs last, since it makes later
launches dearer. The article gives no figure for its passes; vLLM's blog
(2025-08-20) says up to 8 % for SiLU + quantisation.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from cgkit import events, torch_hooks
from cgkit.compiling import CompiledGraph
from cgkit.compiling.cache.folder import turned_off
from cgkit.config import CompilationConfig, CUDAGraphMode
from cgkit.errors import CaptureError
from cgkit.forward_context import BatchDescriptor, set_forward_context
from cgkit.measuring.decode_bench import Step, busy_of, decode_batch, shape_of, timed
from cgkit.serving.llama import PRESETS, Llama
from cgkit.serving.llama_fp8 import SCHEMES, quantize
from cgkit.serving.runner import Runner
from cgkit.serving.weights import build_model, random_weights

if TYPE_CHECKING:
    import pandas as pd

#: What is compared: name -> the passes.
VARIANTS: dict[str, tuple[str, ...]] = {
    "off": (),
    "noop": ("noop",),
    "norm": ("noop", "fuse_norm_quant"),
    "norm + act": ("noop", "fuse_norm_quant", "fuse_act_quant"),
    "norm + act, no noop": ("fuse_norm_quant", "fuse_act_quant"),
}
#: The same without a cut at attention, so that it can be fused as well.
WHOLE: dict[str, tuple[str, ...]] = {
    "whole, off": (),
    "whole, all": ("noop", "fuse_norm_quant", "fuse_act_quant", "fuse_attn_quant"),
    "whole, all, no noop": ("fuse_norm_quant", "fuse_act_quant", "fuse_attn_quant"),
}
#: What answers whether the no-op pass still matters: a variant, and the same without it.
NOOP_PAIRS = (("norm + act", "norm + act, no noop"), ("whole, all", "whole, all, no noop"))


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
    """Measures; returns ``frame`` (a row a variant and batch: see :func:`measure`), ``noop`` (:func:`noop_rows`, also
    in ``tables``, for the terminal) and what it was measured on.

    Raises:
        CaptureError: no GPU, and ``--device cpu`` was not given.
    """
    configs = {name: {"passes": passes} for name, passes in VARIANTS.items()}
    configs |= {name: {"passes": passes, "splitting_ops": ()} for name, passes in WHOLE.items()}
    facts = measure(args, configs, scheme=args.scheme)
    import pandas as pd

    rows = noop_rows(facts["frame"])
    return {**facts, "noop": rows, "tables": {"Without the no-op pass": pd.DataFrame(rows)}}


def noop_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Does the no-op pass still matter? A row a pair of :data:`NOOP_PAIRS` and batch.

    ``fusions_with`` and ``fusions_without`` it (places that all fusions matched in one step), ``noop_matched``, the
    kernels of a step that Inductor generated both ways and, from a GPU, ``wall_ratio`` and ``busy_ratio`` (without it
    over with it).
    """
    rows = []
    indexed = {(row["variant"], row["batch"]): row for row in frame.to_dict("records")}
    fusions = [name for name in frame.columns if name.startswith("matched_fuse_")]
    for (variant, batch), on in indexed.items():
        off = indexed.get((dict(NOOP_PAIRS).get(variant, ""), batch))
        if off is None:
            continue
        counted = [int(sum(row[name] for name in fusions if row[name] == row[name])) for row in (on, off)]
        row = {
            "variant": variant,
            "batch": batch,
            "fusions_with": counted[0],
            "fusions_without": counted[1],
            "noop_matched": int(on["matched_noop"]),
            "kernels_with": on["generated_kernels"],
            "kernels_without": off["generated_kernels"],
        }
        for name, column in (("wall_ratio", "wall_ms"), ("busy_ratio", "gpu_busy_ms")):
            if "gpu_busy_ms" in frame.columns:
                row[name] = off[column] / on[column]
        rows.append(row)
    return rows


def measure(
    args: argparse.Namespace, configs: Mapping[str, Mapping[str, Any]], scheme: str | None
) -> dict[str, Any]:
    """One model under several configurations.

    Rows: ``variant``, ``batch``, ``wall_ms`` and ``cpu_ms`` (a step up to the last norm, one full graph), ``compile_s``
    (tracing included), ``generated_kernels`` (by Inductor) and ``step_bytes_at_16_tokens`` (what its code reads and
    writes, by its own count, at the size of the traced example), both of one whole step: a piece that several layers
    share counts once a layer; matches by pass, also of a whole step; ``max_difference`` to the first variant;
    on a GPU ``kernels_a_layer`` and ``gpu_busy_ms``.
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
        with bytes_by_piece() as moved, warnings.catch_warnings():
            # the variants without it are here to show what it costs
            warnings.filterwarnings("ignore", message=".*without 'noop' before")
            self.executor.compile(self.runner.inputs)
        self.compile_s = time.perf_counter() - started
        compiled = self.executor.compiled
        assert compiled is not None
        self.step_bytes = step_bytes(compiled, moved)
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
        runner = self.runner
        scheduled = decode_batch(runner, batch, self.args.context)
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
            "step_bytes_at_16_tokens": self.step_bytes,
            "max_difference": float((self.hidden - first.hidden).abs().max()),
            **{f"matched_{name}": int(count) for name, count in self.matched.items()},
        }


@contextmanager
def bytes_by_piece() -> Iterator[dict[str, int]]:
    """What each piece that is compiled in the block reads and writes (:func:`torch_hooks.bytes_accessed`), by its
    name; the general shape alone. Pieces that share another one's compilation, and what a cache gave, are not in it."""
    moved: dict[str, int] = {}
    with torch_hooks.bytes_accessed() as total:
        before = 0

        def note(event: events.PieceCompiled) -> None:
            nonlocal before
            if event.shape is None:
                moved[event.piece] = total() - before
            before = total()

        undo = events.subscribe(events.PieceCompiled, note)
        try:
            yield moved
        finally:
            undo()


def step_bytes(compiled: CompiledGraph, moved: Mapping[str, int]) -> int:
    """What one step reads and writes: each piece as often as it runs, not as often as it was compiled."""
    return sum(moved[backend.general.owner] for backend in compiled.backends)


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
            (variant.name, batch): busy_of(variant.step(batch))
            for variant in variants
            for batch in args.batches
        }
        for row in rows:
            ms, kernels = busy[row["variant"], row["batch"]]
            row.update(gpu_busy_ms=ms, kernels_a_layer=kernels / layers)
    return rows
