"""``cgkit plan``: which sizes to capture for a trace or a histogram, beside the lists of the engines."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cgkit.display import shortened
from cgkit.errors import ConfigError
from cgkit.files import check_writable, whole_file
from cgkit.measuring.bench_charts import PICTURES
from cgkit.measuring.compare_sizes import SizesComparison, compare_sizes, readable
from cgkit.measuring.histogram_file import read_histogram
from cgkit.measuring.padding import named_ladder
from cgkit.measuring.plan_sizes import plan_capture_sizes
from cgkit.measuring.pool_model import PoolModel, recorded_memory
from cgkit.measuring.request_trace import read_requests
from cgkit.measuring.simulate_traffic import SimulatedTraffic, simulate_traffic
from cgkit.measuring.step_cost import REPLAYED, StepCost, recorded_step_cost

MIB = 2**20
SHAPES = ("llama-3.1-8b", "llama-3.2-1b")
_PAGES = (".html", ".htm")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``cgkit plan``."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--trace",
        metavar="FILE",
        help="requests as CSV: TIMESTAMP,ContextTokens,GeneratedTokens (Azure's format)",
    )
    what.add_argument("--histogram", metavar="FILE", help="steps by size: CSV with batch_size,count, or JSON")
    parser.add_argument(
        "--budget",
        metavar="N",
        help="MiB that recording may take (512MiB, or 512), or a number of graphs (40graphs)",
    )
    parser.add_argument(
        "--max-graphs",
        type=_whole,
        metavar="N",
        help="the most graphs (default without a budget: as many as vLLM's list has sizes, times the graphs of a size)",
    )
    parser.add_argument(
        "--mode", default="FULL", choices=list(REPLAYED), help="what is recorded (default: %(default)s)"
    )
    parser.add_argument(
        "--max-num-seqs", type=_seats, default=256, metavar="N", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--step-cost",
        metavar="FILE",
        help="CSV or JSON of cgkit bench crossover, or CSV with batch,replayed_ms,uncaptured_ms (default: a recording)",
    )
    parser.add_argument(
        "--shape", default=SHAPES[0], choices=SHAPES, help="whose recordings to use (default: %(default)s)"
    )
    parser.add_argument(
        "--splits", type=_whole, metavar="N", help="attention layers, for PIECEWISE (default: the shape's)"
    )
    parser.add_argument(
        "--size-mib",
        type=_number,
        metavar="X",
        help="memory that each size adds, MiB (default: the recording's)",
    )
    parser.add_argument(
        "--largest",
        type=_positive,
        metavar="N",
        help="plan no size above this, and cut the engines' lists to it (default: twice --max-num-seqs up to 512, at "
        "least --max-num-seqs)",
    )
    parser.add_argument("--out", metavar="FILE", help="the chart: .png, .svg, .pdf, or a page: .html")
    traffic = parser.add_argument_group("of a trace")
    traffic.add_argument("--speed", type=_number, default=1.0, metavar="X", help="2: arrivals twice as fast")
    traffic.add_argument(
        "--max-num-batched-tokens", type=_positive, default=2048, metavar="N", help="(default: %(default)s)"
    )
    traffic.add_argument(
        "--split",
        action="store_true",
        help="the decode half of a split deployment: prompts are computed elsewhere",
    )


@dataclass
class PlanResult:
    """What ``cgkit plan`` found.

    Attributes:
        comparison: the plan and the lists.
        traffic: of a trace.
        facts_about: what it was found from.
        notes: what makes the figures less certain.
        out: the chart, if one was asked for.
    """

    comparison: SizesComparison
    traffic: SimulatedTraffic | None
    facts_about: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    out: Path | None = None

    def facts(self) -> dict[str, Any]:
        """For ``--json``: ``plan``, ``ladders`` by name, and what they were found from."""
        traffic = {"traffic": self.traffic.facts()} if self.traffic is not None else {}
        out = {"out": str(self.out)} if self.out else {}
        return {**self.comparison.facts(), **self.facts_about, **traffic, "notes": self.notes, **out}

    def text(self) -> str:
        """For a terminal."""
        from cgkit.plotting.tables import text_table

        plan = self.comparison.plan
        lines = [repr(self.traffic), ""] if self.traffic is not None else []
        lines += [
            repr(plan),
            f"  tensorrt_llm:\n    {plan.tensorrt_llm.replace(chr(10), chr(10) + '    ')}",
            "",
        ]
        lines += [text_table(readable(self.comparison.to_frame())), ""]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join([*lines, *([f"chart: {self.out}"] if self.out else [])])


def run(args: argparse.Namespace) -> PlanResult:
    """Reads, simulates, plans, compares, and draws if ``args.out`` is set.

    Raises:
        CgkitError: a file or an option makes no sense, with what would.
    """
    out = _picture(args.out)
    cost = (
        StepCost.read(args.step_cost, args.mode)
        if args.step_cost is not None
        else recorded_step_cost(args.shape, args.mode)
    )
    memory = _memory(args)
    splits = args.splits if args.splits is not None else _layers(args.shape)
    per_size = splits + 1 if args.mode == "PIECEWISE" else 1
    budget, graphs, default = _budget(args, per_size)
    traffic, histogram = _steps(args, cost)
    plan = plan_capture_sizes(
        histogram,
        cost,
        budget,
        graphs,
        memory=memory,
        mode=args.mode,
        splits=splits,
        candidates=_candidates(histogram, cost, args),
    )
    comparison = compare_sizes(plan, max_num_seqs=args.max_num_seqs, largest=_largest(args))
    about = {
        "mode": args.mode,
        "budget": {"bytes": budget, "graphs": graphs, "default": default},
        "graphs_per_size": per_size,
        "step_cost": {"source": cost.source, "unit": cost.unit, "points": list(cost.points)},
        "memory": {"source": memory.source, "each_bytes": memory.each_bytes(1)},
        "waste_of": "padded tokens (waste_of_real: real tokens)",
    }
    result = PlanResult(
        comparison, traffic, about, _notes(args, cost, memory, comparison, default, per_size, histogram)
    )
    if out is not None:
        _write(result, out)
        result.out = out
    return result


# --- inside ----------------------------------------------------------------------------------------------


def _whole(text: str, least: int = 0, most: int = 10**9) -> int:
    """A number for argparse; limited, so that no float that is made of it overflows."""
    if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most):
        raise argparse.ArgumentTypeError(f"{shortened(text)} is not a whole number from {least} to {most:,}")
    return int(text)


def _positive(text: str) -> int:
    return _whole(text, 1)


def _seats(text: str) -> int:
    """Lists of engines have a size every few of them: with more they would not fit into memory."""
    return _whole(text, 1, 2**16)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return value


_MOST = 1e15
_BUDGET = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>MiB|MB|GiB|GB|graphs?|)", re.IGNORECASE)


def parse_budget(text: str) -> tuple[float | None, int | None]:
    """``"64MiB"``, ``"64"`` (MiB) or ``"2GiB"`` as bytes, ``"40graphs"`` as graphs: (bytes, graphs).

    Raises:
        ConfigError: it is none of these.
    """
    found = _BUDGET.fullmatch(text.strip())
    if not found or (found["unit"].lower().startswith("graph") and found[2]):
        raise ConfigError(f"--budget {text!r}: give MiB (512, 512MiB, 2GiB) or a number of graphs (40graphs)")
    number, unit = float(found["number"]), found["unit"].lower()
    if number > _MOST:
        raise ConfigError(
            f"--budget {text[:20]}...: that is no limit; leave it out, or give up to {_MOST:.0e}"
        )
    if unit.startswith("graph"):
        return None, int(number)
    scale = {"": MIB, "mib": MIB, "mb": 10**6, "gib": 2**30, "gb": 10**9}[unit]
    return number * scale, None


def _budget(args: argparse.Namespace, per_size: int) -> tuple[float | None, int | None, bool]:
    """Bytes, graphs, and whether the limit is the default."""
    size, graphs = parse_budget(args.budget) if args.budget is not None else (None, None)
    if args.max_graphs is not None:
        graphs = args.max_graphs if graphs is None else min(graphs, args.max_graphs)
    if size is None and graphs is None:
        return None, len(named_ladder("vllm-0.33", args.max_num_seqs)) * per_size, True
    return size, graphs, False


def _memory(args: argparse.Namespace) -> PoolModel:
    extra = None if args.size_mib is None else args.size_mib * MIB
    return recorded_memory(args.shape, args.mode, extra)


def _layers(shape: str) -> int:
    from cgkit import recordings

    return int(recordings.load(f"h200-crossover-{shape}")["layers"])


def _steps(args: argparse.Namespace, cost: StepCost) -> tuple[SimulatedTraffic | None, Any]:
    """The traffic, if it is simulated, and the histogram."""
    if args.histogram is not None:
        if args.split or args.speed != 1:
            raise ConfigError(
                "--split and --speed say how a --trace is served; the steps of a --histogram are there already. For "
                "decode steps only take --mode FULL_DECODE_ONLY and a column kind"
            )
        return None, read_histogram(args.histogram)
    traffic = simulate_traffic(
        read_requests(args.trace),
        cost,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        speed=args.speed,
        split=args.split,
    )
    if not traffic.counts:
        raise ConfigError(
            f"{args.trace}: with --split nothing is left to decode: every request has one token"
        )
    return traffic, traffic.to_frame()


def _largest(args: argparse.Namespace) -> int:
    return args.largest or max(args.max_num_seqs, min(2 * args.max_num_seqs, 512))


def _candidates(histogram: Any, cost: StepCost, args: argparse.Namespace) -> list[int]:
    """Each batch that occurs and each size that was measured, up to the largest that may be recorded, and that one.

    Also those above all batches: a measured cost may fall with the size, and a list of an engine may gain by that.
    """
    top = _largest(args)
    sizes = [*map(int, histogram["batch"]), *cost.points, top]
    return sorted({size for size in sizes if size <= top})


def _notes(
    args: argparse.Namespace,
    cost: StepCost,
    memory: PoolModel,
    found: SizesComparison,
    default: bool,
    per_size: int,
    histogram: Any,
) -> list[str]:
    """What a reader must know before believing a number."""
    notes = []
    if args.step_cost is None:
        notes.append(
            f"the step cost was not measured on your machine: {cost.source} (a decode step without output "
            "projection, 256 tokens of context); --step-cost FILE takes yours"
        )
    notes.append(
        f"memory: {memory.source}; the pool's reserve follows from the largest size (the graphs share it), and each "
        f"size adds {memory.each_bytes(1) / MIB:.2f} MiB"
        + (
            ""
            if args.size_mib is not None
            else ", an upper bound for what lies outside of the pool (--size-mib sets it)"
        )
    )
    if default:
        number = len(named_ladder("vllm-0.33", args.max_num_seqs))
        notes.append(
            f"no budget was given: as many graphs as vLLM's list has ({number} sizes, {per_size} a size)"
        )
    frame = found.plan.histogram_frame()
    over = frame["batch"] > (cost.points or [float("inf")])[-1]
    above = frame.loc[over, "count"].sum() / frame["count"].sum()
    if above:
        notes.append(
            f"{above:.1%} of the steps are larger than the largest measured one ({cost.points[-1]} tokens): their "
            "cost is extrapolated"
        )
    too_large = frame.loc[frame["batch"] > _largest(args), "count"].sum() / frame["count"].sum()
    if too_large:
        notes.append(
            f"{too_large:.1%} of the steps are larger than the largest size that may be planned ({_largest(args)}; "
            "--largest sets it): they run without a graph, and the engines' lists are cut to that size too"
        )
    if found.plan.sizes and found.plan.sizes[-1] < args.max_num_seqs:
        notes.append(
            f"the largest planned size is {found.plan.sizes[-1]}: if more than that ever run at once, they run "
            f"without a graph (--max-num-seqs is {args.max_num_seqs})"
        )
    if found.plan.mode != "FULL_DECODE_ONLY" and _mixed(histogram):
        notes.append(
            "the plan counts steps with prompts in them too, and the lists of SGLang and TensorRT-LLM are for decode "
            "steps: for their options take --mode FULL_DECODE_ONLY"
        )
    if args.trace:
        notes.append(
            "batches are simulated (a queue without KV-cache limits, a step as long as its replayed graph)"
        )
    return notes


def _mixed(histogram: Any) -> bool:
    """Whether steps with prompts in them are counted, as far as the histogram tells."""
    return "kind" in histogram and bool((histogram["kind"] == "mixed").any())


def _picture(out: str | None) -> Path | None:
    """The chart's file, if its ending is known and it can be written: asked before the work, not after it."""
    if out is None:
        return None
    path = Path(out)
    if path.suffix.lower() not in PICTURES + _PAGES:
        raise ConfigError(f"--out {out}: name it {', '.join(PICTURES + _PAGES[:1])}")
    return check_writable(out)


