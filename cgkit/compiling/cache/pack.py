"""One file out of the cache, and the cache out of one file: so that a class starts warm."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
from pathlib import Path

from cgkit.compiling.cache.factors import FACTORS
from cgkit.compiling.cache.folder import cache_root, entries, keys_folder, make_private, read_key
from cgkit.errors import ConfigError


def pack(file: str | Path, root: Path | None = None) -> list[str]:
    """Writes all keys of the cache into ``file`` (a gzipped tar); returns their names.

    Raises:
        ConfigError: the cache is empty.
    """
    folders = [folder for folder in entries(root) if read_key(folder) is not None]
    if not folders:
        raise ConfigError(f"the cache at {root or cache_root()} is empty: compile something first, then pack")
    file = Path(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.part")
    try:
        with tarfile.open(part, "w:gz") as archive:
            for folder in folders:
                archive.add(folder, folder.name, filter=_anonymous)
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)
    return [folder.name for folder in folders]


def unpack(file: str | Path, root: Path | None = None) -> list[str]:
    """Puts the keys of ``file`` into the cache; keys that are there already stay as they are.

    Whoever unpacks a file runs the code in it: take it only from somebody you trust.

    Raises:
        ConfigError: ``file`` is no packed cache; nothing was put anywhere.
    """
    into = keys_folder(root)
    make_private(into)
    with tempfile.TemporaryDirectory(dir=into, prefix=".unpack-") as scratch:
        try:
            with tarfile.open(file, "r:gz") as archive:
                archive.extractall(scratch, filter="data")
        except FileNotFoundError:
            raise ConfigError(f"{file} is no packed compile cache: there is no such file") from None
        except (OSError, EOFError, tarfile.TarError) as error:
            raise ConfigError(
                f"{file} is no packed compile cache ({type(error).__name__}: {error})"
            ) from None
        folders = [each for each in Path(scratch).iterdir() if read_key(each) is not None]
        if not folders:
            raise ConfigError(
                f"{file} is no packed compile cache: no key with its {len(FACTORS)} factors in it"
            )
        return [_put(folder, into / folder.name) for folder in folders]


def _put(folder: Path, target: Path) -> str:
    """Moves a key into place; where it is there already, only the files that are missing in it."""
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)
    try:
        os.rename(folder, target)
    except OSError:  # there is one: its files are whole, so they stay
        for path in folder.rglob("*"):
            place = target / path.relative_to(folder)
            if path.is_file() and not place.exists():
                make_private(place.parent)
                shutil.move(path, place)
    return target.name


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Without the user's name, and without what another process is just writing."""
    if member.name.endswith((".part", ".lock", ".tmp")):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
