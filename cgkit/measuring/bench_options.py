"""What every ``cgkit bench NAME`` has beside its own options: ``--csv``, and help that names the defaults."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from cgkit.files import check_writable

if TYPE_CHECKING:
    import pandas as pd

#: Options that name a file to be written, by their names in ``args``.
WRITTEN = ("csv", "table_csv", "picture", "svg", "chart", "histogram", "requests_csv", "steps_csv", "rules_csv",
           "candidates_csv")  # fmt: skip


def add_csv(parser: argparse.ArgumentParser) -> None:
    """Adds ``--csv`` to a benchmark that has none of its own."""
    if not any("--csv" in action.option_strings for action in parser._actions):
        parser.add_argument("--csv", dest="table_csv", metavar="FILE", help="write the table as CSV too")


def say_defaults(parser: argparse.ArgumentParser) -> None:
    """Each option's help ends with its default, unless it names one already or there is none to name."""
    for action in parser._actions:
        default, said = action.default, action.help or ""
        if default in (None, False, "", argparse.SUPPRESS) or said == argparse.SUPPRESS or "default" in said:
            continue
        shown = " ".join(map(str, default)) if isinstance(default, (list, tuple)) else str(default)
        if shown:
            action.help = f"{said} (default: {shown})".strip().replace("%", "%%")


def check_outputs(args: argparse.Namespace) -> None:
    """Asks before anything is measured whether the files that are to be written can be.

    Raises:
        UnwritableFileError: one cannot.
    """
    for name in WRITTEN:
        if path := getattr(args, name, None):
            check_writable(path)


def write_table(args: argparse.Namespace, frame: pd.DataFrame | Any) -> None:
    """Writes what :func:`add_csv`'s option asks for."""
    if path := getattr(args, "table_csv", None):
        frame.to_csv(path, index=False, float_format="%.6g")
