"""``cgkit bench kernels``: the kernels of a decode step by themselves, against what the memory allows.

Two subjects, on the shapes of Llamas. *attention*: the decode kernel with each way to divide and to tile it (the
constants at the top of :mod:`cgkit.kernels.triton_decode`), over batch and context. *product*: a layer's matrix
products one by one and merged (:mod:`cgkit.serving.merged`). Each row says how long, and how much longer than copying
its bytes.

How it is timed: a CUDA graph of many calls, each on buffers of its own that together outgrow the second-level
cache, replayed between two events; the rows of one case in turn; medians. With ``--device cpu`` the torch forms are
timed by the clock: a dry run. The article's "decode 的瓶颈" (what bounds decode) is launches; this is what is left.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from cgkit.errors import CaptureError
from cgkit.kernels import attend
from cgkit.kernels.bench import Spy, decode_arguments
from cgkit.kernels.splits import splits_for
from cgkit.measuring.bench_static import timed_in_turn
from cgkit.measuring.decode_bench import shape_of
from cgkit.measuring.kernel_rules import rank_rules
from cgkit.measuring.roofline import measure_rates
from cgkit.serving.llama import PRESETS, LlamaConfig

if TYPE_CHECKING:
    import pandas as pd

#: (tile, num_warps, num_stages) that are tried with each number of programs a context is divided over.
SETTINGS = ((64, 4, 3), (64, 4, 2), (32, 4, 3), (64, 2, 3), (128, 4, 2), (128, 8, 2))
SPLITS = (1, 2, 4, 8, 16, 32)
#: Bytes behind one timing, at least (an H200's second-level cache holds 50 MB), and the most calls that make them up.
_COLD_BYTES, _MOST_CALLS = 96 * 10**6, 192
#: The most programs that are tried, for each multiprocessor.
_PROGRAMS_A_PROCESSOR = 4
_COMPILING_THREADS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``cgkit bench kernels``."""
    parser.add_argument(
        "--shapes", nargs="+", default=["llama-3.1-8b", "llama-3.2-1b"], choices=sorted(PRESETS)
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 2048])
    parser.add_argument(
        "--subjects", nargs="+", default=["product", "attention"], choices=["product", "attention"]
    )
    parser.add_argument("--repeats", type=int, default=15, help="replays of each row (default: 15)")
    parser.add_argument(
        "--seconds", type=float, default=55, help="after these, what is set now alone is timed (default: 55)"
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: a dry run")
    parser.add_argument("--csv", metavar="FILE", help="write all rows as CSV")
    parser.add_argument("--rules-csv", metavar="FILE", help="write how settings for all cases compare as CSV")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures. ``frame``: the rows as they are set now and the best of each case; ``rows``: all.

    Columns: ``subject``, ``shape``, ``batch``, ``kv_heads`` and ``context`` (attention), ``name``, ``tile``,
    ``splits``, ``num_warps``, ``num_stages``, ``now`` (as it is set), ``best`` (of its case), ``us``, ``low_us`` (tenth
    percentile), ``mb`` (that must be moved), ``tb_per_s``, ``over_floor`` (time over that of copying the bytes).
    ``rules``: :func:`cgkit.measuring.kernel_rules.rank_rules`. ``left_out``: rows that the time did not suffice for;
    ``failed``: candidates that could not be launched, and why.

    Raises:
        CaptureError: no GPU, and ``--device cpu`` was not given.
    """
    import pandas as pd

    if args.device == "cuda" and not torch.cuda.is_available():
        raise CaptureError("cgkit bench kernels measures a GPU, and there is none; --device cpu is a dry run")
    bench = _Bench(args)
    with torch.no_grad():
        rows = [row for subject in args.subjects for row in getattr(bench, subject)()]
    frame = pd.DataFrame(rows)
    rules = rank_rules(frame)
    if args.csv:
        frame.to_csv(args.csv, index=False, float_format="%.5g")
    if args.rules_csv:
        rules.to_csv(args.rules_csv, index=False, float_format="%.5g")
    return {
        "frame": _shown(frame),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu (dry run)",
        "copy_tb_per_s": bench.copy / 1e12,
        "seconds": bench.elapsed(),
        "left_out": bench.left_out,
        "failed": bench.failed,
        "rows": rows,
        "rules": rules.to_dict("records"),
    }


def _shown(frame: pd.DataFrame) -> pd.DataFrame:
    shown = frame[frame["now"] | frame["best"]].drop(columns=["low_us"])
    return shown.dropna(axis="columns", how="all").reset_index(drop=True)


@dataclass(frozen=True)
class Candidate:
    """One way to launch the decode kernel."""

    tile: int
    splits: int
    num_warps: int
    num_stages: int


class _Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.cuda = args, args.device == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.started, self.left_out = time.perf_counter(), 0
        self.failed: dict[str, str] = {}
        self.copy = measure_rates(args.device).copy_bytes_per_s
        self.shapes = [shape_of(name) for name in args.shapes]

    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    # --- products --------------------------------------------------------------------------------

    def product(self) -> Iterator[dict[str, Any]]:
        """Rows of a layer's products: parts in turn, and merged."""
        for shape in self.shapes:
            for batch in self.args.batches:
                for names in products_of(shape).values():
                    calls: dict[str, list[Callable[[], Any]]] = {}
                    size = 0
                    for name, widths in names.items():
                        size = sum(inner * rows for inner, rows in widths) * self.dtype.itemsize
                        calls[name] = [
                            partial(_multiply, self._pairs(batch, widths)) for _ in range(self._calls(size))
                        ]
                    yield from self._rows(
                        {"subject": "product", "shape": shape.name, "batch": batch},
                        calls,
                        size,
                        {name: {"name": name, "now": "+" not in name} for name in names},
                    )

    def _pairs(
        self, batch: int, widths: Sequence[tuple[int, int]]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        made = {"device": self.args.device, "dtype": self.dtype}
        return [
            (torch.randn(batch, inner, **made), torch.empty(rows, inner, **made).normal_(std=0.02).t())
            for inner, rows in widths
        ]

    # --- attention -------------------------------------------------------------------------------

    def attention(self) -> Iterator[dict[str, Any]]:
        """Rows of the decode kernel's candidates."""
        cases = [(s, b, c) for s in self.shapes for b in self.args.batches for c in self.args.contexts]
        with _roomy() if self.cuda else nullcontext(0) as self.programs_a_processor:
            if self.cuda:
                self._compile_ahead(cases)
            for shape, batch, context in cases:
                yield from self._case(shape, batch, context)

    def _case(self, shape: LlamaConfig, batch: int, context: int) -> list[dict[str, Any]]:
        size = 2 * batch * context * shape.num_key_value_heads * shape.head_dim * self.dtype.itemsize
        steps = [self._arguments(shape, batch, context) for _ in range(self._calls(size))]
        about = {"subject": "attention", "shape": shape.name, "kv_heads": shape.num_key_value_heads}
        about |= {"batch": batch, "context": context}
        calls: dict[str, list[Callable[[], Any]]]
        if not self.cuda:
            calls = {"torch": [partial(attend, *step) for step in steps]}
            return self._rows(about, calls, size, {"torch": {"name": "torch", "now": True}})
        now, candidates = self._candidates(shape, batch, context)
        if self.elapsed() > self.args.seconds:
            self.left_out += len(candidates) - 1
            candidates = [now]
        calls, facts = {}, {}
        for each in candidates:
            setting = _Setting(each)
            try:
                _attend_as(setting, steps[0])
            except (
                Exception
            ) as error:  # what Triton cannot compile or launch, for instance for want of shared memory
                self.failed[f"{shape.name}: {_name(each)}"] = f"{type(error).__name__}: {error}"
                continue
            calls[_name(each)] = [partial(_attend_as, setting, step) for step in steps]
            facts[_name(each)] = {"name": "decode", "now": each == now, **asdict(each)}
        return self._rows(about, calls, size, facts)

    def _arguments(self, shape: LlamaConfig, batch: int, context: int) -> tuple[Any, ...]:
        heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        return decode_arguments(
            batch, heads, kv_heads, shape.head_dim, context,
            max_context=max(self.args.contexts), device=self.args.device, dtype=self.dtype,
        )  # fmt: skip

    def _candidates(self, shape: LlamaConfig, batch: int, context: int) -> tuple[Candidate, list[Candidate]]:
        """What the kernel takes now for such a context, and all that are tried, that one first."""
        from cgkit.kernels import triton_decode as kernel

        programs = batch * shape.num_key_value_heads
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        now = Candidate(
            kernel.TILE, self._usual_splits(programs, context), kernel.NUM_WARPS, kernel.NUM_STAGES
        )
        found = [now]
        for splits in SPLITS:
            for tile, warps, stages in SETTINGS:
                fits = splits == 1 or (
                    programs * splits <= _PROGRAMS_A_PROCESSOR * processors and (splits - 1) * tile < context
                )
                if fits:
                    found.append(Candidate(tile, splits, warps, stages))
        return now, list(dict.fromkeys(found))

    def _usual_splits(self, programs: int, context: int) -> int:
        from cgkit.kernels import triton_decode as kernel

        wanted = self.programs_a_processor * torch.cuda.get_device_properties(0).multi_processor_count
        return splits_for(programs, context, chunk=kernel.MIN_CHUNK, most=kernel.MAX_SPLITS, wanted=wanted)

    def _compile_ahead(self, cases: Sequence[tuple[LlamaConfig, int, int]]) -> None:
        """Compiles every candidate's kernel in threads, whose results the launches then find. What fails here
        fails again where it is launched, and says so there."""
        from cgkit.kernels import triton_decode

        wanted: dict[Any, Callable[[], Any]] = {}
        for shape, batch, context in cases:
            for candidate in self._candidates(shape, batch, context)[1]:
                key = (shape.name, candidate)
                if key not in wanted:
                    spy = Spy()
                    arguments = self._arguments(shape, batch, min(self.args.contexts))
                    _attend_as(_Setting(candidate, launch=spy), arguments)
                    grid, tensors, numbers, constants = spy.seen
                    options = {"num_warps": candidate.num_warps, "num_stages": candidate.num_stages}
                    wanted[key] = partial(
                        triton_decode._decode_kernel.warmup,
                        *tensors, *numbers, *constants, grid=grid, **options,
                    )  # fmt: skip
        with ThreadPoolExecutor(_COMPILING_THREADS) as pool:
            for done in [pool.submit(compile_it) for compile_it in wanted.values()]:
                with suppress(Exception):
                    done.result()

    # --- rows ------------------------------------------------------------------------------------

    def _calls(self, size: int) -> int:
        return max(2, min(_MOST_CALLS, -(-_COLD_BYTES // size))) if self.cuda else 1

    def _rows(
        self,
        about: dict[str, Any],
        calls: dict[str, list[Callable[[], Any]]],
        size: int,
        facts: dict[str, dict[str, Any]],
    ) -> list[dict[str, Any]]:
        seconds = timed_in_turn(calls, self.args.repeats, self.args.device)
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        best = min(medians, key=medians.__getitem__)
        empty = dict.fromkeys(("kv_heads", "context", "tile", "splits", "num_warps", "num_stages"))
        return [
            {
                **empty,
                **about,
                **facts[name],
                "best": name == best,
                "us": medians[name] * 1e6,
                "low_us": sorted(times)[len(times) // 10] * 1e6,
                "mb": size / 1e6,
                "tb_per_s": size / medians[name] / 1e12,
                "over_floor": medians[name] * self.copy / size,
            }
            for name, times in seconds.items()
        ]


def products_of(shape: LlamaConfig) -> dict[str, dict[str, list[tuple[int, int]]]]:
    """A layer's products as (inner, rows of the weight), by what they read: one after the other, and merged."""
    hidden, wide = shape.hidden_size, shape.intermediate_size
    query = shape.num_attention_heads * shape.head_dim
    key = shape.num_key_value_heads * shape.head_dim
    return {
        "qkv": {"q+k+v": [(hidden, query), (hidden, key), (hidden, key)], "qkv": [(hidden, query + 2 * key)]},
        "o": {"o": [(query, hidden)]},
        "gate_up": {"gate+up": [(hidden, wide)] * 2, "gate_up": [(hidden, 2 * wide)]},
        "down": {"down": [(wide, hidden)]},
    }


def _multiply(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.mm(a, b) for a, b in pairs]


# --- the decode kernel as a candidate says ------------------------------------------------------------


class _Setting:
    """A candidate's values for the names in :mod:`cgkit.kernels.triton_decode`, with launches and plans of its own."""

    def __init__(self, candidate: Candidate, launch: Any = None) -> None:
        from cgkit.kernels import triton_decode
        from cgkit.kernels.launch import CachedLaunch

        self.launch = launch or CachedLaunch(
            triton_decode._decode_kernel,
            num_warps=candidate.num_warps,
            num_stages=candidate.num_stages,
        )
        self.values: dict[str, Any] = {
            "TILE": candidate.tile,
            "MIN_CHUNK": candidate.tile,
            "num_splits": lambda *args: candidate.splits,
            "_launch": self.launch,
            "_plans": {},
        }


def _attend_as(setting: _Setting, step: tuple[Any, ...]) -> None:
    from cgkit.kernels import triton_decode

    names = vars(triton_decode)
    before = {name: names[name] for name in setting.values}
    names.update(setting.values)
    try:
        attend(*step)
    finally:
        names.update(before)


@contextmanager
def _roomy() -> Iterator[int]:
    """In the block the kernel's workspace has room for as many programs as are tried; yields the usual number of
    programs for each multiprocessor."""
    from cgkit.kernels import triton_decode

    usual = triton_decode.PROGRAMS_A_PROCESSOR

    def set_to(programs: int) -> None:
        triton_decode.PROGRAMS_A_PROCESSOR = programs
        triton_decode._programs_wanted.cache_clear()
        triton_decode._workspace.cache_clear()
        triton_decode._plans.clear()

    set_to(_PROGRAMS_A_PROCESSOR)
    try:
        yield usual
    finally:
        set_to(usual)


def _name(candidate: Candidate) -> str:
    return (
        f"{candidate.splits} x {candidate.tile}, {candidate.num_warps} warps, {candidate.num_stages} stages"
    )
