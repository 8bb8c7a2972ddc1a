"""How each stage's artefact looks in a notebook: registered by class name with :mod:`cgkit.display`.

Only an artefact's ``repr`` and ``to_frame()`` are used, so that plotting knows no stage. Imported the
first time that an artefact is shown.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any

from cgkit.display import register_drawing, register_html, register_page
from cgkit.plotting import charts, compile_cards, hazard_charts, padding_charts
from cgkit.plotting.dump_page import dump_page
from cgkit.plotting.picture import Picture
from cgkit.plotting.split_graph import GraphPicture, graph_picture, of_artefact
from cgkit.plotting.style import About
from cgkit.plotting.tables import NOTEBOOK_CSS, table

if TYPE_CHECKING:
    import pandas as pd


#: A cell stays small however deep the model is: so many rows at most.
MANY = 60
#: Of so many different pieces the operators are drawn.
OPENED = 8
#: More nodes than this are not drawn but listed, unless they are asked for.
DRAWN = 150


def _about(artefact: Any) -> About | None:
    """The model's name and whether graphs are emulated, as far as the artefact says so."""
    model = getattr(artefact, "model_name", "") or getattr(
        getattr(artefact, "compiled", None), "model_name", ""
    )
    platform = getattr(artefact, "platform", None)
    emulated = getattr(platform, "emulated", None)
    return About(model=str(model), emulated=emulated) if model or emulated else None


def _card(artefact: Any, *parts: str) -> str:
    """The first line of the repr as a heading, then the parts, then the whole repr folded."""
    first, *rest = repr(artefact).splitlines()
    more = f"<details><summary>as text</summary><pre>{escape(repr(artefact))}</pre></details>" if rest else ""
    return f'{NOTEBOOK_CSS}<div class="cg-show"><h4>{escape(first)}</h4>{"".join(parts)}{more}</div>'


def _has(frame: pd.DataFrame, *columns: str) -> bool:
    return set(columns) <= set(frame.columns) and len(frame) > 0


def traced_graph(artefact: Any) -> str:
    """The operators by how often they are called, then the nodes."""
    frame = artefact.to_frame()
    parts = []
    if _has(frame, "op", "operator"):
        calls = frame[frame["op"].astype(str).str.startswith("call")]["operator"].astype(str)
        counts = calls.value_counts().rename_axis("operator").reset_index(name="times")
        parts.append(table(counts, rows=8))
    if _has(frame, "role", "reads_from", "fetched_from") and len(frame) <= DRAWN:
        parts.append(f"<details open><summary>drawn</summary>{traced_picture(artefact).svg()}</details>")
    shown = frame.drop(
        columns=["file", "role", "reads_from", "constants", "fetched_from"], errors="ignore"
    ).head(MANY)
    rest = f"<p>{len(frame) - MANY} more: <code>.to_frame()</code></p>" if len(frame) > MANY else ""
    summary = f"the first {len(shown)} of {len(frame)} nodes" if rest else f"{len(frame)} nodes"
    parts.append(f"<details><summary>{summary}</summary>{table(shown, rows=MANY)}{rest}</details>")
    return _card(artefact, *parts)


def traced_picture(artefact: Any, engine: str = "auto") -> GraphPicture:
    """What ``traced.draw()`` gives: all operators of the one graph."""
    frame = artefact.to_frame()
    held = frame["fetched_from"].str.removeprefix("L['self'].")
    return graph_picture(frame.assign(text=frame["source"], source=held), _about(artefact), engine=engine)


def split_graph_card(artefact: Any) -> str:
    """The pieces in order, equal ones in one colour, repeats folded; each different one opens."""
    frame = artefact.to_frame()
    rows = f"<details><summary>{len(frame)} pieces</summary>{table(frame, rows=12)}</details>"
    picture = split_picture(artefact)
    return _card(artefact, picture.svg(), *opened_pieces(artefact, frame, picture), rows)


def split_picture(artefact: Any, open: Any = (), engine: str = "auto") -> GraphPicture:
    """What ``split.draw()`` gives."""
    return of_artefact(artefact, _about(artefact), open=open, engine=engine)


