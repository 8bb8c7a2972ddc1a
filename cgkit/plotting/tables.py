"""DataFrames as HTML tables: numbers to the right, units in the heading, long ones folded away."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

#: How a column is written, by the unit at the end of its name.
_UNITS: dict[str, tuple[str, Callable[[float], str]]] = {
    "_bytes": ("", lambda v: human_bytes(v)),
    "_us": (" (µs)", lambda v: f"{v:,.1f}"),
    "_ms": (" (ms)", lambda v: f"{v:,.2f}"),
    "_s": (" (s)", lambda v: _seconds(v)),
    "seconds": (" (s)", lambda v: _seconds(v)),
    "ms_per_token": ("", lambda v: f"{v:,.2f}"),
}


def human_bytes(count: float) -> str:
    """A byte count in the unit in which it has one to four digits: ``48.0 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:,.0f} B" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    raise AssertionError


def human_seconds(seconds: float) -> str:
    """A time in the unit in which it can be read: ``2.74 s``, ``37.0 ms``, ``850 µs``."""
    if abs(seconds) >= 1 or seconds == 0:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:,.1f} ms" if abs(seconds) >= 1e-3 else f"{seconds * 1e6:,.0f} µs"


def _seconds(value: float) -> str:
    """Two decimals, and four where two would show nothing."""
    return f"{value:,.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.4f}"


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value) or type(value).__name__ == "NAType"


def _heading(column: str) -> str:
    for ending, (unit, _) in _UNITS.items():
        if column.endswith(ending):
            stem = column.removesuffix(ending) if ending.startswith("_") else column
            return stem.replace("_", " ") + unit
    return column.replace("_", " ")


def _cell(column: str, value: Any) -> tuple[str, bool]:
    """The whole text of a cell, and whether it is a number."""
    if _missing(value):
        return "", False
    if isinstance(value, (bool,)) or type(value).__name__ in ("bool", "bool_"):
        return ("yes" if value else "no"), False
    if isinstance(value, (int, float)) or type(value).__module__ == "numpy":
        for ending, (_, write) in _UNITS.items():
            if column.endswith(ending):
                return write(float(value)), True
        return (f"{value:,}" if float(value).is_integer() else f"{value:,.3g}"), True
    text = ", ".join(map(str, value)) if isinstance(value, (list, tuple, set)) else str(value)
    return text, False


def _cut(text: str, chars: int) -> str:
    return text if len(text) <= chars else f"{text[: chars - 1]}…"


def _html(text: str, chars: int) -> str:
    """A cell's text as HTML: cut where it is long, and then whole in the tooltip."""
    shown = escape(_cut(text, chars))
    return shown if len(text) <= chars else f'<span title="{escape(text)}">{shown}</span>'


def table(
    frame: pd.DataFrame,
    *,
    rename: Mapping[str, str] | None = None,
    rows: int = 12,
    chars: int = 60,
    caption: str = "",
) -> str:
    """``frame`` as an HTML table.

    The first ``rows`` rows are shown, the others behind a fold; texts over ``chars`` characters are cut
    and whole in the tooltip. A column whose name ends in ``_bytes``, ``_s``, ``_ms`` or ``_us`` is
    written in that unit.
    """
    names = dict(rename or {})
    columns = [str(column) for column in frame.columns]
    cells = [
        [_cell(column, value) for column, value in zip(columns, row)]
        for row in frame.itertuples(index=False, name=None)
    ]
    numeric = [bool(cells) and any(row[i][1] for row in cells) for i in range(len(columns))]
    head = "".join(
        f'<th scope="col"{_right(numeric[i])}>{escape(names.get(column, _heading(column)))}</th>'
        for i, column in enumerate(columns)
    )
    body = [
        "<tr>"
        + "".join(f"<td{_right(numeric[i])}>{_html(text, chars)}</td>" for i, (text, _) in enumerate(row))
        + "</tr>"
        for row in cells
    ]
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    start, rest = body[:rows], body[rows:]
    if len(rest) < 3:
        start, rest = body, []
    whole = lambda part: (  # noqa: E731
        f'<table class="cg-table">{title}<thead><tr>{head}</tr></thead><tbody>{"".join(part)}</tbody></table>'
    )
    out = whole(start)
    if rest:
        title = ""
        out += f"<details><summary>{len(rest)} more rows</summary>{whole(rest)}</details>"
    return f'<div class="cg-scroll">{out}</div>'


def _right(numeric: bool) -> str:
    return ' class="cg-num"' if numeric else ""


def text_table(frame: pd.DataFrame, *, indent: str = "  ") -> str:
    """``frame`` for a terminal: columns aligned, the same units as :func:`table`, texts cut at 200 characters."""
    columns = [str(column) for column in frame.columns]
    rows = [
        [_cell(column, value) for column, value in zip(columns, row)]
        for row in frame.itertuples(index=False, name=None)
    ]
    plain = [[_cut(text, 200) for text, _ in row] for row in rows]
    heads = [_heading(column) for column in columns]
    widths = [max([len(head), *(len(row[i]) for row in plain)]) for i, head in enumerate(heads)]
    right = [any(row[i][1] for row in rows) for i in range(len(columns))]
    lines = [
        "  ".join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(cells, widths, right))
        for cells in [heads, *plain]
    ]
    return "\n".join((indent + line).rstrip() for line in lines)


#: Style of the tables where no page brings its own (a notebook).
NOTEBOOK_CSS = """<style>
.cg-show{font-size:13px}.cg-show h4{margin:.2em 0 .4em}.cg-show .cg-scroll{overflow-x:auto}
.cg-show table.cg-table{border-collapse:collapse;margin:.3em 0}
.cg-show .cg-table th,.cg-show .cg-table td{padding:.2em .8em .2em 0;text-align:left;background:none}
.cg-show .cg-table th{border-bottom:1px solid currentColor}
.cg-show .cg-table .cg-num{text-align:right;font-variant-numeric:tabular-nums}
.cg-show .cg-facts{display:flex;flex-wrap:wrap;gap:.2em 1.6em;margin:.2em 0 .5em}
.cg-show .cg-facts b{font-weight:600}
.cg-show pre{font-family:ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace!important}
</style>"""
