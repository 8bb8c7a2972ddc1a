"""``record_memory``: everything that the memory charts need, measured in one go and written as small files."""

from __future__ import annotations

import functools
import gc
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cgkit.config import CompilationConfig, CUDAGraphMode
from cgkit.measuring.lifetimes import output_lifetimes
from cgkit.measuring.manifest import machine
from cgkit.measuring.memory import Ledger
from cgkit.measuring.predict_pool import NOT_IN_THE_POOL, PoolPrediction, predict_pool
from cgkit.measuring.segments import pool_segments
from cgkit.measuring.waterfall import waterfall
from cgkit.serving.llama import PRESETS
from cgkit.serving.runner import Runner
from cgkit.serving.weights import build_model, random_weights

SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)


def record_memory(
    outdir: str | Path,
    shapes: Sequence[str] = ("llama-3.2-1b", "llama-3.1-8b"),
    batches: Sequence[int] = (1, 32),
    *,
    sizes: Sequence[int] = SIZES,
    device: str = "cuda",
    prefix: str = "h200",
    layers: int | None = None,
    context: int = 256,
    compiler: str = "inductor",
) -> dict[str, dict[str, Any]]:
    """Measures the graphs' memory of each shape (random weights; bfloat16 on a GPU) and writes it into ``outdir``.

    For each shape, beginning with ``PREFIX-memory-``: ``ledger-SHAPE.csv`` (a row a graph, column ``run``: the first
    capture of the process, both orders of sizes, both modes together), ``segments-SHAPE.csv`` (the pool at its
    fullest), ``waterfall-SHAPE.csv``, ``lifetimes-SHAPE.csv`` (steps of ``batches`` one after the other),
    ``prediction-SHAPE.csv`` (predicted beside measured, with reasons) and ``SHAPE.json`` (totals, the driver's bytes).

    Args:
        sizes: what is recorded; ``batches`` are added.
        device: "cpu" is a dry run with emulated graphs.
        layers: fewer layers than the shape has.
        context: tokens in the KV cache of each request.
        compiler: as in :class:`cgkit.CompilationConfig`.

    Returns:
        The files for a manifest: name -> ``what`` it holds, with model, mode and batch.
    """
    entries: dict[str, dict[str, Any]] = {}
    for shape in shapes:
        recording = _Recording(
            Path(outdir), shape, batches, sorted({*sizes, *batches}), device, prefix, compiler
        )
        with torch.no_grad():
            entries |= recording.run(layers, context)
        del recording
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return entries


@functools.cache
def memory_here(
    shape: str = "llama-3.2-1b", device: str | None = None, layers: int | None = None
) -> Path | None:
    """A folder with the recordings of :func:`record_memory` made on this machine's GPU, for the ``path=`` of
    :mod:`cgkit.recordings`; None without a GPU: then the recordings of the checkout are to be read. Once a process.

    Args:
        device: "cpu": a dry run with emulated graphs; None: "cuda" where there is one.
        layers: fewer layers than the shape has.
    """
    device = device or ("cuda" if torch.cuda.is_available() else None)
    if device is None:
        return None
    folder = Path(tempfile.mkdtemp(prefix="cgkit-memory-"))
    files = record_memory(
        folder, [shape], device=device, layers=layers, prefix="h200", compiler=_COMPILERS[device]
    )
    facts = {**machine(), "command": "cgkit.measuring.record_memory.memory_here", "files": files}
    (folder / "manifest.json").write_text(json.dumps(facts), encoding="utf-8")
    return folder


_COMPILERS = {"cuda": "inductor", "cpu": "eager"}


