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
