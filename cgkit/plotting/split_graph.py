"""The pieces of a split graph as a picture: boxes in order, equal ones in one colour, repeats folded.

A split graph is a chain, so the layout is our own and the same on every machine; ``engine="dot"`` asks
Graphviz instead, and falls back where ``dot`` is missing or takes too long.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from cgkit.plotting.folding import Run, fold
from cgkit.plotting.style import SERIES, SPLITTING, About, titled

if TYPE_CHECKING:
    import pandas as pd

BOX_W, BOX_H, GAP, ROW, MARGIN = 162, 84, 26, 132, 12
DOT_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Box:
    """One piece as it is drawn. ``colour`` is shared by equal pieces; ``key`` says which are equal."""

    name: str
    splitting: bool
    lines: tuple[str, ...]
    key: tuple[Any, ...]
    colour: str
    tip: str


def split_graph(
    frame: pd.DataFrame, about: About | None = None, *, width: int = 960, engine: str = "own"
) -> str:
    """The pieces as an SVG element.

    Args:
        frame: one row a piece in order, with the columns ``piece``, ``kind`` ("splitting" or another
            word), ``nodes`` and ``operators`` (text or a list). With a column ``key`` pieces of one key
            are equal; without it those with equal operators, inputs and outputs.
        about: stands in the title.
        width: of the picture in pixels.
        engine: "own" (the same everywhere) or "dot" (Graphviz where there is one).
    """
    boxes = _boxes(frame)
    runs = fold([box.key for box in boxes])
    capturable = sum(not box.splitting for box in boxes)
    distinct = len({box.key for box in boxes if not box.splitting})
    heading = titled(
        f"{len(boxes)} pieces: {capturable} to compile and record ({distinct} different), "
        f"{len(boxes) - capturable} that split them",
        about,
    )
    if engine == "dot" and (drawn := _dot(boxes, runs, heading)):
        return drawn
    return _draw(boxes, runs, heading, width)


def _boxes(frame: pd.DataFrame) -> list[Box]:
    colours: dict[Any, str] = {}
    boxes = []
    for row in frame.to_dict("records"):
        splitting = str(row["kind"]) == "splitting"
        operators = _names(row.get("operators"))
        key = (splitting, row.get("key") or (tuple(operators), row.get("nodes")))
        colour = (
            SPLITTING if splitting else colours.setdefault(key, SERIES[min(len(colours), len(SERIES) - 1)])
        )
        boxes.append(
            Box(
                str(row["piece"]),
                splitting,
                (_nodes(row["nodes"]), *_summary(operators)),
                key,
                colour,
                f"{row['piece']}: {', '.join(operators)}",
            )
        )
    return boxes


def _names(operators: Any) -> list[str]:
    """Operator names without namespace and overload, from a list or comma-separated text."""
    if operators is None or (isinstance(operators, float) and operators != operators):
        return []
    names = operators.replace(";", ",").split(",") if isinstance(operators, str) else list(operators)
    return [str(name).strip() for name in names if str(name).strip()]


def _nodes(count: Any) -> str:
    return f"{count} node{'' if count == 1 else 's'}"


def _short(name: str) -> str:
    parts = name.split("::")[-1].split(".")
    return (parts[1] if len(parts) > 1 and parts[0] in ("aten", "prims", "cgkit") else parts[0]).split(" ")[0]


def _summary(operators: Sequence[str], lines: int = 2, chars: int = 23) -> tuple[str, ...]:
    """The most frequent operators, as up to ``lines`` lines of at most ``chars`` characters."""
    counts: dict[str, int] = {}
    for name in operators:
        counts[_short(name)] = counts.get(_short(name), 0) + 1
    words = [f"{n} ×{c}" if c > 1 else n for n, c in sorted(counts.items(), key=lambda item: -item[1])]
    if len(words) == 1 and len(words[0]) > chars:
        cut = words[0].rfind("_", 1, chars)
        return (words[0][:cut], words[0][cut:]) if cut > 0 else (words[0][:chars] + "…",)
    out: list[str] = []
    line = ""
    for word in words:
        longer = f"{line}, {word}" if line else word
        if len(longer) <= chars:
            line = longer
            continue
        if line:
            out.append(line)
        line = word if len(word) <= chars else word[: chars - 1] + "…"
    out = [*out, line] if line else out
    if len(out) > lines:
        out = [*out[: lines - 1], out[lines - 1][: chars - 2] + " …"]
    return tuple(out)


def _rows(runs: Sequence[Run], width: int) -> list[list[Run]]:
    """Runs to rows of the picture; a folded block stays together."""
    per_row = max(1, (width - 2 * MARGIN + GAP) // (BOX_W + GAP))
    rows: list[list[Run]] = [[]]
    used = 0
    for run in runs:
        if used and used + run.length > per_row:
            rows.append([])
            used = 0
        rows[-1].append(run)
        used += run.length
    return rows


def _draw(boxes: Sequence[Box], runs: Sequence[Run], heading: str, width: int) -> str:
    rows = _rows(runs, width)
    lines = heading.split("\n")
    top = 24 + 18 * len(lines) + 10
    widest = max(sum(run.length for run in row) for row in rows)
    width = max(width, 2 * MARGIN + widest * (BOX_W + GAP) - GAP)
    height = top + ROW * len(rows) - 10
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{escape(" ".join(lines))}" '
        "style=\"max-width:100%;height:auto;font-family:system-ui,-apple-system,'Segoe UI',sans-serif\" "
        'fill="currentColor" font-size="11.5">',
        '<defs><marker id="cg-arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0.8 L7 4 L0 7.2 z" fill="currentColor"/></marker></defs>',
    ]
    for number, line in enumerate(lines):
        weight = ' font-weight="600" font-size="14"' if number == 0 else ' opacity="0.8"'
        out.append(f'<text x="{MARGIN}" y="{24 + 18 * number}"{weight}>{escape(line)}</text>')
    for number, row in enumerate(rows):
        x, y = MARGIN, top + number * ROW
        for position, run in enumerate(row):
            if number or position:
                out.append(_arrow(x - GAP, x, y))
            if run.times > 1:
                out.append(_bracket(x, y, run))
            for offset in range(run.length):
                if offset:
                    out.append(_arrow(x - GAP, x, y))
                out.append(_box(boxes[run.start + offset], x, y))
                x += BOX_W + GAP
        if number < len(rows) - 1:
            out.append(_arrow(x - GAP, x - GAP + 18, y, head=False))
    return "\n".join([*out, "</svg>"])


def _box(box: Box, x: float, y: float) -> str:
    dash = ' stroke-dasharray="5 3"' if box.splitting else ""
    parts = [
        f"<g><title>{escape(box.tip)}</title>",
        f'<rect x="{x}" y="{y}" width="{BOX_W}" height="{BOX_H}" rx="{26 if box.splitting else 7}" '
        f'fill="{box.colour}" fill-opacity="0.16" stroke="{box.colour}" stroke-width="1.6"{dash}/>',
        f'<text x="{x + 12}" y="{y + 21}" font-weight="600" font-size="12.5">{escape(box.name)}</text>',
    ]
    note = "not recorded" if box.splitting else "compiled"
    parts.append(f'<text x="{x + 12}" y="{y + 37}" opacity="0.75">{escape(box.lines[0])}, {note}</text>')
    for number, line in enumerate(box.lines[1:]):
        parts.append(f'<text x="{x + 12}" y="{y + 55 + 15 * number}" font-size="11">{escape(line)}</text>')
    return "".join([*parts, "</g>"])


def _arrow(x0: float, x1: float, y: float, head: bool = True) -> str:
    middle = y + BOX_H / 2
    end = ' marker-end="url(#cg-arrow)"' if head else ' stroke-dasharray="2 3"'
    return (
        f'<path d="M{max(x0 + 3, 1)} {middle} H{x1 - (4 if head else 0)}" fill="none" '
        f'stroke="currentColor" stroke-width="1.2"{end}/>'
    )


def _bracket(x: float, y: float, run: Run) -> str:
    wide = run.length * (BOX_W + GAP) - GAP
    return (
        f'<rect x="{x - 9}" y="{y - 9}" width="{wide + 18}" height="{BOX_H + 34}" rx="11" fill="none" '
        'stroke="currentColor" stroke-opacity="0.5" stroke-dasharray="3 3"/>'
        f'<text x="{x + wide / 2}" y="{y + BOX_H + 18}" text-anchor="middle" font-weight="600">'
        f"{run.times} × the same</text>"
    )


def _dot(boxes: Sequence[Box], runs: Sequence[Run], heading: str) -> str | None:
    """The same by Graphviz, or None where there is no ``dot`` or it takes too long."""
    program = shutil.which("dot")
    if program is None:
        return None
    quote = lambda text: '"' + text.replace("\\", "\\\\").replace('"', "'") + '"'  # noqa: E731
    lines = ["digraph {", "rankdir=LR; bgcolor=transparent; labelloc=t; labeljust=l;"]
    lines.append(f"label={quote(heading)}; node [shape=box, fontname=sans, style=rounded];")
    drawn: list[int] = []
    for run in runs:
        for index in range(run.start, run.start + run.length):
            times = f"{run.times} × the same" if run.times > 1 else ""
            text = "\n".join(filter(None, [boxes[index].name, *boxes[index].lines, times]))
            style = "dashed" if boxes[index].splitting else "rounded"
            lines.append(f'n{index} [label={quote(text)}, color="{boxes[index].colour}", style={style}];')
            drawn.append(index)
    lines += [f"n{a} -> n{b};" for a, b in itertools.pairwise(drawn)]
    try:
        done = subprocess.run(
            [program, "-Tsvg"],
            input="\n".join([*lines, "}"]),
            capture_output=True,
            text=True,
            timeout=DOT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout[done.stdout.index("<svg") :]