class _Recording:
    """One shape: a runner, and captures of it one after the other."""

    def __init__(
        self,
        out: Path,
        shape: str,
        batches: Sequence[int],
        sizes: Sequence[int],
        device: str,
        prefix: str,
        compiler: str,
    ) -> None:
        self.out, self.shape, self.batches, self.sizes = out, shape, list(batches), tuple(sizes)
        self.compiler = compiler
        self.cuda, self.device, self.prefix = device == "cuda", device, prefix
        self.ledgers: list[Any] = []
        self.runs: dict[str, dict[str, Any]] = {}
        self.entries: dict[str, dict[str, Any]] = {}
        out.mkdir(parents=True, exist_ok=True)

    def run(self, layers: int | None, context: int) -> dict[str, dict[str, Any]]:
        """Captures in every way, writes the files, and returns their entries."""
        import pandas as pd

        runner = self.runner = self._runner(layers, context)
        executor = runner.executor
        started = time.perf_counter()
        executor.compile(runner.inputs)
        self.facts: dict[str, Any] = {"shape": self.shape, "layers": runner.model.config.num_hidden_layers}
        self.facts |= {
            "dtype": str(runner.dtype),
            "sizes": self.sizes,
            "compile_s": time.perf_counter() - started,
        }
        self.facts["emulated"] = not self.cuda
        piecewise, both = CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL_AND_PIECEWISE
        down = self._predicted(piecewise, True)  # before anything is captured
        up, all_modes = self._predicted(piecewise, False), self._predicted(both, True)
        self._captured("first of the process", piecewise, True)
        executor.release()
        ledger, after = self._captured("large to small", piecewise, True)
        compared = [down.compare(ledger, after).assign(run="large to small")]
        lives = output_lifetimes(executor.captured, self.batches) if executor.captured else None
        self._write("segments", "the pool's blocks when it was fullest", ledger.fullest)
        if lives is not None:
            self._write("lifetimes", "which replay overwrites which output", lives.to_frame(), self.batches)
        executor.release()
        ledger, after = self._captured("small to large", piecewise, False)
        compared.append(up.compare(ledger, after).assign(run="small to large"))
        executor.release()
        ledger, after = self._captured("both modes", both, True, count_nodes=True)
        compared.append(all_modes.compare(ledger, after).assign(run="both modes"))
        self._write("waterfall", "where the device's memory goes", waterfall(runner).to_frame())
        executor.release()
        self._write("ledger", "a row a recorded graph", pd.concat(self.ledgers, ignore_index=True))
        self._write(
            "prediction", "the pool predicted beside measured", pd.concat(compared, ignore_index=True)
        )
        self._write_facts({"large to small": down, "small to large": up, "both modes": all_modes})
        return self.entries

    def _runner(self, layers: int | None, context: int) -> Runner:
        shape = PRESETS[self.shape]
        shape = shape.scaled(num_hidden_layers=layers) if layers else shape
        dtype = torch.bfloat16 if self.cuda else torch.float32
        model = build_model(shape, random_weights(shape, dtype, self.device), dtype=dtype, device=self.device)
        config = CompilationConfig(
            compiler=self.compiler,
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
            cudagraph_capture_sizes=self.sizes,
        )
        most = self.sizes[-1]
        return Runner(
            model,
            config=config,
            max_num_seqs=most,
            max_model_len=context + 64,
            kv_cache_tokens=most * (context + 16),
        )

    def _predicted(self, mode: CUDAGraphMode, largest_first: bool) -> PoolPrediction:
        compiled = self.runner.executor.compiled
        assert compiled is not None
        started = time.perf_counter()
        found = predict_pool(compiled, self.sizes, mode=mode, largest_first=largest_first)
        self.facts["predict_s"] = time.perf_counter() - started
        return found

    def _captured(
        self, run: str, mode: CUDAGraphMode, largest_first: bool, count_nodes: bool = False
    ) -> tuple[Ledger, Any]:
        """Records, notes the driver's free memory before and after, and reads the pool's blocks."""
        executor, platform = self.runner.executor, None
        if count_nodes and self.cuda:
            from cgkit.capturing.cuda import CudaPlatform

            platform = CudaPlatform(keep_graphs=True)
        executor.mode = mode
        gc.collect()
        before = self._device_bytes()
        with Ledger() as ledger:
            executor.capture_model(self.runner.inputs, largest_first=largest_first, platform=platform)
        after = self._device_bytes()
        captured = executor.captured
        assert captured is not None
        blocks = pool_segments(captured)
        live = int(blocks.loc[blocks["state"] == "live", "block_bytes"].sum())
        self.ledgers.append(ledger.to_frame().assign(run=run))
        self.runs[run] = {
            "graphs": captured.num_graphs,
            "seconds": captured.seconds,
            "pool_reserved_bytes": captured.pool_bytes.reserved,
            "pool_peak_allocated_bytes": int(ledger.to_frame()["peak_allocated_bytes"].max()),
            "pool_live_after_bytes": live,
            "vllm_estimate_bytes": ledger.vllm_estimate_bytes(),
            "driver_bytes": None if before is None or after is None else before[0] - after[0],
            "torch_reserved_growth_bytes": None if before is None or after is None else after[1] - before[1],
        }
        return ledger, blocks

    def _device_bytes(self) -> tuple[int, int] | None:
        """(free by the driver, reserved by torch)."""
        if not self.cuda:
            return None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()

    def _write(self, part: str, what: str, frame: Any, batches: Sequence[int] | None = None) -> None:
        name = f"{self.prefix}-memory-{part}-{self.shape}.csv"
        frame.to_csv(self.out / name, index=False)
        self._enter(name, what, batches or self.sizes)

    def _enter(self, name: str, what: str, sizes: Sequence[int]) -> None:
        sizes_said = ", ".join(map(str, sizes)) if len(sizes) < 5 else f"{len(sizes)} sizes to {sizes[-1]}"
        entry = {"what": f"{what}, {self.shape}", "model": self.shape, "mode": "PIECEWISE and FULL"}
        self.entries[name] = {**entry, "batch": f"{sizes_said} tokens", "emulated": not self.cuda}

    def _write_facts(self, predictions: dict[str, PoolPrediction]) -> None:
        for run, prediction in predictions.items():
            self.runs[run] |= {
                "predicted_reserved_bytes": prediction.reserved_bytes,
                "predicted_peak_allocated_bytes": prediction.peak_allocated_bytes,
                "found_in": sorted(set(prediction.to_frame()["found_in"].dropna())),
                "notes": prediction.notes,
            }
        facts = {**self.facts, "runs": self.runs, "not_in_the_pool": NOT_IN_THE_POOL}
        name = f"{self.prefix}-memory-{self.shape}.json"
        (self.out / name).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        self._enter(name, "totals of the pool, predicted and measured, and of the driver", self.sizes)
