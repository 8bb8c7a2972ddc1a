"""The headline's rows of one model: every way to run it on one set of weights, built first and then timed in turn.

Two parts, each in a process of its own on a GPU (:mod:`cgkit.measuring.headline`). ``rows``: all but
``reduce-overhead``. ``last``: ``reduce-overhead``, and FULL_AND_PIECEWISE once more as its twin. When CUDAGraph Trees
record, the cuBLAS workspaces go whose addresses hand-recorded graphs hold, so those must not be replayed
afterwards. Hence this order: ``reduce-overhead`` records every size and is timed by itself; only then the twin is
recorded, and both are timed in turn. The profiler comes after all timing: where it has run, launches cost more.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from cgkit.capturing import CapturedGraphs
from cgkit.config import CUDAGraphMode
from cgkit.files import whole_file
from cgkit.forward_context import set_forward_context
from cgkit.measuring.decode_bench import COUNTED, DecodeBench, Step, Times, any_shape, timed
from cgkit.measuring.headline_frame import GRAPHS, MODES, weight_bytes
from cgkit.measuring.roofline import measure_rates
from cgkit.measuring.step_counts import profiled

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
TWIN, LAST = "FULL_AND_PIECEWISE", "reduce-overhead"
#: Recorded beside the batches on a GPU: the sizes of ``cgkit bench modes``.
SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
OTHER_ROWS = "a folder that was empty at first, in a process that compiles other rows too"


@dataclass(frozen=True)
class Options:
    """What to measure of one model."""

    shape: str
    batches: tuple[int, ...] = (1, 8, 32, 128)
    modes: tuple[str, ...] = MODES
    layers: int | None = None
    device: str = "cuda"
    compiler: str = "inductor"
    context: int = 256
    rounds: int = 8
    generate: bool = True
    generate_rounds: int = 3
    generate_batch: int = 8
    prompt_tokens: int = 32
    new_tokens: int = 128
    profile: bool = True

    @classmethod
    def from_json(cls, text: str) -> Options:
        """What ``json.dumps(asdict(options))`` made of them."""
        fields = json.loads(text)
        return cls(**{**fields, "batches": tuple(fields["batches"]), "modes": tuple(fields["modes"])})


def own_code(function: FunctionType) -> FunctionType:
    """The same function with a code object of its own: Dynamo keeps and limits compilations by code object."""
    copy = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class HeadlineBench(DecodeBench):
    """One model with its rows ready to run.

    Attributes:
        first_s: mode and size -> seconds of its first call, compiling included.
        recorded: mode -> its graphs.
    """

    def __init__(self, options: Options, modes: Sequence[str]) -> None:
        self.options, self.modes = options, tuple(modes)
        self.prefill = options.generate_batch * options.prompt_tokens if options.generate else 0
        own = (options.generate_batch, self.prefill) if options.generate else ()
        sizes = {*own, *(SIZES if options.device == "cuda" else ())}
        super().__init__(
            any_shape(options.shape, options.layers),
            [*options.batches, *own[:1]],
            device=options.device,
            context=max(options.context, options.prompt_tokens + options.new_tokens),
            sizes=sorted(sizes),
            compiler=options.compiler,
            max_num_seqs=max(*options.batches, *own[:1], 1),
        )
        self.context = options.context
        self.first_s: dict[tuple[str, int], float] = {}
        self.recorded: dict[str, CapturedGraphs] = {}
        self._static: dict[tuple[str, int], Forward] = {}
        self._level_1: Forward | None = None
        generator = torch.Generator().manual_seed(0)
        count = (options.generate_batch, options.prompt_tokens)
        self.prompts = torch.randint(self.shape.vocab_size, count, generator=generator).tolist()

    def synchronize(self) -> None:
        """Waits for the GPU, if there is one."""
        if self.cuda:
            torch.cuda.synchronize()

    # --- building --------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Compiles and records everything of :attr:`modes`, and runs each row once at each size.

        With reduce-overhead among them only that is recorded: see :meth:`record`.
        """
        self.executor.compile(self.runner.inputs)
        names = [LAST] if LAST in self.modes else list(self.modes)
        if LAST not in self.modes:
            self.record()
        for batch in sorted(self.options.batches):
            if LAST in self.modes:  # attention keeps a workspace: not one of CUDAGraph Trees' pool
                self.step("eager", batch)()
            for name in names:
                self._first(name, batch, self.step(name, batch))
        if self.options.generate:
            for name in ["eager", LAST, LAST, LAST] if LAST in self.modes else names:
                self.generate(name, new_tokens=6)

    def record(self) -> None:
        """Records the graphs of :attr:`modes`."""
        for mode in self.modes:
            if mode in GRAPHS:
                self.recorded[mode] = self.executor.record(self.runner.inputs, mode=CUDAGraphMode[mode])

    def _first(self, mode: str, batch: int, step: Step) -> None:
        self.synchronize()
        started = time.perf_counter()
        step()
        self.synchronize()
        self.first_s[mode, batch] = time.perf_counter() - started
        for _ in range(4):  # CUDAGraph Trees record at the second or third call
            step()

    def _eager(self) -> Forward:
        model = self.model

        def forward(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return model(input_ids, positions)

        return forward

    def _compiled_by_torch(self, mode: str | None, dynamic: bool | None) -> Forward:
        """Plain ``torch.compile`` of the model, with the attention operator inside."""
        forward = own_code(self._eager())  # type: ignore[arg-type]
        if self.options.compiler == "eager":
            return torch.compile(forward, backend="eager", dynamic=dynamic)
        return torch.compile(forward, mode=mode, dynamic=dynamic)

    def _static_for(self, mode: str, size: int) -> Forward:
        """``torch.compile`` of ``mode`` for exactly ``size`` tokens, made when it is first asked for."""
        if (mode, size) not in self._static:
            how = None if mode == "torch.compile" else mode
            self._static[mode, size] = self._compiled_by_torch(how, dynamic=False)
        return self._static[mode, size]

    def forward_of(self, mode: str) -> Forward:
        """The model of a row without recorded graphs: ``(input_ids, positions) -> hidden``, any size."""
        if mode == "eager":
            return self._eager()
        if mode == "compiled":
            assert self.executor.compiled is not None
            return self.executor.compiled.bind()
        if mode == "level 1":
            if self._level_1 is None:
                self._level_1 = self._compiled_by_torch(None, dynamic=None)
            return self._level_1
        return lambda ids, positions: self._static_for(mode, ids.shape[0])(ids, positions)

    # --- what is timed ---------------------------------------------------------------------------

    def steps(self, batch: int) -> dict[str, Step]:
        """The decode step of each row, on buffers that are filled already."""
        return {mode: self.step(mode, batch) for mode in self.modes}

    def step(self, mode: str, batch: int) -> Step:
        """The decode step of one row."""
        metadata = self.prepared(batch)
        if mode in GRAPHS:
            captured = self.recorded[mode]
            runtime, key, padded = captured.dispatcher.route(batch, True)
            call: Forward = captured.run
        else:
            runtime, key, padded = CUDAGraphMode.NONE, None, batch
            call = self._static_for(mode, batch) if mode in ("torch.compile", LAST) else self.forward_of(mode)
        ids, positions = self.front(padded)

        def step() -> Any:
            with set_forward_context(metadata, cudagraph_runtime_mode=runtime, batch_descriptor=key):
                return call(ids, positions)

        return step

    def generate(self, mode: str, new_tokens: int | None = None) -> float:
        """Answers the prompts through one row; seconds of the whole call."""
        if mode in GRAPHS:
            self.executor.use(self.recorded[mode])
        else:
            self.executor.use(None, self.forward_of(mode))
        self.synchronize()
        started = time.perf_counter()
        self.runner.generate(self.prompts, new_tokens or self.options.new_tokens, stop_at_eos=False)
        self.synchronize()
        seconds = time.perf_counter() - started
        self.executor.use(None)
        return seconds

    def timed_generation(self, modes: Sequence[str]) -> dict[str, Times]:
        """Whole answers of each row in turn, after one of each that does not count."""
        times = {mode: Times() for mode in modes}
        for number in range(self.options.generate_rounds + 1):
            for mode in modes:
                gc.collect()
                seconds = self.generate(mode)
                if number:
                    times[mode].wall_s.append(seconds)
        return times


def measure(options: Options, part: str, ready: Callable[[], None]) -> Iterator[list[dict[str, Any]]]:
    """Measures ``part`` ("rows" or "last") of one model; gives all rows so far after each stage.

    ``ready`` is called when everything is built and nothing is measured yet; it may wait.
    """
    wanted = [TWIN, LAST] if part == "last" else [mode for mode in options.modes if mode != LAST]
    with torch.no_grad():
        bench = HeadlineBench(options, wanted)
        bench.prepare()
        ready()
        table = _Table(bench)
        yield from table.rows_part() if part == "rows" else table.last_part()


class _Table:
    """Collects the rows of one process."""

    def __init__(self, bench: HeadlineBench) -> None:
        self.bench, self.options = bench, bench.options
        self.step_bytes, self.head_bytes = weight_bytes(bench.model)
        small = {} if bench.cuda else {"copy_bytes": 2**22, "side": 64}
        self.rates = measure_rates(bench.device, **small)
        self.rows: list[dict[str, Any]] = []

    def rows_part(self) -> Iterator[list[dict[str, Any]]]:
        options, bench = self.options, self.bench
        for batch in options.batches:
            measured = timed(bench.steps(batch), options.rounds * COUNTED, bench.cuda)
            self.rows += [self.decode_row(mode, batch, times) for mode, times in measured.items()]
            yield self.rows
        if options.generate:
            measured = bench.timed_generation(bench.modes)
            self.rows += [self.generate_row(mode, times) for mode, times in measured.items()]
            yield self.rows
        if options.profile and bench.cuda:
            self.profile(bench.modes)
            yield self.rows

    def last_part(self) -> Iterator[list[dict[str, Any]]]:
        """reduce-overhead by itself, then in turn with its twin: what is measured in turn replaces what was before."""
        options, bench = self.options, self.bench
        alone: dict[int, dict[str, Any]] = {}
        for batch in options.batches:
            times = timed({LAST: bench.step(LAST, batch)}, COUNTED, bench.cuda)[LAST]
            alone[batch] = self.decode_row(LAST, batch, times)
        self.rows = list(alone.values())
        yield self.rows
        bench.record()
        for batch in options.batches:
            measured = timed(bench.steps(batch), options.rounds * COUNTED, bench.cuda)
            row = self.decode_row(LAST, batch, measured[LAST])
            alone[batch] = {**row, "twin_ms": measured[TWIN].row()["wall_ms"]}
            self.rows = list(alone.values())
            yield self.rows
        if options.generate:
            both = bench.timed_generation([TWIN, LAST])
            twin_ms = statistics.median(both[TWIN].wall_s) * 1e3
            self.rows = [*alone.values(), {**self.generate_row(LAST, both[LAST]), "twin_ms": twin_ms}]
            yield self.rows
        if options.profile and bench.cuda:
            self.profile([LAST])
            yield self.rows

    # --- rows ------------------------------------------------------------------------------------

    def _row(self, case: str, mode: str, batch: int, times: Times) -> dict[str, Any]:
        bench, options = self.bench, self.options
        captured = bench.recorded.get(mode)
        row: dict[str, Any] = {
            "model": options.shape,
            "layers": bench.shape.num_hidden_layers,
            "case": case,
            "mode": mode,
            "batch": batch,
            "copy_bytes_per_s": self.rates.copy_bytes_per_s,
            "context_tokens": options.context if case == "decode" else None,
            "samples": len(times.wall_s),
            "compiler": options.compiler,
            "emulated": not bench.cuda,
            "device": bench.device_name,
        }
        if captured is not None and captured.num_graphs:
            row["capture_s"], row["graphs"] = captured.seconds, captured.num_graphs
            row["pool_bytes"] = captured.pool_bytes.reserved
        return row

    def decode_row(self, mode: str, batch: int, times: Times) -> dict[str, Any]:
        row = {**self._row("decode", mode, batch, times), **times.row()}
        row["tokens_s"] = batch / row["wall_ms"] * 1e3
        row["weight_bytes"] = self.step_bytes
        first = self.bench.first_s.get((mode, batch))
        if first is not None and mode not in GRAPHS and mode != "compiled":
            row["first_call_s"], row["first_call_how"] = first, OTHER_ROWS
        return row

    def generate_row(self, mode: str, times: Times) -> dict[str, Any]:
        """A whole answer: the prompts in one step, then as many as there are further tokens."""
        options = self.options
        row = self._row("generate", mode, options.generate_batch, times)
        ordered = sorted(times.wall_s)
        row["wall_ms"] = statistics.median(ordered) * 1e3
        row["wall_p10_ms"], row["wall_p90_ms"] = ordered[0] * 1e3, ordered[-1] * 1e3
        row["tokens_s"] = options.generate_batch * options.new_tokens / row["wall_ms"] * 1e3
        row["weight_bytes"] = options.new_tokens * (self.step_bytes + self.head_bytes)
        row["prompt_tokens"], row["new_tokens"] = options.prompt_tokens, options.new_tokens
        return row

    def profile(self, modes: Sequence[str]) -> None:
        """Busy time, kernels and launches of a decode step, into the rows that are there."""
        by = {(row["mode"], row["batch"]): row for row in self.rows if row["case"] == "decode"}
        for batch in self.options.batches:
            for mode in modes:
                by[mode, batch].update(profiled(self.bench.step(mode, batch)))


# --- a process of its own ------------------------------------------------------------------------------


def main() -> None:
    """The child: ``OPTIONS PART STEM``. Writes ``STEM.ready`` and waits for ``STEM.go``; rows go into ``STEM.json``."""
    options, part, stem = Options.from_json(sys.argv[1]), sys.argv[2], Path(sys.argv[3])

    def ready() -> None:
        stem.with_suffix(".ready").touch()
        while not stem.with_suffix(".go").exists():
            time.sleep(0.02)

    for rows in measure(options, part, ready):
        with whole_file(stem.with_suffix(".json")) as path:
            path.write_text(json.dumps(rows))


def as_json(options: Options, **changes: Any) -> str:
    """Options for a child."""
    return json.dumps(asdict(replace(options, **changes)))


if __name__ == "__main__":
    main()
