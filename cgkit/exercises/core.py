"""The registry of exercises, and what a check answers."""

from __future__ import annotations

import ast
import inspect
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from cgkit.errors import CgkitError

Outcome = Literal["right", "nearly", "wrong"]

#: Where the solutions of the course stand, in a checkout.
SOLUTIONS = Path(__file__).resolve().parents[2] / "notebooks" / "solutions"

_MARKS = {"right": ("✔", "#1a7f37"), "nearly": ("≈", "#9a6700"), "wrong": ("✘", "#b42318")}


class ExerciseError(CgkitError, LookupError):
    """There is no such exercise or hint, or an exercise is declared in a way that cannot be found again."""


@dataclass(frozen=True)
class Verdict:
    """What a check says of an answer; ``bool(verdict)`` is true for ``right`` alone."""

    outcome: Outcome
    say: str  # one or two sentences: what is right, or what is off
    id: str = ""

    def __bool__(self) -> bool:
        return self.outcome == "right"

    def __repr__(self) -> str:
        return f"{_MARKS[self.outcome][0]} {self.id + ': ' if self.id else ''}{self.outcome}. {self.say}"

    def _repr_html_(self) -> str:
        mark, colour = _MARKS[self.outcome]
        lines = escape(self.say).replace("\n", "<br>")
        return (
            f'<div style="border-left:4px solid {colour};padding:.4em .8em;margin:.3em 0">'
            f'<b style="color:{colour}">{mark} {escape(self.id)} {self.outcome}</b><br>{lines}</div>'
        )


def right(say: str = "That is it.") -> Verdict:
    """The answer is right; ``say`` names why, or what follows from it."""
    return Verdict("right", say)


def nearly(say: str) -> Verdict:
    """The answer has the right idea and one mistake that ``say`` names."""
    return Verdict("nearly", say)


def wrong(say: str) -> Verdict:
    """The answer is wrong; ``say`` names what was seen and what was asked for, not the answer."""
    return Verdict("wrong", say)


@dataclass(frozen=True)
class Exercise:
    """One exercise: its id (``"07-2"``: notebook 07, the second), question, hints and check."""

    id: str
    question: str
    hints: tuple[str, ...]
    check: Callable[[Any], Verdict]

    @property
    def notebook(self) -> str:
        return self.id.split("-")[0]

    @property
    def solution_name(self) -> str:
        """What the solution is called in its file: ``solution_07_2``."""
        return "solution_" + self.id.replace("-", "_")


class Said(str):
    """Text in Markdown that shows itself without quotes; printed, an exercise's number has no asterisks."""

    __slots__ = ()

    def __str__(self) -> str:
        return re.sub(r"^\*\*(\d\d-\d+\.)\*\*", r"\1", super().__str__())

    def __repr__(self) -> str:
        return super().__str__()

    def _repr_markdown_(self) -> str:
        return super().__str__()


_registry: dict[str, Exercise] = {}


def exercise(
    id: str, *, question: str, hints: Sequence[str] = ()
) -> Callable[[Callable[[Any], Verdict]], Callable[[Any], Verdict]]:
    """Declares a function (answer -> :class:`Verdict`) as the check of exercise ``id``.

    It must stand in ``cgkit/exercises/nbNN.py`` with the NN of its id, where :func:`check` looks for it.
    Raises: ExerciseError where it does not.
    """

    def declare(function: Callable[[Any], Verdict]) -> Callable[[Any], Verdict]:
        home = f"nb{id.split('-')[0]}"
        if function.__module__.rsplit(".", 1)[-1] != home:
            raise ExerciseError(
                f"exercise {id!r} is declared in {function.__module__}; it is looked for in cgkit/exercises/{home}.py"
            )
        _registry[id] = Exercise(id, question, tuple(hints), function)
        return function

    return declare


def _load(notebook: str) -> None:
    name = f"cgkit.exercises.nb{notebook}"
    if notebook.isalnum() and find_spec(name):
        import_module(name)


def package() -> Any:
    """cgkit itself, loaded when first needed, and untyped: checks call it as a notebook does (names as text)."""
    return import_module("cgkit")


def exercises_of(notebook: str) -> list[Exercise]:
    """The exercises of a notebook (``"07"``), in order; an empty list where it has none."""
    _load(notebook)
    return sorted(
        (each for each in _registry.values() if each.notebook == notebook), key=lambda each: each.id
    )


def _find(id: str) -> Exercise:
    notebook = str(id).split("-")[0]
    _load(notebook)
    if id not in _registry:
        known = ", ".join(each.id for each in exercises_of(notebook)) or "none"
        raise ExerciseError(f"there is no exercise {id!r}; notebook {notebook} has: {known}")
    return _registry[id]


def check(id: str, answer: Any = ...) -> Verdict:
    """Says whether ``answer`` is right, nearly right or wrong, and what is off.

    An answer that raises (a function, mostly) is wrong, with its exception. ``...`` means: no answer yet.
    Raises: ExerciseError for an id that no exercise has.
    """
    found = _find(id)
    if answer is ...:
        return Verdict("wrong", "No answer yet: put yours in the place of `...`.", id)
    try:
        verdict = found.check(answer)
    except Exception as error:  # the reader's code: whatever it raises is what is to be shown
        verdict = wrong(_what_was_raised(error))
    return Verdict(verdict.outcome, verdict.say, id)


def _what_was_raised(error: Exception) -> str:
    """The exception, and the last line of the reader's own code on its way (what lies outside this package)."""
    here = str(Path(__file__).parent)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(here)]
    line = next((f.line for f in reversed(frames) if f.line and "/lib/" not in f.filename), None)
    where = f" at `{line}`" if line else ""
    return f"It raised {type(error).__name__}{where}: {error}"


def question(id: str) -> str:
    """The question of an exercise. Raises: ExerciseError for an id that no exercise has."""
    return Said(f"**{id}.** {inspect.cleandoc(_find(id).question)}")


def hint(id: str, n: int = 1) -> str:
    """The ``n``-th hint of an exercise, from 1. Raises: ExerciseError where there is none."""
    hints = _find(id).hints
    if not 1 <= n <= len(hints):
        raise ExerciseError(f"exercise {id} has {len(hints)} hints, there is no hint {n}")
    more = (
        f"  ({n} of {len(hints)}; the next: hint({id!r}, {n + 1}))" if n < len(hints) else f"  ({n} of {n})"
    )
    return Said(hints[n - 1] + more)


def solution(id: str) -> str:
    """Where the solution stands: file, name and line. Raises: ExerciseError for an id that no exercise has."""
    found = _find(id)
    where, name = f"notebooks/solutions/{found.notebook}.py", found.solution_name
    path = SOLUTIONS / f"{found.notebook}.py"
    if not path.exists():
        return Said(f"{name} in {where} of the repository")
    for node in ast.parse(path.read_text()).body:
        targets = [t.id for t in getattr(node, "targets", ()) if isinstance(t, ast.Name)]
        if name in [getattr(node, "name", None), *targets]:
            return Said(f"{name} in {where}, line {node.lineno}")
    raise ExerciseError(f"{where} holds no {name}: the solution of exercise {id} is missing")
