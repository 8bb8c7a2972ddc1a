"""``cgkit bench boundaries``: what it costs to cut a step, whatever the pieces compute.

The same kernels in the same order, cut in different ways: one graph; graphs with a plain launch between them, as a
PIECEWISE step has its attention; a graph for each kernel that was between. The device is kept busy until the host has
handed everything over, so the device's time holds no wait for the host: what a cut way takes longer than one graph is
what the hardware and the driver need where one graph ends and the next launch begins. That is a floor: no host, however
fast, makes a PIECEWISE step as fast as a FULL one.

Beside it the host's time a graph launch: of different graphs in a row, as in a step, and of one graph again and again,
as a benchmark of launches would have it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cgkit import torch_hooks
from cgkit.capturing.platform import get_platform, session
from cgkit.errors import CaptureError, ConfigError
from cgkit.files import check_writable, whole_file
from cgkit.measuring.manifest import write_manifest

WHAT = "the same kernels as one graph, cut at every launch between pieces, and in graphs only: device and host time"
#: Cycles for which the device sleeps before a timed step: some two milliseconds.
_HEAD_START = 4_000_000
#: The ways that run the same kernels; the others are there for the host's time a launch.
SAME_KERNELS = ("one graph", "graphs and launches between", "graphs and small graphs between")
Call = Callable[[], Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``cgkit bench boundaries``."""
    parser.add_argument("--pieces", type=int, default=17, help="graphs of a step (default: %(default)s)")
    parser.add_argument("--kernels", type=int, default=9, help="kernels of a piece (default: %(default)s)")
    parser.add_argument("--numbers", type=int, default=1 << 16, help="of which a kernel's tensor consists")
    parser.add_argument("--rounds", type=int, default=100, help="turns of each way (default: %(default)s)")
    parser.add_argument("--csv", metavar="FILE", help="write the rows as CSV, with a manifest beside it")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures; ``frame`` is the table, ``rows`` its rows as data.

    Raises:
        CaptureError: no GPU. ConfigError: a number makes no sense. UnwritableFileError: the CSV cannot be written.
    """
    import pandas as pd

    if not torch.cuda.is_available():
        raise CaptureError("cgkit bench boundaries measures a GPU's launches, and torch sees no GPU")
    if min(args.pieces - 1, args.kernels, args.numbers, args.rounds) < 1:
        raise ConfigError("pieces must be at least 2, kernels, numbers and rounds at least 1")
    if args.csv:
        check_writable(args.csv)
    with torch.no_grad():
        rows = measured(args.pieces, args.kernels, args.numbers, args.rounds)
    frame = pd.DataFrame(rows)
    if args.csv:
        with whole_file(args.csv) as path:
            frame.to_csv(path, index=False, float_format="%.6g")
        command = (
            f"cgkit bench boundaries --pieces {args.pieces} --kernels {args.kernels} --numbers {args.numbers}"
        )
        write_manifest(args.csv, WHAT, command, emulated=False)
    return {"frame": frame, "rows": rows}


def measured(pieces: int, kernels: int, numbers: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each way to cut the step."""
    ways, _graphs = ways_to_cut(pieces, kernels, torch.zeros(numbers, device="cuda"))
    device: dict[str, list[float]] = {name: [] for name in ways}
    host: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 5):
        for name, calls in ways.items():
            on_device, on_host = _step(calls)
            if turn >= 5:
                device[name].append(on_device)
                host[name].append(on_host)
    whole = statistics.median(device["one graph"])
    return [
        {
            "way": name,
            "launches": len(calls),
            "device_us": statistics.median(device[name]),
            "device_p10_us": _tenth(device[name]),
            **_cost(statistics.median(device[name]) - whole, len(calls), name in SAME_KERNELS),
            "host_us": statistics.median(host[name]),
            "host_us_a_launch": statistics.median(host[name]) / len(calls),
            "rounds": rounds,
            "pieces": pieces,
            "kernels_a_piece": kernels,
            "device": torch.cuda.get_device_name(),
        }
        for name, calls in ways.items()
    ]


def _cost(more_us: float, launches: int, comparable: bool) -> dict[str, float]:
    if not comparable:
        return {"over_one_graph_us": float("nan"), "each_boundary_us": float("nan")}
    return {"over_one_graph_us": more_us, "each_boundary_us": more_us / max(launches - 1, 1)}


def ways_to_cut(pieces: int, kernels: int, x: torch.Tensor) -> tuple[dict[str, list[Call]], list[Any]]:
    """What each way calls in a step, in order, and the graphs, to be kept as long as they are launched.

    The first three run the same kernels in the same order, each adding 1 to ``x``.
    """
    platform = get_platform(device="cuda")
    pool = platform.new_pool()
    stream, kept = torch_hooks.LaunchStream(torch.cuda.current_device()), []

    def work(times: int) -> Call:
        def run() -> None:
            for _ in range(times):
                x.add_(1.0)

        return run

    def graph(function: Call) -> Call:
        with session(platform):
            made, _ = platform.record(function, pool)
        kept.append(made)  # a prepared launch knows the graph's address only
        prepare = getattr(made, "prepared_replay", None)
        return (prepare(stream) if prepare else None) or made.replay

    def whole() -> None:
        work(pieces * kernels + pieces - 1)()

    between = work(1)
    between()
    cut = [graph(work(kernels)) for _ in range(pieces)]
    small = [graph(between) for _ in range(pieces - 1)]
    platform.synchronize()
    ways = {
        "one graph": [graph(whole)],
        "graphs and launches between": _alternating(cut, [between] * (pieces - 1)),
        "graphs and small graphs between": _alternating(cut, small),
        "different graphs": cut,
        "one piece again and again": cut[:1] * pieces,
    }
    return ways, kept


def _alternating(pieces: Sequence[Call], between: Sequence[Call]) -> list[Call]:
    return [call for pair in zip(pieces, between) for call in pair] + [pieces[-1]]


def _step(calls: Sequence[Call]) -> tuple[float, float]:
    """Device and host time of one step, in microseconds."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch_hooks.device_sleep(_HEAD_START)
    start.record()
    began = time.perf_counter()
    for call in calls:
        call()
    took = time.perf_counter() - began
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3, took * 1e6


def _tenth(samples: Sequence[float]) -> float:
    return sorted(samples)[len(samples) // 10]
