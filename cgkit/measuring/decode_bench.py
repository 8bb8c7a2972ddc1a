"""One decode step of a model of cgkit in every mode, ready to be timed: what the benchmarks share.

What is compared runs in turn, over and over, because a machine's speed drifts. A turn is a few steps
of one row, the first of which do not count: a server repeats one graph step after step, and the first
replay after another row finds the host's caches cold. All rows have the same weights, the same attention
operator and the same KV cache. With ``device="cpu"`` graphs are emulated: a dry run.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch

from cgkit.config import CompilationConfig, CUDAGraphMode
from cgkit.errors import CaptureError, ConfigError, ServingError
from cgkit.forward_context import BatchDescriptor, set_forward_context
from cgkit.measuring.roofline import Work, llama_work
from cgkit.serving.llama import PRESETS, LlamaConfig, RopeScaling
from cgkit.serving.request import Request, Scheduled
from cgkit.serving.runner import Runner
from cgkit.serving.weights import Shape, named_shape, random_model

Step = Callable[..., Any]
#: One turn of a row: steps that do not count, then steps that do.
UNCOUNTED, COUNTED = 2, 8
#: Steps in one profile, from which the GPU's busy time is taken.
PROFILED = 4


def shape_of(name: str, layers: int | None = None) -> LlamaConfig:
    """The preset ``name`` of a Llama, with another number of layers if that is given.

    Raises:
        ConfigError: there is no such preset, or a model of so many layers.
    """
    shape = any_shape(name, layers)
    if not isinstance(shape, LlamaConfig):
        raise ConfigError(f"{name!r} is no shape of a Llama; use one of {', '.join(sorted(PRESETS))}")
    return shape


def any_shape(name: str, layers: int | None = None) -> Shape:
    """As :func:`shape_of`, of every family that a runner serves."""
    try:
        return named_shape(name, layers)
    except ServingError as error:
        raise ConfigError(str(error)) from error


class StepBench(Protocol):
    """What can be timed in every mode: :class:`DecodeBench`, or a model of somebody's own."""

    device: str
    cuda: bool
    device_name: str

    def steps(self, batch: int) -> dict[str, Step]:
        """The step of each mode."""

    def work(self) -> Work:
        """What a step must move and compute at least."""

    def about(self) -> dict[str, Any]:
        """Model and settings."""


