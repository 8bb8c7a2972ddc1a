"""The command line: ``cgkit tour``, ``timeline``, ``plan``, ``doctor``, ``hazards``, ``bench`` and ``cache``.

Every command takes ``--json``: then the facts stand on standard output and nothing else does; progress
and tables go to standard error. A failure has a non-zero exit status and one line that says why
(``--debug`` adds the traceback). Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from cgkit import __version__
from cgkit.errors import CgkitError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status (0: it worked; 1: it did not; 130: interrupted)."""
    args = build_parser().parse_args(argv)
    try:
        with machine_readable(args.json) as write:
            return int(args.run(args, write) or 0)
    except CgkitError as error:
        if args.debug:
            traceback.print_exc()
        print(f"cgkit: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("cgkit: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read the output has seen enough (`cgkit tour --json | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--json", action="store_true", help="the facts as JSON on standard output, nothing else"
    )
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser = argparse.ArgumentParser(
        prog="cgkit",
        description="Watch an LLM decode step get traced, split, compiled, recorded and replayed.",
    )
    parser.add_argument("--version", action="version", version=f"cgkit {__version__}")
    commands = parser.add_subparsers(
        title="commands", required=True, metavar="COMMAND", parser_class=_LazyParser
    )
    _tour_parser(commands, common)
    _timeline_parser(commands, common)
    _plan_parser(commands, common)
    _doctor_parser(commands, common)
    _hazards_parser(commands, common)
    _bench_parser(commands, common)
    _cache_parser(commands, common)
    return parser


def _tour_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    tour = commands.add_parser(
        "tour",
        parents=[common],
        help="the whole road on a real model, with a page that shows each stage",
        description="Traces, splits, compiles, records and replays a real language model, lets it answer, "
        "and writes a page with what happened at each stage.",
    )
    tour.add_argument(
        "--model",
        default="smollm2",
        help="smollm2 (SmolLM2-135M-Instruct, real weights), tiny-llama (random weights, no download), or a "
        "folder of safetensors (default: %(default)s)",
    )
    tour.add_argument(
        "--device", default="auto", choices=["auto", "cpu", "cuda"], help="default: %(default)s"
    )
    tour.add_argument(
        "--tokens",
        type=positive,
        default=48,
        metavar="N",
        help="of each answer, at most (default: %(default)s)",
    )
    tour.add_argument(
        "--out", default="out/tour.html", metavar="FILE", help="the page (default: %(default)s)"
    )
    tour.set_defaults(run=run_tour)


def _timeline_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    timeline = commands.add_parser(
        "timeline",
        parents=[common],
        help="the bill of a profiler trace, and a page with its timeline",
        description="Reads what torch.profiler's export_chrome_trace wrote (plain or gzip, NVIDIA or AMD; several "
        "files are ranks of one run), prints where the wall time went, and writes a page with the timeline.",
    )
    timeline.add_argument("trace", nargs="+", metavar="TRACE", help="trace.json or trace.json.gz")
    timeline.add_argument(
        "--out", default="out/timeline.html", metavar="FILE", help="the page (default: %(default)s)"
    )
    timeline.add_argument(
        "--step", type=int, metavar="N", help="bill this step (default: the whole trace, and the median step)"
    )
    timeline.add_argument("--python", action="store_true", help="show the events of Python functions too")
    timeline.set_defaults(run=run_timeline)


def _plan_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    plan = commands.add_parser(
        "plan",
        parents=[common],
        help="which batch sizes to capture, for your traffic and your memory",
        description="Finds the list of capture sizes with the least expected step time within a budget, and prints it "
        "beside the lists of the article, vLLM, SGLang and TensorRT-LLM, each cut to the same budget, and as their "
        "options.",
    )
    plan.load = lambda: import_module("cgkit.measuring.plan_command")
    plan.set_defaults(run=run_plan)


def _doctor_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    doctor = commands.add_parser(
        "doctor",
        parents=[common],
        help="what goes wrong with a model of yours: graph breaks, syncs, dropped guards, ...",
        description="Traces, splits, records and runs a model and reports what breaks, what would compute something "
        "else in silence, and what will be slow: each with the line, the reason and the way out. The exit status is 1 "
        "if there is an error.",
    )
    doctor.load = lambda: import_module("cgkit.measuring.doctor.command")
    doctor.set_defaults(run=run_doctor)


def _hazards_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    museum = commands.add_parser(
        "hazards",
        parents=[common],
        help="the museum: how graphs and compilation go wrong, happening on purpose, found and fixed",
        description="Runs small programs that go wrong as those of the engines' users did: what happens unnoticed, "
        "what cgkit says, and the fixed code. The exit status is 1 if one does not do what it describes.",
    )
    museum.load = lambda: import_module("cgkit.hazards.command")
    museum.set_defaults(run=run_hazards)


def _bench_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    bench = commands.add_parser("bench", help="measure one claim", description="Measures one claim.")
    names = bench.add_subparsers(title="benchmarks", required=True, metavar="NAME", parser_class=_LazyParser)
    for name, (what, load) in BENCHES.items():
        one = names.add_parser(name, parents=[common], help=what, description=what)
        one.load, one.bench = load, name
        one.set_defaults(run=run_bench, bench=name, load=load)


def _cache_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    cache = commands.add_parser(
        "cache",
        help="look into the compile cache, or make one file of it",
        description="Compiled pieces and traces, in $CGKIT_CACHE_DIR: the next process traces and compiles nothing.",
    )
    verbs = cache.add_subparsers(title="what to do", required=True, metavar="VERB")
    for verb, what, arguments in (
        ("list", "the keys on disk, the newest first", ()),
        ("explain", "why two keys differ, factor by factor", ("KEY_A", "KEY_B")),
        ("pack", "write the whole cache into one file", ("FILE",)),
        ("unpack", "put a packed cache into this one (it is code: only from somebody you trust)", ("FILE",)),
    ):
        one = verbs.add_parser(verb, parents=[common], help=what, description=what)
        for argument in arguments:
            one.add_argument(argument.lower(), metavar=argument)
        one.set_defaults(run=run_cache, verb=verb)


class _LazyParser(argparse.ArgumentParser):
    """Asks a command or a benchmark for its options only when it was named."""

    load: Callable[[], Any] | None = None
    bench = ""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        if self.load is not None:
            from cgkit.measuring.bench_charts import add_out
            from cgkit.measuring.bench_options import add_csv, say_defaults

            self.load().add_arguments(self)
            add_out(self, self.bench)
            if self.bench:
                add_csv(self)
            say_defaults(self)
            self.load = None
        return super().parse_known_args(args, namespace)


def positive(text: str) -> int:
    """A positive whole number, for argparse."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


@contextmanager
def machine_readable(on: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Gives a function that writes facts as JSON to standard output; with ``on``, nothing else can.

    Everything that is printed meanwhile, by libraries and by compiled code too, goes to standard error:
    the file descriptor itself is turned round.
    """
    if not on:
        yield lambda facts: None
        return
    sys.stdout.flush()
    outer, sys.stdout = sys.stdout, sys.stderr
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        try:
            yield lambda facts: print(json.dumps(facts, indent=1, default=str), file=out, flush=True)
        finally:
            os.dup2(out.fileno(), 1)
            sys.stdout = outer


@contextmanager
def progress_bars(only: str = "") -> Iterator[None]:
    """Draws :class:`cgkit.events.Progress` on standard error: bars on a terminal, else a line a stage. ``only``: this
    stage alone, of a command that goes the whole road many times."""
    from tqdm import tqdm

    from cgkit import events

    bars: dict[str, tqdm[Any]] = {}
    terminal = sys.stderr.isatty()

    def show(event: events.Progress) -> None:
        if only and event.stage != only:
            return
        if not terminal:
            if event.done >= event.total:
                print(f"  {event.stage}: {event.what or 'done'}", file=sys.stderr, flush=True)
            return
        bar = bars.get(event.stage)
        if bar is None:
            form = "  {desc:<12} {percentage:3.0f}% |{bar:30}| {n_fmt}/{total_fmt} {elapsed} {postfix}"
            bar = bars[event.stage] = tqdm(total=event.total, desc=event.stage, bar_format=form, leave=True)
        bar.total = event.total
        bar.set_postfix_str(event.what, refresh=False)
        bar.update(event.done - bar.n)
        if event.done >= event.total:
            bars.pop(event.stage).close()

    undo = events.subscribe(events.Progress, show)
    try:
        yield
    finally:
        undo()
        for bar in bars.values():
            bar.close()


def run_tour(args: argparse.Namespace, write: Callable[[dict[str, Any]], None]) -> int:
    """``cgkit tour``."""
    from cgkit.tour import tour

    with progress_bars():
        result = tour(args.model, device=args.device, tokens=args.tokens, out=args.out)
    print(result.text(), file=sys.stderr if args.json else sys.stdout)
    write(result.facts())
    return 0 if result.data.tokens_equal else 1


def run_timeline(args: argparse.Namespace, write: Callable[[dict[str, Any]], None]) -> int:
    """``cgkit timeline``."""
    from cgkit.measuring import timeline_command

    result = timeline_command.run(args.trace, out=args.out, step=args.step, python=args.python)
    print(result.text(), file=sys.stderr if args.json else sys.stdout)
    write(result.facts())
    return 0


def run_doctor(args: argparse.Namespace, write: Callable[[dict[str, Any]], None]) -> int:
    """``cgkit doctor``."""
    from cgkit.measuring.doctor import command

    if args.codes:
        from cgkit.measuring.doctor.codes import codes_frame
        from cgkit.plotting.tables import text_table

        frame = codes_frame()
        print(text_table(frame), file=sys.stderr if args.json else sys.stdout)
        write({"codes": frame.to_dict("records")})
        return 0
    with progress_bars("checking"):
        report = command.run(args)
    print(repr(report), file=sys.stderr if args.json else sys.stdout)
    write(report.facts())
    return 1 if report.errors else 0


def run_hazards(args: argparse.Namespace, write: Callable[[dict[str, Any]], None]) -> int:
    """``cgkit hazards``."""
    from cgkit.hazards import command

    with progress_bars("exhibits"):
        result = command.run(args)
    print(result.text, file=sys.stderr if args.json else sys.stdout)
    write(result.facts)
    return 0 if result.ok else 1


def run_plan(args: argparse.Namespace, write: Callable[[dict[str, Any]], None]) -> int:
    """``cgkit plan``."""
    from cgkit.measuring import plan_command

    with progress_bars():
        result = plan_command.run(args)
    print(result.text(), file=sys.stderr if args.json else sys.stdout)
    write(result.facts())
    return 0


def run_bench(args: argparse.Namespace, write: Callable[[dict[str, Any]], None]) -> int:
    """``cgkit bench NAME``: a table, or with ``--json`` the facts."""
    from cgkit.measuring.bench_options import check_outputs, write_table
    from cgkit.plotting.tables import text_table

    check_outputs(args)
    with progress_bars():
        facts = dict(args.load().run(args))
    frame, out = facts.pop("frame"), sys.stderr if args.json else sys.stdout
    write_table(args, frame)
    print(text_table(frame), file=out)
    for title, table in facts.pop("tables", {}).items():
        print(f"\n{title}\n{text_table(table)}", file=out)
    if getattr(args, "picture", None):
        from cgkit.measuring.bench_charts import save_chart

        print(f"drawn: {save_chart(args.bench, frame, facts, args.picture)}", file=sys.stderr)
    write({"bench": args.bench, **facts})
    return 0


def run_cache(args: argparse.Namespace, write: Callable[[dict[str, Any]], None]) -> int:
    """``cgkit cache list | explain | pack | unpack``."""
    from cgkit.compiling import cache

    out = sys.stderr if args.json else sys.stdout
    facts: dict[str, Any] = {"folder": str(cache.cache_root())}
    if args.verb == "explain":
        difference = cache.explain_cache(args.key_a, args.key_b)
        print(difference, file=out)
        facts["differences"] = difference.to_frame().to_dict("records")
    elif args.verb == "list":
        facts["keys"] = [_key_facts(folder) for folder in cache.entries()]
        for key in facts["keys"]:
            held = f"{key['pieces']} pieces, {key['traces']} traces"
            print(f"{key['key']}  {held}  {key['bytes'] / 2**20:.1f} MiB", file=out)
            for model in key["models"]:
                print(f"    {model}", file=out)
        print(f"{len(facts['keys'])} keys in {facts['folder']}", file=out)
    else:
        facts["keys"] = (cache.pack if args.verb == "pack" else cache.unpack)(args.file)
        done = "packed into" if args.verb == "pack" else "unpacked from"
        print(f"{len(facts['keys'])} keys {done} {args.file}", file=out)
    write(facts)
    return 0


def _key_facts(folder: Any) -> dict[str, Any]:
    from cgkit.compiling.cache.traces import models_in

    files = [path for path in folder.rglob("*") if path.is_file()]
    count = {
        kind: sum(path.name.startswith(f"{kind}_") and path.suffix == ".bin" for path in files)
        for kind in ("piece", "trace")
    }
    return {
        "key": folder.name,
        "pieces": count["piece"],
        "traces": count["trace"],
        "models": models_in(folder),
        "bytes": sum(path.stat().st_size for path in files),
    }


class _Dedup:
    """``cgkit bench dedup``: a process and an empty cache for each depth."""

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--layers", type=positive, nargs="+", default=[4, 16, 80], metavar="N", help="(default: 4 16 80)"
        )
        parser.add_argument(
            "--compiler", default="inductor", choices=["inductor", "inductor_patched", "eager"]
        )
        parser.add_argument("--csv", metavar="FILE", help="write the rows as CSV too")

    @staticmethod
    def run(args: argparse.Namespace) -> dict[str, Any]:
        from cgkit.measuring import bench_dedup

        frame = bench_dedup.run(args.layers, compiler=args.compiler)
        if args.csv:
            frame.to_csv(args.csv, index=False, float_format="%.4g")
        return {"frame": frame, "rows": frame.to_dict("records")}


#: Name -> what it measures, and what loads it: something with ``add_arguments(parser)`` and
#: ``run(args) -> facts``, where ``facts["frame"]`` is the DataFrame for the terminal (and ``tables`` more of them, by
#: their titles).
BENCHES: dict[str, tuple[str, Callable[[], Any]]] = {
    "custom-ops": (
        "hand-written norm, SwiGLU and rotary against torch code that Inductor fuses: kernels, step, compile time",
        lambda: import_module("cgkit.measuring.bench_custom_ops"),
    ),
    "passes": (
        "an FP8 Llama with each graph pass off and on: kernels a layer, bytes moved, step time",
        lambda: import_module("cgkit.measuring.bench_passes"),
    ),
    "adaptors": (
        "the three ways to compile a piece: cold and warm start, handles and files",
        lambda: import_module("cgkit.measuring.bench_adaptors"),
    ),
    "crossover": (
        "at which batch size a decode step stops being launch-bound, measured and predicted",
        lambda: import_module("cgkit.measuring.crossover"),
    ),
    "dedup": (
        "compile time of a deep model against a shallow one: equal pieces are compiled once",
        lambda: _Dedup,
    ),
    "engine": (
        "what the engine costs the host beside the model: a step by part, batch by batch",
        lambda: import_module("cgkit.measuring.bench_engine"),
    ),
    "boundaries": (
        "the same kernels as one graph, or cut at every launch between pieces: what the cuts cost the device",
        lambda: import_module("cgkit.measuring.boundaries"),
    ),
    "events-off": (
        "what the stages' reporting costs when nobody reads it: against a build without it",
        lambda: import_module("cgkit.measuring.events_off"),
    ),
    "headline": (
        "every way to run a decode step and a whole answer, three model shapes side by side",
        lambda: import_module("cgkit.measuring.headline"),
    ),
    "host": (
        "where the host's time of a recorded step goes, part by part, on each path",
        lambda: import_module("cgkit.measuring.bench_host"),
    ),
    "kernels": (
        "the decode kernel divided and tiled in every way, and a layer's products merged or not, against the copy rate",
        lambda: import_module("cgkit.measuring.bench_kernels"),
    ),
    "ledgers": (
        "what the free ledgers (addresses, mode count) cost a recorded PIECEWISE step, in turn with a step without",
        lambda: import_module("cgkit.measuring.bench_ledgers"),
    ),
    "launch-overhead": (
        "what a launch, a guard and a module call cost on this machine",
        lambda: import_module("cgkit.measuring.launch_overhead"),
    ),
    "explore": (
        "frame times of the interactive timeline in headless Chromium",
        lambda: import_module("cgkit.measuring.bench_explore"),
    ),
    "modes": (
        "one decode step through every mode, on a GPU, in one process",
        lambda: import_module("cgkit.measuring.bench_modes"),
    ),
    "serve": (
        "real or made-up traffic through several modes: latencies, batches, padding, which graphs ran",
        lambda: import_module("cgkit.measuring.bench_serve"),
    ),
    "startup": (
        "a second process with nothing changed against the first: whole start and compile stage",
        lambda: import_module("cgkit.measuring.bench_startup"),
    ),
    "static": (
        "what a static, tuned compilation buys over the general one, against cuBLAS",
        lambda: import_module("cgkit.measuring.bench_static"),
    ),
    "traces": (
        "reading and billing a profiler trace of a million events, against HolisticTraceAnalysis",
        lambda: import_module("cgkit.measuring.bench_traces"),
    ),
}
