"""Requests from a CSV: when each arrived, how long its prompt was, how many tokens were generated.

Read are the columns of the Azure LLM inference traces (``TIMESTAMP``, ``ContextTokens``, ``GeneratedTokens``)
and the plain names ``arrival_s``, ``prompt_tokens``, ``output_tokens``. A time is a date with a time of day, or
a number of seconds.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from cgkit import events
from cgkit.display import shortened
from cgkit.errors import CgkitError

#: What a column may be called: (when, prompt, generated).
COLUMNS = (
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    ("arrival_s", "prompt_tokens", "output_tokens"),
)
_TOO_LONG = 2**31
#: Seconds: after the last year that a date can have, and before now in milliseconds since 1970.
_TOO_LATE = 1e12


class RequestTraceError(CgkitError, ValueError):
    """A file of requests cannot be read; the message names line and column."""


@dataclass(frozen=True)
class RequestTrace:
    """Requests in the order of their arrival.

    Attributes:
        arrivals: seconds since the first one; never falling.
        prompts, outputs: tokens of each; at least 1.
        source: the file's name.
    """

    arrivals: Sequence[float]
    prompts: Sequence[int]
    outputs: Sequence[int]
    source: str = ""

    def __len__(self) -> int:
        return len(self.arrivals)

    def to_frame(self) -> Any:
        """A row a request: ``arrival_s``, ``prompt_tokens``, ``output_tokens``."""
        import pandas as pd

        columns = {"arrival_s": self.arrivals, "prompt_tokens": self.prompts, "output_tokens": self.outputs}
        return pd.DataFrame({name: list(values) for name, values in columns.items()})

    def __repr__(self) -> str:
        if not self.arrivals:
            return f"RequestTrace of {self.source or 'nothing'}: no requests"
        seconds = self.arrivals[-1]
        span = f"{seconds / 3600:.2f} h" if seconds >= 360 else f"{seconds:.1f} s"
        return (
            f"RequestTrace of {self.source or 'lists'}: {len(self):,} requests in {span}, "
            f"{sum(self.prompts):,} prompt and {sum(self.outputs):,} generated tokens"
        )


def read_requests(path: str | Path) -> RequestTrace:
    """The requests of the CSV ``path``.

    Raises:
        RequestTraceError: it cannot be read, lacks a column, holds no request, or a line has a time that goes back,
            no number, or a length below 1. The message names line and column.
    """
    path = Path(path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return _read(file, path.name, os.fstat(file.fileno()).st_size)
    except UnicodeDecodeError as error:
        raise RequestTraceError(
            f"{path}: this is no text in UTF-8 ({error.reason} at byte {error.start}); unpack a compressed file first"
        ) from error
    except OSError as error:
        raise RequestTraceError(f"{path}: it cannot be read ({error.strerror})") from error
    except csv.Error as error:
        raise RequestTraceError(f"{path}: this is no CSV ({error})") from error


def _read(file: TextIO, name: str, size: int) -> RequestTrace:
    rows = csv.reader(file)
    columns, where = _header(next(rows, None), name)
    arrivals: list[float] = []
    prompts: list[int] = []
    outputs: list[int] = []
    done = 0
    for line, row in _lines(rows):
        cells = [row[index] if index < len(row) else "" for index in where]
        arrivals.append(_time(cells[0], f"{name}, line {line}, column {columns[0]}"))
        if len(arrivals) > 1 and arrivals[-1] < arrivals[-2]:
            raise RequestTraceError(
                f"{name}, line {line}, column {columns[0]}: {cells[0]!r} is earlier than the line before; sort "
                "the file by time"
            )
        prompts.append(_length(cells[1], f"{name}, line {line}, column {columns[1]}"))
        outputs.append(_length(cells[2], f"{name}, line {line}, column {columns[2]}"))
        done += sum(map(len, row)) + len(row)
        if not len(arrivals) % 50_000 and done < size:
            events.emit(events.Progress("reading", done, size, name))
    if not arrivals:
        raise RequestTraceError(f"{name}: there is a header and no request under it")
    if done:
        events.emit(events.Progress("reading", size, size, f"{len(arrivals):,} requests"))
    first = arrivals[0]
    return RequestTrace([time - first for time in arrivals], prompts, outputs, name)


def _lines(rows: Any) -> Iterator[tuple[int, list[str]]]:
    """Line number and cells of each line that holds something."""
    for row in rows:
        if any(cell.strip() for cell in row):
            yield rows.line_num, row


def _header(row: list[str] | None, name: str) -> tuple[Sequence[str], list[int]]:
    """The names of the three columns and where they stand."""
    if row is None:
        raise RequestTraceError(
            f"{name}: the file is empty; line 1 must name the columns {', '.join(COLUMNS[0])}"
        )
    there = [cell.strip() for cell in row]
    best = max(COLUMNS, key=lambda names: len(set(names) & set(there)))
    missing = [column for column in best if column not in there]
    if missing:
        raise RequestTraceError(
            f"{name}, line 1: the column{'s' * (len(missing) > 1)} {', '.join(missing)} "
            f"{'are' if len(missing) > 1 else 'is'} missing (there are {', '.join(there)[:200]}); needed are "
            + " or ".join(", ".join(names) for names in COLUMNS)
        )
    return best, [there.index(column) for column in best]


def _time(text: str, where: str) -> float:
    text = text.strip()
    try:
        value = float(text)
    except ValueError:
        try:
            moment = datetime.fromisoformat(text)
            value = moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()
        except ValueError:
            raise RequestTraceError(
                f"{where}: {shortened(text)} is neither a date with a time nor a number of seconds"
            ) from None
    if not math.isfinite(value):
        raise RequestTraceError(f"{where}: {shortened(text)} is no time")
    if abs(value) >= _TOO_LATE:
        raise RequestTraceError(
            f"{where}: {shortened(text)} seconds are beyond any date; give seconds, not milli-, micro- or nanoseconds"
        )
    return value


def _length(text: str, where: str) -> int:
    text = text.strip()
    try:
        value = int(text)
    except ValueError:
        raise RequestTraceError(f"{where}: {shortened(text)} is no whole number of tokens") from None
    if not 1 <= value < _TOO_LONG:
        wrong = "at least 1" if value < 1 else f"below {_TOO_LONG:,}"
        raise RequestTraceError(f"{where}: {shortened(value)} tokens; a length is {wrong}")
    return value
