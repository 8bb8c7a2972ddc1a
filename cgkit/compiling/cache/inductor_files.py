"""What Inductor wrote beside the compiled pieces: it runs as it was written, or not at all.

Inductor takes a file that is there for good: generated Python, a library, a pickle of its own caches. A process that
was killed while writing leaves half of one, and to load half a library ends a process (seen: SIGBUS), each time
again. So files count with their SHA-256 only: of a piece, in its own file; of all, in a list that is written when a
compilation is through. What is not in the list is taken away before Inductor compiles here. Triton's own folder is
left alone: Triton writes whole files, and loads none whose pieces are not all there.

One process at a time compiles in a folder. The lock is the kernel's, so that it goes with the process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from cgkit.compiling.cache.folder import write_atomically

try:
    import fcntl
except ImportError:  # Windows: nobody is locked out, and nothing is taken away
    fcntl = None  # type: ignore[assignment]

LIST = "inductor_files.json"
#: What is loaded without a look at its content, by the end of its name.
_LOADED = (".py", ".so", ".dylib", ".pyd", ".cubin", ".hsaco")
#: Inductor's own caches of graphs: pickles.
_GRAPHS = ("fxgraph", "aotautograd")
_TRITON = "triton"
#: How long another process may compile one piece; Inductor's own locks wait as long.
_PATIENCE_SECONDS = 600.0


class InductorFiles:
    """The files below ``folder``; the list and the lock lie beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._digests: dict[tuple[str, int, int], str] = {}
        self._cleaned = False

    def digests(self) -> dict[str, str]:
        """What may be loaded with a piece: path below the folder -> SHA-256."""
        return {self._name(path): self._digest(path) for path in self._files() if path.suffix in _LOADED}

    def check(self, files: dict[str, str]) -> None:
        """What is there must be what was written; what is missing is built again.

        Raises:
            ValueError: a file is another one; it is taken away.
        """
        for name, digest in files.items():
            path = self.folder / name
            if path.exists() and self._digest(path) != digest:
                self._remove(path)
                self._cleaned = False
                raise ValueError(f"{path} is not what was written")

    @contextlib.contextmanager
    def compiling(self) -> Iterator[bool]:
        """While Inductor compiles here: no other process does, and nothing half is here. Gives whether another one
        had to be waited for, which may have made what is wanted."""
        with self._lock() as (alone, waited):
            if alone and (waited or not self._cleaned):
                self._clean()
            self._cleaned = False
            yield waited
            if alone:
                self._write_list()
                self._cleaned = True

    # --- inside ---

    def _clean(self) -> None:
        try:
            known = dict(json.loads((self.folder.parent / LIST).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            known = {}
        for path in self._code():
            with contextlib.suppress(OSError):
                if known.get(self._name(path)) != self._digest(path):
                    self._remove(path)

    def _write_list(self) -> None:
        with contextlib.suppress(OSError):  # then all of it is built again
            found = {self._name(path): self._digest(path) for path in self._code()}
            write_atomically(self.folder.parent / LIST, json.dumps(found, indent=1).encode())

    def _code(self) -> list[Path]:
        """What Inductor itself would load: its code, and its caches of graphs."""
        found = []
        for path in self._files():
            top = path.relative_to(self.folder).parts[0]
            if top in _GRAPHS or (top != _TRITON and path.suffix in _LOADED):
                found.append(path)
        return found

    def _files(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if path.is_file()] if self.folder.exists() else []

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.folder))

    def _remove(self, path: Path) -> None:
        """Triton's with all that belongs to it: it would take a kernel for whole whose code is missing."""
        if path.relative_to(self.folder).parts[0] == _TRITON:
            shutil.rmtree(path.parent, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def _digest(self, path: Path) -> str:
        """The file's SHA-256; read once as long as its size and time stay."""
        status = path.stat()
        known = (str(path), status.st_size, status.st_mtime_ns)
        if known not in self._digests:
            self._digests[known] = hashlib.sha256(path.read_bytes()).hexdigest()
        return self._digests[known]

    @contextlib.contextmanager
    def _lock(self) -> Iterator[tuple[bool, bool]]:
        """(whether nobody else compiles here, whether somebody did when we came)."""
        try:
            file = (self.folder.parent / "inductor.lock").open("w")
        except OSError:
            yield False, False
            return
        with file:
            yield _take(file.fileno())


def _take(handle: int) -> tuple[bool, bool]:
    """Locks an open file; closing it lets go."""
    waited, until = False, time.monotonic() + _PATIENCE_SECONDS
    while fcntl is not None and time.monotonic() < until:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = True
            time.sleep(0.05)
        except OSError:  # a file system without locks
            return False, waited
        else:
            return True, waited
    return False, waited
