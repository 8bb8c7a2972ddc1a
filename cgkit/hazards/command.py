"""``cgkit hazards list | show ID | run``."""

from __future__ import annotations

import argparse
from typing import Any

from cgkit import hazards
from cgkit.display import Shown
from cgkit.errors import ConfigError
from cgkit.files import check_writable, whole_file
from cgkit.plotting.tables import text_table


class HazardsResult(Shown):
    """What the command prints, and its facts; ``ok``: every exhibit did what it describes."""

    def __init__(self, text: str, facts: dict[str, Any], ok: bool = True) -> None:
        self.text, self.facts, self.ok = text, facts, ok

    def __repr__(self) -> str:
        return self.text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``cgkit hazards``."""
    parser.add_argument(
        "verb", choices=["list", "show", "run"], help="the table, one exhibit, or all of them"
    )
    parser.add_argument("id", nargs="?", help="of the exhibit to show")
    parser.add_argument(
        "--device", default="cpu", choices=["cpu", "cuda"], help="cpu: emulated graphs (default)"
    )
    parser.add_argument("--csv", metavar="FILE", help="write the table of `run` as CSV")


def run(args: argparse.Namespace) -> HazardsResult:
    """Runs the command.

    Raises:
        ConfigError: there is no such exhibit, or none was named. UnwritableFileError: as it says.
    """
    if args.verb == "list":
        frame = hazards.table()
        return HazardsResult(text_table(frame), {"rows": frame.to_dict("records")})
    if args.verb == "show":
        if not args.id:
            raise ConfigError(f"say which exhibit: {', '.join(hazards.EXHIBITS)}")
        visit = hazards.show(args.id, args.device)
        broken, fixed = visit.exhibit.code()
        text = f"{visit!r}\n\n--- broken\n{broken}\n\n--- fixed\n{fixed}"
        return HazardsResult(text, visit.row(), visit.as_described)
    path = check_writable(args.csv) if args.csv else None
    frame = hazards.run(args.device)
    if path is not None:
        with whole_file(path) as part:
            frame.to_csv(part, index=False)
    text = text_table(frame[["id", "rows", "platform", "as_described", "seen"]])
    return HazardsResult(text, {"exhibits": frame.to_dict("records")}, bool(frame["as_described"].all()))