def opened_pieces(artefact: Any, frame: pd.DataFrame, picture: GraphPicture) -> list[str]:
    """Each different piece with its operators, behind a line that opens it; coloured as in ``picture``."""
    first = frame.drop_duplicates(["kind", "content"])
    parts = []
    for row in first.head(OPENED).to_dict("records"):
        equal = int((frame["content"] == row["content"]).sum())
        as_well = f", and {equal - 1} equal to it" if equal > 1 else ""
        nodes = artefact.nodes_frame(row["piece"])
        inside = picture.piece(row["piece"], nodes) if len(nodes) <= DRAWN else table(nodes, rows=20)
        line = f"{escape(str(row['piece']))}{as_well}: {row['nodes']} node{'s' * (row['nodes'] != 1)}"
        parts.append(f"<details><summary>{line}</summary>{inside}</details>")
    if len(first) > OPENED:
        parts.append(f"<p>{len(first) - OPENED} more different pieces: <code>.draw(open=[name])</code></p>")
    return parts


def compiled_graph(artefact: Any) -> str:
    """What was really compiled, and what was shared."""
    frame = artefact.to_frame()
    parts = []
    if _has(frame, "piece", "key", "compile_s"):
        parts.append(Picture(charts.compile_times(frame, _about(artefact))).svg())
    return _card(artefact, *parts, table(frame, rows=8, chars=24))


def captured_graphs(artefact: Any) -> str:
    """Time and memory of the recordings, size by size."""
    frame = artefact.to_frame()
    parts = []
    if _has(frame, "mode", "num_tokens", "seconds"):
        parts.append(Picture(charts.capture_seconds(frame, _about(artefact))).svg())
    return _card(artefact, *parts, table(frame, rows=8))


def capture_sizes(artefact: Any) -> str:
    """The staircase of padding, to a third above the largest size."""
    largest = list(artefact)[-1]
    frame = artefact.to_frame(range(1, max(largest + 4, round(1.3 * largest)) + 1))
    return _card(artefact, Picture(padding_charts.staircase(frame.assign(ladder="sizes"))).svg())


def measured(artefact: Any) -> str:
    """The picture and the table of what was measured."""
    try:
        drawn = [Picture(artefact.plot()).svg()]
    except TypeError:  # it asks what to draw (the divisor of a waste): that is the user's to say
        drawn = []
    return _card(artefact, *drawn, table(artefact.to_frame(), rows=8))


def mode_table(artefact: Any) -> str:
    """The pool while recording, the modes with their sentences, the keys in order, and where batches go."""
    folded = [
        f"<details><summary>{what}</summary>{table(frame, rows=MANY)}</details>"
        for what, frame in (
            ("every recorded key, in order", artefact.to_frame()),
            ("which graph a batch takes", artefact.routes_frame()),
        )
    ]
    modes = artefact.modes_frame()
    said = "".join(f"<li>{escape(sentence)}</li>" for sentence in modes["said"])
    picture = Picture(artefact.plot()).svg()
    return _card(artefact, picture, table(modes.drop(columns=["said"]), rows=8), f"<ul>{said}</ul>", *folded)


def doctor_report(artefact: Any) -> str:
    """The findings, worst first."""
    frame = artefact.to_frame()
    if not len(frame):
        return _card(artefact, "<p>nothing was found</p>")
    place = frame["file"].str.rsplit("/", n=1).str[-1] + ":" + frame["line"].astype(str)
    shown = frame.assign(place=place.where(frame["file"] != "", ""))
    return _card(
        artefact, table(shown[["severity", "code", "place", "source", "what", "cost", "fix"]], rows=20)
    )


