"""A drawing that shows itself as the last line of a cell, and saves itself."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from cgkit.plotting import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_serial = itertools.count()


class Picture:
    """Wraps Axes or an SVG string: rich display in a notebook, a sentence in a terminal.

    >>> Picture("<svg></svg>", "nothing at all")
    <picture: nothing at all>
    """

    def __init__(self, drawing: Axes | str, alt: str = "") -> None:
        self.drawing = drawing
        self.alt = alt or ("a picture of pieces" if isinstance(drawing, str) else style.title_of(drawing))

    def svg(self) -> str:
        """The picture as an SVG element for a page."""
        if isinstance(self.drawing, str):
            return self.drawing
        return style.svg(self.drawing, self.alt, f"cg{next(_serial)}")

    def save(self, path: str | Path) -> Path:
        """Writes the picture; the file's ending names the format."""
        return style.save(self.drawing, path)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/plain": repr(self), "text/html": self.svg()}

    def __repr__(self) -> str:
        return f"<picture: {self.alt}>"
