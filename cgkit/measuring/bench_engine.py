"""``cgkit bench engine``: the host's time a step outside of the model, by part.

Batches of requests decode side by side until each has been measured for long enough; what counts is the
engine's own work (scheduling, inputs, dispatch, launching the sampling, handing tokens out), not the call of
the model and not the waiting for its tokens. Batches and ways (ahead of the device or not) take turns, since a
machine's speed drifts. On a CPU the inputs' and the sampling's arithmetic runs inside of those parts: a dry
run, whose figures are no GPU's.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from typing import Any

import torch

from cgkit import events
from cgkit.config import CompilationConfig
from cgkit.errors import CaptureError, ConfigError
from cgkit.files import whole_file
from cgkit.measuring.decode_bench import shape_of
from cgkit.serving.engine import Engine
from cgkit.serving.llama import PRESETS
from cgkit.serving.runner import Runner
from cgkit.serving.sampling import GREEDY, SamplingParams
from cgkit.serving.step_report import OWN, PARTS
from cgkit.serving.weights import build_model, random_weights

#: Steps of a turn, and those at its start that do not count (caches, the first step after an arrival).
TURN, UNCOUNTED = 60, 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``cgkit bench engine``."""
    parser.add_argument("--shape", default="llama-3.2-1b", choices=sorted(PRESETS))
    parser.add_argument("--layers", type=int, default=None, help="fewer layers than the shape has")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=128, help="prompt tokens of each request")
    parser.add_argument("--turns", type=int, default=4, help=f"of {TURN} steps each (default: %(default)s)")
    parser.add_argument("--mode", default="FULL_AND_PIECEWISE")
    parser.add_argument("--compiler", default="inductor", choices=["inductor", "inductor_patched", "eager"])
    parser.add_argument("--drawing", action="store_true", help="temperature 0.8, top-p 0.95 and not greedy")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: emulated, a dry run")
    parser.add_argument("--csv", metavar="FILE", help="the table as CSV")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures; returns ``frame``: a row a batch and way, medians in microseconds.

    Raises:
        CaptureError: no GPU, and ``--device cpu`` was not given.
        ConfigError: an option makes no sense.
    """
    import pandas as pd

    if args.device == "cuda" and not torch.cuda.is_available():
        raise CaptureError("cgkit bench engine measures a GPU, and there is none; --device cpu is a dry run")
    if wrong := [number for number in (*args.batches, args.context, args.turns) if number < 1]:
        raise ConfigError(f"{wrong[0]} among --batches, --context and --turns: use positive numbers")
    runner = make_runner(args)
    collected: dict[tuple[int, str], list[Any]] = {}
    cases = [(batch, ahead) for batch in args.batches for ahead in (True, False)]
    done, total = 0, len(cases) * args.turns
    for _ in range(args.turns):
        for batch, ahead in cases:
            way = "a step ahead" if ahead else "in turn"
            collected.setdefault((batch, way), []).extend(_turn(runner, args, batch, ahead))
            done += 1
            events.emit(events.Progress("steps", done, total, f"batch {batch}, {way}"))
    frame = pd.DataFrame([_row(batch, way, pd.concat(parts)) for (batch, way), parts in collected.items()])
    frame["emulated"] = args.device == "cpu"
    if args.csv:
        with whole_file(args.csv) as path:
            frame.to_csv(path, index=False)
    return {
        "shape": args.shape,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu (emulated)",
        "emulated": args.device == "cpu",
        "rows": frame.to_dict("records"),
        "frame": frame,
    }


def make_runner(args: argparse.Namespace) -> Runner:
    """A model of random weights in its graphs, with room for the largest batch."""
    shape = shape_of(args.shape, args.layers)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    model = build_model(
        shape, random_weights(shape, dtype, args.device), dtype=dtype, device=torch.device(args.device)
    )
    most, length = max(args.batches), args.context + TURN + 8
    sizes = None if args.mode == "NONE" else tuple(sorted({1, 2, 4, 8, 16, 32, *args.batches}))
    config = CompilationConfig(
        cudagraph_mode=args.mode, cudagraph_capture_sizes=sizes, compiler=args.compiler
    )
    runner = Runner(
        model,
        config=config,
        max_num_seqs=most,
        max_model_len=length,
        max_num_batched_tokens=max(most * args.context, most),
        kv_cache_tokens=most * (length + 16),
    )
    runner.capture_model()
    return runner


def _turn(runner: Runner, args: argparse.Namespace, batch: int, ahead: bool) -> Iterator[Any]:
    """One engine's decode steps of ``batch`` requests; its frame without the steps that do not count."""
    engine = Engine(runner, async_scheduling=ahead)
    for number in range(batch):
        sampling = SamplingParams(0.8, top_p=0.95, seed=number) if args.drawing else GREEDY
        engine.add_request([1 + number] * args.context, TURN, sampling, stop_at_eos=False)
    gc.collect()
    gc.disable()
    try:
        for _ in engine.run():
            pass
    finally:
        gc.enable()
    frame = engine.to_frame()
    full = frame[(frame["kind"] == "decode") & (frame["num_reqs"] == batch)]
    yield full.iloc[UNCOUNTED:]


def _row(batch: int, way: str, frame: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"batch": batch, "way": way, "mode": "/".join(sorted(set(frame["mode"])))}
    row.update({f"{part}_us": frame[f"{part}_us"].median() for part in OWN})
    row["outside_model_us"] = frame["host_outside_model_us"].median()
    row["outside_model_p90_us"] = frame["host_outside_model_us"].quantile(0.9)
    row.update({f"{part}_us": frame[f"{part}_us"].median() for part in PARTS[len(OWN) :]})
    times = frame["ended_s"].diff()[frame["step"].diff() == 1]  # within one engine's run
    row["step_us"] = times.median() * 1e6
    row["steps"] = len(frame)
    return row
