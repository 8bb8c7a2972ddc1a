"""``crossover(shape, batches)``: at which batch size a decode step stops being launch-bound, in each mode.

A step is launch-bound while the host needs longer to issue it than the GPU needs to run it. The host's time hardly
depends on the batch; the GPU's grows with it. So the predicted curve takes the host's time from one
measurement, at the smallest batch, and the GPU's from a roofline: bytes over the measured copy bandwidth or FLOPs over
the measured matrix rate, whichever is longer. The measured curve stands beside it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cgkit.display import Shown
from cgkit.errors import ConfigError
from cgkit.measuring.roofline import Rates, Work, measure_rates

if TYPE_CHECKING:
    import pandas as pd

    from cgkit.config import CompilationConfig
    from cgkit.measuring.decode_bench import StepBench
    from cgkit.serving.llama import LlamaConfig

BATCHES = (1, 4, 16, 32, 64, 128, 256, 512)


@dataclass(repr=False)
class Crossover(Shown):
    """The curves of one model, and where they cross.

    Attributes:
        rows: a dict a mode and batch, as :meth:`to_frame` gives them.
        batches: what was measured, ascending.
        rates, work: what the predicted curve was made of.
        about: model, device, context, versions; ``emulated`` for a dry run on a CPU.
    """

    rows: list[dict[str, Any]]
    batches: list[int]
    rates: Rates
    work: Work
    about: dict[str, Any]

    def to_frame(self) -> pd.DataFrame:
        """A row a mode and batch: ``wall_ms`` (synchronised), ``cpu_ms`` (until the call returned), ``gpu_busy_ms``
        (sum of kernel times; None without a GPU), ``roofline_ms``, ``predicted_ms``, ``launch_bound``, ``emulated``."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    def crossings(self) -> pd.DataFrame:
        """A row a mode: ``measured_batch`` and ``predicted_batch`` from which on the GPU is the slower one.

        0 for "already at the smallest batch", infinity for "not up to the largest one measured" (or, predicted, never);
        None where nothing was measured (no GPU). Between two measured batches it is interpolated.
        """
        import pandas as pd

        return pd.DataFrame(
            [self._crossing(mode) for mode in dict.fromkeys(row["mode"] for row in self.rows)]
        )

    def _crossing(self, mode: str) -> dict[str, Any]:
        rows = sorted((row for row in self.rows if row["mode"] == mode), key=lambda row: row["batch"])
        host_s = rows[0]["cpu_ms"] / 1e3
        return {
            "mode": mode,
            "measured_batch": measured_crossing(rows),
            "predicted_batch": self.work.batch_at(host_s, self.rates),
            "host_ms": rows[0]["cpu_ms"],
            "emulated": bool(self.about.get("emulated")),
        }

    def plot(self, ax: Any = None) -> Any:
        """Both curves of each mode; see :func:`cgkit.plotting.launch_charts.crossover`."""
        from cgkit.plotting import launch_charts
        from cgkit.plotting.style import About

        known = {name: str(self.about.get(name) or "") for name in ("model", "device", "recorded")}
        about = About(**known, emulated=self.about.get("emulated"))
        return launch_charts.crossover(self.to_frame(), self.crossings(), about, ax=ax)

    def facts(self) -> dict[str, Any]:
        """Everything as plain data, for JSON."""
        return {
            **self.about,
            "rates": asdict(self.rates),
            "work": asdict(self.work),
            "crossings": [_finite(row) for row in self.crossings().to_dict("records")],
            "rows": self.rows,
        }

    @classmethod
    def from_facts(cls, facts: dict[str, Any], **about: Any) -> Crossover:
        """Back from :meth:`facts`, for instance of a recording; ``about`` adds to what it says of itself."""
        own = {k: v for k, v in facts.items() if k not in ("rates", "work", "crossings", "rows")}
        batches = sorted({row["batch"] for row in facts["rows"]})
        return cls(facts["rows"], batches, Rates(**facts["rates"]), Work(**facts["work"]), own | about)

    def __repr__(self) -> str:
        kind = "emulated, a dry run" if self.about.get("emulated") else "measured"
        lines = [f"Crossover of {self.about.get('model')} on {self.about.get('device')} ({kind})"]
        for row in self.crossings().to_dict("records"):
            lines.append(
                f"  {row['mode']:<10} host {row['host_ms']:8.3f} ms; no longer launch-bound from batch "
                f"{said(row['measured_batch'])} (measured), {said(row['predicted_batch'])} (predicted)"
            )
        return "\n".join(lines)


