"""Why two keys differ, or why nothing on disk fits: factor by factor, down to file and line.

Asked for by users of the engines: a cache that is missed in silence costs minutes (vLLM #52154 "Standalone
torch.compile cache uses stale artifact path after relocation", #53366, whose key lacked a factor).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cgkit.compiling.cache.factors import FACTORS, CacheKey
from cgkit.compiling.cache.folder import cache_root, entries, keys_folder, read_key
from cgkit.compiling.cache.store import last_asked
from cgkit.compiling.cache.traces import FactDifference, differences_of, said, trace_misses
from cgkit.display import Shown
from cgkit.errors import ConfigError

#: In place of a value that one of the keys does not have.
ABSENT = "(absent)"


@dataclass(frozen=True)
class Difference:
    """One named part of one factor in which two keys differ. ``lines``: of a traced file's text.

    ``factor`` "trace" is none of the four: a fact (of the model, the call, torch's state) that a stored trace
    depends on, and that compiled pieces do not.
    """

    factor: str
    name: str
    a: str
    b: str
    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.factor == "trace":
            return f"trace: {said((self.name, self.a, self.b))}"
        if self.factor != "code":
            return f"{self.factor}: {self.name} is {self.a} in the one, {self.b} in the other"
        if ABSENT in (self.a, self.b):
            return f"code: {self.name} was traced in one of them only"
        shown = "".join(f"\n    {line}" for line in self.lines)
        return f"code: {self.name} has changed{shown or ' (its text was not kept)'}"


class CacheDifference(Shown):
    """All differences between two keys. Iterable; true if there are any."""

    def __init__(self, a: CacheKey, b: CacheKey, differences: list[Difference], note: str = "") -> None:
        self.a, self.b, self.differences, self.note = a, b, differences, note

    def __iter__(self) -> Any:
        return iter(self.differences)

    def __len__(self) -> int:
        return len(self.differences)

    def to_frame(self) -> Any:
        """A DataFrame with ``factor``, ``name``, ``a``, ``b`` and ``lines`` (text)."""
        import pandas as pd

        rows = [(d.factor, d.name, d.a, d.b, "\n".join(d.lines)) for d in self.differences]
        return pd.DataFrame(rows, columns=["factor", "name", "a", "b", "lines"])

    def __repr__(self) -> str:
        head = self.note or f"keys {self.a.digest} and {self.b.digest}"
        if not self.differences:
            return f"{head}: no difference"
        text = "\n".join([f"{head}: {len(self)} differences", *(f"  {each}" for each in self.differences)])
        return text.encode("utf-8", "backslashreplace").decode()  # a source or a setting that is no UTF-8


def explain_cache(key_a: CacheKey | str | Path, key_b: CacheKey | str | Path) -> CacheDifference:
    """In what two keys differ.

    Args:
        key_a, key_b: a :class:`CacheKey` (``CompiledGraph.cache_key``), the name of a key in the cache
            (its ten digits, or the first few), or the folder of one.

    Raises:
        ConfigError: there is no such key.
    """
    a, b = _key(key_a), _key(key_b)
    folders = [keys_folder() / key.digest for key in (a, b)]
    return CacheDifference(a, b, [*_differences(a, b), *_of_traces(differences_of(*folders), a, b)])


def why_miss(key: CacheKey | None = None, root: Path | None = None) -> CacheDifference | None:
    """In what ``key`` differs from the nearest other key on disk; None if there is no other.

    Args:
        key: default: the one that was last asked for in this process.
        root: of the cache; default: :func:`cache_root`.

    Without ``key``, also in what the models that were traced differ from the nearest stored traces (factor
    "trace"). The nearest key is the one with the fewest differences. What was missed is compiled and kept, so ``key``
    itself is usually there by now: it is not counted, but said.

    Raises:
        ConfigError: no key was given, and nothing was asked for in this process.
    """
    missed = [each for found in trace_misses().values() for each in found] if key is None else []
    key = key or last_asked()
    if key is None:
        raise ConfigError(
            "nothing was compiled with a cache in this process: give the key, or its ten digits"
        )
    found = [(folder, other) for folder in entries(root) if (other := read_key(folder)) is not None]
    others = [(_differences(other, key), folder, other) for folder, other in found if other != key]
    if not others and not missed:
        return None
    if not others:
        return CacheDifference(key, key, _of_traces(missed, key, key), "no stored trace fits")
    differences, folder, other = min(others, key=lambda each: len(each[0]))
    kept = ", which is on disk by now" if len(others) < len(found) else ""
    note = f"the nearest key on disk is {folder.name} (a), asked for was {key.digest} (b){kept}"
    return CacheDifference(other, key, [*differences, *_of_traces(missed, other, key)], note)


def _of_traces(found: list[FactDifference], a: CacheKey, b: CacheKey) -> list[Difference]:
    """Differences of stored traces, less those that the keys' own factors say."""
    own = tuple(f"{factor} " for factor in FACTORS)
    return [
        Difference("trace", name, was or ABSENT, now or ABSENT)
        for name, was, now in found
        if not (name.startswith(own) and a != b)
    ]


def _key(given: CacheKey | str | Path) -> CacheKey:
    if isinstance(given, CacheKey):
        return given
    folder = Path(given)
    if not _is_folder(folder):
        matches = [each for each in entries() if each.name.startswith(str(given))]
        if len(matches) != 1:
            known = ", ".join(each.name for each in entries()) or "none"
            raise ConfigError(f"{given} names {len(matches)} keys in {cache_root()}; there are: {known}")
        folder = matches[0]
    key = read_key(folder)
    if key is None:
        raise ConfigError(
            f"{folder} holds no readable cache_key_factors.json; give the folder of a cache key"
        )
    return key


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # no file can have such a name
        return False


def _differences(a: CacheKey, b: CacheKey) -> list[Difference]:
    found = []
    for factor in FACTORS:
        one, other = a.factor(factor), b.factor(factor)
        for name in sorted({*one, *other}):
            values = one.get(name, ABSENT), other.get(name, ABSENT)
            if values[0] != values[1]:
                lines = _changed_lines(a, b, name) if factor == "code" and ABSENT not in values else ()
                found.append(Difference(factor, name, *values, lines))
    return found


def _changed_lines(a: CacheKey, b: CacheKey, name: str, most: int = 12) -> tuple[str, ...]:
    """The changed lines of a file, each with its number: ``-`` as in ``a``, ``+`` as in ``b``."""
    if name not in a.sources or name not in b.sources:
        return ()
    before, after = a.sources[name].splitlines(), b.sources[name].splitlines()
    lines = []
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag != "equal":
            lines += [f"- line {i + 1}: {before[i].strip()}" for i in range(i1, i2)]
            lines += [f"+ line {j + 1}: {after[j].strip()}" for j in range(j1, j2)]
    return (*lines[:most], f"... {len(lines) - most} more") if len(lines) > most else tuple(lines)
