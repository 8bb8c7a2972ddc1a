"""Models written to break the road: each call is right, or refused with a named cause; never silently wrong.

Without ``debug=True`` some of what users do cannot be seen for free; those are listed here with what sees them, and
with it none may pass.
"""

from __future__ import annotations

import pytest

from tests.fuzz import moves
from tests.fuzz.programs import CRASH, EQUAL, WRONG, draw, outcomes

MODES = ("PIECEWISE", "FULL")
PLAIN = [moves.Plain]


def bad(found: dict[str, str], *kinds: str) -> dict[str, str]:
    return {name: outcome for name, outcome in found.items() if outcome.startswith(kinds)}
