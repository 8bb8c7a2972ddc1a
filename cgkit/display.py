"""How an artefact shows itself: a registry that is filled lazily from ``cgkit.plotting``.

A stage's artefact inherits :class:`Shown`. In a terminal it has its readable ``__repr__``; in a
notebook, the first time that one is drawn, ``cgkit.plotting`` is imported and registers how. So no
stage imports a plot, and importing cgkit draws in no matplotlib.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

_html: dict[str, Callable[[Any], str]] = {}


def register_html(class_name: str, render: Callable[[Any], str]) -> None:
    """Says how objects of the class ``class_name`` (its bare name) look as an HTML fragment."""
    _html[class_name] = render


class Shown:
    """Mixin: rich display in a notebook, the plain ``repr`` everywhere else."""

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        bundle = {"text/plain": repr(self)}
        import_module("cgkit.plotting.artefacts")  # registers the renderers
        for cls in type(self).__mro__:
            if render := _html.get(cls.__name__):
                try:
                    bundle["text/html"] = render(self)
                except Exception as error:  # a picture must never break the cell that shows it
                    bundle["text/plain"] += f"\n(could not be drawn: {error!r})"
                break
        return bundle
