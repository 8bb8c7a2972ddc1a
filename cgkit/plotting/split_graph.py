"""The pieces of a split graph as a picture: equal ones in one colour, repeats folded, any of them opened.

Laid out by Graphviz where there is a ``dot``, and otherwise (or if it hangs) by ourselves.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgkit.errors import ConfigError
from cgkit.plotting.folding import Run
from cgkit.plotting.picture import Picture
from cgkit.plotting.split_dot import digraph, lay_out
from cgkit.plotting.split_model import Model, make_model, opened_nodes
from cgkit.plotting.split_own import draw_own
from cgkit.plotting.style import About, titled

if TYPE_CHECKING:
    import graphviz
    import pandas as pd

ENGINES = ("auto", "dot", "own")
_ids = re.compile(r'(\bid="|url\(#|href="#)')


class GraphPicture(Picture):
    """A split graph as drawn. ``engine`` says who laid it out: "dot" or "own"."""

    def __init__(self, svg: str, model: Model, engine: str) -> None:
        super().__init__(svg, " ".join(" ".join(model.heading).split()))
        self.model = model
        self.engine = engine

    @property
    def graph(self) -> graphviz.Digraph:
        """The same drawing as a ``graphviz.Digraph``, to change or to render otherwise.

        Raises:
            ImportError: the package ``graphviz`` is not installed.
        """
        return digraph(self.model)

    @property
    def source(self) -> str:
        """The drawing as DOT text."""
        return self.graph.source

    def piece(self, name: str, nodes: pd.DataFrame) -> str:
        """One piece alone with its operators, coloured as in this picture, as an SVG element."""
        box = next(box for box in self.model.boxes if box.name == name)
        alone = replace(box, opened=opened_nodes(nodes))
        model = Model([], [replace(alone, index=0)], [Run(0, 1, 1)], [0], [])
        return _own_ids(draw_own(model))

    def save(self, path: str | Path) -> Path:
        """Writes the picture: ``.svg``, or ``.dot`` / ``.gv`` for its DOT text."""
        if Path(path).suffix in (".dot", ".gv"):
            Path(path).write_text(self.source, encoding="utf-8")
            return Path(path)
        return super().save(path)


def split_graph(
    frame: pd.DataFrame,
    about: About | None = None,
    *,
    edges: pd.DataFrame | None = None,
    nodes: Mapping[str, pd.DataFrame] | None = None,
    engine: str = "auto",
) -> GraphPicture:
    """The pieces as a picture.

    Args:
        frame: one row a piece in order, with the columns ``piece``, ``kind`` ("splitting" or another
            word), ``nodes`` and ``operators`` (text or a list). Pieces with one ``key``, or else one
            ``content``, are equal; without such a column those with equal operators and nodes.
        about: stands in the title.
        edges: what crosses between pieces (``SplitGraph.edges_frame()``).
        nodes: the pieces to open: by name, their nodes (``SplitGraph.nodes_frame(piece)``).
        engine: "dot" or "auto" (Graphviz if it answers in time, else ours), "own" (the same everywhere).

    Raises:
        ConfigError: there is no such engine.
    """
    if engine not in ENGINES:
        raise ConfigError(f"engine={engine!r} is unknown; use one of {', '.join(ENGINES)}")
    kinds = [str(kind) for kind in frame["kind"]]
    splitting = kinds.count("splitting")
    model = make_model(frame, "", edges=edges, nodes=nodes)
    distinct = f" ({len(model.letters)} different)" if len(kinds) - splitting else ""
    pieces = f"{len(kinds)} piece{'s' * (len(kinds) != 1)}"
    what = f"{pieces}: {len(kinds) - splitting} to compile and record{distinct}, {splitting} that split them"
    model.heading = titled(what, about).split("\n")
    svg = _through_dot(model) if engine != "own" else None
    if svg is not None:
        return GraphPicture(_own_ids(svg), model, "dot")
    return GraphPicture(_own_ids(draw_own(model)), model, "own")


def _through_dot(model: Model) -> str | None:
    try:
        source = digraph(model).source
    except ImportError:
        return None
    return lay_out(source, " ".join(model.heading))


def _own_ids(svg: str) -> str:
    """``svg`` with ids that no other picture of the page has, and that are the same each time."""
    prefix = f"sg{hashlib.sha256(svg.encode('utf-8', 'replace')).hexdigest()[:8]}-"
    return _ids.sub(lambda found: found[1] + prefix, svg)


def of_artefact(
    split: Any,
    about: About | None = None,
    *,
    open: Any = (),
    engine: str = "auto",
    frame: Any = None,
) -> GraphPicture:
    """The picture of anything with ``to_frame()``, ``edges_frame()`` and ``nodes_frame(piece)``."""
    nodes = {name: split.nodes_frame(name) for name in open}
    frame = split.to_frame() if frame is None else frame
    return split_graph(frame, about, edges=split.edges_frame(), nodes=nodes, engine=engine)


def graph_picture(nodes: pd.DataFrame, about: About | None = None, *, engine: str = "auto") -> GraphPicture:
    """A graph that is not split: all its operators in one box.

    Args:
        nodes: one row a node: ``node``, ``role``, ``operator``, ``constants``, ``shape``, ``dtype``,
            ``reads_from``, ``source`` (as of ``SplitGraph.nodes_frame``).
    """
    import pandas as pd

    calls = nodes[nodes["role"] == "call"]
    name = about.model if about and about.model else "graph"
    row = {
        "piece": name,
        "kind": "traced",
        "nodes": len(calls),
        "operators": ", ".join(dict.fromkeys(calls["operator"].astype(str))),
        "content": "graph",
    }
    frame = pd.DataFrame([row])
    model = make_model(frame, titled(f"One graph: {len(calls)} operators", about), nodes={name: nodes})
    model.letters = {}
    svg = _through_dot(model) if engine != "own" else None
    return GraphPicture(_own_ids(svg or draw_own(model)), model, "dot" if svg else "own")
