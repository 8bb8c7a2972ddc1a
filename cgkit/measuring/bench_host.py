"""``cgkit bench host``: where the host's time of a recorded decode step goes, part by part, on each path.

Each path is a chain of steps in which one more part does nothing (:mod:`cgkit.measuring.host_paths`). All steps of all
chains run in turn in one process, the GPU idle before each; a part is the difference of two neighbours' medians. So
the parts add up to the whole by construction, and what is left when everything is empty stands there as
"unexplained". A part within the machine's noise may come out below zero: it is shown as it came out.

On a CPU graphs are emulated and attention computes: the figures then say nothing of a GPU, and say so.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from cgkit.config import CUDAGraphMode
from cgkit.display import Shown
from cgkit.errors import CaptureError, ConfigError
from cgkit.files import whole_file
from cgkit.measuring.bench_charts import picture_file
from cgkit.measuring.decode_bench import COUNTED, DecodeBench, Times, any_shape
from cgkit.measuring.host_paths import (
    AROUND,
    PARTS,
    PATHS,
    REST,
    Chain,
    full_chain,
    module_chain,
    plan_chain,
    traced_chain,
)
from cgkit.measuring.manifest import write_manifest

if TYPE_CHECKING:
    import pandas as pd

WHAT = (
    "host time of a recorded decode step by path and part: differences of medians of steps in which one more part does "
    "nothing; the parts of a path and batch add up to whole_us"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``cgkit bench host``."""
    parser.add_argument("--shape", default="llama-3.2-1b", metavar="SHAPE", help="(default: %(default)s)")
    parser.add_argument("--layers", type=int, default=None, help="fewer layers than the shape has")
    parser.add_argument("--batches", type=int, nargs="+", default=[1], help="(default: 1)")
    parser.add_argument("--paths", nargs="+", default=list(PATHS), choices=list(PATHS), metavar="PATH")
    parser.add_argument("--context", type=int, default=256, help="tokens in the KV cache of each request")
    parser.add_argument("--rounds", type=int, default=25, help="turns of each step, 8 counted ones each")
    parser.add_argument("--compiler", default="inductor", choices=["inductor", "eager"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: emulated, a dry run")
    parser.add_argument("--csv", metavar="FILE", help="write the rows as CSV, with a manifest beside it")
    parser.add_argument("--out", "--svg", dest="svg", type=picture_file, metavar="FILE", help="draw the bars")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures; ``frame`` is the table, ``rows`` its rows as data, ``summary`` a row a path and batch.

    Raises:
        CaptureError: no GPU, and ``--device cpu`` was not given.
        ConfigError: the shape is unknown or a number makes no sense.
    """
    if args.device == "cuda" and not torch.cuda.is_available():
        raise CaptureError(
            "cgkit bench host measures a GPU's host, and there is none; --device cpu is a dry run"
        )
    found = host_time(
        args.shape,
        args.batches,
        paths=args.paths,
        device=args.device,
        layers=args.layers,
        context=args.context,
        rounds=args.rounds,
        compiler=args.compiler,
    )
    if args.csv:
        with whole_file(args.csv) as path:
            found.to_frame().to_csv(path, index=False, float_format="%.5g")
        command = f"cgkit bench host --shape {args.shape} --batches {' '.join(map(str, args.batches))}"
        write_manifest(args.csv, WHAT, command, model=args.shape, emulated=args.device == "cpu")
    if args.svg:
        from cgkit.plotting.style import save

        save(found.plot(), args.svg)
    return {
        **found.about,
        "frame": found.table(),
        "rows": found.rows,
        "summary": found.summary().to_dict("records"),
        "not_measured": found.missing,
    }


@dataclass(repr=False)
class HostTime(Shown):
    """The parts of a step's host time, path by path.

    Attributes:
        rows: a dict a path, batch and part, as :meth:`to_frame` gives them.
        missing: path -> why it was not measured.
        about: model, device, ``emulated``, versions.
    """

    rows: list[dict[str, Any]]
    missing: dict[str, str]
    about: dict[str, Any]

    def to_frame(self) -> pd.DataFrame:
        """A row a path, batch and part: ``step_us``, ``piece_us``, ``count`` (how often it occurs in a step),
        ``each_us``, ``share`` of ``whole_us`` (the whole step's), ``pieces``, ``what``; and model, device, emulated."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    def table(self) -> pd.DataFrame:
        """The rows for reading: the whole first, then its parts."""
        import pandas as pd

        made: list[dict[str, Any]] = []
        for row in self.rows:
            head = {"path": row["path"], "batch": row["batch"]}
            if not made or any(made[-1][name] != value for name, value in head.items()):
                whole = {"step_us": row["whole_us"], "piece_us": row["whole_us"] / row["pieces"], "count": 1}
                made.append(
                    {**head, "part": "the whole step", **whole, "each_us": row["whole_us"], "share": 1.0}
                )
            made.append(
                {
                    **head,
                    **{
                        name: row[name]
                        for name in ("part", "step_us", "piece_us", "count", "each_us", "share")
                    },
                }
            )
        return pd.DataFrame(made)

    def summary(self) -> pd.DataFrame:
        """A row a path and batch: ``whole_us``; ``empty_attention_us`` (the model's call and its forward context, with
        empty attention: what stands before a padded batch is ready left out) and the same a piece;
        ``empty_replays_us`` (with empty replays too)."""
        import pandas as pd

        rows = []
        for path, batch in dict.fromkeys((row["path"], row["batch"]) for row in self.rows):
            mine = {r["part"]: r["step_us"] for r in self.rows if (r["path"], r["batch"]) == (path, batch)}
            first = next(r for r in self.rows if (r["path"], r["batch"]) == (path, batch))
            inner = sum(us for part, us in mine.items() if part not in (*AROUND, "attention launches"))
            rows.append(
                {
                    "path": path,
                    "batch": batch,
                    "whole_us": first["whole_us"],
                    "empty_attention_us": inner,
                    "empty_attention_us_a_piece": inner / first["pieces"],
                    "empty_replays_us": inner - mine.get("graph replays", 0.0),
                    "emulated": first["emulated"],
                }
            )
        return pd.DataFrame(rows)

    def plot(self, ax: Any = None) -> Any:
        """Stacked bars; see :func:`cgkit.plotting.host_chart.host_time`."""
        from cgkit.plotting import host_chart
        from cgkit.plotting.style import About

        known = {name: str(self.about.get(name) or "") for name in ("model", "device")}
        return host_chart.host_time(self.to_frame(), About(**known, emulated=self.about["emulated"]), ax=ax)

    def __repr__(self) -> str:
        kind = "emulated" if self.about["emulated"] else self.about["device"]
        lines = [f"HostTime of {self.about['model']} ({kind}): microseconds of a decode step on the host"]
        for row in self.summary().to_dict("records"):
            lines.append(
                f"  {row['path']:<10} batch {row['batch']:<4} {row['whole_us']:8.1f} us; with empty attention "
                f"{row['empty_attention_us']:8.1f} us, {row['empty_attention_us_a_piece']:.2f} us a piece"
            )
        return "\n".join([*lines, *(f"  {path}: not measured ({why})" for path, why in self.missing.items())])


def host_time(
    shape: str = "llama-3.2-1b",
    batches: Sequence[int] = (1,),
    *,
    paths: Sequence[str] = tuple(PATHS),
    device: str | None = None,
    layers: int | None = None,
    context: int = 256,
    rounds: int = 25,
    compiler: str = "inductor",
) -> HostTime:
    """Takes the host's time of a decode step apart; see the module.

    Args:
        shape: a model of :mod:`cgkit.serving`, random weights.
        batches: the numbers of requests in a step to measure at.
        paths: of :data:`cgkit.measuring.host_paths.PATHS`.
        device: "cuda" or "cpu" (emulated); None: the GPU if there is one.
        layers: fewer than the shape has; None: all.
        context: tokens in the KV cache of each request.
        rounds: turns of each step; 8 counted steps a turn.
        compiler: "inductor" or "eager".

    Raises:
        ConfigError: an unknown shape or path, or a number that makes no sense.

    Source: the article's "一次 decode 步的 CPU 账单" (the CPU bill of one decode step), which stops at the step
    without graphs; the parts are those in which vLLM's own path can be told.
    """
    if unknown := [path for path in paths if path not in PATHS]:
        raise ConfigError(f"paths has {unknown}; use {', '.join(PATHS)}")
    if not batches or min(batches) < 1 or rounds < 1:
        raise ConfigError(f"batches={list(batches)}, rounds={rounds}: use positive numbers")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    with torch.no_grad():
        bench = DecodeBench(
            any_shape(shape, layers), batches, device=device, context=context, compiler=compiler
        )
        inputs = bench.runner.inputs
        bench.executor.compile(inputs)
        pieces = bench.executor.record(inputs, mode=CUDAGraphMode.PIECEWISE)
        whole = bench.executor.record(inputs, mode=CUDAGraphMode.FULL_DECODE_ONLY)
        about = {
            "model": shape,
            "layers": bench.shape.num_hidden_layers,
            "device": bench.device_name,
            "emulated": not bench.cuda,
            "context_tokens": context,
            "compiler": compiler,
            "torch": torch.__version__,
        }
        for batch in batches:
            chains: list[Chain] = []
            for path in paths:
                if path == "plan":
                    found = plan_chain(bench, pieces, batch)
                    if isinstance(found, str):
                        missing[path] = found
                        continue
                    chains.append(found)
                elif path == "full":
                    chains.append(full_chain(bench, whole, batch))
                else:
                    chains.append((module_chain if path == "module" else traced_chain)(bench, pieces, batch))
            rows += measured(chains, batch, rounds, bench.cuda, about)
    return HostTime(rows, missing, about)


def measured(
    chains: Sequence[Chain], batch: int, rounds: int, cuda: bool, about: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Runs every step of every chain in turn and gives the parts of each path."""
    times = {(chain.path, index): Times() for chain in chains for index in range(len(chain.links) + 1)}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for chain in chains:
                for index, link in enumerate(chain.links):
                    with link.swapped():
                        times[chain.path, index].turn(link.step, cuda)
                times[chain.path, len(chain.links)].turn(_empty, cuda)
    finally:
        gc.enable()
    rows = []
    for chain in chains:
        medians = [statistics.median(times[chain.path, i].cpu_s) * 1e6 for i in range(len(chain.links) + 1)]
        parts = parts_of([link.removed for link in chain.links], medians)
        rows += rows_of(chain, batch, medians[0], parts, rounds * COUNTED, about)
    return rows


def parts_of(removed: Sequence[str], medians: Sequence[float]) -> dict[str, float]:
    """Part -> microseconds, from a chain's medians.

    ``removed``: by step, the part that it lacks and the one before has (the first: none). ``medians`` has one more: an
    empty call. What the last step still takes, that call and the clock included, is "unexplained".
    """
    parts = {name: medians[i] - medians[i + 1] for i, name in enumerate(removed[1:])}
    parts[REST] = medians[len(removed) - 1]
    return parts


def rows_of(
    chain: Chain, batch: int, whole: float, parts: Mapping[str, float], samples: int, about: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """A row a part, in the order of :data:`PARTS`."""
    return [
        {
            "model": about["model"],
            "path": chain.path,
            "batch": batch,
            "part": part,
            "step_us": parts[part],
            "piece_us": parts[part] / chain.pieces,
            "count": chain.counts[part],
            "each_us": parts[part] / chain.counts[part],
            "share": parts[part] / whole,
            "whole_us": whole,
            "pieces": chain.pieces,
            "samples": samples,
            "what": PARTS[part],
            "emulated": about["emulated"],
            "device": about["device"],
        }
        for part in PARTS
        if part in parts
    ]


def _empty() -> None:
    """What is left when everything is gone."""
