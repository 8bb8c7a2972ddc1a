"""Events as one compressed block of bytes for the browser: columns of numbers, and each text once.

The block is gzip of: the length of a JSON head (uint32, little-endian), the head, padding to eight bytes,
then the columns one after the other, each padded to eight bytes. Events are sorted by row and start, so
that a row is one stretch of each column. ``explorer_data.js`` reads it.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from cgkit.plotting import timeline_layout as rows_of
from cgkit.plotting.timeline_layout import GAPS

if TYPE_CHECKING:
    import pandas as pd


def pack(
    events: pd.DataFrame,
    *,
    steps: pd.DataFrame | None = None,
    gaps: pd.DataFrame | None = None,
    title: str = "",
    about: str = "",
    notes: list[str] | None = None,
) -> bytes:
    """Everything that the explorer draws, as bytes.

    Args:
        events: ``Timeline.events``, or a part of it (index as in the whole).
        steps: ``Timeline.steps``; each becomes a choice in the toolbar.
        gaps: idle times of the GPUs with their cause, as for :func:`cgkit.plotting.timeline_chart.timeline`.
        title: of the page; ``about``: the line of provenance; ``notes``: what a reader must know.
    """
    rows_of.check(events)
    layout = rows_of.layout(events)
    shown = np.flatnonzero(layout.row >= 0)
    start = events["start_us"].to_numpy(float)
    order = shown[np.lexsort((-events["dur_us"].to_numpy(float)[shown], start[shown], layout.row[shown]))]
    origin = float(start[shown].min()) if len(shown) else 0.0
    columns, texts = _columns(events, order, origin)
    columns["row"] = layout.row[order].astype(np.int32)
    palettes = {}
    for by in ("piece", "kind"):
        codes, palette = rows_of.paints(events, by)
        columns[f"paint_{by}"] = codes[order].astype(np.uint16)
        palettes[by] = [asdict(paint) for paint in palette]
    gaps = rows_of.gpu_gaps(events) if gaps is None else gaps
    columns |= _gap_columns(gaps, layout, origin)
    head = {
        "count": len(order),
        "texts": texts,
        "groups": [asdict(group) for group in layout.groups],
        "palettes": palettes,
        "gap_paints": [asdict(paint) for paint in GAPS.values()],
        "steps": _steps(steps, origin),
        "has_pieces": any(text for text in texts["piece"]),
        "origin_us": origin,
        "title": title,
        "about": about,
        "notes": notes or [],
    }
    return _block(head, columns)


def _columns(
    events: pd.DataFrame, order: np.ndarray, origin: float
) -> tuple[dict[str, np.ndarray], dict[str, list[str]]]:
    columns: dict[str, np.ndarray] = {}
    columns["start"] = events["start_us"].to_numpy(np.float64)[order] - origin
    columns["dur"] = events["dur_us"].to_numpy(np.float32)[order]
    columns["correlation"] = events["correlation"].to_numpy(np.float64)[order]
    columns["index"] = np.asarray(events.index, dtype=np.int32)[order]
    texts = {}
    for name in ("name", "kind", "piece", "stage"):
        codes, values = rows_of.codes_of(events[name])
        columns[name] = codes[order].astype(np.uint32)
        texts[name] = ["" if value == "nan" else value for value in values]
    # ties name rows of the whole trace; here they name places in the new order
    place = np.full(len(events) + 1, -1, dtype=np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    for name in ("launched_by", "graph_launch"):
        columns[name] = place[events.index.get_indexer(events[name].to_numpy()[order])]
    return columns, texts


def _gap_columns(gaps: pd.DataFrame, layout: rows_of.Layout, origin: float) -> dict[str, np.ndarray]:
    """Each gap once for every stream of its process' GPU, sorted by row and start."""
    causes = list(GAPS)
    parts = []
    for group in layout.groups:
        if group.side != "gpu":
            continue
        mine = gaps[(gaps["process"] == group.process) & (gaps["device"] == group.device)]
        cause = [causes.index(str(c)) if str(c) in GAPS else causes.index("idle") for c in mine["cause"]]
        part = np.zeros((len(mine), 4))
        part[:, 0], part[:, 1] = group.first_row, mine["start_us"] - origin
        part[:, 2], part[:, 3] = mine["dur_us"], cause
        parts.append(part[np.argsort(part[:, 1], kind="stable")])
    table = np.concatenate(parts) if parts else np.zeros((0, 4))
    return {
        "gap_row": table[:, 0].astype(np.int32),
        "gap_start": table[:, 1],
        "gap_dur": table[:, 2].astype(np.float32),
        "gap_cause": table[:, 3].astype(np.uint8),
    }


def _steps(steps: pd.DataFrame | None, origin: float) -> list[dict[str, Any]]:
    if steps is None:
        return []
    return [
        {
            "name": f"{row['name']}",
            "process": int(row.get("process", 0)),
            "start": float(row["start_us"]) - origin,
            "dur": float(row["dur_us"]),
        }
        for row in steps.to_dict("records")
    ]


def _block(head: dict[str, Any], columns: dict[str, np.ndarray]) -> bytes:
    offset, places = 0, {}
    for name, column in columns.items():
        places[name] = [column.dtype.name, offset, len(column)]
        offset += -(-column.nbytes // 8) * 8
    text = json.dumps(head | {"columns": places}, separators=(",", ":")).encode()
    text += b" " * (-(4 + len(text)) % 8)
    parts = [len(text).to_bytes(4, "little"), text]
    for column in columns.values():
        little = column.astype(column.dtype.newbyteorder("<"), copy=False)
        parts.append(little.tobytes() + b"\0" * (-column.nbytes % 8))
    return gzip.compress(b"".join(parts), compresslevel=6, mtime=0)


def unpack(block: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The head and the columns of a block: what the browser sees, for tests and for who wants the data."""
    raw = gzip.decompress(block)
    size = int.from_bytes(raw[:4], "little")
    head = json.loads(raw[4 : 4 + size])
    base = 4 + size
    columns = {
        name: np.frombuffer(raw, dtype=np.dtype(kind), count=count, offset=base + offset)
        for name, (kind, offset, count) in head["columns"].items()
    }
    return head, columns
