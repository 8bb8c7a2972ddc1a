"""``cgkit bench static``: what a static, tuned compilation buys over the general one.

For a matrix product (the article's: 8x2048 by 2048x3072) and for the pieces of Llama shapes at some batch
sizes, four callables: compiled for any token count, for this one, for this one with ``max_autotune`` and
``coordinate_descent_tuning``, and cuBLAS (``torch.mm``; of a piece its products alone). Implements the article's
"set_inductor_config：动态 shape 与静态 shape 的两种编译策略" (two strategies).

How it is timed: on a GPU each callable stands in a CUDA graph a number of times, each time with other weights,
so that no launch and no second-level cache is measured; replays of the rows in turn, each between two CUDA
events; medians. With ``--device cpu`` calls are timed by the clock: a dry run.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cgkit import torch_hooks
from cgkit.compiling import CompiledGraph, CompiledPiece, PiecewiseBackend, compile_pieces
from cgkit.compiling.cache.folder import turned_off
from cgkit.config import CompilationConfig
from cgkit.errors import CaptureError, ConfigError
from cgkit.files import whole_file
from cgkit.measuring.decode_bench import shape_of
from cgkit.splitting import SplitGraph, split_graph
from cgkit.tracing import trace

ARTICLE = "8x2048x3072"
#: What overrides the tuning of a static size.
UNTUNED = {"max_autotune": False, "coordinate_descent_tuning": False}
POLICIES = ("general", "static", "static, tuned")
#: Weights behind one timing, at least: more than any second-level cache holds.
_WEIGHT_BYTES = 2**28
_MOST_CALLS = 32
#: Pieces of a model with two layers: all kinds that there are.
KINDS = ("first", "middle", "last")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``cgkit bench static``."""
    parser.add_argument(
        "--products", nargs="*", default=[ARTICLE], metavar="MxKxN", help=f"(default: {ARTICLE})"
    )
    parser.add_argument("--shapes", nargs="*", default=["llama-3.2-1b", "llama-3.1-8b"], metavar="SHAPE")
    parser.add_argument("--pieces", nargs="+", default=list(KINDS), choices=KINDS, help="(default: all)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=100, help="timings of each row (default: 100)")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: a dry run")
    parser.add_argument("--csv", metavar="FILE", help="write the rows as CSV too")
    parser.add_argument("--candidates-csv", metavar="FILE", help="write what the autotuner tried as CSV")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures. ``frame``: a row a subject, batch and callable; ``candidates``: a row a candidate of the autotuner.

    ``frame`` has the columns ``subject`` ("product", a shape), ``piece`` ("8x2048x3072"; "first", "middle",
    "last"), ``batch``, ``callable``, ``us`` (median of one call), ``low_us`` (tenth percentile), ``compile_s``,
    ``kernels`` (that Inductor generated), ``times_general`` (the general callable's time over this one's).
    ``candidates`` as :func:`cgkit.torch_hooks.autotuning_caught`, with ``subject``, ``piece`` and ``batch``.

    Raises:
        CaptureError: no GPU, and ``--device cpu`` was not given.
        ConfigError: a product or a shape that is none.
    """
    import pandas as pd

    if args.device == "cuda" and not torch.cuda.is_available():
        raise CaptureError("cgkit bench static measures a GPU, and there is none; --device cpu is a dry run")
    rows: list[dict[str, Any]] = []
    candidates: list[dict[str, Any]] = []
    with torch.no_grad(), turned_off():
        for subject in _subjects(args):
            rows += subject.measure(args.repeats)
            candidates += subject.candidates
            # After each: autotuning takes minutes, and what was measured is not lost when someone stops it.
            for path, table in ((args.csv, rows), (args.candidates_csv, candidates)):
                if path:
                    with whole_file(path) as place:
                        pd.DataFrame(table).to_csv(place, index=False, float_format="%.5g")
    return {
        "frame": pd.DataFrame(rows),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu (dry run)",
        "rows": rows,
        "candidates": candidates,
    }


# --- what is compared --------------------------------------------------------------------------------


@dataclass
class Subject:
    """One piece at one batch size, compiled in every way.

    ``pieces``: by policy; ``args``: several sets of arguments, each with weights of its own; ``products``: the
    matrix products in it, as (rows, inner, columns).
    """

    name: str
    piece: str
    batch: int
    device: str
    pieces: dict[str, CompiledPiece]
    args: list[list[Any]]
    products: list[tuple[int, int, int]]
    candidates: list[dict[str, Any]] = field(default_factory=list)

    def measure(self, repeats: int) -> list[dict[str, Any]]:
        """A row a callable: see :func:`run`."""
        calls = {
            policy: [_bound(piece.runnable, args) for args in self.args]
            for policy, piece in self.pieces.items()
        }
        calls["cuBLAS"] = self._library()
        seconds = timed_in_turn(calls, repeats, self.device)
        general = statistics.median(seconds["general"])
        return [
            {
                "subject": self.name,
                "piece": self.piece,
                "batch": self.batch,
                "callable": policy,
                "us": statistics.median(times) * 1e6,
                "low_us": sorted(times)[len(times) // 10] * 1e6,
                "compile_s": self.pieces[policy].seconds if policy in self.pieces else 0.0,
                "kernels": self.pieces[policy].kernels if policy in self.pieces else None,
                "times_general": general / statistics.median(times),
            }
            for policy, times in seconds.items()
        ]

    def _library(self) -> list[Callable[[], Any]]:
        """The piece's products alone, through ``torch.mm``."""
        dtype = _dtype(self.device)
        made: list[Callable[[], Any]] = []
        for _ in self.args:
            pairs = [
                (
                    torch.randn(m, k, device=self.device, dtype=dtype),
                    torch.randn(n, k, device=self.device, dtype=dtype).t(),
                )
                for m, k, n in self.products
            ]
            made.append(functools.partial(_multiply, pairs))
        return made


