"""The text of a trace file: unpacked as far as it is whole, and event by event where it is no whole JSON."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cgkit.errors import TimelineError


def contents(path: Path) -> tuple[bytes | bytearray, list[str]]:
    """The file's text, unpacked; what could not be unpacked is said in the second value."""
    try:
        data: bytes | bytearray = path.read_bytes()
    except FileNotFoundError:
        raise TimelineError(f"{path}: there is no such file") from None
    except IsADirectoryError:
        raise TimelineError(f"{path} is a directory; name the trace files in it") from None
    except OSError as error:
        raise TimelineError(f"{path} cannot be read: {error.strerror or error}") from None
    if not data:
        raise TimelineError(f"{path} is empty (0 bytes): the profiler has not finished writing it")
    warnings: list[str] = []
    if data[:2] == b"\x1f\x8b":
        data, warnings = _gunzip(data, path.name)
    if data[:3] == b"\xef\xbb\xbf":
        data = data[3:]
    elif data[:2] in (b"\xff\xfe", b"\xfe\xff"):  # what a shell on Windows makes of a file that it redirects
        data = data.decode("utf-16", "replace").encode()
    return data, warnings


def _gunzip(packed: bytes | bytearray, name: str) -> tuple[bytearray, list[str]]:
    """Unpacks as much as is whole; gzip files may consist of several members."""
    text = bytearray()
    view = memoryview(packed)
    while view.nbytes:
        one = zlib.decompressobj(31)
        try:
            for at in range(0, view.nbytes, 1 << 20):
                text += one.decompress(view[at : at + (1 << 20)])
                if one.eof:
                    left = len(one.unused_data) + max(view.nbytes - at - (1 << 20), 0)
                    break
        except zlib.error as error:
            if text:
                return text, [f"the gzip stream is damaged after {len(text):,} bytes of text ({error})"]
            raise TimelineError(f"{name} is no readable gzip file: {error}") from None
        if not one.eof:
            if not text:
                raise TimelineError(f"{name}: the gzip stream ends before its first byte of text")
            return text, [f"the gzip stream ends in the middle, after {len(text):,} bytes of text"]
        view = view[view.nbytes - left :]
        if bytes(view[:2]) != b"\x1f\x8b":  # padding after the last member
            break
    return text, []


_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_NEXT = re.compile(r'\{\s*"(?:ph|name|cat|pid|tid|ts)"\s*:')


def salvage(data: bytes | bytearray, source: str) -> tuple[list[bytes], dict[str, Any], list[str]]:
    """Event by event from a text that is no whole JSON; stops where nothing more can be read."""
    text = bytes(data).decode("utf-8", "replace")
    start, header = 0, {}
    if match := _EVENTS.search(text):
        start = match.end()
        try:
            header = json.loads(text[:start] + "]}")
        except (ValueError, RecursionError):
            header = {}
    elif text.lstrip()[:1] == "[":
        start = text.index("[") + 1
    else:
        raise TimelineError(_no_trace(text, source))
    events: list[bytes] = []
    holes = 0
    end = len(text)
    for piece in _objects(text, start):
        if piece is None:
            holes += 1
        else:
            events.append(piece.encode("utf-8", "replace"))
    if not events:
        raise TimelineError(f"{source or 'the text'} ends before its first whole event: nothing to show")
    what = [
        f"the file is cut off or damaged: {len(events):,} whole events were read of its {end:,} characters"
    ]
    if holes:
        what.append(f"{holes:,} places inside the file could not be read and were skipped")
    return events, header if isinstance(header, dict) else {}, what


def _objects(text: str, at: int) -> Iterator[str | None]:
    """The whole JSON objects from ``at`` on; None where something had to be skipped."""
    scan = json.JSONDecoder().raw_decode
    blank = re.compile(r"[\s,]*")
    while True:
        at = blank.match(text, at).end()  # type: ignore[union-attr]
        if text[at : at + 1] in ("", "]"):
            return
        try:
            _, end = scan(text, at)
            yield text[at:end]
            at = end
        except (ValueError, RecursionError):
            following = _NEXT.search(text, at + 1)
            if following is None:
                return
            yield None
            at = following.start()


def _no_trace(text: str, source: str) -> str:
    begin = text[:40].encode("unicode_escape").decode("ascii")
    return (
        f"{source or 'the text'} is no chrome trace: it has neither traceEvents nor a list of events "
        f"(it begins with {begin!r}); torch.profiler writes one with export_chrome_trace"
    )
