"""The tour's page: the sections of :mod:`cgkit.plotting.report`, filled from the tour's DataFrames."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from html import escape
from typing import TYPE_CHECKING

from cgkit.plotting import charts, compile_cards, memory_charts, padding_charts, report
from cgkit.plotting.compile_gantt import compile_gantt
from cgkit.plotting.split_graph import split_graph
from cgkit.plotting.style import About, svg
from cgkit.plotting.tables import human_bytes, table

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

EMULATED_NOTE = (
    "<b>No GPU here: the recorded graphs are emulated.</b> An emulated graph keeps the contract of a CUDA "
    "graph (fixed addresses, frozen numbers, outputs that the next replay overwrites, recording runs "
    "nothing), so everything on this page can be tried on a laptop. It has no launch overhead to remove, "
    "so it cannot be faster: the times below are a CPU's and say nothing about a GPU."
)


@dataclass
class TourData:
    """What the tour found, as plain data.

    The frames: ``nodes`` (a row a node of the traced graph: ``op``, ``operator``), ``pieces`` and ``edges``
    (as for :func:`split_graph`; ``opened``: the nodes of one piece of each kind, by name),
    ``compilations`` (a row a piece: ``piece``, ``key``, ``compile_s``), ``log`` (:func:`compile_gantt`), ``captures``
    (:func:`memory_charts.ledger`), ``memory`` (:func:`memory_charts.waterfall`), ``padding``
    (:func:`padding_charts.staircase`), ``coverage`` (:func:`padding_charts.coverage`), ``steps`` (``kind, num_reqs,
    num_tokens, num_padded_tokens, mode, ms``), ``times`` (:func:`charts.ms_per_token`),
    ``counters`` (``sign, counter, expected, seen, law``), ``stages`` (``stage, seconds``),
    ``answers`` (``prompt, answer, tokens, equal``), ``bill_table`` (a row a part of a step's wall time, a column a
    mode), and ``step_pictures``: each drawn already, with what it shows in words.
    """

    model: str
    device: str
    emulated: bool
    layers: int
    sizes: list[int]
    mode: str
    dtype: str
    requests: int
    tokens: int
    tokens_equal: bool
    nodes: pd.DataFrame
    pieces: pd.DataFrame
    edges: pd.DataFrame
    compilations: pd.DataFrame
    log: pd.DataFrame
    captures: pd.DataFrame
    memory: pd.DataFrame
    padding: pd.DataFrame
    coverage: pd.DataFrame
    steps: pd.DataFrame
    times: pd.DataFrame
    counters: pd.DataFrame
    stages: pd.DataFrame
    answers: pd.DataFrame
    bill_table: pd.DataFrame | None = None
    step_pictures: list[tuple[Axes, str]] = field(default_factory=list)
    opened: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    stitch_source: str = ""
    cold_compile_s: float = 0.0
    pool_bytes: int = 0
    adaptor: str = ""
    versions: str = ""
    command: str = ""
    remarks: list[str] = field(default_factory=list)

    @property
    def about(self) -> About:
        """What every picture of the tour says of itself."""
        return About(self.model, "", "", self.device, self.emulated)

    @property
    def num_unique(self) -> int:
        """Different pieces among those to compile."""
        return int(self.compilations["key"].nunique())


def tour_page(data: TourData) -> str:
    """The whole page as HTML text."""
    splitting = int((data.pieces["kind"] == "splitting").sum())
    ms = dict(zip(data.times["mode"], data.times["ms_per_token"]))
    facts = [
        ("layers", f"{data.layers}"),
        ("pieces after the split", f"{len(data.pieces)}"),
        ("different ones compiled", f"{data.num_unique} of {len(data.pieces) - splitting}"),
        ("graphs recorded", f"{len(data.captures)}"),
        ("in one pool", human_bytes(data.pool_bytes)),
        ("replayed = eager", "same tokens" if data.tokens_equal else "TOKENS DIFFER"),
    ]
    if "eager" in ms and "FULL" in ms:
        where = ", on this CPU" if data.emulated else ""
        facts.append((f"eager → full graph, ms a step{where}", f"{ms['eager']:.1f} → {ms['FULL']:.1f}"))
    lead = (
        f"{escape(data.model)}, {data.layers} layers, {escape(data.dtype)}, on {escape(data.device)}: the "
        f"model is traced once, cut at attention, compiled piece by piece, recorded at {len(data.sizes)} "
        f"batch sizes, and then answers {data.requests} prompts from the "
        "recordings."
    )
    notes = [EMULATED_NOTE] if data.emulated else []
    notes += [escape(remark) for remark in data.remarks]
    sections = [
        _answers(data),
        _traced(data),
        _split(data),
        _compiled(data),
        _captured(data),
        _replayed(data),
        *([_bill(data)] if data.bill_table is not None else []),
        _counters(data),
    ]
    footer = f"Made by <code>{escape(data.command)}</code> with {escape(data.versions)}."
    title = "How one decode step gets compiled"
    return report.page(title, lead, facts, sections, note="<br>".join(notes), footer=footer)


def _answers(data: TourData) -> report.Section:
    items = "".join(
        f'<li><div class="q">{escape(row["prompt"])}</div><div class="a">{escape(row["answer"])}</div></li>'
        for row in data.answers.to_dict("records")
    )
    equal = "the very same tokens as" if data.tokens_equal else "OTHER tokens than"
    lead = (
        f"Greedy, at most {data.tokens} tokens each, all requests at a time. Replayed as a full graph, as "
        f"pieces and compiled without graphs, the model says {equal} eager PyTorch."
    )
    if not data.tokens_equal:
        lead = f"<b>{lead}</b>"
    time = table(data.stages, rename={"seconds": "seconds"}, rows=20)
    return report.Section(
        "The answers", lead, [f'<ul class="chat">{items}</ul>', report.folded("Where the time went", time)]
    )


def _traced(data: TourData) -> report.Section:
    calls = data.nodes[data.nodes["op"].isin(["call_function", "call_method", "call_module"])]
    counts = calls["operator"].astype(str).value_counts().rename_axis("operator").reset_index(name="times")
    inputs = int((data.nodes["op"] == "placeholder").sum())
    lead = (
        "Dynamo ran the forward's bytecode symbolically, once, and handed over one graph of "
        f"{len(data.nodes):,} nodes: {len(calls):,} calls and {inputs:,} inputs (weights are inputs, too). "
        "The number of tokens is a symbol, so this one graph serves every batch. No guard is kept: of a later "
        "call only the arguments are looked at."
    )
    return report.Section("Traced", lead, [table(counts, rows=8)], 1)


def _split(data: TourData) -> report.Section:
    splitting = int((data.pieces["kind"] == "splitting").sum())
    lead = (
        f"The graph is cut at attention, whose work depends on more than shapes: {splitting} calls of it "
        f"leave {len(data.pieces) - splitting} pieces between them. A dashed piece runs its operator each "
        "step; the others are compiled and recorded. Pieces of one colour have the same content."
    )
    picture = split_graph(_with_keys(data), data.about, edges=data.edges, engine="own")
    body = [report.figure(picture.svg())]
    body += [
        report.folded(f"{name}: {len(nodes)} nodes, drawn", picture.piece(name, nodes))
        for name, nodes in data.opened.items()
    ]
    if data.stitch_source:
        lines = [line if len(line) < 160 else f"{line[:159]}…" for line in data.stitch_source.splitlines()]
        shown = "\n".join(
            [*lines[:24], f"    # ... {len(lines) - 24} more lines"] if len(lines) > 30 else lines
        )
        body.append(report.folded("The generated Python that runs the pieces in order", report.pre(shown)))
    columns = [c for c in ("piece", "kind", "nodes", "inputs", "outputs", "operators") if c in data.pieces]
    body.append(report.folded("All pieces", table(data.pieces[columns], rows=10)))
    return report.Section("Split", lead, body, 2)


def _with_keys(data: TourData) -> pd.DataFrame:
    """The pieces, with the content keys that the compile stage found."""
    keys = dict(zip(data.compilations["piece"], data.compilations["key"]))
    return data.pieces.assign(key=[keys.get(piece, "") for piece in data.pieces["piece"]])


def _compiled(data: TourData) -> report.Section:
    requests = len(data.compilations)
    lead = (
        f"{requests} compilations were asked for, {data.num_unique} were done, from an empty cache (adaptor: "
        f"{escape(data.adaptor)}): a deep model repeats one layer, and equal pieces share one compiled "
        "callable. Without that, this stage would grow with the depth of the model."
    )
    alt = "Bars from start to end: the trace, the split, each compilation and each recorded size"
    body = [report.figure(svg(compile_gantt(data.log, data.about), alt, "compile"))]
    body.append(report.folded("All compilations", table(data.compilations, rows=8, chars=16)))
    return report.Section("Compiled", lead, body, 3)


def _captured(data: TourData) -> report.Section:
    sizes = ", ".join(map(str, data.sizes))
    lead = (
        f"For each of the sizes {sizes} every piece was recorded (PIECEWISE), and the whole step once more "
        "(FULL). Recording runs nothing: it writes down which operators read and write which addresses. "
        "Largest first, so that smaller sizes fit into memory that the pool has already; outputs are held "
        "weakly, so that pieces reuse it too."
    )
    about = replace(data.about, mode="PIECEWISE and FULL")
    seconds = svg(charts.capture_seconds(data.captures, about), "Bars: time to record each size", "capture")
    pool = svg(memory_charts.ledger(data.captures, about), "The pool's bytes while recording", "pool")
    whole = svg(
        memory_charts.waterfall(data.memory, about), "Bars: where the memory goes, part by part", "memory"
    )
    by_size = (
        data.captures.groupby(["mode", "num_tokens"], sort=False)
        .agg(
            graphs=("name", "size"),
            seconds=("seconds", "sum"),
            pool_bytes=("reserved_after_bytes", "last"),
        )
        .reset_index()
    )
    by_size = by_size.assign(emulated=data.emulated)
    words = {"num_tokens": "size (tokens)", "pool_bytes": "pool reserved after it"}
    body = [report.figure(seconds), report.figure(pool), report.figure(whole)]
    body.append(report.folded("Size by size", table(by_size, rename=words, rows=24)))
    return report.Section("Captured", lead, body, 4)


def _replayed(data: TourData) -> report.Section:
    lead = (
        "Each step the dispatcher looks the batch up: padded to the next recorded size, and then one "
        "replay (FULL), or one replay a piece with attention between them (PIECEWISE). A batch above the "
        "largest size runs the compiled pieces without a graph."
    )
    about = replace(data.about, mode=data.mode, batch=f"{data.requests} requests")
    seen = [int(n) for n in data.steps["num_tokens"].unique()]
    stairs = padding_charts.staircase(data.padding, about, seen=seen)
    covered = padding_charts.coverage(data.coverage, replace(data.about, mode=data.mode))
    steps = charts.padding_steps(data.steps, about)
    times = charts.ms_per_token(data.times, replace(data.about, batch=f"{data.requests} requests"))
    body = [
        report.figure(svg(times, "Bars: median decode step by mode", "times")),
        report.figure(svg(steps, "Bars: tokens and padding of each step", "steps")),
        report.figure(svg(stairs, "A staircase: what each batch size is padded to", "stairs")),
        report.figure(svg(covered, "A strip: which kind of graph each batch size gets", "covered")),
        report.folded("All steps", table(data.steps.assign(emulated=data.emulated), rows=12)),
    ]
    return report.Section("Dispatched and replayed", lead, body, 5)


def _bill(data: TourData) -> report.Section:
    lead = (
        "One more decode step of all requests in each mode, under the profiler, from the filling of the input "
        "buffers to the tokens on the host: what the CPU did, and what the GPU did meanwhile. The parts add up to "
        "the wall time. The profiler's own work is in it, so that these steps take longer than those above; a graph "
        "launch suffers most, because the profiler lists every kernel of the graph."
    )
    if data.emulated:
        lead += " There is no GPU here: the CPU does the computing too, and nothing is launched."
    body = [report.figure(svg(ax, alt, f"step{i}")) for i, (ax, alt) in enumerate(data.step_pictures)]
    body.append(report.folded("The bill as a table", table(data.bill_table, rows=30)))
    return report.Section("The bill of a step", lead, body)


def _counters(data: TourData) -> report.Section:
    wrong = int((data.counters["sign"] == "≠").sum())
    verdict = f"<b>{wrong} of them differ: ≠.</b>" if wrong else "All are as expected."
    lead = (
        "What the stages reported, beside what it must be, worked out from layers, sizes and pieces. A count "
        f"that is off says which stage did not do its work. {verdict}"
    )
    return report.Section("Counters", lead, [compile_cards.counters(data.counters)])
