"""How an artefact shows itself: a registry that is filled lazily from ``cgkit.plotting``.

A stage's artefact inherits :class:`Shown`. In a terminal it has its readable ``__repr__``; in a
notebook, the first time that one is drawn, ``cgkit.plotting`` is imported and registers how. So no
stage imports a plot, and importing cgkit draws in no matplotlib.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from importlib import import_module
from typing import Any
from urllib.parse import quote

_html: dict[str, Callable[[Any], str]] = {}
_draw: dict[str, Callable[..., Any]] = {}
_page: dict[str, Callable[..., str]] = {}


def register_html(class_name: str, render: Callable[[Any], str]) -> None:
    """Says how objects of the class ``class_name`` (its bare name) look as an HTML fragment."""
    _html[class_name] = render


def register_drawing(class_name: str, draw: Callable[..., Any]) -> None:
    """Says what :func:`drawn` gives for objects of the class ``class_name``."""
    _draw[class_name] = draw


def drawn(thing: Any, **options: Any) -> Any:
    """The picture of ``thing``, drawn as :mod:`cgkit.plotting` registered it for its class."""
    import_module("cgkit.plotting.artefacts")  # registers the drawings
    return next(_draw[cls.__name__] for cls in type(thing).__mro__ if cls.__name__ in _draw)(thing, **options)


def register_page(class_name: str, render: Callable[..., str]) -> None:
    """Says how objects of the class ``class_name`` look as a whole HTML page (:func:`html_page`)."""
    _page[class_name] = render


def html_page(thing: Any, files: Sequence[tuple[str, str]]) -> str:
    """A page about ``thing`` that links ``files``: (where, what it is). Where pictures cannot be drawn (the
    extra ``cgkit[plot]`` is missing), the links alone."""
    try:
        import_module("cgkit.plotting.artefacts")  # registers the pages
        return _page[type(thing).__name__](thing, files)
    except Exception as error:  # a picture must never break what writes the page
        links = "".join(
            f'<li><a href="{quote(where)}">{escape(where)}</a>: {escape(what)}</li>' for where, what in files
        )
        return (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>cgkit</title><pre>{escape(repr(thing))}</pre>'
            f"<ul>{links}</ul><p>The pictures could not be drawn: {escape(repr(error))}</p></html>\n"
        )


def shortened(value: Any, most: int = 60) -> str:
    """``repr(value)`` for an error's message, cut after ``most`` characters: a broken file may hold anything."""
    shown = repr(value)
    return shown if len(shown) <= most else f"{shown[:most]}... ({len(shown):,} characters)"


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
