"""A histogram of batch sizes from a file: CSV with the columns ``batch_size,count``, or the same as JSON."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cgkit.display import shortened
from cgkit.errors import CgkitError

_BATCH = ("batch_size", "batch")
_KINDS = ("decode", "mixed")
#: No step has so many tokens, and a float counts no more steps one by one; sums of their products stay finite.
_TOO_LONG, _TOO_OFTEN = 2**31, 2**53


class HistogramFileError(CgkitError, ValueError):
    """A histogram's file cannot be read; the message names where."""


def read_histogram(path: str | Path) -> Any:
    """A DataFrame ``batch``, ``count`` (steps), and ``kind`` if the file has it.

    CSV: columns ``batch_size`` (or ``batch``) and ``count``, perhaps ``kind`` (decode or mixed). JSON: an object
    of sizes and counts (``{"8": 100}``), or a list of objects with those names.

    Raises:
        HistogramFileError: it cannot be read, lacks a column, holds nothing, or a value makes no sense. The message
            names line (or entry) and column. A JSON object that names a size twice is refused too: one of the two
            counts would be lost.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise HistogramFileError(
            f"{path}: this is no text in UTF-8 ({error.reason} at byte {error.start}); unpack a compressed file first"
        ) from error
    except OSError as error:
        raise HistogramFileError(f"{path}: it cannot be read ({error.strerror})") from error
    read = _json if path.suffix.lower() == ".json" else _csv
    try:
        rows = list(read(text, path.name))
    except csv.Error as error:
        raise HistogramFileError(f"{path.name}: this is no CSV ({error})") from error
    if not rows or not any(count for _, count, _ in rows):
        raise HistogramFileError(f"{path.name}: it holds no steps: no row, or every count is 0")
    import pandas as pd

    _all_or_no_kinds([kind for _, _, kind in rows], path.name)
    frame = pd.DataFrame(rows, columns=["batch", "count", "kind"])
    return frame if (frame["kind"] != "").any() else frame.drop(columns="kind")


_Row = tuple[int, float, str]


def _all_or_no_kinds(kinds: list[str], name: str) -> None:
    without = kinds.count("")
    if 0 < without < len(kinds):
        raise HistogramFileError(
            f"{name}: {without} of {len(kinds)} rows have no kind, the first of them is row {kinds.index('') + 1}; "
            f"give each {' or '.join(_KINDS)}, or none"
        )


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
        found = json.loads(text, object_pairs_hook=_once)
    except HistogramFileError as error:
        raise HistogramFileError(f"{name}: {error}") from error
    except (ValueError, RecursionError) as error:
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
                f"{name}, entry {number}: {shortened(entry)} is no object with batch_size and count"
            )
        yield _row(entry, batch, f"{name}, entry {number}")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON in which no name stands twice."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise HistogramFileError(f"{shortened(key)} stands there twice; add its counts up")
        found[key] = value
    return found


def _row(cells: dict[str, Any], batch: str, where: str) -> _Row:
    try:
        size = int(str(cells[batch]).strip())
    except ValueError:
        size = 0
    if not 1 <= size < _TOO_LONG:
        raise HistogramFileError(
            f"{where}, column {batch}: {shortened(cells[batch])} is no positive whole number of tokens below "
            f"{_TOO_LONG:,}"
        )
    try:
        count = float(str(cells["count"]).strip())
    except ValueError:
        count = math.nan
    if not 0 <= count < _TOO_OFTEN:
        raise HistogramFileError(
            f"{where}, column count: {shortened(cells['count'])} is no number of steps (0 or more, below 2**53)"
        )
    kind = str(cells.get("kind") or "").strip()
    if kind and kind not in _KINDS:
        raise HistogramFileError(
            f"{where}, column kind: {shortened(kind)} is unknown; use {' or '.join(_KINDS)}"
        )
    return size, count, kind
