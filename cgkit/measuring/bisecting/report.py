"""What ``cgkit.bisect`` returns: a row a stage, and what was found at the first that differs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cgkit.display import Shown

STAGES = ("traced", "split", "compiled", "recorded", "replayed")
COLUMNS = ("stage", "verdict", "piece", "operator", "line", "difference", "why")


@dataclass(frozen=True)
class StageResult:
    """One stage: ``verdict`` is "same", "differs", "refused" (an error in place of a result) or "not reached".

    ``piece``, ``operator``, ``line``: the first that differ, "" where that cannot be told or does not apply.
    ``difference``: how the results differ. ``why``: what is known of the cause.
    """

    stage: str
    verdict: str
    piece: str = ""
    operator: str = ""
    line: str = ""
    difference: str = ""
    why: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether the search ends here."""
        return self.verdict in ("differs", "refused")


class Bisection(Shown):
    """The stages of one model on one call, each compared with the eager model.

    Attributes:
        model_name: the model's class.
        stages: one :class:`StageResult` a stage, in the order of the road.
        emulated: whether graphs were emulated; None where nothing was recorded.
        compared_with: what served as the yardstick.
    """

    def __init__(
        self, model_name: str, stages: list[StageResult], emulated: bool | None, compared_with: str
    ) -> None:
        self.model_name, self.emulated, self.compared_with = model_name, emulated, compared_with
        known = {each.stage: each for each in stages}
        self.stages = [known.get(stage, StageResult(stage, "not reached")) for stage in STAGES]

    @property
    def found(self) -> StageResult | None:
        """The first stage that differs, or None."""
        return next((each for each in self.stages if each.is_wrong), None)

    @property
    def ok(self) -> bool:
        """Whether no stage differs."""
        return self.found is None

    @property
    def stage(self) -> str:
        """The first stage that differs, or ""."""
        return self.found.stage if self.found else ""

    @property
    def piece(self) -> str:
        """The first piece that differs, or ""."""
        return self.found.piece if self.found else ""

    @property
    def operator(self) -> str:
        """The first operator that differs, or ""."""
        return self.found.operator if self.found else ""

    def to_frame(self) -> Any:
        """A row a stage: ``stage``, ``verdict``, ``piece``, ``operator``, ``line``, ``difference``, ``why``."""
        import pandas as pd

        rows = [{name: getattr(each, name) for name in COLUMNS} for each in self.stages]
        return pd.DataFrame(rows, columns=list(COLUMNS))

    def __repr__(self) -> str:
        found = self.found
        if found is None:
            head = f"Bisection of {self.model_name}: every stage gives what the model gives"
        else:
            place = ", ".join(part for part in (found.piece, found.operator) if part)
            head = f"Bisection of {self.model_name}: the first stage that differs is {found.stage}" + (
                f" ({place})" if place else ""
            )
        lines = [head, f"  compared with {self.compared_with}{', graphs emulated' if self.emulated else ''}"]
        for each in self.stages:
            lines.append(f"  {each.stage:<9} {each.verdict}")
            for label in ("piece", "operator", "line", "difference", "why"):
                if value := getattr(each, label):
                    lines.append(f"    {label}: {value}")
        return "\n".join(lines)