def hazard(artefact: Any) -> str:
    """The code side by side, then what happened and what was said; long lines are folded."""
    wrapped = (
        '<pre style="font-family:monospace;white-space:pre-wrap;overflow-wrap:anywhere;margin:.2em 0 .6em">'
    )
    codes = "".join(
        f'<div style="flex:1;min-width:18em"><b>{name}</b>{wrapped}{escape(code)}</pre></div>'
        for name, code in zip(("broken", "fixed"), artefact.exhibit.code())
    )
    left = "text-align:left;vertical-align:top"
    said = "".join(
        f'<tr><th style="{left};white-space:nowrap">{name}</th><td style="{left}">{escape(text)}</td></tr>'
        for name, text in artefact.told()
    )
    return _card(
        artefact, f'<div style="display:flex;flex-wrap:wrap;gap:1em">{codes}</div>', f"<table>{said}</table>"
    )


def compilation_counter(artefact: Any) -> str:
    """All counters, zeros too."""
    return _card(artefact, table(artefact.to_frame(), rows=20))


def _carded(render: Callable[[Any], str]) -> Callable[[Any], str]:
    """``render`` under the first line of the repr."""
    return lambda artefact: _card(artefact, render(artefact))


def launch_overhead(artefact: Any) -> str:
    """Every case beside the claims, then the numbers, then what was not measured."""
    missing = "".join(f"<li>{escape(sentence)}</li>" for sentence in artefact.missing)
    rest = f"<p>not measured:</p><ul>{missing}</ul>" if missing else ""
    return _card(artefact, Picture(artefact.plot()).svg(), table(artefact.to_frame(), rows=8), rest)


def crossover(artefact: Any) -> str:
    """Both curves of each mode, and where they cross."""
    return _card(artefact, Picture(artefact.plot()).svg(), table(artefact.crossings(), rows=8))


def bill_card(artefact: Any) -> str:
    """Where the wall time went: two bars, and the table behind them."""
    return _card(artefact, Picture(artefact.plot()).svg(), table(artefact.table(), rows=40))


def timeline_card(artefact: Any) -> str:
    """The static picture (of the middle step), how complete it is, the steps, and the events by kind."""
    events = artefact.to_frame()
    kinds = (
        events.groupby("kind", observed=True)["dur_us"].agg(events="count", longest_us="max").reset_index()
    )
    lines = "".join(f"<li>{escape(line)}</li>" for line in artefact.complete())
    steps = table(artefact.steps.drop(columns=["thread"], errors="ignore"), rows=6)
    return _card(artefact, _timeline_picture(artefact), f"<ul>{lines}</ul>", steps, table(kinds, rows=14))


def capture_plan(artefact: Any) -> str:
    """What comes and what is recorded, size by size, and the options of the engines."""
    options = "\n\n".join(artefact.options().values())
    return _card(
        artefact,
        Picture(artefact.plot()).svg(),
        table(artefact.to_frame(), rows=8),
        f"<details><summary>as an option of vLLM, SGLang, TensorRT-LLM</summary><pre>{escape(options)}</pre></details>",
    )


def sizes_comparison(artefact: Any) -> str:
    """The plan's sizes, and what a step costs with each list."""
    return _card(artefact, Picture(artefact.overview()).svg(), table(artefact.to_frame(), rows=12))


_CHANGES = {
    "added": "background:#dff3e4;color:#111",
    "removed": "background:#fbe3e4;color:#111",
    "kept": "color:#777",
}

#: A line too long for the page goes on below, set in; the mark at its beginning stands alone.
_WRAPPED = "white-space:pre-wrap;overflow-wrap:anywhere;padding-left:4ch;text-indent:-4ch"


def pass_report(artefact: Any) -> str:
    """What a pass took away and put in, line by line, in the order of the graph."""
    lines = [
        f'<div style="{_CHANGES[change]};{_WRAPPED}">{mark} {escape(line)}</div>'
        for change, line in artefact.to_frame().itertuples(index=False)
        for mark in [{"added": "+", "removed": "-"}.get(change, "&nbsp;")]
    ]
    style = "font-family:monospace;font-size:11px;max-height:420px;overflow-y:auto"
    diff = f'<div style="{style}">{"".join(lines)}</div>' if lines else "<p>the graph is as it was</p>"
    notes = "".join(f"<li>{escape(note)}</li>" for note in artefact.notes)
    head, *_ = repr(artefact).splitlines()
    body = (f"<ul>{notes}</ul>" if notes else "") + diff
    return f'{NOTEBOOK_CSS}<div class="cg-show"><h4>{escape(head)}</h4>{body}</div>'


