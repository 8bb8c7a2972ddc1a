"""Dynamo's bytecode as text: Python where it can be decompiled, a listing where not."""

from __future__ import annotations

import contextlib
import dis
import io
from types import CodeType


def decompile(code: CodeType) -> tuple[str, str]:
    """(how, text): ``"depyf"`` and Python source, or ``"dis"`` and a listing.

    depyf (optional) decompiles most functions on Python 3.11, fewer on 3.12 and none on 3.13; where
    it fails, or is not installed, the plain listing is shown instead.
    """
    with contextlib.suppress(Exception):
        import depyf

        source = depyf.decompile(code)
        if isinstance(source, str) and "def " in source:
            return "depyf", source
    listing = io.StringIO()
    dis.dis(code, file=listing, depth=0)
    return "dis", listing.getvalue()
