"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cgkit.errors import CgkitError


class UnwritableFileError(CgkitError, OSError):
    """A file could not be written; what was there before is there still."""


def check_writable(out: str | Path) -> Path:
    """``out``, if a file can be written there: asked before the work, not after it. Missing folders are made.

    Raises:
        UnwritableFileError: it is a folder, or the disk or its permissions refuse.
    """
    path = Path(out)
    try:
        if path.is_dir() or str(out).endswith(("/", os.sep)):
            raise IsADirectoryError(0, "it is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UnwritableFileError(
            f"out={str(out)!r} cannot be written ({error.strerror}); name another file"
        ) from error
    return path


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """A place to write to, which becomes ``path`` when the block ends well; missing folders are made.

    Raises:
        UnwritableFileError: the disk or its permissions refuse. What the block raises itself goes through,
            and leaves nothing behind either.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        os.close(handle)
        os.chmod(name, 0o644)
        try:
            yield Path(name)
            os.replace(name, path)
        finally:
            Path(name).unlink(missing_ok=True)
    except OSError as error:
        if isinstance(error, CgkitError):
            raise
        raise UnwritableFileError(f"{path} cannot be written ({error}); name another place") from error
