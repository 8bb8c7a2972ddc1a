"""A split graph through Graphviz: DOT text made with the ``graphviz`` package, laid out by ``dot``.

``dot`` is run by ourselves and not by the package, because a layout must be given a limit of time: a
user's once ran for six days. Whatever goes wrong, the answer is None, and the caller draws without it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgkit.plotting.split_model import INPUTS, OUTPUTS, Box, Model, Node, Wire, summary
from cgkit.plotting.svg_text import clean, cut, weight_line, xml

if TYPE_CHECKING:
    import graphviz

#: A layout that takes longer is given up.
DOT_TIMEOUT_S = 10.0
_FONT = "Helvetica"


def find_dot() -> str | None:
    """``dot``, or the one of the wheel ``graphviz-pure`` (same input, same output), or None."""
    beside = Path(sys.executable).with_name("graphviz-pure")
    return shutil.which("dot") or shutil.which("graphviz-pure") or (str(beside) if beside.is_file() else None)


def digraph(model: Model) -> graphviz.Digraph:
    """The drawing as a ``graphviz.Digraph``: its ``source`` is DOT text.

    Raises:
        ImportError: the package ``graphviz`` is not installed.
    """
    import graphviz

    graph = graphviz.Digraph("split")
    graph.attr(rankdir="TB", bgcolor="transparent", compound="true", labelloc="t", labeljust="l")
    graph.attr(fontname=_FONT, fontsize="16", ranksep="0.45", nodesep="0.25")
    graph.attr(label=_label([*model.heading, ""]))
    graph.attr("node", fontname=_FONT, fontsize="14", shape="box", style="rounded,filled", margin="0.18,0.1")
    graph.attr("edge", fontname=_FONT, fontsize="12", arrowsize="0.7")
    starts = {run.start: (run, said) for run, said in model.spans()}
    shown = iter(model.shown)
    for index in shown:
        if index not in starts:
            _piece(graph, model.boxes[index])
            continue
        run, said = starts[index]
        with graph.subgraph(name=f"cluster_fold_{run.start}") as fold:
            fold.attr(label=_label([said]), style="dashed,rounded", color="#777777", fontsize="14")
            _piece(fold, model.boxes[index])
            for _ in range(run.length - 1):
                _piece(fold, model.boxes[next(shown)])
    _ends(graph, model)
    for wire in model.wires:
        _edge(graph, model, wire)
    return graph


def _label(lines: list[str]) -> str:
    """Lines to the left, with what means something to Graphviz taken literally."""
    import graphviz

    return "".join(graphviz.escape(clean(line)) + "\\l" for line in lines)


def _piece(graph: Any, box: Box) -> None:
    """One piece: a node, or a cluster of its operators if it is opened."""
    letter = f"   [{box.letter}]" if box.letter else ""
    lines = [f"{box.name}{letter}", f"{box.size}, {box.note}"]
    dashed = "rounded,dashed,filled" if box.splitting else "rounded,filled"
    tip = clean(f"{box.name}: {', '.join(box.operators)}")
    look = {"color": box.colour, "fillcolor": f"{box.colour}26", "style": dashed, "penwidth": "2"}
    if not box.opened:
        graph.node(
            f"p{box.index}", _label([*lines, cut(summary(box.operators), 400, 14)]), tooltip=tip, **look
        )
        return
    with graph.subgraph(name=f"cluster_p{box.index}") as inner:
        inner.attr(label=_label(lines), fontsize="14", tooltip=tip, **look)
        for node in box.opened:
            inner.node(
                _id(box, node.name), _inner_label(node), tooltip=clean(node.tip), **_inner_look(box, node)
            )
        for node in box.opened:
            for name in node.inputs:
                inner.edge(_id(box, name), _id(box, node.name), color="#555555")


def _id(box: Box, name: str) -> str:
    return f"p{box.index}_{name}"


def _inner_label(node: Node) -> str:
    import graphviz

    lines = [cut(line, 230, 12) for line in (node.title, node.shape) if line]
    lines += [weight_line(name, 230, 12).replace("⟵", "←") for name in node.weights]
    return "\\n".join(graphviz.escape(line) for line in lines)


def _inner_look(box: Box, node: Node) -> dict[str, str]:
    if node.role in ("value", "constant", "output"):
        return {"color": "#888888", "fillcolor": "#88888818", "fontsize": "12", "margin": "0.1,0.05"}
    return {"color": box.colour, "fillcolor": f"{box.colour}38", "fontsize": "12", "margin": "0.1,0.05"}


def _ends(graph: Any, model: Model) -> None:
    look = {"color": "#888888", "fillcolor": "#88888818", "shape": "box", "style": "filled"}
    weights = [f"and {model.weights:,} weights"] if model.weights else []
    if model.inputs:
        graph.node("inputs", _label(["takes", *model.inputs[:4], *weights]), **look)
    if model.outputs:
        graph.node("outputs", _label(["returns", *model.outputs[:4]]), **look)


def _edge(graph: Any, model: Model, wire: Wire) -> None:
    ends, options = [], {}
    for end, name, side in ((wire.source, "inputs", "ltail"), (wire.target, "outputs", "lhead")):
        if end in (INPUTS, OUTPUTS):
            ends.append(name)
            continue
        box = model.boxes[end]
        ends.append(f"p{end}")
        if box.opened:
            options[side] = f"cluster_p{end}"
            ends[-1] = _id(box, box.opened[-1 if side == "ltail" else 0].name)
    values = [*wire.values[:5], *([f"and {len(wire.values) - 5} more"] if len(wire.values) > 5 else [])]
    graph.edge(
        ends[0],
        ends[1],
        label=_label([f"  {value}" for value in values]),
        tooltip=clean("\n".join(wire.values)),
        **options,
    )


def lay_out(source: str, alt: str) -> str | None:
    """``source`` (DOT text) as an SVG element, or None where there is no ``dot``, or it fails, or it
    takes longer than :data:`DOT_TIMEOUT_S`."""
    program = find_dot()
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "-Kdot", "-Tsvg"],
            input=source.encode(),
            capture_output=True,
            timeout=DOT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    text = done.stdout.decode("utf-8", "replace")
    if "<svg" not in text or "</svg>" not in text:
        return None
    return _embedded(text, alt)


def _embedded(text: str, alt: str) -> str:
    """Graphviz' SVG as a part of a page: it takes the page's ink, and says what it shows."""
    text = text[text.index("<svg") : text.rindex("</svg>") + len("</svg>")]
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.S)
    text = text.replace('stroke="black"', 'stroke="currentColor"').replace(
        'fill="black"', 'fill="currentColor"'
    )
    text = text.replace(f'font-family="{_FONT}"', 'font-family="Helvetica, Arial, sans-serif"')
    text = re.sub(
        r'(<polygon) fill="(?:white|transparent)" stroke="(?:none|transparent)"', r'\1 fill="none"', text
    )
    head = f'<svg role="img" aria-label="{xml(alt)}" fill="currentColor" style="max-width:100%;height:auto"'
    return text.replace("<svg", head, 1)
