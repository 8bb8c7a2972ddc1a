"""Recordings made on a real GPU, listed and loaded: for charts on a laptop.

::

    from cgkit.plotting import memory_charts

    cgkit.recordings.list()                             # a table of what there is
    frame = cgkit.recordings.load("h200-memory-ledger-llama-3.2-1b")
    memory_charts.ledger(frame, cgkit.recordings.about("h200-memory-ledger-llama-3.2-1b"))

They lie in ``data/recordings/`` of the repository, each named in a ``manifest-*.json`` beside it, which says how it
was made. An installed wheel has no such folder: name one with the environment variable ``CGKIT_RECORDINGS`` or with
``path=``.
"""

from __future__ import annotations

import builtins
import difflib
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgkit.errors import RecordingError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from cgkit.plotting.picture import Picture
    from cgkit.plotting.style import About

COLUMNS = ["name", "what", "device", "torch", "commit", "date", "command", "bytes"]
#: Endings of a file's name that are not part of the recording's name.
_ENDINGS = (".gz", ".json", ".csv", ".txt")


def folder(path: str | Path | None = None) -> Path:
    """Where recordings lie: ``path``, else ``CGKIT_RECORDINGS``, else ``data/recordings`` of the checkout.

    Raises:
        RecordingError: there is no such folder.
    """
    named = path or os.environ.get("CGKIT_RECORDINGS")
    found = Path(named) if named else Path(__file__).resolve().parent.parent / "data" / "recordings"
    if not found.is_dir():
        why = "was named" if named else "is where a checkout has them, and this installation has none"
        raise RecordingError(
            f"no recordings: the folder {found} {why}, and it does not exist. Set the environment variable "
            "CGKIT_RECORDINGS to the folder data/recordings of a checkout of cgkit, or pass path="
        )
    return found


def list(path: str | Path | None = None) -> pd.DataFrame:
    """A row a recording: ``name``, ``what`` it holds, ``device`` it was made on, ``torch``, ``commit``, ``date``,
    ``command``, ``bytes`` of its file.

    Raises:
        RecordingError: there is no folder of recordings, or a manifest cannot be read.
    """
    import pandas as pd

    root = folder(path)
    rows = [
        {"name": name, "bytes": (root / entry["file"]).stat().st_size, **_facts(entry)}
        for name, entry in sorted(_index(root).items())
    ]
    return pd.DataFrame(rows, columns=COLUMNS)


def load(name: str, path: str | Path | None = None) -> Any:
    """The recording ``name``: a :class:`Timeline` for a trace, a DataFrame for CSV, a dict (or list) for JSON, a
    string for text. ``frame.attrs["recorded"]`` of a DataFrame says where it was made.

    Raises:
        RecordingError: there is no recording of this name (near ones are listed), its file is missing, or it cannot
            be read.
    """
    root = folder(path)
    entry = _entry(name, root)
    file = root / entry["file"]
    try:
        if _is_trace(entry, file):
            from cgkit.measuring.timeline import Timeline

            return Timeline.from_trace(file, name=name)
        suffixes = [suffix for suffix in file.suffixes if suffix != ".gz"]
        if suffixes[-1:] == [".csv"]:
            import pandas as pd

            frame = pd.read_csv(file)
            frame.attrs["recorded"] = _recorded_on(entry)
            return frame
        raw = file.read_bytes()
        text = (gzip.decompress(raw) if file.suffix == ".gz" else raw).decode()
        return json.loads(text) if suffixes[-1:] == [".json"] else text
    except (OSError, ValueError, EOFError) as error:
        raise RecordingError(f"the recording {name!r} ({file.name}) cannot be read: {error}") from error


def about(name: str, path: str | Path | None = None) -> About:
    """What a chart of this recording says of itself: model, mode, batch, and that it was recorded, where.

    Raises:
        RecordingError: as :func:`load`.
    """
    from cgkit.plotting.style import About

    entry = _entry(name, folder(path))
    return About(
        str(entry.get("model", "")),
        str(entry.get("mode", "")),
        str(entry.get("batch", "")),
        emulated=bool(entry.get("emulated", False)),
        recorded=_recorded_on(entry),
    )


def picture(
    name: str, draw: Callable[..., Axes], path: str | Path | None = None, *, query: str = ""
) -> Picture | Missing:
    """The recording ``name`` as ``draw(frame, about)`` draws it; where it was not made, a sentence that says so.

    Args:
        name: of a recording that is a table.
        draw: a function of :mod:`cgkit.plotting` that takes a DataFrame and an ``About``.
        query: which of its rows, as ``DataFrame.query`` takes it.

    Raises:
        RecordingError: it is there and cannot be read.
    """
    from cgkit.plotting.picture import Picture

    frame = find(name, path)
    if frame is None:
        return Missing(name)
    return Picture(draw(frame.query(query) if query else frame, about(name, path)))


def find(name: str, path: str | Path | None = None) -> Any:
    """As :func:`load`; None where there is no such recording, or no folder of recordings at all."""
    try:
        root = folder(path)
    except RecordingError:
        return None
    return load(name, root) if name in _index(root) else None


class Missing:
    """In place of the picture of a recording that was not made."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"There is no recording {self.name!r} here; this picture is drawn of one (data/README.md)."


# --- inside ------------------------------------------------------------------------------------------


def _index(root: Path) -> dict[str, dict[str, Any]]:
    """Name -> its entry: the manifest's common facts with the file's own on top."""
    index: dict[str, dict[str, Any]] = {}
    for manifest in sorted(root.glob("manifest*.json")):
        try:
            facts = json.loads(manifest.read_text(encoding="utf-8"))
            files = facts.pop("files")
            entries = {str(file): {**facts, **own, "file": str(file)} for file, own in files.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RecordingError(
                f"{manifest.name} is no manifest of recordings ({error!r}): it is a JSON object with command, commit, "
                'gpu, torch and "files": {name: {"what": ...}}'
            ) from error
        for file, entry in entries.items():
            if (root / file).is_file():
                index[_name_of(file)] = entry
    return index


def _name_of(file: str) -> str:
    name = file
    while name.endswith(_ENDINGS):
        name = name[: name.rindex(".")]
    return name


def _entry(name: str, root: Path) -> dict[str, Any]:
    index = _index(root)
    found = index.get(name) or index.get(_name_of(name))
    if found is None:
        near = difflib.get_close_matches(name, index, n=3, cutoff=0.4)
        near = near or builtins.list(index)[:3]
        hint = (
            f"near it are {', '.join(map(repr, near))}"
            if near
            else f"no manifest in {root.name} names a file"
        )
        raise RecordingError(
            f"there is no recording {name!r}; {hint}. cgkit.recordings.list() shows all {len(index)}"
        )
    return found


def _facts(entry: dict[str, Any]) -> dict[str, Any]:
    known = {column: entry.get(column, "") for column in COLUMNS if column not in ("name", "bytes")}
    return {**known, "device": entry.get("gpu") or entry.get("device", "")}


def _recorded_on(entry: dict[str, Any]) -> str:
    device = entry.get("gpu") or entry.get("device", "")
    torch = f"torch {entry['torch']}" if entry.get("torch") else ""
    return ", ".join(str(part) for part in (device, torch, entry.get("date")) if part)


def _is_trace(entry: dict[str, Any], file: Path) -> bool:
    """Whether it is a Kineto trace: its entry says so (``"kind": "trace"``), or its beginning does."""
    if "kind" in entry or ".json" not in file.suffixes:
        return entry.get("kind") == "trace"
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as opened:
        return b'"traceEvents"' in opened.read(2**18)
