"""What an exhibit is: broken code, what it does unnoticed, what cgkit says about it, and the fixed twin."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cgkit.display import Shown
from cgkit.errors import CgkitError

#: What a hazard does: computes something else without an error, takes long, or ends a start or a step with an error.
WRONG, SLOW, STOPS = KINDS = ("wrong numbers", "slow", "stops")
#: What finds it here, and what that is.
TOOLS = {
    "doctor": "cgkit.doctor(model, *example), before anything is recorded",
    "debug=True": "CompilationConfig(debug=True), at the step that goes wrong",
    "the recording itself": "capture, which refuses and says why",
    "dispatcher.explain": "the dispatcher, asked about a batch; the ledgers keep the answer for each that came",
    "counters_table": "the counters beside what they must be",
    "explain_cache": "two keys of the compile cache, factor by factor",
    "the dump itself": "what was compiled, as text: it says how it was made",
    "predict_pool": "the recordings gone through without a device",
}


class Symptom(NamedTuple):
    """What was seen with no check in the way: whether it did harm, and what it was, with its numbers."""

    harm: bool
    seen: str


@dataclass(frozen=True, repr=False)
class Exhibit(Shown):
    """One hazard. ``symptom`` and ``says`` are given the broken code or its fixed twin, and the device.

    Attributes:
        id: its name, stable.
        rows: the rows of :func:`cgkit.hazards.table` that it shows.
        hurt: where it happened, as reported.
        broken, fixed: the code; shown, and run.
        symptom: runs the code with cgkit's check off or absent.
        says: what cgkit says of the code, word by word; "" if nothing.
        on_gpu: whether it runs on a GPU too.
        kind: what it does, one of :data:`KINDS`.
        tool: what ``says`` asks, one of :data:`TOOLS`.
    """

    id: str
    title: str
    rows: tuple[int, ...]
    hurt: str
    why: str
    broken: Callable[..., Any]
    fixed: Callable[..., Any]
    symptom: Callable[[Any, str], Symptom]
    says: Callable[[Any, str], str]
    on_gpu: bool = True
    kind: str = field(kw_only=True)
    tool: str = field(kw_only=True)

    def run(self, device: str = "cpu") -> Visit:
        """Runs all four: broken and fixed, without the check and with it. Takes a second or less."""
        return Visit(
            self,
            device,
            self.symptom(self.broken, device),
            self.says(self.broken, device),
            self.symptom(self.fixed, device),
            self.says(self.fixed, device),
        )

    def code(self) -> tuple[str, str]:
        """The source of the broken code and of the fixed one."""
        broken, fixed = (
            inspect.cleandoc("\n" + inspect.getsource(each)) for each in (self.broken, self.fixed)
        )
        return broken, fixed

    def __repr__(self) -> str:
        rows = ", ".join(map(str, self.rows))
        return f"Exhibit({self.id}: {self.title}; row {rows})"


@dataclass(frozen=True, repr=False)
class Visit(Shown):
    """What happened when an exhibit was run on ``device`` ("cpu": emulated graphs)."""

    exhibit: Exhibit
    device: str
    symptom: Symptom
    says: str
    fixed_symptom: Symptom
    fixed_says: str

    @property
    def as_described(self) -> bool:
        """The broken code does harm and is found; the fixed code does none and nothing is said of it."""
        return self.symptom.harm and bool(self.says) and not self.fixed_symptom.harm and not self.fixed_says

    def row(self) -> dict[str, Any]:
        """As one row of a table."""
        return {
            "id": self.exhibit.id,
            "rows": " ".join(map(str, self.exhibit.rows)),
            "kind": self.exhibit.kind,
            "tool": self.exhibit.tool,
            "platform": "emulated" if self.device == "cpu" else self.device,
            "as_described": self.as_described,
            "harm": self.symptom.harm,
            "seen": self.symptom.seen,
            "says": self.says,
            "fixed_harm": self.fixed_symptom.harm,
            "fixed_seen": self.fixed_symptom.seen,
            "fixed_says": self.fixed_says,
        }

    def told(self) -> list[tuple[str, str]]:
        """(what, in words): what is shown, line by line."""
        return [
            ("happened", self.exhibit.hurt),
            ("why", self.exhibit.why),
            ("unnoticed", self.symptom.seen),
            ("cgkit says", self.says or "(nothing)"),
            ("fixed", f"{self.fixed_symptom.seen}; cgkit says: {self.fixed_says or '(nothing)'}"),
        ]

    def __repr__(self) -> str:
        where = "emulated graphs" if self.device == "cpu" else self.device
        lines = [f"{self.exhibit.title}   [{self.exhibit.id}, {where}]"]
        return "\n".join(lines + [f"  {name + ':':<12} {text}" for name, text in self.told()])


def said_by(call: Callable[[], Any]) -> str:
    """The text of the error of cgkit's that ``call`` raises; "" if it raises none."""
    try:
        call()
    except CgkitError as error:
        return f"{type(error).__name__}: {error}"
    return ""
