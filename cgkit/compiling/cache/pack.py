"""One file out of the cache, and the cache out of one file: so that a class starts warm."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from cgkit.compiling.cache.factors import FACTORS
from cgkit.compiling.cache.folder import cache_root, entries, keys_folder, make_private, read_key
from cgkit.errors import ConfigError

#: The disk's fault and not the packed file's.
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


def pack(file: str | Path, root: Path | None = None) -> list[str]:
    """Writes all keys of the cache into ``file`` (a gzipped tar); returns their names.

    Raises:
        ConfigError: the cache is empty, or ``file`` cannot be written.
    """
    folders = [folder for folder in entries(root) if read_key(folder) is not None]
    if not folders:
        raise ConfigError(f"the cache at {root or cache_root()} is empty: compile something first, then pack")
    file = Path(file)
    with _disk_said(f"{file} cannot be written"):
        if file.is_dir():
            raise ConfigError(f"{file} is a folder: name a file to pack into")
        part = file.with_name(f".{file.name}.part")
        file.parent.mkdir(parents=True, exist_ok=True)
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
        ConfigError: ``file`` is no packed cache, or the cache's folder cannot be written; nothing was put anywhere.
    """
    file, into = Path(file), keys_folder(root)
    with _disk_said(f"{file} cannot be unpacked into {into}; CGKIT_CACHE_DIR names another folder"):
        make_private(into)
        return _unpack(file, into)


def _unpack(file: Path, into: Path) -> list[str]:
    with tempfile.TemporaryDirectory(dir=into, prefix=".unpack-") as scratch:
        try:
            with tarfile.open(file, "r:gz") as archive:
                archive.extractall(scratch, filter="data")
        except FileNotFoundError:
            raise ConfigError(f"{file} is no packed compile cache: there is no such file") from None
        except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
            if isinstance(error, OSError) and error.errno in _DISK:
                raise
            raise ConfigError(
                f"{file} is no packed compile cache ({type(error).__name__}: {error})"
            ) from None
        there = [each for each in Path(scratch).iterdir() if not each.is_symlink()]
        folders = [each for each in there if read_key(each) is not None]
        if not folders:
            raise ConfigError(
                f"{file} is no packed compile cache: no key with its {len(FACTORS)} factors in it"
            )
        return [_put(folder, into / folder.name) for folder in folders]


@contextlib.contextmanager
def _disk_said(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{what} ({error})") from None


def _put(folder: Path, target: Path) -> str:
    """Moves a key into place; where it is there already, only the files that are missing in it."""
    for path in [folder, *folder.rglob("*")]:
        if not path.is_symlink():  # what it names may be gone, or another key's
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
