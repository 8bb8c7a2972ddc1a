"""The registry, what a check answers, and that an answer that raises is wrong and no crash."""

import signal
import sys
import threading
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import torch

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


KINDS = """
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from cgkit.exercises.core import exercise, right, wrong

@exercise("98-1", question="A function, please.")
def function(answer: Callable[[int], int]):
    return right() if answer(3) + 1 == 7 else wrong("Not for 3.")

@exercise("98-2", question="A class, please.")
def kind(answer: type[Any]):
    return right() if answer() is not None else wrong("None.")

@exercise("98-3", question="A dictionary, please.")
def dictionary(answer: dict[str, int]):
    return right() if answer["a"] == 1 else wrong("a is not 1.")

@exercise("98-4", question="A list, please.")
def numbers(answer: Sequence[int]):
    return right() if list(answer) == [1, 2] else wrong("Not 1, 2.")
"""


@pytest.fixture
def four(monkeypatch):
    """A notebook 98 whose exercises say what kind of answer they take."""
    module = ModuleType("cgkit.exercises.nb98")
    exec("from __future__ import annotations\n" + KINDS, module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(core, "_load", lambda notebook: None)
    yield
    for number in range(1, 5):
        core._registry.pop(f"98-{number}")


def test_an_answer_of_another_kind_is_told_what_is_asked_for(four):
    class Module:
        def forward(self):
            """An instance of a class like this can be called."""

        __call__ = forward

    for id, answer, said in (
        ("98-1", None, "A function is asked for, and this is None (NoneType). Give the function itself"),
        ("98-1", 6, "this is 6 (int)"),
        ("98-2", Module(), "A class is asked for"),
        ("98-2", [], "A class is asked for"),
        ("98-3", [1], "A dictionary is asked for, and this is [1] (list)."),
        ("98-4", "1, 2", "A list is asked for, and this is '1, 2' (str)."),
        ("98-4", 1, "A list is asked for"),
    ):
        verdict = exercises.check(id, answer)
        assert verdict.outcome == "wrong" and said in verdict.say, verdict


def test_the_right_answer_may_come_in_another_form(four):
    assert exercises.check("98-1", lambda x: np.int64(2 * x)) and exercises.check("98-1", lambda x: 2.0 * x)
    assert exercises.check("98-2", dict) and exercises.check("98-2", lambda: 1)
    assert exercises.check("98-3", pd.Series({"a": 1})) and exercises.check("98-3", {"a": np.float32(1)})
    for numbers in ((1, 2), np.array([1, 2]), torch.tensor([1, 2]), range(1, 3), iter([1, 2])):
        assert exercises.check("98-4", numbers)


def test_what_a_check_can_do_nothing_with_is_no_error_of_the_answers_own_code(four):
    filename = str(core.Path(core.__file__).parent / "nb98.py")
    exec(compile(f"from __future__ import annotations\n{KINDS}", filename, "exec"), {"__name__": "x.nb98"})
    verdict = exercises.check("98-1", lambda x: None)
    assert verdict.say.startswith("It has not the form that is asked for (TypeError: unsupported operand")
    assert verdict.say.endswith("Does every way through it end with a `return`?")
    assert exercises.check("98-1", lambda x: 1 // 0).say.startswith("It raised ZeroDivisionError at `")


def test_a_loop_without_an_end_is_stopped_and_named(four, monkeypatch):
    monkeypatch.setattr(core, "LIMIT_S", 0.05)
    before = signal.getsignal(signal.SIGVTALRM)

    def endless(x):
        while True:
            try:
                x += 1
            except Exception:  # an answer cannot catch it
                x = 0

    verdict = exercises.check("98-1", endless)
    assert verdict.outcome == "wrong" and verdict.say.startswith(
        "It was stopped after 0.05 s of computing at `"
    )
    assert signal.getsignal(signal.SIGVTALRM) is before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert exercises.check("98-1", lambda x: 2 * x)


def test_outside_of_the_main_thread_there_is_no_limit_but_an_answer(four):
    found = []
    thread = threading.Thread(target=lambda: found.append(exercises.check("98-1", lambda x: 2 * x)))
    thread.start()
    thread.join()
    assert found[0]


def test_an_answer_that_leaves_python_is_wrong(four):
    assert "SystemExit" in exercises.check("98-1", lambda x: sys.exit(x)).say


def test_only_code_is_indented_in_a_question():
    """A line set in reads as code; one in the middle of a sentence is a slip of folding."""
    for notebook in range(12):
        core._load(f"{notebook:02d}")
    assert len(core._registry) >= 36
    for id in core._registry:
        lines = exercises.question(id).splitlines()
        for before, line in zip(["", *lines], lines):
            code = line.startswith("    ") and (before.startswith("    ") or not before.strip())
            in_list = line.startswith("  ") and before.startswith(("- ", "  "))
            assert code or in_list or not line.startswith(" "), (id, line)
