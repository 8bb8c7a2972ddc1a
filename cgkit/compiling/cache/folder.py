"""Where the cache lies, and whether it may be trusted.

``<root>/torch_compile_cache/<key>/rank_<rank>_<data-parallel rank>/``, as in the article. The root is
``CGKIT_CACHE_DIR``, or ``cgkit`` in the user's cache folder. Compiled pieces are code: they are only
loaded from folders that belong to the user and that nobody else can write.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cgkit.compiling.cache.factors import FACTORS, CacheKey
from cgkit.errors import ConfigError

FACTORS_FILE = "cache_key_factors.json"
SOURCES_FILE = "traced_files.json"


def disabled() -> bool:
    """Whether ``CGKIT_DISABLE_COMPILE_CACHE=1`` turns the cache off (Inductor's own caches with it)."""
    return os.environ.get("CGKIT_DISABLE_COMPILE_CACHE", "").lower() not in ("", "0", "false")


@contextmanager
def turned_off() -> Iterator[None]:
    """In the block every compilation is one: neither cgkit's compile cache nor Inductor's own answers."""
    name = "CGKIT_DISABLE_COMPILE_CACHE"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def cache_root() -> Path:
    """The cache's folder; it need not exist."""
    given = os.environ.get("CGKIT_CACHE_DIR")
    if given:
        return Path(given).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return (Path(base) / "cgkit").expanduser().absolute()


def keys_folder(root: Path | None = None) -> Path:
    """The folder that holds one folder a key."""
    return (root or cache_root()) / "torch_compile_cache"


def rank_folder(key: CacheKey, root: Path | None = None) -> Path:
    """The folder of this process' compiled pieces: by key, rank and data-parallel rank."""
    return keys_folder(root) / key.digest / rank_name()


def rank_name() -> str:
    """The name of this process' folder in the folder of a key.

    Raises:
        ConfigError: ``RANK`` or ``DATA_PARALLEL_RANK`` is no whole number.
    """
    rank, data_parallel = os.environ.get("RANK", "0"), os.environ.get("DATA_PARALLEL_RANK", "0")
    for name, value in (("RANK", rank), ("DATA_PARALLEL_RANK", data_parallel)):
        if not value.isdigit():
            raise ConfigError(
                f"{name}={value!r} is not a whole number; it names a folder of the compile cache"
            )
    return f"rank_{rank}_{data_parallel}"


def why_untrusted(folder: Path) -> str | None:
    """Why nothing is loaded from ``folder``: a sentence, or None where all is well.

    The folder and every one above it up to the cache's root belong to the user (or to root), and
    neither group nor others may write.
    """
    if not hasattr(os, "geteuid"):  # Windows has no such permissions
        return None
    root, here = cache_root(), folder
    while True:
        try:
            status = here.stat()
        except OSError:
            return None  # nothing there, so nothing is loaded
        if reason := _why_not(here, status):
            return reason
        if here == root or here == here.parent:
            return None
        here = here.parent


def why_untrusted_file(path: Path) -> str | None:
    """The same of one file; the folder that it lies in is another question."""
    try:
        return _why_not(path, path.stat()) if hasattr(os, "geteuid") else None
    except OSError:
        return None


def _why_not(path: Path, status: os.stat_result) -> str | None:
    if status.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to another user (uid {status.st_uid})"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):o}; chmod go-w it)"
    return None


def make_private(folder: Path) -> None:
    """Makes ``folder`` and what is missing above it, for the user alone."""
    missing = [folder, *folder.parents]
    for each in reversed(missing):
        if not each.exists():
            each.mkdir(mode=0o700, exist_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """``path`` holds all of ``content`` afterwards, or what it held before."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_key(folder: Path, key: CacheKey) -> None:
    """Writes the factors, and the traced files' text, beside the compiled pieces (once)."""
    for name, content in ((FACTORS_FILE, key.as_dict()), (SOURCES_FILE, dict(key.sources))):
        if not (folder / name).exists():
            text = json.dumps(content, indent=1, ensure_ascii=True)
            write_atomically(folder / name, text.encode("utf-8", "surrogatepass"))


def read_key(folder: Path) -> CacheKey | None:
    """The key whose factors lie in ``folder`` (a key's, or a rank's in it); None if there are none."""
    for place in (folder, *sorted(folder.glob("rank_*"))):
        try:
            factors = json.loads((place / FACTORS_FILE).read_text(encoding="utf-8"))
            parts = {name: dict(factors[name]) for name in FACTORS}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
        return CacheKey(**parts, sources=_sources(place))
    return None


def _sources(folder: Path) -> dict[str, str]:
    try:
        found: Any = json.loads((folder / SOURCES_FILE).read_text(encoding="utf-8"))
        return dict(found)
    except (OSError, ValueError, TypeError):
        return {}


def entries(root: Path | None = None) -> Iterator[Path]:
    """The folder of each key on disk, the newest first."""
    folders = [each for each in keys_folder(root).glob("*") if each.is_dir()]
    yield from sorted(folders, key=lambda each: each.stat().st_mtime, reverse=True)
