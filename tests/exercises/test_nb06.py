"""Notebook 06: each exercise against the solution, a nearly right and a wrong answer."""

import runpy

import pytest
import torch

from cgkit.exercises import check, core, exercises_of, hint

solutions = runpy.run_path(str(core.SOLUTIONS / "06.py"))
ids = [f"06-{number}" for number in range(1, 6)]


def kept_output(function, example, platform):
    buffer = example.clone()
    graph, output = platform.record(lambda: function(buffer), platform.new_pool())

    def fast(x):
        buffer.copy_(x)
        graph.replay()
        return output

    return fast


def callers_example(function, example, platform):
    graph, output = platform.record(lambda: function(example), platform.new_pool())

    def fast(x):
        example.copy_(x)
        graph.replay()
        return output.clone()

    return fast


def stale(function, example, platform):
    graph, output = platform.record(lambda: function(example), platform.new_pool())

    def fast(x):
        graph.replay()
        return output.clone()

    return fast


def no_graph(function, example, platform):
    return lambda x: function(x)


def unchecked(function, platform, pool):
    entries = {}

    def wrapped(key, x):
        if key not in entries:
            entries[key] = platform.record(lambda: function(x), pool)
        entries[key][0].replay()
        return entries[key][1]

    return wrapped


def otherwise_refused(function, platform, pool):
    own = solutions["solution_06_5"](function, platform, pool)

    def wrapped(key, x):
        try:
            return own(key, x)
        except ValueError as error:
            raise RuntimeError("moved") from error

    return wrapped


def never_replayed(function, platform, pool):
    entries = {}

    def wrapped(key, x):
        if key in entries:
            entries[key][0].replay()
        else:
            entries[key] = platform.record(lambda: function(x), pool)
        return entries[key][1]

    return wrapped


def one_graph(function, platform, pool):
    entries = []

    def wrapped(key, x):
        if not entries:
            entries.append(platform.record(lambda: function(x), pool))
        entries[0][0].replay()
        return entries[0][1]

    return wrapped


def without_decode_limit(layers, sizes, mode, max_num_seqs):
    count = len(sizes)
    by_mode = {"NONE": 0, "PIECEWISE": count * (layers + 1), "FULL": count, "FULL_DECODE_ONLY": count}
    return {**by_mode, "FULL_AND_PIECEWISE": count * (layers + 2)}[mode]


def frozen_branch(x):
    return torch.relu(x / 3).sum()


def test_every_exercise_is_there_with_a_hint_and_a_solution():
    assert [each.id for each in exercises_of("06")] == ids
    assert all(hint(each) for each in ids)


@pytest.mark.parametrize("id", ids)
def test_the_solution_is_right(id):
    assert check(id, solutions[f"solution_{id.replace('-', '_')}"]).outcome == "right"


@pytest.mark.parametrize(
    ("id", "answer", "outcome", "says"),
    [
        ("06-1", [3, 15, 18, 3000], "nearly", "new tensor"),
        ("06-1", [3, 15, 600, 100000], "nearly", "factor"),
        ("06-1", [3, 3, 3, 3], "wrong", "2, 3, 4"),
        ("06-1", [3, 15], "wrong", "Four numbers"),
        ("06-2", without_decode_limit, "nearly", "Which sizes can decode have"),
        ("06-2", lambda layers, sizes, mode, most: layers * len(sizes), "wrong", "2 layers"),
        ("06-3", kept_output, "nearly", "kept all three"),
        ("06-3", callers_example, "nearly", "buffer of your own"),
        ("06-3", stale, "wrong", "Which memory"),
        ("06-3", no_graph, "wrong", "called again"),
        ("06-3", lambda *_: lambda x: torch.tanh(x * 2) + x, "wrong", "does not give function(x)"),
        ("06-4", lambda x: x.sum() * 0, "wrong", "the same for every x: 0.0"),
        ("06-4", lambda x: None, "wrong", "the same for every x: None"),
        ("06-5", otherwise_refused, "nearly", "with RuntimeError"),
        ("06-4", frozen_branch, "nearly", "numbers differ"),
        ("06-4", lambda x: x[x > 0].sum(), "wrong", "cannot be recorded"),
        ("06-5", unchecked, "nearly", "stale input"),
        ("06-5", never_replayed, "nearly", "NaN"),
        ("06-5", one_graph, "wrong", "key 2"),
        ("06-5", lambda function, platform, pool: lambda key, x: function(x), "wrong", "called again"),
    ],
)
def test_nearly_right_and_wrong_answers(id, answer, outcome, says):
    verdict = check(id, answer)
    assert verdict.outcome == outcome and says in verdict.say, verdict
