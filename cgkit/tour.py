"""The main job: one real model takes the whole road, answers, and a page shows each stage.

``tour()`` loads a model, lets a :class:`cgkit.serving.Runner` trace, split, compile and record it, then
decodes the same prompts in four ways, step by step in turn: eager, compiled without graphs, PIECEWISE
and FULL. It collects DataFrames only; :mod:`cgkit.plotting.tour_page` draws them.
"""

from __future__ import annotations

import atexit
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cgkit import __version__, events
from cgkit.config import CompilationConfig, CompilationLevel, CUDAGraphMode, whole_sizes
from cgkit.counters import compilation_counter
from cgkit.environment import environment
from cgkit.errors import ConfigError
from cgkit.files import check_writable
from cgkit.forward_context import BatchDescriptor, set_forward_context
from cgkit.measuring.compile_log import CompilationLog, record_compilation
from cgkit.measuring.expected_counters import counters_table
from cgkit.measuring.profile_step import profile_step
from cgkit.measuring.timeline import Timeline
from cgkit.serving import LoadedModel, Request, Runner, Scheduled, chat_prompt, load_model

if TYPE_CHECKING:
    from cgkit.plotting.tour_page import TourData

#: Short names for the command line.
MODELS = {"smollm2": "smollm2-135m-instruct"}

#: One long and some short, so that some steps are padded, one is above the largest size, and the batch
#: shrinks as answers end.
PROMPTS = (
    "What is the capital of France?",
    "Give me three words that rhyme with 'graph'.",
    "Explain in one sentence what a compiler does.",
    "Write a haiku about waiting.",
    "I have read that a large language model spends most of the time of a decode step on reading its weights "
    "from memory, and that on a fast GPU, with a small batch, a good part of what is left is spent on "
    "starting kernels. Which of the two gets better with a larger batch? Answer briefly.",
)
SIZES = (1, 2, 4, 8, 16, 32, 64)
RANDOM = "The weights are random: what the model says means nothing, that it says it again each way does."
MODES = ("eager", "compiled", "PIECEWISE", "FULL")


@dataclass
class TourResult:
    """What a tour found: ``data`` (DataFrames, see ``TourData``), and where the page is."""

    data: Any
    counters: dict[str, int]
    report: Path
    device: str
    seconds: float

    def facts(self) -> dict[str, Any]:
        """The facts for a machine, as ``cgkit tour --json`` prints them."""
        data = self.data
        splitting = int((data.pieces["kind"] == "splitting").sum())
        return {
            "model": data.model,
            "device": self.device,
            "emulated": data.emulated,
            "layers": data.layers,
            "pieces": len(data.pieces),
            "pieces_compiled": len(data.pieces) - splitting,
            "pieces_unique": data.num_unique,
            "sizes": data.sizes,
            "graphs_captured": len(data.captures),
            "counters": self.counters,
            "cold_compile_s": round(data.cold_compile_s, 3),
            "tokens_equal": data.tokens_equal,
            "ms_per_token": {
                mode: round(ms, 3) for mode, ms in zip(data.times["mode"], data.times["ms_per_token"])
            },
            "report": str(self.report),
        }

    def text(self) -> str:
        """The table for a terminal."""
        import pandas as pd

        from cgkit.plotting.tables import human_bytes, text_table

        data, facts = self.data, self.facts()
        graphs = "emulated graphs: no GPU here" if data.emulated else "CUDA graphs"
        rows = [
            ("traced", f"one graph of {len(data.nodes):,} nodes, {data.layers} layers"),
            ("split", f"{facts['pieces']} pieces, {facts['pieces_compiled']} of them to compile"),
            (
                "compiled",
                f"{facts['pieces_unique']} different pieces in {data.cold_compile_s:.1f} s, from an empty cache",
            ),
            (
                "captured",
                f"{facts['graphs_captured']} graphs at {data.sizes}, {human_bytes(data.pool_bytes)}",
            ),
            ("replayed", "the same tokens as eager" if data.tokens_equal else "OTHER TOKENS THAN EAGER"),
        ]
        times = data.times.assign(
            emulated=[data.emulated and mode in MODES[2:] for mode in data.times["mode"]]
        )
        answer = data.answers.iloc[0]
        lines = [
            f"{data.model} on {data.device} ({graphs})",
            *(f"  {stage:<9} {what}" for stage, what in rows),
            "",
            text_table(pd.DataFrame(times)[["mode", "ms_per_token", "low_ms", "high_ms", "emulated"]]),
            "",
            f"  > {answer['prompt']}",
            f"  {' '.join(str(answer['answer']).split()) if not data.remarks else '(' + data.remarks[0] + ')'}",
            "",
            f"  the page: {self.report} ({self.seconds:.0f} s in all)",
        ]
        return "\n".join(lines)


