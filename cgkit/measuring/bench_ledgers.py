"""``cgkit bench ledgers``: what the free ledgers cost a PIECEWISE step.

The step as it is, against the same step in which the ledgers' parts do nothing: the dispatcher's route without its
count, and the address check replaced by what it gave at capture. Only data is swapped (an attribute, an entry of a
table), for one turn at a time; turns alternate in one process, and so does who begins. A plan's check is one expression
that also sees whether this is the step that it was laid out for; all of it counts as address check, so that the cost is
stated too high rather than too low.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from cgkit import marks
from cgkit.capturing import CapturedGraphs
from cgkit.capturing.dispatcher import Route
from cgkit.errors import CaptureError, ConfigError
from cgkit.files import whole_file
from cgkit.forward_context import BatchDescriptor, set_forward_context
from cgkit.measuring.decode_bench import DecodeBench, Step, Times, any_shape
from cgkit.measuring.manifest import write_manifest

#: A step with its ledgers may take so many times what it takes without.
GOAL = 1.015
PATHS = ("plan", "module")
#: What is swapped out for a row.
PARTS = {"all ledgers": ("count", "addresses"), "mode count": ("count",), "address check": ("addresses",)}
WHAT = (
    "a PIECEWISE decode step with its ledgers against the same step without, in turn; ratios of paired turns"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``cgkit bench ledgers``."""
    parser.add_argument("--shape", default="llama-3.2-1b", metavar="SHAPE", help="(default: %(default)s)")
    parser.add_argument("--layers", type=int, default=None, help="fewer layers than the shape has")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=256, help="tokens in the KV cache of each request")
    parser.add_argument("--rounds", type=int, default=60, help="pairs of turns (default: %(default)s)")
    parser.add_argument("--paths", nargs="+", default=list(PATHS), choices=list(PATHS), metavar="PATH")
    parser.add_argument("--compiler", default="inductor", choices=["inductor", "eager"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: emulated, a dry run")
    parser.add_argument("--csv", metavar="FILE", help="write the rows as CSV, with a manifest beside it")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures; ``frame`` is the table, ``rows`` its rows as data.

    Raises:
        CaptureError: no GPU, and ``--device cpu`` was not given; or a path cannot be taken.
        ConfigError: a number makes no sense.
    """
    import pandas as pd

    if args.device == "cuda" and not torch.cuda.is_available():
        raise CaptureError(
            "cgkit bench ledgers measures a GPU's step, and there is none; --device cpu is a dry run"
        )
    if args.rounds < 1 or args.batch < 1:
        raise ConfigError(f"rounds={args.rounds}, batch={args.batch}: use positive numbers")
    with torch.no_grad():
        shape = any_shape(args.shape, args.layers)
        bench = DecodeBench(
            shape, [args.batch], device=args.device, context=args.context, compiler=args.compiler
        )
        bench.capture()
        about = {**bench.about(), "model": args.shape, "batch": args.batch}
        about |= {"device": bench.device_name, "emulated": not bench.cuda}
        rows = [row for path in args.paths for row in measured(bench, args.batch, path, args.rounds, about)]
    frame = pd.DataFrame(rows)
    if args.csv:
        with whole_file(args.csv) as path:
            frame.to_csv(path, index=False, float_format="%.6g")
        command = f"cgkit bench ledgers --shape {args.shape} --batch {args.batch} --rounds {args.rounds}"
        write_manifest(args.csv, WHAT, command, model=args.shape, emulated=not bench.cuda)
    return {**about, "goal": GOAL, "rows": rows, "frame": frame}


def measured(
    bench: DecodeBench, batch: int, path: str, rounds: int, about: dict[str, Any]
) -> list[dict[str, Any]]:
    """A row a part: medians with and without it, and the ratio of the pairs."""
    captured = bench.executor.captured
    assert captured is not None
    metadata, (ids, positions) = bench.prepared(batch), bench.front(batch)
    step = routed_step(captured, path, batch, metadata, (ids, positions))
    step()
    rows = []
    for part, parts in PARTS.items():
        without = lambda parts=parts: swapped_out(captured, path, batch, metadata, (ids, positions), parts)  # noqa: E731
        pairs = list(in_turn(step, without, rounds, bench.cuda))
        rows.append({**about, "path": path, "part": part, **row_of(pairs)})
    return rows


def routed_step(
    captured: CapturedGraphs, path: str, batch: int, metadata: Any, inputs: tuple[torch.Tensor, ...]
) -> Step:
    """A step as a runner makes it: the dispatcher is asked, the context set, the model called."""
    forward = captured.run if path == "plan" else captured.run_module
    dispatcher = captured.dispatcher

    def step() -> Any:
        mode, key, _ = dispatcher.route(batch, False)
        with set_forward_context(metadata, cudagraph_runtime_mode=mode, batch_descriptor=key):
            return forward(*inputs)

    return step


@contextmanager
def swapped_out(
    captured: CapturedGraphs,
    path: str,
    batch: int,
    metadata: Any,
    inputs: tuple[torch.Tensor, ...],
    parts: Sequence[str],
) -> Iterator[None]:
    """While inside, these parts of the ledgers do nothing.

    Raises:
        CaptureError: no plan serves this step.
    """
    with ExitStack() as undo:
        if "count" in parts:
            dispatcher = captured.dispatcher
            marks.swap_attribute(dispatcher, "route", uncounted(captured), undo)
        if "addresses" in parts and path == "plan":
            _without_plan_check(captured, BatchDescriptor(batch), metadata, inputs, undo)
        elif "addresses" in parts:
            for wrapper in captured.pieces:
                replay, output, _, addresses = wrapper._replays[BatchDescriptor(batch)]
                entry = (replay, output, _always(addresses), addresses)
                marks.swap_item(wrapper._replays, BatchDescriptor(batch), entry, undo)
        yield


def _without_plan_check(
    captured: CapturedGraphs, key: BatchDescriptor, metadata: Any, inputs: tuple[Any, ...], undo: ExitStack
) -> None:
    found = captured.plans.ready.get(key)
    now = None if found is None else found.read(inputs, {}, metadata)
    taken = None if found is None else next((c for c in found.choices if c[0] == now), None)
    if found is None or taken is None:
        raise CaptureError(
            f"no replay plan serves this step: {captured.plans.refused or 'none was laid out'}"
        )
    marks.swap_item(captured.plans.ready, key, found._replace(read=_always(taken[0]), choices=(taken,)), undo)


def uncounted(captured: CapturedGraphs) -> Callable[..., Route]:
    """The route as it would be without a count: the table and its bounds."""
    tables = tuple(routes for routes, _ in captured.dispatcher._routes)
    slow = captured.dispatcher.route_of

    def route(num_tokens: int, uniform_decode: bool = False) -> Route:
        routes = tables[uniform_decode]
        if 0 <= num_tokens < len(routes):
            return routes[num_tokens]
        return slow(num_tokens, uniform_decode)

    return route


def _always(value: Any) -> Callable[..., Any]:
    return lambda *args: value


def in_turn(
    step: Step, without: Callable[[], Any], rounds: int, cuda: bool
) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
    """((wall, host) with, (wall, host) without) of each pair of turns, medians in seconds."""
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            found: dict[bool, tuple[float, float]] = {}
            for bare in (False, True) if number % 2 else (True, False):
                times = Times()
                with without() if bare else ExitStack():
                    times.turn(step, cuda)
                found[bare] = statistics.median(times.wall_s), statistics.median(times.cpu_s)
            yield found[False], found[True]
    finally:
        gc.enable()


def row_of(pairs: Sequence[tuple[tuple[float, float], tuple[float, float]]]) -> dict[str, Any]:
    """Medians of both, and of the pairs' ratios and differences."""
    ratios = sorted(a[0] / b[0] for a, b in pairs)
    return {
        "with_us": statistics.median(a[0] for a, _ in pairs) * 1e6,
        "without_us": statistics.median(b[0] for _, b in pairs) * 1e6,
        "ratio": statistics.median(ratios),
        "ratio_low": ratios[len(ratios) // 4],
        "ratio_high": ratios[len(ratios) * 3 // 4],
        "host_difference_us": statistics.median(a[1] - b[1] for a, b in pairs) * 1e6,
        "rounds": len(ratios),
        "within_goal": statistics.median(ratios) <= GOAL,
    }
