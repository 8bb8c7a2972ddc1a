"""The registry, what a check answers, and that an answer that raises is wrong and no crash."""

import sys
from types import ModuleType

import pytest

from cgkit import exercises
from cgkit.exercises import core

SOURCE = """
from cgkit.exercises.core import exercise, nearly, right, wrong

@exercise("98-1", question="Which number?", hints=("It is prime.", "It is even."))
def number(answer):
    if answer == 2:
        return right("The even prime.")
    return nearly("Prime, not even.") if answer in (3, 5) else wrong(f"{answer + 0} is not prime.")

@exercise("98-2", question="Double it.", hints=("Add it to itself.",))
def double(answer):
    return right() if answer(3) == 6 else wrong("Not for 3.")
"""


@pytest.fixture
def two(monkeypatch):
    """A notebook 98 with two exercises."""
    module = ModuleType("cgkit.exercises.nb98")
    exec(SOURCE, module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(core, "_load", lambda notebook: None)
    yield module
    for id in ("98-1", "98-2"):
        core._registry.pop(id)


def test_right_nearly_and_wrong(two):
    verdicts = [exercises.check("98-1", answer) for answer in (2, 3, 4)]
    assert [v.outcome for v in verdicts] == ["right", "nearly", "wrong"]
    assert [bool(v) for v in verdicts] == [True, False, False]
    assert verdicts[1].say == "Prime, not even." and verdicts[1].id == "98-1"
    assert "nearly" in repr(verdicts[1]) and "Prime, not even." in verdicts[1]._repr_html_()


def test_an_answer_that_raises_is_wrong_and_says_what_it_raised(two):
    def mine(x):
        return x[0]

    verdict = exercises.check("98-2", mine)
    assert verdict.outcome == "wrong"
    assert "TypeError" in verdict.say and "return x[0]" in verdict.say
    assert exercises.check("98-2", lambda x: 2 * x)


def test_an_answer_of_another_type_is_wrong(two):
    assert "TypeError" in exercises.check("98-1", "two").say


def test_no_answer_yet(two):
    assert exercises.check("98-1", ...).outcome == "wrong"
    assert "No answer yet" in exercises.check("98-1").say


def test_what_is_shown_is_escaped():
    assert "<b>x" not in exercises.wrong("<b>x")._repr_html_()


def test_hints_come_one_by_one(two):
    assert exercises.hint("98-1").startswith("It is prime.") and "hint('98-1', 2)" in exercises.hint("98-1")
    assert exercises.hint("98-1", 2).startswith("It is even.")
    with pytest.raises(exercises.ExerciseError, match="2 hints"):
        exercises.hint("98-1", 3)
    assert repr(exercises.question("98-1")) == "**98-1.** Which number?"
    assert str(exercises.question("98-1")) == "98-1. Which number?"  # printed, nothing is bold
    assert str(core.Said("2**3 and 3**2")) == "2**3 and 3**2"


def test_the_solution_is_pointed_at(two, tmp_path, monkeypatch):
    monkeypatch.setattr(core, "SOLUTIONS", tmp_path)
    assert exercises.solution("98-1") == "solution_98_1 in notebooks/solutions/98.py of the repository"
    (tmp_path / "98.py").write_text("import os\n\nsolution_98_1 = 2\n")
    assert exercises.solution("98-1") == "solution_98_1 in notebooks/solutions/98.py, line 3"
    with pytest.raises(exercises.ExerciseError, match="no solution_98_2"):
        exercises.solution("98-2")


def test_an_unknown_exercise_names_those_that_are_there(two):
    with pytest.raises(exercises.ExerciseError, match="98-1, 98-2"):
        exercises.check("98-7", 1)
    assert [each.id for each in exercises.exercises_of("98")] == ["98-1", "98-2"]


def test_an_unknown_notebook_has_no_exercises():
    assert exercises.exercises_of("97") == []
    with pytest.raises(exercises.ExerciseError, match="none"):
        exercises.check("97-1", 1)
    with pytest.raises(exercises.ExerciseError, match="none"):
        exercises.check("../x-1", 1)


def test_an_exercise_in_the_wrong_file_is_refused():
    with pytest.raises(exercises.ExerciseError, match="nb98"):
        exercises.exercise("98-3", question="?")(lambda answer: exercises.right())
