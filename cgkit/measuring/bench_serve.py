"""``cgkit bench serve``: the same traffic through several modes, side by side.

Each mode has a runner of its own over the same weights; arrivals are in real time (``--speed`` times the
trace's), rounds take turns. Weights are random unless a model is loaded, prompts are random tokens, answers as
long as the trace says. On a CPU graphs are emulated and every latency is the CPU's: a dry run, which says so.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from cgkit import events
from cgkit.config import CompilationConfig, CUDAGraphMode
from cgkit.errors import CaptureError, ConfigError
from cgkit.files import whole_file
from cgkit.measuring.bench_charts import picture_file
from cgkit.measuring.decode_bench import shape_of
from cgkit.measuring.make_requests import FittedRequests, fit_requests, synthetic_requests
from cgkit.measuring.request_trace import read_requests
from cgkit.measuring.serve_traffic import ServedTraffic, serve_traffic
from cgkit.serving.engine import Engine
from cgkit.serving.llama import PRESETS
from cgkit.serving.runner import Runner
from cgkit.serving.weights import build_model, random_weights

MODES = ("NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE")
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``cgkit bench serve``."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--trace",
        metavar="FILE",
        help="requests as CSV: TIMESTAMP,ContextTokens,GeneratedTokens (Azure's format)",
    )
    what.add_argument(
        "--synthetic",
        type=int,
        metavar="N",
        help="N requests made up from --seed (default without a trace: 64)",
    )
    parser.add_argument(
        "--rate", type=float, default=8.0, help="synthetic requests a second (default: %(default)s)"
    )
    parser.add_argument(
        "--prompt-tokens", type=float, default=256, help="their mean length (default: %(default)s)"
    )
    parser.add_argument(
        "--output-tokens", type=float, default=64, help="their mean answer (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of synthetic requests and of prompts' tokens")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N requests")
    parser.add_argument("--speed", type=float, default=1.0, help="2: requests arrive twice as fast")
    parser.add_argument(
        "--scale-lengths", type=float, default=1.0, help="lengths times this, for a small model"
    )
    parser.add_argument("--modes", nargs="+", default=list(MODES), metavar="MODE", help="(default: all four)")
    parser.add_argument(
        "--rounds", type=int, default=1, help="each mode serves the traffic so often, in turn"
    )
    parser.add_argument("--shape", default="llama-3.2-1b", choices=sorted(PRESETS))
    parser.add_argument("--layers", type=int, default=None, help="fewer layers than the shape has")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=1024)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument(
        "--kv-cache-tokens", type=int, help="(default: every request at its longest, at most 1 GiB)"
    )
    parser.add_argument(
        "--sizes", type=int, nargs="+", help="capture sizes (default: up to max-num-seqs and 256)"
    )
    parser.add_argument("--compiler", default="inductor", choices=["inductor", "inductor_patched", "eager"])
    parser.add_argument(
        "--no-async", action="store_true", help="read each step's tokens before the next is prepared"
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: emulated, a dry run")
    parser.add_argument("--csv", metavar="FILE", help="the table as CSV")
    parser.add_argument("--requests-csv", metavar="FILE", help="a row a mode, round and request")
    parser.add_argument("--steps-csv", metavar="FILE", help="a row a mode, round and step")
    parser.add_argument(
        "--histogram", metavar="FILE", help="batch sizes of the first mode, for cgkit plan --histogram"
    )
    parser.add_argument(
        "--out",
        "--chart",
        dest="chart",
        type=picture_file,
        metavar="FILE",
        help="a picture (svg, png or pdf)",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Serves; returns ``frame`` (a row a mode and round) and what was served.

    Raises:
        CaptureError: no GPU, and ``--device cpu`` was not given.
        RequestTraceError: the trace cannot be read.
        ConfigError: an option makes no sense.
    """
    import pandas as pd

    if args.device == "cuda" and not torch.cuda.is_available():
        raise CaptureError("cgkit bench serve measures a GPU, and there is none; --device cpu is a dry run")
    modes = [CUDAGraphMode.parse(mode, "--modes").name for mode in args.modes]
    if len(set(modes)) < len(modes) or args.rounds < 1:
        raise ConfigError(
            f"--modes {' '.join(args.modes)} --rounds {args.rounds}: name each mode once, and 1 round at least"
        )
    numbers = {"max-num-seqs": args.max_num_seqs, "max-num-batched-tokens": args.max_num_batched_tokens}
    if wrong := {name: number for name, number in numbers.items() if number < 1}:
        raise ConfigError(
            f"{', '.join(f'--{name} {number}' for name, number in wrong.items())}: use 1 or more"
        )
    shape = shape_of(args.shape, args.layers)
    longest = min(args.max_model_len, shape.max_position_embeddings)
    fitted = requests_of(args, longest)
    served = _serve_all(args, modes, _runners(args, modes, shape, longest), fitted)
    frame = pd.DataFrame([{**each.about, **each.summary()} for each in served]).drop(columns="label")
    about = _about(args, fitted)
    _write(args, served, frame, about)
    return {
        **about,
        "rows": frame.to_dict("records"),
        "frame": _shown(frame.assign(emulated=about["emulated"])),
    }


def requests_of(args: argparse.Namespace, longest: int) -> FittedRequests:
    """The traffic that the options ask for."""
    if args.trace:
        trace = read_requests(args.trace)
    else:
        trace = synthetic_requests(
            args.synthetic if args.synthetic is not None else 64,
            args.rate,
            prompt_tokens=args.prompt_tokens,
            output_tokens=args.output_tokens,
            seed=args.seed,
        )
    return fit_requests(trace, longest, limit=args.limit, speed=args.speed, scale_lengths=args.scale_lengths)


