"""The table of claims, made of the records in the notebooks' outputs: what is covered, how, and what is open."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cgkit.claims.card import MIME, OUTCOMES
from cgkit.claims.listing import Claim, read


@dataclass(frozen=True)
class Record:
    """One claim as a notebook's output has it."""

    id: str
    measured: str
    outcome: str
    why: str
    notebook: str  # file name
    section: str  # the last heading above the cell

    @property
    def where(self) -> str:
        """A link to the notebook, with the section."""
        return f"[{self.notebook[:2]}]({self.notebook}){' ' + self.section if self.section else ''}"


def notebooks(folder: Path) -> list[Path]:
    """The numbered notebooks of a folder, in order."""
    return sorted(folder.glob("[0-9][0-9]_*.ipynb"))


def records(folder: Path) -> list[Record]:
    """What the outputs of a folder's notebooks say of claims, in the notebooks' order."""
    return [record for path in notebooks(folder) for record in _of_file(path)]


def _of_file(path: Path) -> Iterator[Record]:
    section = ""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        section = _heading(cell) or section
        for output in cell.get("outputs", ()):
            for row in output.get("data", {}).get(MIME, ()):
                yield Record(**row, notebook=path.name, section=section)


def _heading(cell: dict[str, Any]) -> str:
    if cell["cell_type"] != "markdown":
        return ""
    lines = [line.strip() for line in "".join(cell["source"]).splitlines()]
    return next((line.lstrip("# ").strip() for line in reversed(lines) if line.startswith("## ")), "")


def missing(folder: Path) -> list[str]:
    """Ids that a notebook of the folder should cover and none covers."""
    there = {path.name[:2] for path in notebooks(folder)}
    return [each.id for each in _uncovered(folder) if each.notebook in there]


def still_open(folder: Path) -> list[str]:
    """Ids whose notebook is not there yet, and which no other covers."""
    there = {path.name[:2] for path in notebooks(folder)}
    return [each.id for each in _uncovered(folder) if each.notebook not in there]


def _uncovered(folder: Path) -> list[Claim]:
    covered = {record.id for record in records(folder)}
    return [each for each in read().values() if each.id not in covered and not each.not_measured]


def markdown(folder: Path) -> str:
    """``CLAIMS.md``: the article's claims in its order, where each was measured and what came out."""
    by_id: dict[str, list[Record]] = {}
    for record in records(folder):
        by_id.setdefault(record.id, []).append(record)
    lines = [_HEAD, _count(by_id)]
    heading = ""
    for each in read().values():
        if each.heading != heading:
            heading = each.heading
            lines += ["", f"## {heading}", "", "| claim | where | outcome |", "|---|---|---|"]
        lines.append(_row(each, by_id.get(each.id, [])))
    return "\n".join(lines) + "\n"


_HEAD = """# What the article claims, and what measuring says

Made by `notebooks/claims.py` of the notebooks' outputs; not edited by hand. **confirmed**: the measurement agrees.
**wrong**: it does not. **overtaken**: engines do it otherwise now. **not measured**: it needs what is not here.
**open**: its notebook is not there yet.
"""


def _count(by_id: dict[str, list[Record]]) -> str:
    outcomes = Counter(_outcome(each, by_id.get(each.id, [])) for each in read().values())
    parts = [f"{outcomes[name]} {name}" for name in (*OUTCOMES, "open") if outcomes[name]]
    return f"{len(read())} claims: {', '.join(parts)}."


def _outcome(each: Claim, found: list[Record]) -> str:
    """The worst of a claim's outcomes: one notebook may confirm what another finds wrong elsewhere."""
    said = {record.outcome for record in found}
    if not said:
        return "not measured" if each.not_measured else "open"
    return next(name for name in ("wrong", "overtaken", "confirmed", "not measured") if name in said)


def _row(each: Claim, found: list[Record]) -> str:
    what = f"`{each.id}` {each.says}"
    if not found and each.not_measured:
        return f"| {_cell(what)} | – | **not measured**: {_cell(each.not_measured)} |"
    if not found:
        return f"| {_cell(what)} | notebook {each.notebook} | **open** |"
    where = "<br>".join(dict.fromkeys(_cell(record.where) for record in found))
    texts = (". ".join(filter(None, (record.measured.rstrip("."), record.why))) for record in found)
    outcomes = "<br>".join(f"**{record.outcome}**: {_cell(text)}" for record, text in zip(found, texts))
    return f"| {_cell(what)} | {where} | {outcomes} |"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
