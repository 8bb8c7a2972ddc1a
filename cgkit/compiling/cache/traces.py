"""Stored traces on disk: beside the compiled pieces that they need, under the same rules.

``<key>/rank_<r>_<d>/trace_<class>_<facts>.bin``. The name is known before anything is traced; the folder,
whose key holds the traced files, only after: so the entries of all keys are looked at, and one is taken if
its files, its globals and its operators are what they were.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cgkit.compiling.cache import folder as places
from cgkit.compiling.cache.store import read_packed, write_packed

MAGIC = b"cgkit trace 2\n"
#: A fact's name, what it was when the trace was stored, and what it is; None where it is absent.
FactDifference = tuple[str, str | None, str | None]

#: By class, why the last model of it was traced in this process.
_misses: dict[str, list[FactDifference]] = {}


@dataclass(frozen=True)
class Stored:
    """One entry: where it lies, what it was made under, and the rest as bytes.

    ``about``: ``model``, ``before`` and ``after`` (facts), ``code`` (traced files), ``reads``, ``devices``.
    """

    path: Path
    about: dict[str, Any]
    payload: bytes

    @property
    def key_digest(self) -> str:
        """The name of the key's folder that it lies in."""
        return self.path.parent.parent.name


def file_name(model: str, before: Mapping[str, str]) -> str:
    """The name of the entry for a class and its facts."""
    return f"trace_{_class_digest(model)}_{_hash(json.dumps(sorted(before.items())))[:24]}.bin"


def _class_digest(model: str) -> str:
    return _hash(model)[:10]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def candidates(name: str) -> list[Path]:
    """All entries of this name, the newest first."""
    return _newest_first(places.keys_folder().glob(f"*/{places.rank_name()}/{name}"))


def entries_of(model: str) -> list[Path]:
    """All entries of a class, the newest first."""
    return candidates(f"trace_{_class_digest(model)}_*.bin")


def entries_in(folder: Path) -> list[Path]:
    """The entries in the folder of a key."""
    return _newest_first(folder.glob("rank_*/trace_*.bin"))


def _newest_first(paths: Iterator[Path]) -> list[Path]:
    times = []
    for path in paths:
        with contextlib.suppress(OSError):
            times.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(times, reverse=True)]


def read(path: Path) -> Stored:
    """One entry.

    Raises:
        ValueError: it is not, byte for byte, what was written, or lies where others may write.
        OSError: it cannot be read.
    """
    if reason := places.why_untrusted(path.parent) or places.why_untrusted_file(path):
        raise ValueError(reason)
    return Stored(path, *read_packed(path, MAGIC))


def write(folder: Path, name: str, about: dict[str, Any], payload: bytes) -> Path:
    """Writes an entry, whole or not at all. OSError where the disk refuses."""
    places.make_private(folder)
    write_packed(folder / name, about, payload, MAGIC)
    return folder / name


# --- traced files ----------------------------------------------------------------------------


def find_file(name: str) -> str | None:
    """The file that a key's code factor calls ``name`` (a module, or a script), in this process."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main and Path(main).name == name:
        return str(Path(main).absolute())
    module = sys.modules.get(name)
    if module is not None:
        return getattr(module, "__file__", None)
    package, _, rest = name.partition(".")
    for place in getattr(sys.modules.get(package), "__path__", ()) if rest else ():
        base = os.path.join(place, *rest.split("."))
        for file in (f"{base}.py", os.path.join(base, "__init__.py")):
            if os.path.isfile(file):
                return file
    return None


def changed_files(code: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """(path by name, text by name, names of those that are not what they were) of a code factor."""
    paths, texts, changed = {}, {}, []
    for name, digest in code.items():
        file = find_file(name)
        try:
            text = Path(file or "").read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            changed.append(name)
            continue
        paths[name], texts[name] = str(file), text
        if hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest() != digest:
            changed.append(name)
    return paths, texts, changed


# --- why -------------------------------------------------------------------------------------


def differences(a: Mapping[str, str], b: Mapping[str, str]) -> list[FactDifference]:
    """Every fact in which two descriptions differ."""
    return [(name, a.get(name), b.get(name)) for name in {**a, **b} if a.get(name) != b.get(name)]


def said(difference: FactDifference) -> str:
    """One difference as half a sentence."""
    name, was, now = difference
    return f"{name} was {was or '(absent)'} and is {now or '(absent)'}"


def note_miss(model: str, different: Sequence[FactDifference]) -> None:
    """Keeps why a model of this class was traced: nothing is different where nothing was stored."""
    _misses[model] = list(different)


def trace_misses() -> dict[str, list[FactDifference]]:
    """By class, in what the last model that was traced in this process differs from the nearest stored one."""
    return dict(_misses)


def differences_of(a: Path, b: Path) -> list[FactDifference]:
    """In what the stored traces in two keys' folders differ: those of each class that are nearest."""
    ours, theirs = _by_model(a), _by_model(b)
    found: list[FactDifference] = []
    for model in ours.keys() & theirs.keys():
        pairs = [differences(one, other) for one in ours[model] for other in theirs[model]]
        found += sorted(pairs, key=len)[0]
    return found


def models_in(folder: Path) -> list[str]:
    """The classes of the stored traces in a key's folder."""
    return sorted(_by_model(folder))


def _by_model(folder: Path) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for path in entries_in(folder)[:8]:
        with contextlib.suppress(ValueError, OSError):
            about = read(path).about
            found.setdefault(about["model"], []).append({**about["before"], **about["after"]})
    return found