def _write(result: PlanResult, path: Path) -> None:
    """The chart or the page, whole or not at all."""
    from cgkit.plotting.picture import Picture
    from cgkit.plotting.style import save

    axes = result.comparison.overview()
    with whole_file(path) as part:
        if path.suffix.lower() in _PAGES:
            part.write_text(_html(result, Picture(axes, _alt(result)).svg()), encoding="utf-8")
        else:
            named = part.with_name(part.name + path.suffix.lower())
            save(axes, named)
            named.replace(part)


def _alt(result: PlanResult) -> str:
    plan = result.comparison.plan
    return f"Histogram of steps with the {len(plan.sizes)} planned sizes, and the expected step cost of each list."


def _html(result: PlanResult, picture: str) -> str:
    from html import escape

    from cgkit.plotting.report import Section, figure, page, pre
    from cgkit.plotting.tables import table

    plan = result.comparison.plan
    frame = result.comparison.to_frame()
    memory = plan.pool_bytes
    facts: Sequence[tuple[str, str]] = [
        ("recorded sizes", str(len(plan.sizes))),
        ("graphs", str(plan.graphs)),
        (f"expected step, {plan.workload.cost.unit}", f"{plan.expected_step_cost:.3f}"),
        ("of the tokens that run are padding", f"{plan.waste:.1%}"),
        ("of the steps replay a graph", f"{plan.captured_steps:.1%}"),
        ("taken by recording", "" if memory is None else f"{memory / MIB:.1f} MiB"),
    ]
    options = pre("\n\n".join(f"{engine}\n{text}" for engine, text in plan.options().items()))
    notes = "".join(f"<li>{escape(note)}</li>" for note in result.notes)
    return page(
        "Which sizes should I capture?",
        escape(repr(result.traffic) if result.traffic is not None else f"mode {plan.mode}"),
        facts,
        [
            Section(
                "The plan beside the engines' lists", "", [figure(picture), table(readable(frame), rows=20)]
            ),
            Section("As an option", "For vLLM, SGLang and TensorRT-LLM.", [options]),
            Section("Size by size", "", [table(plan.to_frame(), rows=40)]),
        ],
        note=f"<ul>{notes}</ul>",
        footer="Made by <code>cgkit plan</code>.",
    )