def tour(
    model: str = "smollm2",
    *,
    device: str = "auto",
    tokens: int = 48,
    out: str | Path = "out/tour.html",
    prompts: Sequence[str] = PROMPTS,
    sizes: Sequence[int] = SIZES,
) -> TourResult:
    """Takes ``model`` down the whole road and writes the page to ``out``.

    Args:
        model: "smollm2", "tiny-llama", or what :func:`cgkit.serving.load_model` takes.
        device: "auto" (a GPU if there is one), "cpu" or "cuda".
        tokens: of each answer, at most.
        prompts: questions, all answered at a time.
        sizes: token counts to record; the decode batch must fit the largest.

    Raises:
        CgkitError: there is no such model or device, or the page cannot be written; nothing ran.
    """
    started = time.perf_counter()
    whole_sizes("tokens", [tokens])
    page = check_writable(Path(out))
    where = _device(device)
    clock = _Clock()
    before = compilation_counter.clone()
    with clock.stage("loading"), _progress("loading", model):
        loaded = load_model(MODELS.get(model, model), device=where)
    with record_compilation() as log:
        runner, eager, ledger = _build(loaded, len(prompts), tokens, tuple(sizes), clock)
    lanes = [_Lane(mode, eager if mode == "eager" else runner) for mode in MODES]
    with clock.stage("answering"):
        questions = [chat_prompt(loaded.tokenizer, prompt) for prompt in prompts]
        _race(lanes, questions, tokens)
    data = _data(loaded, runner, lanes, ledger, log, prompts, tokens, where)
    with clock.stage("profiling"):
        data.bill_table, data.step_pictures = _profiled(lanes, data)
    data.command = _command(model, device, tokens)
    counters = {name: count - getattr(before, name) for name, count in compilation_counter.as_dict().items()}
    data.counters = counters_table(runner.executor, counters).to_frame()
    from cgkit.plotting.tour_page import tour_page

    data.stages = _frame(stage=list(clock.seconds), seconds=list(clock.seconds.values()))
    page.write_text(tour_page(data), encoding="utf-8")
    return TourResult(data, counters, page, where.type, time.perf_counter() - started)


def _build(
    loaded: LoadedModel, num_prompts: int, tokens: int, sizes: tuple[int, ...], clock: _Clock
) -> tuple[Runner, Runner, Any]:
    """The runner with everything recorded, an eager one with the same weights, and the memory ledger."""
    from cgkit.measuring.memory import Ledger

    config = CompilationConfig(
        level=CompilationLevel.PIECEWISE,
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
        cudagraph_capture_sizes=sizes,
    )
    # three of the ways share the runner and its cache, each with requests of its own
    limits: dict[str, Any] = {"max_num_seqs": num_prompts, "max_num_batched_tokens": max(512, *sizes)}
    room: dict[str, Any] = {
        "kv_cache_tokens": 3 * num_prompts * (512 + tokens),
        "max_model_len": 512 + tokens,
    }
    with Ledger(keep_blocks=False) as ledger:
        runner = Runner(loaded.model, loaded.tokenizer, config, **limits, **room)
        with clock.stage("tracing to capturing"), _told(events.GraphTraced, "tracing"), _cold_cache():
            runner.capture_model()
    eager = Runner(
        loaded.model,
        loaded.tokenizer,
        CompilationConfig(level=CompilationLevel.NO_COMPILATION),
        **limits,
        **room,
    )
    return runner, eager, ledger


