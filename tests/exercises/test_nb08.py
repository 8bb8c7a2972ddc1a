"""Every exercise of notebook 08: its solution is right, a near miss is nearly right, a wrong answer wrong."""

import runpy

import pytest

from cgkit.exercises import check, exercises_of, solution
from cgkit.exercises.core import SOLUTIONS

SOLVED = runpy.run_path(str(SOLUTIONS / "08.py"))


def first_growth(frame):
    row = frame[frame["growth_bytes"] > 0].iloc[0]
    return row["name"], row["num_tokens"]


def largest_growth(frame):
    row = frame.loc[frame["growth_bytes"].idxmax()]
    return row["name"], row["num_tokens"]


def until_the_end(pieces):
    return {name: len(pieces) - 1 for _, writes in pieces for name in writes}


def at_once(pieces):
    return {name: index for index, (_, writes) in enumerate(pieces) for name in writes}


def twice(run, batches):
    return [(run(batch), run(batch).clone())[1] for batch in batches]


def last_in_place(run, batches):
    return [run(batch) if batch is batches[-1] else run(batch).clone() for batch in batches]


def after_the_loop(run, batches):
    return [answer.clone() for answer in [run(batch) for batch in batches]]


def without_merging(events):
    return SOLVED["solution_08_5"].__class__(
        SOLVED["solution_08_5"].__code__,
        {**SOLVED["solution_08_5"].__globals__, "merged": lambda blocks: blocks},
    )(events)


NEARLY = {
    "08-1": [first_growth, largest_growth],
    "08-2": [until_the_end],
    "08-3": [twice, last_in_place],
    "08-4": [([1024], [4096])],
    "08-5": [without_merging],
}
WRONG = {
    "08-1": [lambda frame: ("submod_0", 1), lambda frame: None],
    "08-2": [at_once, lambda pieces: {}],
    "08-3": [lambda run, batches: [run(batch) for batch in batches], after_the_loop, lambda run, batches: []],
    "08-4": [([], []), ([1024], [1024]), ([2**20], [2**27])],
    "08-5": [lambda events: sum(size for _, size in events), lambda events: events[99999]],
}


@pytest.mark.parametrize("id", NEARLY)
def test_a_solution_is_right_and_the_others_are_what_they_are(id):
    name = f"solution_{id.replace('-', '_')}"
    verdict = check(id, SOLVED[name])
    assert verdict.outcome == "right", verdict
    assert name in str(solution(id))
    assert [check(id, answer).outcome for answer in NEARLY[id]] == ["nearly"] * len(NEARLY[id])
    assert [check(id, answer).outcome for answer in WRONG[id]] == ["wrong"] * len(WRONG[id])


def test_there_are_exercises_with_hints():
    assert [each.id for each in exercises_of("08")] == list(NEARLY)
    assert all(each.hints and each.question for each in exercises_of("08"))
