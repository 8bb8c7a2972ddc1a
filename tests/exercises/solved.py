"""The solutions of a notebook, and that each exercise has one."""

import runpy

import pytest

from cgkit.exercises import check, exercises_of, hint, solution
from cgkit.exercises.core import SOLUTIONS

__all__ = ["check", "pytest", "solutions", "well_formed"]


def solutions(notebook: str) -> dict:
    """What ``notebooks/solutions/NN.py`` defines."""
    return runpy.run_path(str(SOLUTIONS / f"{notebook}.py"))


def well_formed(notebook: str) -> None:
    """Three to five exercises, each with a question, a hint and a solution that is right."""
    found, solved = exercises_of(notebook), solutions(notebook)
    assert 3 <= len(found) <= 5
    for number, each in enumerate(found, 1):
        assert each.id == f"{notebook}-{number}"
        assert len(each.question) > 40 and hint(each.id)
        assert f"solutions/{notebook}.py, line" in solution(each.id)
        verdict = check(each.id, solved[each.solution_name])
        assert verdict.outcome == "right", verdict