def said(batch: float | None) -> str:
    """A crossing in words."""
    if batch is None or math.isnan(batch):
        return "?"
    if batch == 0:
        return "1"
    return "beyond what was measured" if math.isinf(batch) else f"{batch:.0f}"


def measured_crossing(rows: Sequence[dict[str, Any]]) -> float | None:
    """Where ``cpu_ms`` falls below ``gpu_busy_ms``, in ascending rows of one mode; see :meth:`Crossover.crossings`.

    Interpolated on the logarithm of the batch. Of several crossings the last counts: from there on it stays so.
    """
    if any(row.get("gpu_busy_ms") is None for row in rows):
        return None
    over = [math.log(row["cpu_ms"] / row["gpu_busy_ms"]) for row in rows]
    if over[-1] > 0:
        return math.inf
    last = max((index for index, value in enumerate(over) if value > 0), default=None)
    if last is None:
        return 0.0
    left, right = math.log2(rows[last]["batch"]), math.log2(rows[last + 1]["batch"])
    share = over[last] / (over[last] - over[last + 1])
    return 2 ** (left + share * (right - left))


def crossover(
    model: str | LlamaConfig | nn.Module,
    batches: Sequence[int] = BATCHES,
    *,
    make_inputs: Callable[[int], Any] | None = None,
    config: CompilationConfig | None = None,
    metadata: Any = None,
    dynamic_arg_dims: Any = None,
    device: str | None = None,
    context: int = 256,
    layers: int | None = None,
    repeats: int = 40,
) -> Crossover:
    """Measures a step at each batch size and in each mode, and predicts the same.

    Of a Llama (a shape's name, a configuration, or a model of :mod:`cgkit.serving`) it is a decode step up to the last
    norm, with random weights: their values do not change the times. With any other model, give ``make_inputs``.
    On a CPU everything runs emulated: a dry run, labelled so, with no GPU busy time and so no measured crossing.

    The GPU's busy time comes from a profiler: for a Llama in a process of its own, for your own model in this process,
    at the end, after which launches cost more here (:func:`cgkit.measuring.profile_step`).

    Args:
        model: see above.
        batches: tokens in a step; of a Llama requests, each with one new token.
        make_inputs: batch -> the arguments of a call (a tensor, a tuple, or a dict of keywords).
        config: of your own model: splitting operators, compiler. Graph mode and sizes are set here.
        metadata: of your own model: the steps' ``attn_metadata``, or a function of the ``BatchDescriptor``.
        dynamic_arg_dims: of your own model: as :func:`cgkit.trace` takes it.
        device: of a Llama: "cuda" or "cpu"; None: the GPU if there is one. Your own model stays where it is.
        context: of a Llama: tokens in the KV cache of each request.
        layers: of a Llama: fewer layers than the shape has.
        repeats: counted steps of each row.

    Raises:
        ConfigError: an unknown shape, no batches, or a model without ``make_inputs``.
        CaptureError: ``device="cuda"`` without a GPU.
    """
    from cgkit.measuring.decode_bench import DecodeBench, busy, busy_in_a_child

    ordered = sorted(set(batches))
    if not ordered or ordered[0] < 1:
        raise ConfigError(f"batches={list(batches)!r}: give batch sizes of 1 or more")
    if make_inputs is not None:
        from cgkit.measuring.module_bench import ModuleBench

        if not isinstance(model, nn.Module):
            raise ConfigError(f"make_inputs goes with an nn.Module, not with {model!r}")
        own = ModuleBench(
            model, make_inputs, ordered, config=config, metadata=metadata, dynamic_arg_dims=dynamic_arg_dims
        )
        own.capture()
        found = measure_crossover(
            own, ordered, (lambda: busy(own, ordered)) if own.cuda else None, repeats=repeats
        )
        own.free()
        return found
    shape = _shape(model, layers)
    with torch.no_grad():
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        bench = DecodeBench(shape, ordered, device=device, context=context)
        bench.capture()
    in_child = (lambda: busy_in_a_child(shape, ordered, context=context)) if bench.cuda else None
    return measure_crossover(bench, ordered, in_child, repeats=repeats)


