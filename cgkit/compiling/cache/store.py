"""One model's compiled pieces on disk: loaded if they are whole, written so that they are.

A file an artefact, named by the piece's content key. It carries the SHA-256 of its payload and of the
libraries and kernels that Inductor wrote for it, so that what was cut short or changed is found
before it runs. Whatever is wrong with the disk, the piece is compiled instead and a warning says why.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cgkit import torch_hooks
from cgkit.compiling.cache import folder as places
from cgkit.compiling.cache.factors import CacheKey
from cgkit.compiling.cache.inductor_files import InductorFiles
from cgkit.compiling.content_key import ContentKey

_MAGIC = b"cgkit compiled piece 3\n"
_DISK = (errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EFBIG, errno.EACCES)


@dataclass(frozen=True)
class Loaded:
    """What was read instead of being compiled."""

    runnable: Any
    kernels: int | None
    path: Path
    reports: list[dict[str, Any]]
    largest: Mapping[int, int]


class CompileCache:
    """The folder of one :class:`CacheKey`. ``directory`` is where it lies."""

    def __init__(self, key: CacheKey) -> None:
        self.key = key
        self.directory = places.rank_folder(key)
        self.inductor_directory = self.directory / "inductor"
        self.inductor_files = InductorFiles(self.inductor_directory)
        self._told: set[str] = set()
        self.writable = True

    def path(self, key: ContentKey) -> Path:
        """Where the piece of ``key`` lies, if it does."""
        return (
            self.directory / f"piece_{hashlib.sha256(chr(10).join(key.lines).encode()).hexdigest()[:32]}.bin"
        )

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """While a piece is compiled or loaded: Inductor keeps its files in this cache's folder."""
        try:
            places.make_private(self.inductor_directory)
        except OSError as error:
            self._say(f"{self.directory} cannot be made ({error})")
            self.writable = False
        if reason := places.why_untrusted(self.directory):  # Inductor would load what lies there
            self._say(f"nothing is loaded from the cache, and nothing kept in it: {reason}")
            self.writable = False
        if not self.writable:
            yield
            return
        with torch_hooks.inductor_cache_dir(str(self.inductor_directory)):
            yield

    @contextlib.contextmanager
    def compiling(self) -> Iterator[bool]:
        """While a piece is compiled and kept, inside of :meth:`active`: one process at a time, and over nothing that
        another one left half. Gives whether another process had to be waited for: it may have made the piece."""
        if not self.writable:
            yield False
            return
        with self.inductor_files.compiling() as waited:
            yield waited

    def gives_way(self, error: BaseException) -> bool:
        """Whether a compilation failed because this folder cannot be written: then it is tried without it."""
        reason = _disk_error(error)
        if reason is None or not self.writable:
            return False
        self.writable = False
        self._say(f"compiled pieces are not kept: {self.directory} cannot be written ({reason})")
        return True

    # --- reading ---

    def load(self, key: ContentKey, make: Callable[[bytes], Any]) -> Loaded | None:
        """The piece of ``key``; None, with a warning if something was there, where it must be compiled.

        ``make``: the callable from the bytes that its adaptor wrote.
        """
        path = self.path(key)
        if not key.portable or not path.exists():
            return None
        if reason := places.why_untrusted(self.directory) or places.why_untrusted_file(path):
            self._say(f"nothing is loaded from the cache: {reason}")
            return None
        try:
            about, payload = _unpack(path.read_bytes())
            self.inductor_files.check(about["files"])
            runnable = make(payload)
        except Exception as error:  # whatever a broken file makes torch do
            self._say(
                f"{path} cannot be loaded ({type(error).__name__}: {error}); the piece is compiled again"
            )
            self._discard(path)
            return None
        largest = {int(place): most for place, most in about["largest"].items()}
        return Loaded(runnable, about["kernels"], path, about.get("reports", []), largest)

    def _discard(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink()

    # --- writing ---

    def save(
        self,
        key: ContentKey,
        payload: bytes | None,
        kernels: int | None,
        reports: list[dict[str, Any]] | None = None,
        largest: Mapping[int, int] | None = None,
    ) -> Path | None:
        """Writes a piece that was just compiled, and what the graph passes reported of it.

        ``payload``: what its adaptor made of it (None: it cannot be kept). ``largest``: input -> the largest
        number that may stand there.

        Returns None, with a warning where the disk refused, if nothing was written.
        """
        if payload is None or not key.portable or not self.writable:
            return None
        path = self.path(key)
        try:
            about = {
                "kernels": kernels,
                "reports": reports or [],
                "largest": dict(largest or {}),
                "files": self.inductor_files.digests(),
                "digest": key.digest,
            }
            places.make_private(self.directory)
            places.write_key(self.directory, self.key)
            places.write_atomically(path, _pack(about, payload))
        except OSError as error:
            self._say(f"compiled pieces are not kept: {self.directory} cannot be written ({error})")
            return None
        return path

    def _say(self, what: str) -> None:
        """Each thing once: thirty pieces meet the same full disk."""
        if what not in self._told:
            self._told.add(what)
            warnings.warn(f"compile cache: {what}", stacklevel=2)

    def __repr__(self) -> str:
        pieces = len(list(self.directory.glob("piece_*.bin"))) if self.directory.exists() else 0
        return f"CompileCache({self.directory}, {pieces} pieces)"


def _disk_error(error: BaseException | None) -> str | None:
    """What the disk refused, if that is why ``error`` was raised. A C++ compiler only says it in words."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _DISK:
            return str(error)
        if any(os.strerror(number) in str(error) for number in _DISK):
            return next(os.strerror(number) for number in _DISK if os.strerror(number) in str(error))
        error = error.__cause__ or error.__context__
    return None


def write_packed(path: Path, about: dict[str, Any], payload: bytes, magic: bytes) -> None:
    """Writes a file of the cache that holds ``about`` (JSON) and ``payload``, whole or not at all."""
    places.write_atomically(path, _pack(about, payload, magic))


def read_packed(path: Path, magic: bytes) -> tuple[dict[str, Any], bytes]:
    """What :func:`write_packed` wrote. ValueError where a byte is missing or differs."""
    return _unpack(path.read_bytes(), magic)


def _pack(about: dict[str, Any], payload: bytes, magic: bytes = _MAGIC) -> bytes:
    head = json.dumps(about).encode()
    digest = hashlib.sha256(head + b"\n" + payload).hexdigest().encode()
    return magic + digest + b"\n" + head + b"\n" + payload


def _unpack(content: bytes, expected: bytes = _MAGIC) -> tuple[dict[str, Any], bytes]:
    """What :func:`_pack` made. ValueError where a byte is missing or differs."""
    magic, _, rest = content.partition(b"\n")
    digest, _, body = rest.partition(b"\n")
    if magic + b"\n" != expected:
        raise ValueError(f"it is no {expected.decode().strip().rpartition(' ')[0]} of this version of cgkit")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise ValueError("its content is not what was written")
    head, _, payload = body.partition(b"\n")
    return json.loads(head), payload


def open_cache(key: CacheKey) -> CompileCache | None:
    """The cache of ``key``, or None where it is turned off."""
    if places.disabled():
        return None
    _asked[:] = [key]
    return CompileCache(key)


_asked: list[CacheKey] = []


def last_asked() -> CacheKey | None:
    """The key whose cache was opened last in this process."""
    return _asked[0] if _asked else None
