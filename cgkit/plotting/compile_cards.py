"""How what ``cgkit.measuring`` says of a compilation looks in a notebook: explanations, diffs, counters.

Only ``to_frame()`` and plain attributes are used. Colours are never alone: each status has a sign.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from cgkit.plotting.picture import Picture
from cgkit.plotting.tables import table

if TYPE_CHECKING:
    import pandas as pd

SIGNS = {"same": "", "renamed": "·", "looked up": "·", "changed": "≠", "only left": "−", "only right": "+"}
#: So many lines of generated code are shown; and code of so many pieces.
CODE_LINES, CODE_PIECES = 400, 6
#: In a diff, more equal rows than this in a row are summed up.
SAME_ROWS = 4

CSS = """<style>
table.cg-diff{border-collapse:collapse;table-layout:auto;width:100%;font-size:12.5px}
table.cg-diff td,table.cg-diff th{padding:.2em .6em;text-align:left!important;vertical-align:top;
border-bottom:1px solid #8c959f40}
.cg-diff code{font-family:ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;font-size:12px;background:none;
padding:0;overflow-wrap:anywhere}
table.cg-diff td.cg-sign{font-weight:700;width:1.2em;text-align:center!important}
.cg-diff tr.cg-changed td{background:#e69f0033}.cg-diff tr.cg-only-left td{background:#d55e0028}
.cg-diff tr.cg-only-right td{background:#0072b228}.cg-diff tr.cg-equal td{opacity:.75}
.cg-diff tr.cg-wrong td{background:#d55e0030;font-weight:600}table.cg-diff .cg-num{text-align:right!important}
pre.cg-code{max-height:32em;overflow:auto;
font:12px/1.45 ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace!important}
.cg-two{display:grid;grid-template-columns:repeat(auto-fit,minmax(360px,1fr));gap:1em}
</style>"""


def piece_diff(diff: Any) -> str:
    """Two pieces side by side; rows that differ are coloured and carry a sign."""
    frame, (left, right) = diff.to_frame(), diff.names
    rows = frame.to_dict("records")
    keys = "".join(f"<li><code>{escape(line)}</code></li>" for line in diff.key_lines)
    why = f"<p>Their keys differ in</p><ul>{keys}</ul>" if keys else ""
    legend = "<p>≠ changed, − only left, + only right, · another weight's name (no difference)</p>"
    short = _diff_table(rows, left, right, SAME_ROWS)
    whole = f"<details><summary>all {len(rows)} rows</summary>{_diff_table(rows, left, right, len(rows))}</details>"
    return f"{CSS}{why}{short}{legend}{whole}"


def _diff_table(rows: list[dict[str, Any]], left: str, right: str, most_equal: int) -> str:
    out, equal = [], []
    for row in [*rows, None]:
        if row is not None and row["status"] in ("same", "renamed", "looked up"):
            equal.append(row)
            continue
        if len(equal) > most_equal:
            names = sum(r["status"] in ("renamed", "looked up") for r in equal)
            said = f", {names} of them weights under another name" if names else ""
            out.append(
                f'<tr class="cg-equal"><td></td><td colspan="3">{len(equal)} equal nodes{said}</td></tr>'
            )
        else:
            out += [_diff_row(r) for r in equal]
        equal = []
        if row is not None:
            out.append(_diff_row(row))
    head = f'<th></th><th scope="col">{escape(left)}</th><th scope="col">{escape(right)}</th><th scope="col">how</th>'
    return f'<table class="cg-diff"><thead><tr>{head}</tr></thead><tbody>{"".join(out)}</tbody></table>'


def _diff_row(row: dict[str, Any]) -> str:
    kind = (
        "cg-equal"
        if row["status"] in ("same", "renamed", "looked up")
        else f"cg-{row['status'].replace(' ', '-')}"
    )
    cells = "".join(f"<td><code>{escape(row[side])}</code></td>" for side in ("left", "right"))
    sign = f'<td class="cg-sign" title="{row["status"]}">{SIGNS[row["status"]]}</td>'
    return f'<tr class="{kind}">{sign}{cells}<td>{escape(row["what"])}</td></tr>'


def counters(frame: pd.DataFrame) -> str:
    """Expected beside seen (``sign``, ``counter``, ``expected``, ``seen``, ``law``); what differs is marked."""
    rows = []
    for row in frame.to_dict("records"):
        wrong = row["sign"] == "≠"
        expected = "" if _missing(row["expected"]) else f"{int(row['expected']):,}"
        rows.append(
            f'<tr{" class=cg-wrong" if wrong else ""}><td class="cg-sign">{row["sign"]}</td>'
            f'<td>{escape(row["counter"])}</td><td class="cg-num">{expected}</td>'
            f'<td class="cg-num">{int(row["seen"]):,}</td><td>{escape(row["law"])}</td></tr>'
        )
    head = (
        '<th></th><th scope="col">counter</th><th class="cg-num" scope="col">expected</th>'
        '<th class="cg-num" scope="col">seen</th><th scope="col">because</th>'
    )
    return f'{CSS}<table class="cg-diff"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def _missing(value: Any) -> bool:
    return value is None or value != value or type(value).__name__ == "NAType"


def counters_table(counted: Any) -> str:
    """The verdict, then the table."""
    return counters(counted.to_frame()) + "<p>= as expected, ≠ not so, · nothing to compare with</p>"


def compilation_log(log: Any) -> str:
    """The Gantt chart, then what it was drawn from."""
    frame = log.to_frame()
    picture = Picture(log.plot()).svg() if len(frame) else "<p>nothing was compiled</p>"
    return f"{picture}<details><summary>{len(frame)} entries</summary>{table(frame, rows=20)}</details>"


def explanation(explained: Any) -> str:
    """What went in and what came out of each piece, then kernels and code piece by piece, then the bytecode."""
    frame = explained.to_frame()
    own = [piece for piece in explained.pieces if not piece.shared_with]
    parts = [CSS, table(frame.drop(columns="code_path"), rows=8)]
    parts += [
        f"<details><summary>{escape(piece.summary())}</summary>{_inside(piece)}</details>"
        for piece in own[:CODE_PIECES]
    ]
    if len(own) > CODE_PIECES:
        parts.append(f"<p>{len(own) - CODE_PIECES} more different pieces: <code>explained[name]</code></p>")
    if explained.bytecode is not None:
        parts.append(
            f"<details><summary>Dynamo's bytecode, before and after</summary>{bytecode(explained.bytecode)}</details>"
        )
    return "".join(parts)


def piece_explanation(piece: Any) -> str:
    """One piece: its kernels and its code."""
    return CSS + _inside(piece)


def _inside(piece: Any) -> str:
    kernels = table(piece.kernels_frame(), rows=20) if piece.kernels else ""
    path = (
        f"<p>lies in <code>{escape(piece.generated.path)}</code></p>"
        if piece.generated and piece.generated.path
        else ""
    )
    what = "Inductor's code" if piece.generated else "the graph itself (nothing was generated)"
    return f"{kernels}{path}<p>{what}:</p>{code(piece.code)}"


def code(text: str) -> str:
    """Code in a box that scrolls, cut where it is very long."""
    lines = text.splitlines()
    more = f"\n# ... {len(lines) - CODE_LINES} more lines" if len(lines) > CODE_LINES else ""
    return f'<pre class="cg-code">{escape(chr(10).join(lines[:CODE_LINES]))}{more}</pre>'


def bytecode(two: Any) -> str:
    """Before and after side by side, each with how it was made readable."""
    words = {"depyf": "decompiled by depyf", "dis": "as a listing (dis)"}
    halves = [
        f"<div><p>{when} Dynamo, {words[how]}</p>{code(text)}</div>"
        for when, how, text in (("before", two.how_before, two.before), ("after", two.how_after, two.after))
    ]
    return f'{CSS}<div class="cg-two">{"".join(halves)}</div>'