def measure_crossover(
    bench: StepBench,
    batches: Sequence[int],
    busy: Callable[[], Sequence[dict[str, Any]]] | None,
    *,
    repeats: int = 40,
) -> Crossover:
    """The measuring half of :func:`crossover`, on a bench that has captured ``batches`` (ascending) already.

    ``busy``: gives the rows of :func:`cgkit.measuring.decode_bench.busy`; called last. None without a GPU.
    """
    from cgkit.measuring.decode_bench import timed

    with torch.no_grad():
        rates = measure_rates(bench.device)
        work = bench.work()
        measured = {batch: timed(bench.steps(batch), repeats, bench.cuda) for batch in batches}
        profiled = {(row["mode"], row["batch"]): row for row in busy()} if busy is not None else {}
    rows = [
        {"mode": mode, "batch": batch, **times.row(), "gpu_busy_ms": None, **profiled.get((mode, batch), {})}
        for batch, by_mode in measured.items()
        for mode, times in by_mode.items()
    ]
    _predict(rows, rates, work, emulated=not bench.cuda)
    about = {"device": bench.device_name, "emulated": not bench.cuda, "torch": torch.__version__}
    return Crossover(rows, list(batches), rates, work, bench.about() | about)


def _shape(model: Any, layers: int | None) -> LlamaConfig:
    from cgkit.measuring.decode_bench import shape_of
    from cgkit.serving.llama import LlamaConfig

    if isinstance(model, str):
        return shape_of(model, layers)
    shape = getattr(model, "config", model)
    if not isinstance(shape, LlamaConfig):
        raise ConfigError(
            f"{type(model).__name__} is no Llama of cgkit: give make_inputs=lambda batch: (its arguments), or a "
            "shape's name, or a LlamaConfig (LlamaConfig.from_hf takes one of transformers)"
        )
    return shape.scaled(num_hidden_layers=layers) if layers else shape


def _predict(rows: list[dict[str, Any]], rates: Rates, work: Work, emulated: bool) -> None:
    """Adds the predicted columns: the host's time of the smallest batch against the roofline."""
    host: dict[str, float] = {}
    for row in sorted(rows, key=lambda row: row["batch"]):
        host.setdefault(row["mode"], row["cpu_ms"])
    for row in rows:
        roofline = work.seconds(row["batch"], rates) * 1e3
        row["roofline_ms"] = roofline
        row["predicted_ms"] = max(host[row["mode"]], roofline)
        row["launch_bound"] = None if row["gpu_busy_ms"] is None else row["cpu_ms"] > row["gpu_busy_ms"]
        row["emulated"] = emulated


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity and no NaN: they become words and None."""
    plain = {}
    for key, value in row.items():
        number = isinstance(value, float)
        plain[key] = (
            "beyond" if number and math.isinf(value) else None if number and math.isnan(value) else value
        )
    return plain


# --- cgkit bench crossover -----------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``cgkit bench crossover``."""
    from cgkit.serving.llama import PRESETS

    parser.add_argument("--shape", default="llama-3.2-1b", choices=sorted(PRESETS))
    parser.add_argument("--layers", type=int, default=None, help="fewer layers than the shape has")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), metavar="N")
    parser.add_argument("--context", type=int, default=256, help="tokens in the KV cache of each request")
    parser.add_argument("--repeats", type=int, default=40, help="counted steps of each row")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: emulated, a dry run")
    parser.add_argument(
        "--csv", metavar="FILE", help="write the rows as CSV too: cgkit plan --step-cost takes it"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures; returns ``frame`` and :meth:`Crossover.facts`."""
    found = crossover(
        args.shape,
        args.batches,
        device=args.device,
        context=args.context,
        layers=args.layers,
        repeats=args.repeats,
    )
    frame = found.to_frame()
    if args.csv:
        from cgkit.files import whole_file

        with whole_file(args.csv) as part:
            frame.to_csv(part, index=False)
    return {**found.facts(), "frame": frame}