def _runners(args: argparse.Namespace, modes: list[str], shape: Any, longest: int) -> dict[str, Runner]:
    """A runner a mode, captured, all over one model."""
    device = torch.device(args.device)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    model = build_model(shape, random_weights(shape, dtype, args.device), dtype=dtype, device=device)
    sizes = args.sizes or sorted(
        {*(size for size in SIZES if size <= max(256, args.max_num_seqs)), args.max_num_seqs}
    )
    runners = {}
    for mode in modes:
        config = CompilationConfig(
            cudagraph_mode=CUDAGraphMode.parse(mode, "--modes"),
            cudagraph_capture_sizes=None if mode == "NONE" else tuple(sizes),
            compiler=args.compiler,
        )
        runners[mode] = Runner(
            model,
            config=config,
            max_num_seqs=args.max_num_seqs,
            max_model_len=longest,
            max_num_batched_tokens=args.max_num_batched_tokens,
            kv_cache_tokens=args.kv_cache_tokens,
        )
        runners[mode].capture_model()
    return runners


def _serve_all(
    args: argparse.Namespace, modes: list[str], runners: dict[str, Runner], fitted: FittedRequests
) -> list[ServedTraffic]:
    served = []
    engines = {
        mode: Engine(runner, async_scheduling=not args.no_async, keep_reports=10_000_000)
        for mode, runner in runners.items()
    }
    for mode in modes:
        warm_up(engines[mode])
    for number in range(args.rounds):
        for mode in modes:
            each = serve_traffic(engines[mode], fitted.trace, label=mode, seed=args.seed)
            each.about = {"mode": mode, "round": number + 1}
            served.append(each)
    return served


def warm_up(engine: Engine) -> None:
    """Steps of every kind that do not count: what is loaded or tuned at first use is there before the clock runs."""
    runner = engine.runner
    room = min(runner.max_model_len, runner.kv_cache.max_tokens)
    sizes = {*runner.executor.sizes} if runner.executor.sizes else {1, 2}
    for count in sorted({min(size, runner.max_num_seqs) for size in sizes}):
        for _ in range(count):
            engine.add_request([1], min(3, room - 1), stop_at_eos=False)
        list(engine.run())
    longest = min(room - 2, 2 * runner.max_num_batched_tokens)
    engine.add_request([1] * max(1, longest), 2, stop_at_eos=False)
    list(engine.run())


def _about(args: argparse.Namespace, fitted: FittedRequests) -> dict[str, Any]:
    cuda = args.device == "cuda"
    return {
        "shape": args.shape if args.layers is None else f"{args.shape}, {args.layers} layers",
        "device": torch.cuda.get_device_name() if cuda else "cpu (emulated)",
        "emulated": not cuda,
        "trace": fitted.trace.source,
        "requests": len(fitted.trace),
        "requests_cut_to_fit": fitted.cut,
        "speed": fitted.speed,
        "scale_lengths": fitted.scale_lengths,
        "async_scheduling": not args.no_async,
    }


def _write(args: argparse.Namespace, served: list[ServedTraffic], frame: Any, about: dict[str, Any]) -> None:
    import pandas as pd

    frame = frame.assign(**{name: about[name] for name in ("shape", "device", "emulated", "trace", "speed")})
    tables = {
        args.csv: frame,
        args.requests_csv: pd.concat([each.requests.assign(**each.about) for each in served]),
        args.steps_csv: pd.concat([each.steps.assign(**each.about) for each in served]),
        args.histogram: served[0].histogram(),
    }
    for name, table in tables.items():
        if name:
            with whole_file(name) as path:
                table.to_csv(path, index=False)
    if args.chart:
        from cgkit.plotting import save
        from cgkit.plotting.serve_charts import overview

        save(overview(*chart_frames(served), _drawn(about)), args.chart)
    if about["requests_cut_to_fit"]:
        cut, total = about["requests_cut_to_fit"], about["requests"]
        events.emit(
            events.Progress("fitting", 1, 1, f"{cut:,} of {total:,} requests were cut to fit --max-model-len")
        )


def chart_frames(served: list[ServedTraffic]) -> tuple[Any, Any]:
    """What the chart draws: requests and steps of all runs, with a column ``mode``."""
    import pandas as pd

    requests = pd.concat([each.requests.assign(mode=each.label) for each in served], ignore_index=True)
    steps = pd.concat(
        [each.steps.rename(columns={"mode": "taken"}).assign(mode=each.label) for each in served],
        ignore_index=True,
    )
    return requests, steps


def _drawn(about: dict[str, Any]) -> Any:
    from cgkit.plotting import About

    traffic = f"{about['requests']:,} requests of {about['trace']} at {about['speed']:g} times their speed"
    return About(about["shape"], traffic, "", about["device"], about["emulated"])


def _shown(frame: Any) -> Any:
    """The columns of the terminal's table: the others are in the CSV."""
    hidden = ["ttft_p90_ms", "tpot_p90_ms", "total_p90_ms", "wall_s", "dropped_tokens"]
    hidden += ["refused"] if not frame["refused"].any() else []
    hidden += [name for name in ("round",) if frame[name].nunique() == 1]
    return frame.drop(columns=hidden)
