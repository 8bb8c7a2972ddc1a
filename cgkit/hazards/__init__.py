"""The museum of hazards: what hurt the users of engines, happening on purpose, found, and fixed.

Each exhibit is tiny. Its broken code runs with no check in the way (the harm is real, computed now), then cgkit is
asked about it (the words are cgkit's), and both again with the fixed code. ``README.md`` beside this file says how to
add one. Sources: the issues and pull requests that :func:`table` names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cgkit import events
from cgkit.errors import ConfigError
from cgkit.hazards import (
    addresses,
    compiling,
    decompiling,
    guards,
    loading,
    memory,
    recording,
    shapes,
    workspaces,
)
from cgkit.hazards.exhibit import KINDS, TOOLS, Exhibit, Symptom, Visit
from cgkit.hazards.rows import ROWS, Row

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "EXHIBITS",
    "KINDS",
    "ROWS",
    "TOOLS",
    "Exhibit",
    "Row",
    "Symptom",
    "Visit",
    "exhibit",
    "run",
    "show",
    "table",
]

#: id -> exhibit, in the order of the table.
EXHIBITS: dict[str, Exhibit] = {
    each.id: each
    for each in sorted(
        (
            one
            for module in (
                addresses,
                compiling,
                decompiling,
                guards,
                loading,
                memory,
                recording,
                shapes,
                workspaces,
            )
            for one in module.EXHIBITS
        ),
        key=lambda each: each.rows,
    )
}


def exhibit(id: str) -> Exhibit:
    """The exhibit called ``id``.

    Raises:
        ConfigError: there is none of that name; says which there are.
    """
    if id not in EXHIBITS:
        raise ConfigError(f"there is no exhibit {id!r}; there are {', '.join(EXHIBITS)}")
    return EXHIBITS[id]


def show(id: str, device: str = "cpu", apart: bool = False) -> Visit:
    """Runs one exhibit; in a notebook: the code side by side, what happened, what cgkit says.

    ``device``: "cpu" (emulated graphs) or "cuda". ``apart``: in a process of its own, which an illegal address on the
    GPU may end and not this one; it is kept for the next exhibit (:mod:`cgkit.hazards.apart`).

    Raises:
        ConfigError: there is none of that name, or it does not run on a GPU.
    """
    chosen = exhibit(id)
    if device != "cpu" and not chosen.on_gpu:
        raise ConfigError(
            f"exhibit {id!r} needs the emulated platform or no graphs at all; device must be 'cpu'"
        )
    if apart:
        from cgkit.hazards.apart import visit_apart

        return visit_apart(chosen, device)
    return chosen.run(device)


def run(device: str = "cpu") -> pd.DataFrame:
    """Runs all exhibits (on a GPU: those that can, in a process of their own); a row each, see :meth:`Visit.row`."""
    import pandas as pd

    shown = [each for each in EXHIBITS.values() if device == "cpu" or each.on_gpu]
    exhibits = events.counted("exhibits", shown, lambda each: each.id)
    return pd.DataFrame([show(each.id, device, apart=device != "cpu").row() for each in exhibits])


def table() -> pd.DataFrame:
    """Every hazard that is known to us, a row each: ``row``, ``what``, ``reported``, ``exhibits``, ``instead`` (why it
    has none, and what would show it)."""
    import pandas as pd

    rows = []
    for row in ROWS:
        shown = ", ".join(each.id for each in EXHIBITS.values() if row.number in each.rows)
        rows.append(
            {
                "row": row.number,
                "what": row.what,
                "reported": row.reported,
                "exhibits": shown,
                "instead": row.instead,
            }
        )
    return pd.DataFrame(rows)