def pass_reports(artefact: Any) -> str:
    """A row a pass, and each diff folded."""
    folded = [
        f"<details><summary>{escape(report.name)}: matched {report.matched}</summary>{pass_report(report)}</details>"
        for report in artefact
    ]
    return _card(artefact, table(artefact.to_frame(), rows=20), *folded)


def table_only(artefact: Any) -> str:
    """Its table."""
    return _card(artefact, table(artefact.to_frame(), rows=20))


def bisection(artefact: Any) -> str:
    """The stages as a picture, as far as the search went, then its table."""
    frame = artefact.to_frame()
    return _card(artefact, Picture(hazard_charts.road(frame)).svg(), table(frame, rows=20))


def _timeline_picture(artefact: Any) -> str:
    """A bitmap: as SVG a timeline of some thousand events would weigh more than the notebook."""
    explorer = artefact.explore()
    data = base64.b64encode(explorer.picture()).decode()
    return f'<img style="max-width:100%" alt="{escape(explorer.alt())}" src="data:image/png;base64,{data}">'


def ledgers(artefact: Any) -> str:
    """Steps by mode, then each kind of batch with the keys tried, addresses folded, and what came after the lock."""
    addresses, late = artefact.addresses_frame(), artefact.after_lock_frame()
    for column in ("captured_at", "replayed_at"):
        addresses[column] = addresses[column].map(hex)
    elsewhere = addresses[addresses["moved"] > 0]
    parts = [table(artefact.modes_frame(), rows=4), table(artefact.dispatch_frame(), rows=12)]
    if len(elsewhere):
        parts.append(f"<p>found elsewhere than at capture:</p>{table(elsewhere, rows=12)}")
    parts.append(
        f"<details><summary>{len(addresses)} captured addresses</summary>{table(addresses, rows=MANY)}</details>"
    )
    if len(late):
        parts.append(f"<p>after the lock:</p>{table(late, rows=12)}")
    return _card(artefact, *parts)


RENDERERS: dict[str, Callable[[Any], str]] = {
    "TracedGraph": traced_graph,
    "SplitGraph": split_graph_card,
    "CompiledGraph": compiled_graph,
    "CapturedGraphs": captured_graphs,
    "CaptureSizes": capture_sizes,
    "CompilationCounter": compilation_counter,
    "Report": doctor_report,
    "Visit": hazard,
    "Bytecode": _carded(compile_cards.bytecode),
    "CompilationLog": _carded(compile_cards.compilation_log),
    "CountersTable": _carded(compile_cards.counters_table),
    "Explanation": _carded(compile_cards.explanation),
    "PieceDiff": _carded(compile_cards.piece_diff),
    "PieceExplanation": _carded(compile_cards.piece_explanation),
    "Coverage": measured,
    "ExpectedWaste": measured,
    "Bisection": bisection,
    "Debugging": table_only,
    "Ledger": measured,
    "Ledgers": ledgers,
    "HostTime": measured,
    "ModeTable": mode_table,
    "Lifetimes": measured,
    "Padding": measured,
    "PoolPrediction": measured,
    "Waterfall": measured,
    "CapturePlan": capture_plan,
    "SizesComparison": sizes_comparison,
    "SimulatedTraffic": measured,
    "StepCost": table_only,
    "PassReport": pass_report,
    "PassReports": pass_reports,
    "FunctionalizationCost": table_only,
    "Crossover": crossover,
    "LaunchOverhead": launch_overhead,
    "Timeline": timeline_card,
    "Bill": bill_card,
}

DRAWINGS: dict[str, Callable[..., Any]] = {"SplitGraph": split_picture, "TracedGraph": traced_picture}

register_page("CompiledGraph", dump_page)
for _name, _draw in DRAWINGS.items():
    register_drawing(_name, _draw)
for _name, _render in RENDERERS.items():
    register_html(_name, _render)
