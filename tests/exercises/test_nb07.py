"""Notebook 07: each exercise against the solution, a nearly right and a wrong answer."""

import runpy

import pytest

from cgkit.config import CUDAGraphMode
from cgkit.exercises import check, core, exercises_of, hint

solutions = runpy.run_path(str(core.SOLUTIONS / "07.py"))
ids = [f"07-{number}" for number in range(1, 5)]
PAIRS = solutions["solution_07_2"]


def no_fallback(num_tokens, uniform, full, piecewise):
    key = (num_tokens, uniform)
    return ("FULL", key) if key in full else ("PIECEWISE", key) if key in piecewise else ("NONE", None)


def test_every_exercise_is_there_with_a_hint_and_a_solution():
    assert [each.id for each in exercises_of("07")] == ids
    assert all(hint(each) for each in ids)


@pytest.mark.parametrize("id", ids)
def test_the_solution_is_right(id):
    assert check(id, solutions[f"solution_{id.replace('-', '_')}"]).outcome == "right"


@pytest.mark.parametrize(
    ("id", "answer", "outcome", "says"),
    [
        (
            "07-1",
            lambda n, sizes: min((s for s in sizes if s >= n), default=max(sizes)),
            "nearly",
            "Above it",
        ),
        ("07-1", lambda n, sizes: min(s for s in sizes if s >= n), "nearly", "Above it"),
        ("07-1", lambda n, sizes: min((s for s in sizes if s > n), default=None), "nearly", "no padding"),
        ("07-1", lambda n, sizes: n, "wrong", "gave 3"),
        ("07-2", [*PAIRS[:2], ("FULL", 16), *PAIRS[3:]], "nearly", "(9, True)"),
        ("07-2", [[CUDAGraphMode[mode], size] for mode, size in PAIRS], "right", "Pad"),
        ("07-2", [("FULL", 3)] * 5, "wrong", "(3, True)"),
        ("07-3", no_fallback, "nearly", "made for any batch"),
        ("07-3", lambda *_: ("NONE", None), "wrong", "of 50"),
        ("07-4", [1, 2, 4, 8, 16, 24, 32, 48], "nearly", "padding"),
        ("07-4", [1, 2, 4, 8], "wrong", "without a graph"),
        ("07-4", list(range(1, 49)), "wrong", "allowed"),
    ],
)
def test_nearly_right_and_wrong_answers(id, answer, outcome, says):
    verdict = check(id, answer)
    assert verdict.outcome == outcome and says in verdict.say, verdict