class _Lane:
    """One way to run the same requests. What it takes is forced, not dispatched: that is the comparison."""

    def __init__(self, mode: str, runner: Runner) -> None:
        self.mode, self.runner = mode, runner
        self.requests: list[Request] = []
        self.steps: list[dict[str, Any]] = []

    def admit(self, prompt: str, max_tokens: int) -> None:
        """Makes a request and gives it blocks for its longest answer."""
        stop = frozenset(self.runner.model.config.eos_token_ids)
        request = Request(self.runner.tokenizer.encode(prompt), max_tokens, stop_ids=stop)
        cache = self.runner.kv_cache
        request.blocks = cache.allocator.alloc(-(-(len(request.prompt) + max_tokens) // cache.block_size))
        self.requests.append(request)

    @property
    def running(self) -> list[Request]:
        """The requests without an end."""
        return [request for request in self.requests if not request.finish_reason]

    def step(self, batch: list[Scheduled]) -> None:
        """Runs one step, timed until its tokens are on the host."""
        total = sum(count for _, count in batch)
        uniform = total == len(batch)
        route = self._route(total, uniform)
        start = time.perf_counter()
        new = self.run(batch, uniform, *route)
        ms = (time.perf_counter() - start) * 1000
        for (request, count), token in zip(batch, new):
            request.advance(count, token)
        self.steps.append(
            {
                "kind": "decode" if uniform else "prefill",
                "num_reqs": len(batch),
                "num_tokens": total,
                "num_padded_tokens": route[2],
                "mode": route[0].name,
                "ms": ms,
            }
        )

    def run(
        self,
        batch: list[Scheduled],
        uniform: bool,
        mode: CUDAGraphMode,
        key: BatchDescriptor | None,
        padded: int,
    ) -> list[int]:
        """The new token of each request; nothing is advanced."""
        runner = self.runner
        with torch.no_grad():
            metadata = runner.inputs.fill(batch, padded, decode_only=uniform)
            with set_forward_context(metadata, cudagraph_runtime_mode=mode, batch_descriptor=key):
                hidden = runner.executor.forward(*runner.inputs.front(padded))
            last = hidden[runner.inputs.last_token_rows(len(batch))]
            return runner.model.compute_logits(last).argmax(-1).tolist()

    def profiled(self, about: dict[str, Any]) -> Timeline:
        """The last decode step of all requests, again and again under the profiler."""
        batch = [Scheduled(request, 1) for request in self.requests]
        route = self._route(len(batch), True)
        told = about | {"mode": self.mode, "batch": f"{len(batch)} requests"}
        return profile_step(lambda: self.run(batch, True, *route), steps=3, warmup=1, about=told)

    def _route(self, tokens: int, uniform: bool) -> tuple[CUDAGraphMode, BatchDescriptor | None, int]:
        """FULL goes where the dispatcher says; PIECEWISE to the graph of the same size for any batch."""
        if self.mode in ("eager", "compiled"):
            return CUDAGraphMode.NONE, None, tokens
        mode, key, padded = self.runner.executor.route(tokens, uniform and self.mode == "FULL")
        return mode, key, padded


def _race(lanes: Sequence[_Lane], prompts: Sequence[str], tokens: int) -> None:
    """The same requests in every lane: prefilled one by one, then decoded step by step in turn.

    In turn, because a machine's speed drifts: what is compared must be measured side by side. Who
    begins changes with each step.
    """
    total = len(prompts) + tokens - 1
    for number, prompt in enumerate(prompts):
        for lane in lanes:
            lane.admit(prompt, tokens)
            request = lane.requests[-1]
            lane.step([Scheduled(request, request.num_pending)])
        events.emit(events.Progress("answering", number + 1, total, "prefill"))
    for number in range(tokens - 1):
        if not any(lane.running for lane in lanes):
            break
        first = number % len(lanes)
        for lane in [*lanes[first:], *lanes[:first]]:
            if lane.running:
                lane.step([Scheduled(request, 1) for request in lane.running])
        events.emit(events.Progress("answering", len(prompts) + number + 1, total, "decode"))
    if number + 1 < tokens - 1 or tokens == 1:
        events.emit(events.Progress("answering", total, total, "all answers have ended"))


def _profiled(lanes: Sequence[_Lane], data: TourData) -> tuple[Any, list[tuple[Any, str]]]:
    """The bill of a decode step in each mode as a table, and two pictures with what they show in words.

    The very last thing that runs: where the profiler has run, launches cost more.
    """
    from cgkit.measuring import bill
    from cgkit.measuring.bill_table import reading_table

    about = {"model": data.model, "device": data.device, "emulated": data.emulated}
    timelines = []
    for number, lane in enumerate(lanes):
        events.emit(events.Progress("profiling", number, len(lanes), lane.mode))
        timelines.append(lane.profiled(about))
    events.emit(events.Progress("profiling", len(lanes), len(lanes)))
    bills = [timeline.bill() for timeline in timelines]
    shown = [(t, lane.mode) for t, lane in zip(timelines, lanes) if lane.mode in ("eager", "FULL")]
    deep = 6 if data.emulated else 3  # without a GPU there is only the CPU's side to look at
    against = Timeline.plot_against([t for t, _ in shown], [mode for _, mode in shown], most_deep=deep)
    return reading_table(bills), [
        (against, "A step of eager PyTorch above one of the full graph, on one time axis"),
        (bill.plot(bills), "Stacked bars: where the wall time of a step went, mode by mode"),
    ]


def _data(
    loaded: LoadedModel,
    runner: Runner,
    lanes: Sequence[_Lane],
    ledger: Any,
    log: CompilationLog,
    prompts: Sequence[str],
    tokens: int,
    device: torch.device,
) -> TourData:
    from cgkit.measuring.padding import coverage, padding
    from cgkit.measuring.waterfall import waterfall
    from cgkit.plotting.tour_page import TourData

    executor = runner.executor
    traced, split, compiled, captured = executor.traced, executor.split, executor.compiled, executor.captured
    assert traced is not None and split is not None and compiled is not None and captured is not None
    eager, full = lanes[0], lanes[-1]
    equal = all(
        [request.token_ids for request in lane.requests] == [r.token_ids for r in eager.requests]
        for lane in lanes
    )
    return TourData(
        model=loaded.config.name,
        device=_device_name(device),
        emulated=captured.platform.emulated,
        layers=loaded.config.num_hidden_layers,
        sizes=list(captured.sizes),
        mode=captured.mode.name,
        dtype=str(runner.dtype).removeprefix("torch."),
        requests=len(prompts),
        tokens=tokens,
        tokens_equal=equal,
        nodes=traced.to_frame(),
        pieces=split.to_frame(),
        edges=split.edges_frame(),
        opened={piece.name: split.nodes_frame(piece) for piece in split.pieces[:3]},
        log=log.to_frame(),
        compilations=compiled.to_frame(),
        captures=ledger.to_frame(),
        memory=waterfall(runner).to_frame(),
        padding=padding({"recorded": captured.sizes}, most=round(1.25 * captured.sizes.largest)).to_frame(),
        coverage=coverage(captured).to_frame(),
        steps=_frame_of(full.steps),
        times=_times(lanes),
        counters=None,
        stages=None,
        answers=_answers(loaded, full, prompts),
        stitch_source=split.source,
        cold_compile_s=compiled.seconds,
        remarks=[RANDOM] if loaded.source.startswith("random") else [],
        pool_bytes=captured.pool_bytes.reserved,
        adaptor=compiled.manager.adaptor.name,
        versions=f"cgkit {__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}",
    )


def _times(lanes: Sequence[_Lane]) -> Any:
    """Median and quartiles of the decode steps of each lane, the first of each left out (it warms up)."""
    rows = []
    for lane in lanes:
        ms = [step["ms"] for step in lane.steps if step["kind"] == "decode"][1:] or [lane.steps[-1]["ms"]]
        low, middle, high = statistics.quantiles(ms, n=4) if len(ms) > 1 else (ms[0],) * 3
        rows.append(
            {"mode": lane.mode, "ms_per_token": middle, "low_ms": low, "high_ms": high, "steps": len(ms)}
        )
    return _frame_of(rows)


def _answers(loaded: LoadedModel, lane: _Lane, prompts: Sequence[str]) -> Any:
    rows = []
    for prompt, request in zip(prompts, lane.requests):
        shown = [token for token in request.answer if token not in request.stop_ids]
        text = loaded.tokenizer.decode(shown).strip()
        more = "" if request.finish_reason == "stop" else " …"
        rows.append({"prompt": prompt, "answer": text + more, "tokens": len(request.answer)})
    return _frame_of(rows)


@dataclass
class _Clock:
    """Seconds of each part of the tour."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


@contextmanager
def _cold_cache() -> Iterator[None]:
    """Empty caches for the block, cgkit's and Inductor's: each tour compiles from nothing, so that its seconds
    can be compared. The folder goes with the process, because compiled code may be loaded from it late."""
    folder = tempfile.mkdtemp(prefix="cgkit-tour-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with environment(CGKIT_CACHE_DIR=folder, TORCHINDUCTOR_CACHE_DIR=folder):
        yield


@contextmanager
def _progress(stage: str, what: str) -> Iterator[None]:
    """Begins and ends a stage that cannot tell how far it is."""
    events.emit(events.Progress(stage, 0, 1, what))
    yield
    events.emit(events.Progress(stage, 1, 1, what))


@contextmanager
def _told(kind: type[events.Event], stage: str) -> Iterator[None]:
    """The same, ended by an event."""
    undo = events.subscribe(kind, lambda event: events.emit(events.Progress(stage, 1, 1)))
    events.emit(events.Progress(stage, 0, 1))
    try:
        yield
    finally:
        undo()


def _frame(**columns: list[Any]) -> Any:
    import pandas as pd

    return pd.DataFrame(columns)


def _frame_of(rows: Sequence[Any]) -> Any:
    import pandas as pd

    return pd.DataFrame(list(rows))


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"device={name!r} is unknown; use auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device='cuda', but torch {torch.__version__} sees no GPU; use 'auto' or 'cpu' (graphs are "
            "then emulated)"
        )
    return torch.device(name)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({torch.get_num_threads()} threads)"


def _command(model: str, device: str, tokens: int) -> str:
    options = [("--model", model, "smollm2"), ("--device", device, "auto"), ("--tokens", str(tokens), "48")]
    return " ".join(["cgkit tour", *(f"{name} {value}" for name, value, usual in options if value != usual)])
