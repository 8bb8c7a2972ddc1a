"""``cgkit bench headline``: every way to run a decode step, and a whole answer, side by side; one run.

Models: the OPT-125M, Llama-3.2-1B and Llama-3.1-8B shapes with random weights. Cases: a decode step at several batch
sizes, and the setting of the article's figures (vLLM PR #10058: 32 tokens in, 128 out, batch 8). All rows of a model
share its weights, buffers and attention, are warmed up first and then timed in turn, round after round; medians.
``eager`` is plain torch code: no hand-written kernel but the attention.

On a GPU each model takes two processes (:mod:`cgkit.measuring.headline_model` says why). All of them build and compile
at the same time; then one after the other measures. First calls of the road's own rows are measured before that,
in processes of their own: cold with an empty cache folder, then warm. What is done is written at once.
With ``--device cpu`` everything happens in this process, emulated: a dry run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cgkit import events
from cgkit.errors import CaptureError, CgkitError, ConfigError
from cgkit.files import whole_file
from cgkit.measuring.bench_charts import picture_file
from cgkit.measuring.first_call import empty_caches, environment_with_caches, first_calls
from cgkit.measuring.headline_frame import MODES, ROAD, goals, headline_frame
from cgkit.measuring.headline_model import LAST, Options, any_shape, as_json, measure
from cgkit.measuring.manifest import write_manifest

SHAPES = ("opt-125m", "llama-3.2-1b", "llama-3.1-8b")
#: Columns for a terminal.
SHOWN = [
    "model", "case", "mode", "batch", "wall_ms", "cpu_ms", "gpu_busy_ms", "kernels", "graph_launches",
    "first_call_s", "capture_s", "pool_bytes", "ratio_to_eager", "ratio_to_floor",
]  # fmt: skip
WHAT = (
    "decode steps and whole answers of each model shape (random weights) in every mode: wall and CPU time, GPU busy "
    "time, kernels, launches, first call, recording and pool, with ratios to eager and to the weight-read floor"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``cgkit bench headline``."""
    parser.add_argument(
        "--shapes", nargs="+", default=list(SHAPES), metavar="SHAPE", help="(default: all three)"
    )
    parser.add_argument(
        "--modes", nargs="+", default=list(MODES), choices=MODES, metavar="MODE", help="(default: all)"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128], help="of the decode steps")
    parser.add_argument("--layers", type=int, default=None, help="fewer layers than the shapes have")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each row, 8 counted steps each")
    parser.add_argument("--context", type=int, default=256, help="tokens in the KV cache of each request")
    parser.add_argument("--no-generate", action="store_true", help="decode steps only")
    parser.add_argument("--generate-rounds", type=int, default=3, help="whole answers of each row")
    parser.add_argument("--generate-batch", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--no-profile", action="store_true", help="no busy time, kernels and launches")
    parser.add_argument(
        "--no-first-calls", action="store_true", help="no cold and warm first call in own processes"
    )
    parser.add_argument("--compiler", default="inductor", choices=["inductor", "eager"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: emulated, a dry run")
    parser.add_argument("--limit-s", type=float, default=420.0, help="begin no part after so many seconds")
    parser.add_argument("--csv", metavar="FILE", help="write the rows as CSV, with a manifest beside it")
    parser.add_argument(
        "--out", "--svg", dest="svg", type=picture_file, metavar="FILE", help="draw the table"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures; ``frame`` is the short table, ``rows`` the whole one, ``goals`` the ratios that it is read for.

    ``not_measured``: part -> why it is missing. ``seconds``: where the run's own time went.

    Raises:
        ConfigError: a shape is unknown or an option makes no sense.
        CaptureError: no GPU, and ``--device cpu`` was not given.
    """
    if args.device == "cuda" and not torch.cuda.is_available():
        raise CaptureError(
            "cgkit bench headline measures a GPU, and there is none; --device cpu is a dry run"
        )
    options = [_options(args, shape) for shape in args.shapes]
    found = Headline(args)
    if not args.no_first_calls and set(args.modes) & set(ROAD):
        found.first_calls()
    if args.device == "cuda":
        found.in_children(options)
    else:
        found.in_this_process(options)
    return found.facts()


def _options(args: argparse.Namespace, shape: str) -> Options:
    numbers = {
        name: getattr(args, name) for name in ("rounds", "generate_rounds", "generate_batch", "new_tokens")
    }
    numbers |= {"context": args.context, "prompt_tokens": args.prompt_tokens}
    if wrong := {name: value for name, value in numbers.items() if value < 1}:
        raise ConfigError(f"{wrong}: use positive numbers")
    if not args.batches or min(args.batches) < 1 or len(set(args.batches)) < len(args.batches):
        raise ConfigError(f"--batches {args.batches}: use different positive numbers")
    any_shape(shape, args.layers)
    return Options(
        shape,
        tuple(args.batches),
        tuple(args.modes),
        layers=args.layers,
        device=args.device,
        compiler=args.compiler,
        generate=not args.no_generate,
        profile=not args.no_profile,
        **numbers,
    )


@dataclass
class Headline:
    """One run: what it has so far, and the files that it keeps."""

    args: argparse.Namespace
    parts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    first: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    not_measured: dict[str, str] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    def since(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.started

    def rows(self) -> list[dict[str, Any]]:
        """Everything that was measured, models in the order in which they were asked for."""
        found = [dict(row) for rows in self.parts.values() for row in rows]
        how = "an empty folder, then the same one, each in a process of its own, batch 1"
        if len(self.first) > 1:
            how += ", beside those of the other shapes"
        for row in found:
            starts = self.first.get(row["model"])
            if starts and row["mode"] in ROAD:
                row["first_call_s"] = starts["cold"]["first_call_s"]
                row["first_call_warm_s"] = starts["warm"]["first_call_s"]
                row["first_call_how"] = how
        return sorted(found, key=lambda row: self.args.shapes.index(row["model"]))

    def facts(self) -> dict[str, Any]:
        """The result for :func:`run`."""
        rows = self.rows()
        frame = headline_frame(rows)
        return {
            "frame": frame[SHOWN],
            "rows": json.loads(frame.to_json(orient="records")),
            "goals": goals(rows),
            "first_calls": self.first,
            "seconds": self.seconds,
            "not_measured": self.not_measured,
            "emulated": self.args.device == "cpu",
        }

    def save(self) -> None:
        """Writes the CSV, its manifest and the picture, as far as there are rows."""
        rows = self.rows()
        if not rows:
            return
        frame = headline_frame(rows)
        if self.args.csv:
            with whole_file(self.args.csv) as path:
                frame.to_csv(path, index=False, float_format="%.6g")
            facts: dict[str, Any] = {"emulated": self.args.device == "cpu", "seconds": self.seconds}
            if self.not_measured:
                facts["not_measured"] = self.not_measured
            write_manifest(self.args.csv, WHAT, f"cgkit bench headline {_given(self.args)}".strip(), **facts)
        if self.args.svg:
            from cgkit.plotting import headline_chart
            from cgkit.plotting.style import save

            save(headline_chart.headline(frame), self.args.svg)

    # --- first calls -----------------------------------------------------------------------------

    def first_calls(self) -> None:
        """Cold and warm first calls of all shapes."""
        args, began = self.args, self.since()
        events.emit(events.Progress("first calls", 0, 1, "cold, then warm"))
        try:
            self.first = first_calls(
                args.shapes,
                device=args.device,
                layers=args.layers,
                compiler=args.compiler,
                context=args.context,
            )
        except CgkitError as error:
            self.not_measured["first calls"] = str(error)
        self.seconds["first calls"] = self.since() - began
        events.emit(events.Progress("first calls", 1, 1, "done"))

    # --- in this process -------------------------------------------------------------------------

    def in_this_process(self, options: Sequence[Options]) -> None:
        """The dry run: one part after the other."""
        for one, part in _plan(options):
            name, began = f"{one.shape} {part}", self.since()
            for rows in measure(one, part, lambda: None):
                self.parts[name] = list(rows)
            self.seconds[name] = self.since() - began
            self.save()

    # --- in children -----------------------------------------------------------------------------

    def in_children(self, options: Sequence[Options]) -> None:
        """All parts build at the same time; then each measures, one at a time."""
        with empty_caches() as folder:
            plan = list(_plan(options))
            threads = max(2, (os.cpu_count() or 2) // len(plan))
            children = [_Child(one, part, folder, threads) for one, part in plan]
            try:
                for number, child in enumerate(children):
                    events.emit(events.Progress("headline", number, len(children), child.name))
                    self.wait_for_all(children[number:])
                    self.let_measure(child)
                    self.save()
                events.emit(events.Progress("headline", len(children), len(children), "done"))
            finally:
                for child in children:
                    child.end()
        self.save()

    def wait_for_all(self, children: Sequence[_Child]) -> None:
        """Until nobody compiles any more, or three fifths of the time are gone: who compiles disturbs who measures."""
        while any(child.builds for child in children) and self.since() < 0.6 * self.args.limit_s:
            time.sleep(0.05)
        self.seconds.setdefault("building", self.since() - self.seconds.get("first calls", 0.0))

    def let_measure(self, child: _Child) -> None:
        """One child's turn; what it has is taken as it comes."""
        while child.builds and self.since() < self.args.limit_s:
            time.sleep(0.05)
        if child.process.poll() is None and self.since() >= self.args.limit_s:
            self.not_measured[child.name] = f"its turn had not come after limit_s={self.args.limit_s:.0f}"
            return
        began = self.since()
        child.go()
        while child.process.poll() is None and self.since() < 1.3 * self.args.limit_s:
            time.sleep(0.05)
            self.take(child)
        self.take(child)
        self.seconds[child.name] = self.since() - began
        if child.process.poll() is None:
            self.not_measured[child.name] = "cut short: it took too long"
        elif child.process.returncode:
            self.not_measured[child.name] = child.why()

    def take(self, child: _Child) -> None:
        """Its rows so far."""
        rows = child.rows()
        if rows:
            self.parts[child.name] = rows


def _plan(options: Sequence[Options]) -> Iterator[tuple[Options, str]]:
    for one in options:
        if set(one.modes) - {LAST}:
            yield one, "rows"
        if LAST in one.modes:
            yield one, "last"


class _Child:
    """One part of one model in a process of its own."""

    def __init__(self, options: Options, part: str, folder: Path, compile_threads: int) -> None:
        self.name = f"{options.shape} {part}"
        self.stem = folder / f"{options.shape}-{part}".replace(".", "_")
        self._log = self.stem.with_suffix(".log")
        command = [
            sys.executable,
            "-m",
            "cgkit.measuring.headline_model",
            as_json(options),
            part,
            str(self.stem),
        ]
        environment = environment_with_caches(self.stem)
        environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(compile_threads))
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    @property
    def builds(self) -> bool:
        """Whether it is neither ready nor gone."""
        return self.process.poll() is None and not self.stem.with_suffix(".ready").exists()

    def go(self) -> None:
        """It may measure."""
        self.stem.with_suffix(".go").touch()

    def rows(self) -> list[dict[str, Any]]:
        """What it has written."""
        path = self.stem.with_suffix(".json")
        return json.loads(path.read_text()) if path.exists() else []

    def why(self) -> str:
        """How it failed."""
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"exit status {self.process.returncode}: {' | '.join(lines[-3:])[-600:]}"

    def end(self) -> None:
        """Ends it if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def _given(args: argparse.Namespace) -> str:
    """The options that differ from their defaults, as they were written; no files."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = []
    for action in parser._actions:
        value = getattr(args, action.dest, None)
        if action.dest in ("help", "csv", "svg") or value == action.default:
            continue
        words.append(action.option_strings[0])
        if value is not True:
            words += [str(each) for each in (value if isinstance(value, list) else [value])]
    return " ".join(f"'{word}'" if " " in word else word for word in words)
