"""Every exercise of notebook 10: its solution is right, a near miss is nearly right, a wrong answer wrong."""

import runpy

import numpy as np
import pytest

from cgkit.exercises import check, exercises_of, solution
from cgkit.exercises.core import SOLUTIONS
from cgkit.exercises.nb10 import busy_hour
from cgkit.measuring.plan_sizes import price_sizes

SOLVED = runpy.run_path(str(SOLUTIONS / "10.py"))


def without_seats(num_tokens, decode, sizes, max_num_seqs):
    return SOLVED["solution_10_1"](num_tokens, decode, sizes, 10**9)


def padded_always(num_tokens, decode, sizes, max_num_seqs):
    mode, tokens = SOLVED["solution_10_1"](num_tokens, decode, sizes, max_num_seqs)
    return mode, tokens if mode != "NONE" else sizes[-1]


def of_real(counts, sizes):
    share = SOLVED["solution_10_2"](counts, sizes)
    return share / (1 - share)


def in_32_bits(counts, sizes):
    return np.float32(SOLVED["solution_10_2"](counts, sizes))


def each_once(counts, sizes):
    return SOLVED["solution_10_2"](dict.fromkeys(counts, 1), sizes)


def one_swapped(counts, k):
    """The best list, its least size raised to the next batch."""
    sizes, batches = SOLVED["solution_10_3"](counts, k), sorted(counts)
    return [next((b for b in batches if b > sizes[0]), sizes[0]), *sizes[1:]] if len(sizes) > 1 else sizes


NEARLY = {
    "10-1": [without_seats, padded_always],
    "10-2": [of_real, each_once],
    "10-3": [one_swapped],
    "10-4": [[1, 2, 4, *range(8, 73, 8)]],
}
WRONG = {
    "10-1": [lambda *step: ("FULL", step[0]), lambda *step: step[9]],
    "10-2": [lambda counts, sizes: 0.0, lambda counts, sizes: counts["none"]],
    "10-3": [lambda counts, k: [max(counts)], lambda counts, k: sorted(counts), lambda counts, k: [1]],
    "10-4": [[1, 2, 4, 8], list(range(1, 200))],
}


@pytest.mark.parametrize("id", NEARLY)
def test_a_solution_is_right_and_the_others_are_what_they_are(id):
    name = f"solution_{id.replace('-', '_')}"
    verdict = check(id, SOLVED[name])
    assert verdict.outcome == "right", verdict
    assert id != "10-2" or check(id, in_32_bits)
    assert name in str(solution(id))
    for answer in NEARLY[id]:
        assert check(id, answer).outcome == "nearly", check(id, answer)
    for answer in WRONG[id]:
        assert check(id, answer).outcome == "wrong", check(id, answer)


def test_there_are_exercises_with_hints():
    assert [each.id for each in exercises_of("10")] == list(NEARLY)
    assert all(each.hints and each.question for each in exercises_of("10"))


def test_the_lists_that_are_refused_are_what_the_test_takes_them_for():
    traffic, cost, memory = busy_hour()
    assert price_sizes(WRONG["10-4"][1], traffic, cost, memory=memory).pool_bytes > 48 * 2**20
