"""A histogram of batch sizes from a file: CSV with the columns ``batch_size,count``, or the same as JSON."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cgkit.errors import CgkitError

_BATCH = ("batch_size", "batch")
_KINDS = ("decode", "mixed")


class HistogramFileError(CgkitError, ValueError):
    """A histogram's file cannot be read; the message names where."""


def read_histogram(path: str | Path) -> Any:
    """A DataFrame ``batch``, ``count`` (steps), and ``kind`` if the file has it.

    CSV: columns ``batch_size`` (or ``batch``) and ``count``, perhaps ``kind`` (decode or mixed). JSON: an object
    of sizes and counts (``{"8": 100}``), or a list of objects with those names.

    Raises:
        HistogramFileError: it cannot be read, lacks a column, holds nothing, or a value makes no sense. The message
            names line (or entry) and column.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise HistogramFileError(
            f"{path}: this is no text in UTF-8 ({error.reason} at byte {error.start})"
        ) from error
    except OSError as error:
        raise HistogramFileError(f"{path}: it cannot be read ({error.strerror})") from error
    rows = list(_json(text, path.name) if path.suffix == ".json" else _csv(text, path.name))
    if not rows or not any(count for _, count, _ in rows):
        raise HistogramFileError(f"{path.name}: it holds no steps: no row, or every count is 0")
    import pandas as pd

    frame = pd.DataFrame(rows, columns=["batch", "count", "kind"])
    return frame if (frame["kind"] != "").any() else frame.drop(columns="kind")


_Row = tuple[int, float, str]


def _csv(text: str, name: str) -> Iterable[_Row]:
    rows = csv.reader(text.splitlines())
    header = [cell.strip() for cell in next(rows, [])]
    if not header:
        raise HistogramFileError(f"{name}: the file is empty; line 1 must name the columns batch_size, count")
    batch = next((column for column in _BATCH if column in header), None)
    missing = ([] if batch else ["batch_size"]) + ([] if "count" in header else ["count"])
    if batch is None or missing:
        raise HistogramFileError(
            f"{name}, line 1: the column{'s' * (len(missing) > 1)} {', '.join(missing)} "
            f"{'are' if len(missing) > 1 else 'is'} missing (there are {', '.join(header)[:200]})"
        )
    for row in rows:
        if any(cell.strip() for cell in row):
            cells = dict(zip(header, [*row, *[""] * len(header)]))
            yield _row(cells, batch, f"{name}, line {rows.line_num}")


def _json(text: str, name: str) -> Iterable[_Row]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise HistogramFileError(f"{name}: this is no JSON ({error})") from error
    if isinstance(found, dict):
        found = [{"batch_size": key, "count": value} for key, value in found.items()]
    if not isinstance(found, list):
        raise HistogramFileError(
            f'{name}: give an object {{"8": 100}} or a list of objects with batch_size and count'
        )
    for number, entry in enumerate(found, 1):
        batch = next((key for key in _BATCH if isinstance(entry, dict) and key in entry), None)
        if batch is None or "count" not in entry:
            raise HistogramFileError(
                f"{name}, entry {number}: {entry!r} is no object with batch_size and count"
            )
        yield _row(entry, batch, f"{name}, entry {number}")


def _row(cells: dict[str, Any], batch: str, where: str) -> _Row:
    try:
        size = int(str(cells[batch]).strip())
    except ValueError:
        size = 0
    if size < 1:
        raise HistogramFileError(
            f"{where}, column {batch}: {cells[batch]!r} is no positive whole number of tokens"
        )
    try:
        count = float(str(cells["count"]).strip())
    except ValueError:
        count = math.nan
    if not 0 <= count < math.inf:
        raise HistogramFileError(
            f"{where}, column count: {cells['count']!r} is no number of steps (0 or more)"
        )
    kind = str(cells.get("kind") or "").strip()
    if kind and kind not in _KINDS:
        raise HistogramFileError(f"{where}, column kind: {kind!r} is unknown; use {' or '.join(_KINDS)}")
    return size, count, kind
