"""A split graph as DataFrames: its pieces, what crosses between them, the nodes of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cgkit.splitting.node_lines import NodeLine, content_digest, written_inputs
from cgkit.splitting.values import fake_value
from cgkit.tracing.node_text import shape_text

if TYPE_CHECKING:
    import pandas as pd

    from cgkit.splitting.split_graph import SplitGraph

PIECES = ["piece", "kind", "nodes", "inputs", "outputs", "operators", "content"]
EDGES = ["value", "from_piece", "to_piece", "written_by", "role", "shape", "dtype", "source"]
NODES = ["node", "role", "operator", "constants", "text", "shape", "dtype", "reads_from", "source"]


def pieces_frame(split: SplitGraph, nodes: Sequence[int]) -> pd.DataFrame:
    """One row a piece; ``nodes`` is how many belong to each."""
    import pandas as pd

    rows = [
        (
            piece.name,
            piece.kind,
            nodes[piece.index],
            len(piece.input_names),
            len(piece.output_names),
            ", ".join(dict.fromkeys(piece.ops)),
            content_digest(split.lines(piece)),
        )
        for piece in split.pieces
    ]
    return pd.DataFrame(rows, columns=PIECES)


def edges_frame(split: SplitGraph) -> pd.DataFrame:
    """One row a value and piece that takes it (or "" where the graph returns it)."""
    import pandas as pd

    nodes = {node.name: node for node in split.graph_module.graph.nodes}
    made_by: dict[str, str] = {}
    written_by: dict[str, str] = {}
    rows: list[tuple[Any, ...]] = []
    for piece in split.pieces:
        lines = {line.name: line for line in split.lines(piece)}
        for name in piece.input_names:
            line = lines[name]
            rows.append(
                (
                    name,
                    made_by.get(name, ""),
                    piece.name,
                    written_by.get(name, ""),
                    line.role,
                    line.shape,
                    line.dtype,
                    line.source,
                )
            )
        made_by.update(dict.fromkeys(piece.output_names, piece.name))
        written_by.update(dict.fromkeys(written_inputs(piece), piece.name))
    output = split.graph_module.graph.output_node()
    for node in output.all_input_nodes:
        shape, dtype = shape_text(fake_value(nodes[node.name]))
        rows.append(
            (
                node.name,
                made_by.get(node.name, ""),
                "",
                written_by.get(node.name, ""),
                "value",
                shape,
                dtype,
                "",
            )
        )
    return pd.DataFrame(rows, columns=EDGES)


def nodes_frame(lines: Sequence[NodeLine]) -> pd.DataFrame:
    """One row a node."""
    import pandas as pd

    weights = {line.name: line.source for line in lines if line.role == "weight" and line.source}
    rows = [
        (
            line.name,
            line.role,
            line.operator,
            line.constants,
            line.text(weights),
            line.shape,
            line.dtype,
            list(line.reads_from),
            line.source,
        )
        for line in lines
    ]
    return pd.DataFrame(rows, columns=NODES)