def decode_batch(runner: Runner, batch: int, context: int) -> list[Scheduled]:
    """``batch`` requests, each with one new token after ``context`` others and with blocks of its own."""
    each = -(-(context + 1) // runner.kv_cache.block_size)
    return [
        Scheduled(
            Request([1] * (context + 1), 2, blocks=list(range(start, start + each)), num_computed=context), 1
        )
        for start in range(1, 1 + batch * each, each)
    ]


class DecodeBench:
    """One model and one runner; after :meth:`capture` it holds piecewise and full graphs of every size.

    Args:
        shape: the model's; its weights are random.
        batches: the batch sizes that steps will be asked for.
        sizes: what is recorded beside the batches.
        context: tokens in the KV cache of each request.
        max_num_seqs: requests in a step; None: the largest size there is.
        compilation: more fields of the :class:`CompilationConfig` (:func:`cgkit.measuring.tuning.tuned_fields`).
    """

    def __init__(
        self,
        shape: Shape,
        batches: Sequence[int],
        *,
        device: str = "cuda",
        context: int = 256,
        sizes: Sequence[int] = (),
        compiler: str = "inductor",
        max_num_seqs: int | None = None,
        compilation: Mapping[str, Any] | None = None,
    ) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            raise CaptureError(
                "this measures a GPU, and there is none; device='cpu' (--device cpu) is a dry run"
            )
        self.shape, self.context, self.device, self.cuda = shape, context, device, device == "cuda"
        self.device_name = torch.cuda.get_device_name() if self.cuda else "cpu (emulated)"
        dtype = torch.bfloat16 if self.cuda else torch.float32
        self.model = random_model(shape, dtype, device)
        config = CompilationConfig(
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
            cudagraph_capture_sizes=tuple(sorted({*sizes, *batches})),
            compiler=compiler,
            **(compilation or {}),
        )
        length = context + 64
        self.runner = Runner(
            self.model,
            config=config,
            max_num_seqs=max_num_seqs or max([*sizes, *batches]),
            max_model_len=length,
            kv_cache_tokens=max(batches) * (length + 16),
        )
        self.executor = self.runner.executor

    def capture(self) -> None:
        """Compiles, and records every size in both modes."""
        self.executor.compile(self.runner.inputs)
        self.runner.capture_model()

    def front(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and positions of a step of ``size`` tokens, as the runner passes them."""
        inputs: Any = self.runner.inputs
        if hasattr(inputs, "front"):
            return inputs.front(size)
        return inputs.input_ids[:size], inputs.positions[:size]

    def prepared(self, batch: int) -> Any:
        """Fills the buffers once: ``batch`` requests, each with one new token after ``context`` others."""
        scheduled = decode_batch(self.runner, batch, self.context)
        return self.runner.inputs.fill(scheduled, batch, decode_only=True)

    def steps(self, batch: int) -> dict[str, Step]:
        """The step of each mode: the model up to its last norm, on buffers that are filled already."""
        forward = self.executor.forward
        metadata, (ids, positions), model = self.prepared(batch), self.front(batch), self.model

        def eager() -> Any:
            with set_forward_context(metadata):
                return model(ids, positions)

        def routed(mode: CUDAGraphMode, key: BatchDescriptor | None) -> Step:
            def step() -> Any:
                with set_forward_context(metadata, cudagraph_runtime_mode=mode, batch_descriptor=key):
                    return forward(ids, positions)

            return step

        return {
            "eager": eager,
            "compiled": routed(CUDAGraphMode.NONE, None),
            "PIECEWISE": routed(CUDAGraphMode.PIECEWISE, BatchDescriptor(batch)),
            "FULL": routed(CUDAGraphMode.FULL, BatchDescriptor(batch, True)),
        }

    def work(self) -> Work:
        """What a step must move and compute at least."""
        assert isinstance(self.shape, LlamaConfig), "the roofline is worked out for Llamas"
        return llama_work(self.shape, self.context, self.runner.dtype.itemsize)

    def about(self) -> dict[str, Any]:
        """What a measurement says of itself."""
        layers = self.shape.num_hidden_layers
        return {"model": self.shape.name, "layers": layers, "context_tokens": self.context}

    def reduce_overhead_step(self, batch: int) -> Step:
        """``torch.compile(mode="reduce-overhead")`` with the same attention inside, run until it has recorded.

        Nothing of this object may be replayed after it: recording its graphs frees the cuBLAS workspaces
        whose addresses hand-recorded graphs hold.
        """
        metadata, inputs = self.prepared(batch), self.runner.inputs
        ids, positions = inputs.input_ids[:batch], inputs.positions[:batch]
        compiled = torch.compile(self.model, mode="reduce-overhead", dynamic=False)

        def step() -> Any:
            with set_forward_context(metadata):
                return compiled(ids, positions)

        with set_forward_context(metadata):
            self.model(ids, positions)  # attention keeps a workspace: not one of CUDAGraph Trees' pool
        for _ in range(5):
            step()
        return step


@dataclass
class Times:
    """Seconds of a row's counted steps: until the GPU was done, and until the call returned."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def row(self) -> dict[str, float]:
        """Medians in milliseconds, and the 10th and 90th percentile of the wall time."""
        ordered = sorted(self.wall_s)
        return {
            "wall_ms": statistics.median(ordered) * 1e3,
            "wall_p10_ms": ordered[len(ordered) // 10] * 1e3,
            "wall_p90_ms": ordered[len(ordered) * 9 // 10] * 1e3,
            "cpu_ms": statistics.median(self.cpu_s) * 1e3,
        }

    def turn(self, step: Step, cuda: bool) -> None:
        """A turn of one row."""
        synchronize = torch.cuda.synchronize if cuda else (lambda: None)
        for index in range(UNCOUNTED + COUNTED):
            synchronize()
            started = time.perf_counter()
            step()
            returned = time.perf_counter()
            synchronize()
            if index >= UNCOUNTED:
                self.wall_s.append(time.perf_counter() - started)
                self.cpu_s.append(returned - started)


def timed(
    steps: dict[str, Step], repeats: int, cuda: bool, between: Callable[[], None] | None = None
) -> dict[str, Times]:
    """Runs the rows in turn until each has ``repeats`` counted steps; ``between`` rounds something else."""
    times = {name: Times() for name in steps}
    gc.collect()
    gc.disable()
    try:
        for _ in range(-(-repeats // COUNTED)):
            for name, step in steps.items():
                times[name].turn(step, cuda)
            if between is not None:
                between()
    finally:
        gc.enable()
    return times


# --- GPU busy time, from the profiler, in a process of its own ----------------------------------------


def busy_in_a_child(
    shape: LlamaConfig,
    batches: Sequence[int],
    *,
    context: int = 256,
    compilation: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """``gpu_busy_ms`` (sum of kernel times) and ``gpu_nodes`` of a step, by mode and batch.

    In a process of its own: once the profiler has run, every later graph launch of the process costs more.

    Raises:
        CaptureError: the child failed.
    """
    told = json.dumps({"shape": asdict(shape), "context": context, "compilation": dict(compilation or {})})
    command = [sys.executable, "-m", __name__, told, *map(str, batches)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise CaptureError(
            f"the profiling child failed with exit status {done.returncode}; see its output above"
        )
    return json.loads(done.stdout.splitlines()[-1])


def busy(bench: StepBench, batches: Sequence[int]) -> list[dict[str, Any]]:
    """What the child measures: :func:`busy_of` each row."""
    rows = []
    for batch in batches:
        for name, step in bench.steps(batch).items():
            ms, nodes = busy_of(step)
            rows.append({"mode": name, "batch": batch, "gpu_busy_ms": ms, "gpu_nodes": int(nodes)})
    return rows


def busy_of(step: Step) -> tuple[float, float]:
    """Milliseconds of all kernels (copies and fills too) of a step, and how many they are: the mean of ``PROFILED``
    steps in one profile. Launches of the process cost more from then on."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True) as profiler:
        for _ in range(PROFILED):
            step()
            torch.cuda.synchronize()
    return _busy_in(profiler.events())


def _busy_in(happened: Sequence[Any]) -> tuple[float, float]:
    """:func:`busy_of` from a profile's events."""
    kernels = [event for event in happened if str(event.device_type).endswith("CUDA")]
    return sum(event.time_range.elapsed_us() for event in kernels) / PROFILED / 1e3, len(kernels) / PROFILED


def shape_from_json(text: str) -> LlamaConfig:
    """What ``json.dumps(asdict(shape))`` made of a shape."""
    return _shape_from(json.loads(text))


def _shape_from(fields: dict[str, Any]) -> LlamaConfig:
    scaling, stop = fields.pop("rope_scaling"), tuple(fields.pop("eos_token_ids"))
    return LlamaConfig(**fields, eos_token_ids=stop, rope_scaling=scaling and RopeScaling(**scaling))


def _child() -> None:
    told, batches = json.loads(sys.argv[1]), [int(text) for text in sys.argv[2:]]
    shape = _shape_from(told["shape"])
    with torch.no_grad():
        bench = DecodeBench(shape, batches, context=told["context"], compilation=told["compilation"])
        bench.capture()
        print(json.dumps(busy(bench, batches)))


if __name__ == "__main__":
    _child()
