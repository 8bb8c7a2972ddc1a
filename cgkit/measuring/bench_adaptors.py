"""``cgkit bench adaptors``: the adaptors side by side, each start in a fresh process.

For each adaptor three starts: with an empty cache, with the cache that this left behind, and with an empty one
again (how far two cold starts of this machine differ). The article's "InductorAdaptor 的「驯化」工作" (taming
Inductor) against ``standalone_compile`` and against no compiler.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from cgkit import events
from cgkit.config import COMPILERS
from cgkit.measuring.start_case import add_device, device_of, files_in, start

#: What an adaptor keeps of a piece, in words.
HANDLES = {
    "inductor": "artefact",
    "inductor_patched": "hash and file",
    "eager": "",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``cgkit bench adaptors``."""
    parser.add_argument(
        "--model", default="tiny-llama", help="a shape, or toy-llama-N (default: %(default)s)"
    )
    parser.add_argument("--compilers", nargs="+", default=list(COMPILERS), choices=COMPILERS)
    add_device(parser)
    parser.add_argument("--csv", metavar="FILE", help="write the rows as CSV too")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures; ``frame`` has a row an adaptor and start.

    Columns as :func:`cgkit.measuring.start_case.start`, and ``process`` ("first", "second"), ``cache`` ("empty",
    "full"), ``handle`` (what is kept of a piece), ``files`` and ``file_bytes`` in the cache folder afterwards,
    ``same_answer`` as the first row's.

    Raises:
        CgkitError: a process failed.
    """
    import pandas as pd

    rows = [row for compiler in args.compilers for row in _starts(args.model, compiler, device_of(args))]
    first = rows[0]["answer"]
    for row in rows:
        row["same_answer"] = row.pop("answer") == first
    frame = pd.DataFrame(rows)
    if args.csv:
        frame.to_csv(args.csv, index=False, float_format="%.4g")
    return {"frame": frame, "rows": rows, "all_equal": bool(frame["same_answer"].all())}


def _starts(model: str, compiler: str, device: str) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        cases = [("first", "empty", one), ("second", "full", one), ("second", "empty", other)]
        for process, cache, folder in events.counted(
            compiler, cases, lambda case: f"{case[0]} process, {case[1]} cache"
        ):
            found = start(model, compiler, Path(folder), device=device)
            files, size = files_in(Path(folder))
            rows.append(
                {
                    "process": process,
                    "cache": cache,
                    "handle": HANDLES[compiler],
                    **found,
                    "files": files,
                    "file_bytes": size,
                }
            )
    return rows
