"""The source of a model or function of an exercise, to be read in the notebook."""

from __future__ import annotations

import inspect
from typing import Any

from cgkit.exercises.core import Said


def source_of(*what: Any) -> Said:
    """The sources of classes or functions, one after the other; shows itself without quotes."""
    return Said("\n\n".join(inspect.getsource(each) for each in what))