def _subjects(args: argparse.Namespace) -> Iterator[Subject]:
    _warm_up(args.device)
    for text in args.products:
        m, k, n = _product(text)
        weight = torch.randn(n, k, device=args.device, dtype=_dtype(args.device))
        model = _Product(weight)
        split = split_graph(trace(model, weight.new_ones(max(m, 2), k), dynamic_arg_dims={"x": 0}), [])
        yield from _compiled("product", split, {0: text}, [m], args.device)
    for name in args.shapes:
        split = _model_split(name, args.device)
        own = [index for index, piece in enumerate(p for p in split.pieces if not p.is_splitting)]
        chosen = {own[KINDS.index(kind)]: kind for kind in args.pieces}
        yield from _compiled(name, split, chosen, args.batches, args.device)


def _compiled(
    subject: str, split: SplitGraph, names: dict[int, str], batches: Sequence[int], device: str
) -> Iterator[Subject]:
    """The pieces of ``split`` whose index is in ``names``, compiled for any token count and for ``batches``."""
    general = _graph(split)
    untuned, tuned = _graph(split, UNTUNED, batches), _graph(split, {}, batches)
    for index, name in names.items():
        for batch in batches:
            found: list[dict[str, Any]] = []
            one = untuned.backends[index].compile_size(batch)
            with torch_hooks.autotuning_caught(found):
                two = tuned.backends[index].compile_size(batch)
            backend = general.backends[index]
            pieces = dict(zip(POLICIES, (backend.general, one, two)))
            products = products_of(backend, batch)
            per_call = sum(k * n for _, k, n in products) * _dtype(device).itemsize
            calls = max(1, min(_MOST_CALLS, -(-_WEIGHT_BYTES // max(per_call, 1)))) if device == "cuda" else 1
            inputs = [real_inputs(backend, batch, device) for _ in range(calls)]
            about = {"subject": subject, "piece": name, "batch": batch}
            made = [{**about, **row} for row in found]
            yield Subject(subject, name, batch, device, pieces, inputs, products, made)


def _graph(
    split: SplitGraph, options: dict[str, Any] | None = None, sizes: Sequence[int] = ()
) -> CompiledGraph:
    """All pieces for any token count; ``sizes`` are compiled one by one, when they are asked for."""
    config = CompilationConfig(
        cudagraph_mode="NONE",  # type: ignore[arg-type]
        compile_sizes=tuple(sizes),
        compile_at="first_hit",
        inductor_compile_config=dict(options or {}),
    )
    return compile_pieces(split, config)


class _Product(torch.nn.Module):
    """One product with a weight that is kept as a layer keeps it: (columns, inner)."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight)


def _model_split(name: str, device: str) -> SplitGraph:
    """The split graph of a shape with two layers: its pieces are all kinds that there are."""
    from cgkit.serving.runner import Runner
    from cgkit.serving.weights import build_model, random_weights

    shape, dtype = shape_of(name, 2), _dtype(device)
    model = build_model(shape, random_weights(shape, dtype, device), dtype=dtype, device=device)
    config = CompilationConfig(cudagraph_mode="NONE", compiler="eager", custom_ops=("none",))  # type: ignore[arg-type]
    runner = Runner(model, config=config, max_num_seqs=1, max_model_len=64)
    runner.executor.compile(runner.inputs)
    assert runner.executor.split is not None
    return runner.executor.split


def products_of(backend: PiecewiseBackend, batch: int) -> list[tuple[int, int, int]]:
    """The matrix products with a weight in a piece, as (rows, inner, columns), in order."""
    placeholders = [node for node in backend.graph.graph.nodes if node.op == "placeholder"]
    fakes = dict(zip(placeholders, backend.call.args))
    products = []
    for node in backend.graph.graph.nodes:
        if node.op == "call_function" and getattr(node.target, "__name__", "") == "linear":
            weight = fakes.get(node.args[1])
            if weight is not None:
                products.append((batch, int(weight.shape[1]), int(weight.shape[0])))
    return products


def real_inputs(backend: PiecewiseBackend, batch: int, device: str) -> list[Any]:
    """Random arguments for a piece at ``batch`` tokens: numbers, whole numbers (0), small floats."""
    from cgkit.compiling.fakes import static_version, unread_offsets

    call = backend.call
    numbers: dict[Any, int] = dict.fromkeys(unread_offsets(backend.graph, call.args), 0)
    numbers[torch_hooks.symbolic_expression(call.args[call.sym_shape_indices[0]])] = batch
    fakes, _ = static_version(call.args, numbers, backend.name)
    return [_real(fake, device) if isinstance(fake, torch.Tensor) else fake for fake in fakes]


def _real(fake: torch.Tensor, device: str) -> torch.Tensor:
    shape, stride = tuple(fake.shape), tuple(fake.stride())
    empty = torch.empty_strided(shape, stride, dtype=fake.dtype, device=device)
    return empty.normal_(std=0.02) if fake.dtype.is_floating_point else empty.zero_()


def _multiply(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.mm(a, b) for a, b in pairs]


def _bound(runnable: Callable[..., Any], args: list[Any]) -> Callable[[], Any]:
    return lambda: runnable(*args)


# --- timing ------------------------------------------------------------------------------------------


def timed_in_turn(
    calls: dict[str, list[Callable[[], Any]]], repeats: int, device: str
) -> dict[str, list[float]]:
    """Seconds of one call of each row, ``repeats`` times, the rows in turn. A row's calls run one after another."""
    runs = {name: _prepared(each, device) for name, each in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, measure in runs.items():
            seconds[name].append(measure() / len(calls[name]))
    return seconds


def _prepared(calls: list[Callable[[], Any]], device: str) -> Callable[[], float]:
    """What runs all ``calls`` once and says how many seconds that took."""
    for _ in range(3):
        for call in calls:
            call()
    if device != "cuda":

        def by_the_clock() -> float:
            started = time.perf_counter()
            for call in calls:
                call()
            return time.perf_counter() - started

        return by_the_clock
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def by_events() -> float:
        before.record()
        graph.replay()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) / 1e3 if kept else 0.0

    graph.replay()
    return by_events


# --- small things ------------------------------------------------------------------------------------


def _dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def _product(text: str) -> tuple[int, int, int]:
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"{text!r} is no product; write rows, inner and columns as in {ARTICLE}")
    m, k, n = map(int, parts)
    return m, k, n


def _warm_up(device: str) -> None:
    """A compilation that does not count: the first of a process imports and starts workers."""
    model = _Product(torch.ones(8, 8, device=device))
    split = split_graph(trace(model, torch.ones(4, 8, device=device), dynamic_arg_dims={"x": 0}), [])
    _graph(split, {}, [4]).backends[0].compile_size(4)
