"""Exercises of the course, with checks that tell right from nearly right.

In a notebook::

    from cgkit.exercises import check, hint, solution

    check("07-2", my_answer)   # right, nearly or wrong, and what is off
    hint("07-2")               # the first hint; hint("07-2", 2) the second
    solution("07-2")           # where the solution stands

The exercises of notebook NN stand in ``cgkit/exercises/nbNN.py``, each a function decorated with
:func:`exercise` that takes the reader's answer and returns :func:`right`, :func:`nearly` or :func:`wrong`.
What is expected is computed when the answer is checked, never written down.
"""

from cgkit.exercises.core import (
    Exercise,
    ExerciseError,
    Verdict,
    check,
    exercise,
    exercises_of,
    hint,
    nearly,
    question,
    right,
    solution,
    wrong,
)

__all__ = [
    "Exercise",
    "ExerciseError",
    "Verdict",
    "check",
    "exercise",
    "exercises_of",
    "hint",
    "nearly",
    "question",
    "right",
    "solution",
    "wrong",
]
