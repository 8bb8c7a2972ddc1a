"""The list of claims: ``claims.csv``, a row for each heading, mechanism and number of the article."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cgkit.errors import CgkitError

CSV = Path(__file__).with_name("claims.csv")
KINDS = ("heading", "mechanism", "number")


class ClaimError(CgkitError, ValueError):
    """A claim is not in the list, or its record would say nothing."""


@dataclass(frozen=True)
class Claim:
    """One thing that the article says."""

    id: str
    heading: str  # of the article, in English
    kind: str  # heading | mechanism | number
    says: str  # what the article says, in our own words
    unit: str  # of a number
    notebook: str  # which notebook covers it, "00" to "11"
    not_measured: str  # why it cannot be measured here (two GPUs, another vendor); empty for most


@cache
def read() -> dict[str, Claim]:
    """All claims by id, in the article's order. Raises: ClaimError where the list contradicts itself."""
    with CSV.open(newline="", encoding="utf-8") as file:
        rows = [Claim(**row) for row in csv.DictReader(file)]
    listed: dict[str, Claim] = {}
    for row in rows:
        if row.id in listed:
            raise ClaimError(f"claims.csv has two rows with the id {row.id!r}; ids are unique")
        if row.kind not in KINDS:
            raise ClaimError(f"claims.csv: {row.id} has the kind {row.kind!r}, which is none of {KINDS}")
        listed[row.id] = row
    return listed


def of_notebook(notebook: str) -> list[Claim]:
    """The claims that a notebook (``"07"``) should cover."""
    return [each for each in read().values() if each.notebook == notebook]
