"""The pipeline on one printed page: ``python notebooks/poster.py`` writes ``pipeline.html`` (A4, landscape).

The stages are those of the map, the notebooks those of ``course.csv``; what is said of each stage stands below.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import overview  # noqa: E402 - of this folder

from cgkit.plotting.road import OUT, STAGES  # noqa: E402 - the package beside this folder, installed or not

#: What stands under each stage: a heading, and a text a stage (`code` in backticks).
ROWS = (
    (
        "what happens",
        "Dynamo reads the bytecode of `forward` once. The number of tokens stays a symbol. Guards are "
        "dropped: nobody asks again whether the graph fits.",
        "Cut at attention, whose work depends on lengths and not on shapes alone. Nothing changes places. "
        "Attention writes into a buffer that it is given.",
        "Each piece without attention goes to Inductor. Equal pieces are compiled once. What was compiled "
        "stays on disk, under a key of four factors: environment, config, code, compiler.",
        "For each size, the largest first, the launches are written down with their addresses. All graphs "
        "share one pool. Recording computes nothing.",
        "A step's batch is padded to the next size. The dispatcher looks for a graph of the whole step, then "
        "for the pieces', else it runs without. Weights and buffers stay where they are.",
    ),
    (
        "how many (L layers, S sizes)",
        "1 graph, for every batch",
        "2 L + 1 pieces, L of them attention",
        "L + 1 to compile, 3 different: the first, the last, all between",
        "S × (L + 1) in pieces, and S of the whole step",
        "1 look-up a step; L + 1 launches in pieces, 1 for the whole step",
    ),
    (
        "what it is blind to",
        "Numbers, flags and None are constants by now. So is what forward asked about a size.",
        "What an operator does inside. Only its schema says what it writes.",
        "A helper's new code, if the key leaves that file out: then a stale hit.",
        "An input that moved: a replay reads the old address. An output that is kept: the next replay "
        "overwrites it.",
        "Sizes above the largest: they run without a graph, and pay for every launch.",
    ),
    (
        "by hand",
        "`traced = cgkit.trace(model, *args)`",
        "`split = cgkit.split_graph(traced)`",
        "`compiled = cgkit.compile_pieces(split)`",
        "`captured = cgkit.capture(compiled, sizes)`",
        "`cgkit.Engine(runner)`",
    ),
    (
        "its name in vLLM",
        "`support_torch_compile`",
        "`splitting_ops`, `split_graph`",
        "`PiecewiseBackend`",
        "`CUDAGraphWrapper`",
        "`CudagraphDispatcher`",
    ),
)

CSS = """
@page { size: A4 landscape; margin: 9mm }
* { box-sizing: border-box; print-color-adjust: exact; -webkit-print-color-adjust: exact }
body { font: 9.6pt/1.32 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; color: #24292f; margin: 0 auto }
body { max-width: 279mm }
h1 { font-size: 16pt; margin: 0 0 1mm } p { margin: 0 0 3mm; color: #444c56 }
table { border-collapse: separate; border-spacing: 0; width: 100%; table-layout: fixed }
col.what { width: 23mm }
th, td { text-align: left; vertical-align: top; padding: 1.6mm 2mm; overflow-wrap: break-word }
tbody tr > * { border-top: .3mm solid #c4cbd3 }
tbody th { font-weight: 600; color: #444c56; padding-left: 0; font-size: 8.6pt }
thead th { padding: 0 2mm 2mm }
.stage { background: #00466f; color: #fff; padding: 1.8mm 2mm; border-radius: 1.2mm }
.stage { font-size: 12.5pt; font-weight: 700 }
.stage small { display: block; font-size: 8.6pt; font-weight: 400 }
.flow { font-weight: 400; font-size: 8.8pt; padding: 0 0 1.2mm }
code { font: 7.8pt/1.3 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace }
"""


def marked(text: str) -> str:
    """``text`` as HTML, with what stands in backticks as code."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if place % 2 else part for place, part in enumerate(parts))


def row(heading: str, texts: tuple[str, ...]) -> str:
    cells = "".join(f"<td>{text}</td>" for text in texts)
    return f"<tr><th>{escape(heading)}</th>{cells}</tr>"


def poster() -> str:
    """The page as HTML, in one file."""
    course = overview.course()
    gives = [given.replace("\n", " ") for _, _, given in STAGES[1:]] + [OUT]
    heads = "".join(
        f'<th><div class="flow">{escape(given.replace(chr(10), " "))} → {escape(out)}</div>'
        f'<div class="stage">{number} {stage}<small>{escape(tool)}</small></div></th>'
        for number, ((stage, tool, given), out) in enumerate(zip(STAGES, gives), 1)
    )
    books = {
        stage: "<br>".join(
            f"<b>{each.number}</b> {escape(each.title)}" for each in course[course["stage"] == stage].itertuples()
        )
        for stage in [*(stage for stage, _, _ in STAGES), "all"]
    }
    body = "".join(row(heading, tuple(map(marked, texts))) for heading, *texts in ROWS)
    body += row("notebooks", tuple(books[stage] for stage, _, _ in STAGES))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>The road of one decode step</title>'
        f"<style>{CSS}</style></head>\n<body><h1>The road of one decode step</h1>\n"
        "<p>What an engine does once (1 to 4), so that it can make each token (5) without waiting for Python: "
        "compile what repeats, record what is launched, and leave attention in between.</p>\n"
        f'<table><colgroup><col class="what"><col span="5"></colgroup><thead><tr><th></th>{heads}</tr></thead>\n'
        f"<tbody>{body}</tbody></table>\n"
        f"<p>About the whole road: {books['all'].replace('<br>', ' · ')}</p></body></html>\n"
    )


def main() -> None:
    (HERE / "pipeline.html").write_text(poster(), encoding="utf-8")


if __name__ == "__main__":
    main()
