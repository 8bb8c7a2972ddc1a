"""The registry of exercises, and what a check answers."""

from __future__ import annotations

import ast
import inspect
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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

    An answer that raises (a function, mostly) is wrong, with its exception, and so is one that computes for longer
    than :data:`LIMIT_S`. ``...`` means: no answer yet. Raises: ExerciseError for an id that no exercise has.
    """
    found = _find(id)
    if answer is ...:
        return Verdict("wrong", "No answer yet: put yours in the place of `...`.", id)
    if off := _other_kind(found.check, answer):
        return Verdict("wrong", off, id)
    try:
        with _time_limit(LIMIT_S):
            verdict = found.check(answer)
    except (
        Exception,
        SystemExit,
        _TooLong,
    ) as error:  # the reader's code: what it raises is what is to be shown
        verdict = wrong(_what_was_raised(error))
    return Verdict(verdict.outcome, verdict.say, id)


#: How an annotation of a check's answer begins -> what is asked for, whether an answer is that, and what helps.
_KINDS: tuple[tuple[str, str, Callable[[Any], bool], str], ...] = (
    ("Callable", "a function", callable, "Give the function itself: its name, without parentheses."),
    (
        "type[",
        "a class",
        lambda answer: isinstance(answer, type) or (callable(answer) and not hasattr(answer, "forward")),
        "Give the class itself: its name, without parentheses.",
    ),
    ("dict[", "a dictionary", lambda answer: hasattr(answer, "keys"), ""),
    ("Mapping", "a dictionary", lambda answer: hasattr(answer, "keys"), ""),
    ("Sequence", "a list", lambda answer: hasattr(answer, "__iter__") and not isinstance(answer, str), ""),
)


def _other_kind(of: Callable[[Any], Verdict], answer: Any) -> str:
    """What is off where ``answer`` is not even of the kind that the check's parameter is annotated with, else ""."""
    annotation = str(next(iter(inspect.signature(of).parameters.values())).annotation)
    for begins, what, holds, helps in _KINDS:
        if annotation.startswith(begins) and not holds(answer):
            shown = repr(answer)
            shown = shown if len(shown) <= 60 else shown[:59] + "…"
            return f"{what.capitalize()} is asked for, and this is {shown} ({type(answer).__name__}). {helps}".rstrip()
    return ""


#: Seconds of this thread's processor time after which an answer is stopped.
LIMIT_S = 60.0


class _TooLong(BaseException):
    """Stops an answer that does not end. No Exception, so that the answer does not catch it."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises :class:`_TooLong` in the block after so much processor time of this thread, where the system has timers
    for that (not on Windows) and the block runs in the main thread, as a notebook's cells do."""
    if not hasattr(signal, "SIGVTALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return
    ends = time.thread_time() + seconds

    def look(signum: int, frame: Any) -> None:
        nonlocal ends
        now = time.thread_time()  # the timer counts other threads' time too
        inside = frame is None or _not_the_readers(frame.f_code.co_filename)
        if now > ends + (
            2 * seconds if inside else 0
        ):  # rather in the reader's own code than inside of torch
            ends = now + seconds  # not once more while the first is on its way out
            raise _TooLong(f"It was stopped after {seconds:g} s of computing")

    before = signal.signal(signal.SIGVTALRM, look)
    signal.setitimer(signal.ITIMER_VIRTUAL, min(seconds, 1.0), 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _not_the_readers(filename: str) -> bool:
    """Whether a file is cgkit's or a library's."""
    return filename.startswith(str(Path(__file__).parents[1])) or "/lib/" in filename


def _what_was_raised(error: BaseException) -> str:
    """The exception, and the last line of the reader's own code on its way (what lies outside this package). Where
    the check itself could do nothing with what it was given: that."""
    here = str(Path(__file__).parent)
    way = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in way if not _not_the_readers(frame.filename)]
    line = next((f.line for f in reversed(frames) if f.line), None)
    where = f" at `{line}`" if line else ""
    if isinstance(error, _TooLong):
        return f"{error}{where}: does a loop in it never end?"
    if way[-1].filename.startswith(here) and isinstance(
        error, (TypeError, AttributeError, LookupError, ValueError)
    ):
        more = " Does every way through it end with a `return`?" if "NoneType" in str(error) else ""
        return f"It has not the form that is asked for ({type(error).__name__}: {error}).{more}"
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
