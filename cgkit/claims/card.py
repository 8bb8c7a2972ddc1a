"""The card that a notebook shows for a claim: what the article says, what was measured, the outcome."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from cgkit.claims.listing import Claim, ClaimError, read

__all__ = ["MIME", "OUTCOMES", "Claim", "ClaimError", "Claimed", "Claims", "claim"]

#: The record beside the card, for programs (a list of dicts: id, measured, outcome, why).
MIME = "application/vnd.cgkit.claims+json"
OUTCOMES = ("confirmed", "wrong", "overtaken", "not measured")
_COLOURS = {"confirmed": "#1a7f37", "wrong": "#b42318", "overtaken": "#9a6700", "not measured": "#57606a"}


@dataclass(frozen=True)
class Claimed:
    """A claim and what became of it.

    ``measured`` is text made of measured values; ``why`` explains the outcome. Raises: ClaimError for an unknown
    id or outcome, for a confirmed or wrong claim without a measurement, for any other than a confirmed one
    without a reason.
    """

    id: str
    measured: str = ""
    outcome: str = ""
    why: str = ""

    def __post_init__(self) -> None:
        if self.id not in read():
            near = difflib.get_close_matches(self.id, read(), n=3, cutoff=0.4)
            raise ClaimError(f"claims.csv has no {self.id!r}; near it: {', '.join(near) or 'nothing'}")
        if self.outcome not in OUTCOMES:
            raise ClaimError(f"{self.id}: the outcome {self.outcome!r} is none of {', '.join(OUTCOMES)}")
        if self.outcome in ("confirmed", "wrong") and not self.measured:
            raise ClaimError(f"{self.id}: {self.outcome} by which measurement? Say it in `measured`")
        if self.outcome != "confirmed" and not self.why:
            raise ClaimError(f"{self.id}: {self.outcome}, and why? Say it in `why`")

    @property
    def says(self) -> str:
        """What the article says."""
        return read()[self.id].says


@dataclass(frozen=True)
class Claims:
    """One or several claims on a card."""

    rows: tuple[Claimed, ...]
    _shown_in: list[int] = field(default_factory=list, compare=False)  # executions of cells that showed it

    def __repr__(self) -> str:
        return "\n".join(
            f"{row.id}: {row.outcome}\n  the article: {row.says}\n  measured: {row.measured or '-'}"
            + (f"\n  why: {row.why}" if row.why else "")
            for row in self.rows
        )

    def _repr_html_(self) -> str:
        return "".join(_card(row) for row in self.rows)

    def _bundle(self) -> dict[str, Any]:
        record = [asdict(row) for row in self.rows]
        return {"text/plain": repr(self), "text/html": self._repr_html_(), MIME: record}

    def _ipython_display_(self) -> None:
        """Shows the card; once a cell, although the last expression of a cell is shown again by Jupyter."""
        from IPython.core.getipython import get_ipython
        from IPython.display import display

        shell = get_ipython()
        now = shell.execution_count if shell else 0
        if now not in self._shown_in:
            self._shown_in.append(now)
            display(self._bundle(), raw=True)


def _card(row: Claimed) -> str:
    colour = _COLOURS[row.outcome]
    lines = [("the article", row.says), ("measured", row.measured), ("why", row.why)]
    cells = "".join(
        f'<tr><td style="text-align:left;vertical-align:top;color:#57606a;width:6.5em">{name}</td>'
        f'<td style="text-align:left">{escape(text)}</td></tr>'
        for name, text in lines
        if text
    )
    return (
        f'<div style="border-left:4px solid {colour};padding:.2em .8em;margin:.4em 0"><b style="color:{colour}">'
        f"{row.outcome}</b> <code>{escape(row.id)}</code><table>{cells}</table></div>"
    )


def claim(id: str | Sequence[dict[str, str]], measured: str = "", outcome: str = "", why: str = "") -> Claims:
    """Shows what the article claims, what was measured and the outcome, and leaves a record in the cell's output.

    ``outcome`` is one of ``confirmed``, ``wrong``, ``overtaken`` (engines do it otherwise now) and ``not measured``;
    where there is a number, let the measurement decide it: true is ``confirmed``, false ``wrong``. Several at once: a list of dicts with these four names.
    Raises: ClaimError for an unknown id or outcome, or a record that would say nothing.
    """
    rows = [{"id": id, "measured": measured, "outcome": outcome, "why": why}] if isinstance(id, str) else id
    card = Claims(tuple(Claimed(**_decided(row)) for row in rows))
    shell = sys.modules.get("IPython.core.getipython")
    if shell and shell.get_ipython():
        card._ipython_display_()
    return card


def _decided(row: dict[str, Any]) -> dict[str, str]:
    """A row whose outcome is a word, also if a comparison gave it."""
    if isinstance(row.get("outcome", ""), str):
        return {"outcome": "", **row}
    if row["outcome"]:
        return {**row, "outcome": "confirmed"}
    return {**row, "outcome": "wrong", "why": row.get("why") or "What was measured does not agree."}
