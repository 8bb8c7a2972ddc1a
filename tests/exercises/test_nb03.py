"""The checks of notebook 03: the solutions are right, and nearly right is told from wrong."""

import runpy
from pathlib import Path

import pytest
import torch

from cgkit.exercises import check, exercises_of, solution
from cgkit.exercises.random_graphs import is_splitting, judge, random_graph, run

SOLUTIONS = runpy.run_path(str(Path(__file__).parents[2] / "notebooks" / "solutions" / "03.py"))


@pytest.mark.parametrize("id", [each.id for each in exercises_of("03")])
def test_the_solution_is_right(id):
    verdict = check(id, SOLUTIONS[f"solution_{id.replace('-', '_')}"])
    assert verdict, verdict
    assert "line" in solution(id)


def test_the_pieces():
    answer = SOLUTIONS["solution_03_1"]
    assert check("03-1", {**answer, "different": 3}).outcome == "nearly"
    assert check("03-1", dict.fromkeys(answer, 12)).outcome == "wrong"


def test_the_cuts():
    all_three = check("03-2", ["nb03::attend", "nb03::mix", "nb03::scale"])
    assert all_three.outcome == "nearly"
    assert "nb03::mix" in check("03-2", ["nb03::attend"]).say
    assert check("03-2", []).outcome == "wrong"
    assert "SplitError" in check("03-2", ["nb03::attention"]).say


def test_stitching():
    def holds_everything(steps, values, returned):
        for step in steps:
            values.update(zip(step.outputs, step.run(*[values[name] for name in step.inputs])))
        return [values[name] for name in returned]

    def in_the_wrong_order(steps, values, returned):
        return holds_everything(list(reversed(steps)), values, returned)

    def without_the_last(steps, values, returned):
        values = {name: None for step in steps for name in step.outputs} | values
        return holds_everything(steps[:-1], values, returned)

    leak = check("03-3", holds_everything)
    assert leak.outcome == "nearly" and "is still held" in leak.say
    assert check("03-3", in_the_wrong_order).outcome == "wrong"
    assert check("03-3", without_the_last).outcome == "wrong"


def test_the_hash():
    by_name = check("03-4", lambda lines: tuple((line.name, line.text()) for line in lines))
    assert by_name.outcome == "nearly"
    operators_alone = check("03-4", lambda lines: tuple((line.operator, line.shape) for line in lines))
    assert operators_alone.outcome == "wrong" and "taken for equal" in operators_alone.say
    own = SOLUTIONS["solution_03_4"]
    for no_key in (lambda lines: list(own(lines)), lambda lines: (list(own(lines)), 1)):
        verdict = check("03-4", no_key)
        assert verdict.outcome == "nearly" and "hashable" in verdict.say


def test_split_graph():
    def as_in_the_article(graph, is_splitting):
        number, piece_of = 0, {}
        for node in graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            if is_splitting(node):
                piece_of[node] = number + 1
                number += 2
            else:
                piece_of[node] = number
        return piece_of

    def a_piece_a_node(graph, is_splitting):
        own = {node: index for index, node in enumerate(graph.nodes)}
        return {
            node: own[node.args[0] if "getitem" in str(node.target) else node]
            for node in graph.nodes
            if node.op not in ("placeholder", "output")
        }

    def cuts_first(graph, is_splitting):
        body = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        return {node: 0 if is_splitting(node) else 1 for node in body}

    article = check("03-5", as_in_the_article)
    assert article.outcome == "nearly" and "a tuple crosses" in article.say
    assert check("03-5", a_piece_a_node).outcome == "nearly"
    assert check("03-5", cuts_first).outcome == "wrong"
    assert check("03-5", lambda graph, is_splitting: {}).outcome == "wrong"
    assert check("03-5", lambda graph, is_splitting: dict.fromkeys(graph.nodes, 0)).outcome == "wrong"


def test_random_graphs_are_worth_cutting():
    graphs = [random_graph(seed) for seed in range(60)]
    assert sum(any(map(is_splitting, graph.nodes)) for graph in graphs) > 50
    assert all(map(torch.equal, run(list(graphs[0].nodes)), run(list(random_graph(0).nodes))))
    late = SOLUTIONS["solution_03_5"]
    # a cut that comes too early or too late is noticed in most of them: the order is their meaning
    swapped = [judge(graph, {node: -n for node, n in late(graph, is_splitting).items()}) for graph in graphs]
    assert sum(verdict is not None and verdict.outcome == "wrong" for verdict in swapped) > 40
