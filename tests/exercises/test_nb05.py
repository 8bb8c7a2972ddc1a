"""The exercises of notebook 05 tell right from nearly right and from wrong."""

import torch

from tests.exercises.solved import check, pytest, solutions, well_formed

SOLVED = solutions("05")
MATCHES, PASS = SOLVED["solution_05_1"], SOLVED["solution_05_3"]
aten = torch.ops.aten


@pytest.mark.slow
def test_the_solutions_are_right():
    well_formed("05")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "outcome", "says"),
    [
        (lambda layers: {**MATCHES(layers), "fuse_attn_quant": 0}, "nearly", "not cut"),
        (lambda layers: {**MATCHES(layers), "fuse_norm_quant": 2 * layers + 1}, "nearly", "only one"),
        (lambda layers: {}, "wrong", "you say None"),
    ],
)
def test_predict_matches(answer, outcome, says):
    verdict = check("05-1", answer)
    assert verdict.outcome == outcome and says in verdict.say.lower() + verdict.say


def swapped(old, new):
    return sorted(map(str, old)) == sorted(map(str, new)) or SOLVED["solution_05_2"](old, new)


@pytest.mark.parametrize(
    ("answer", "outcome", "says"),
    [
        (lambda old, new: old == new, "wrong", "cases are off"),
        (lambda old, new: SOLVED["solution_05_2"](old, new) and "s" not in old, "nearly", "symbols"),
        (lambda old, new: SOLVED["solution_05_2"](old, new) if "s" in old else old == new, "nearly", "-1"),
        (swapped, "wrong", "changes the shape"),
    ],
)
def test_reshape_is_noop(answer, outcome, says):
    verdict = check("05-2", answer)
    assert verdict.outcome == outcome and says in verdict.say


def careless(graph, ops=((aten.mul.Tensor, 1), (aten.add.Tensor, 0)), same_type=False):
    taken = 0
    for node in list(graph.nodes):
        if any(node.target is op and node.args[1] == number for op, number in ops):
            if same_type and node.meta["val"].dtype != node.args[0].meta["val"].dtype:
                continue
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            taken += 1
    return taken


@pytest.mark.parametrize(
    ("answer", "outcome", "says"),
    [
        (lambda graph: careless(graph, same_type=True), "nearly", "caller's own tensor"),
        (careless, "wrong", "graphs are off"),
        (lambda graph: careless(graph, ops=((aten.mul.Tensor, 1),), same_type=True), "wrong", "do nothing"),
        (lambda graph: 0, "wrong", "0 nodes were taken out, 1 do nothing"),
        (lambda graph: PASS(graph) + 1, "wrong", "returned 2"),
    ],
)
def test_own_pass(answer, outcome, says):
    verdict = check("05-3", answer)
    assert verdict.outcome == outcome and says in verdict.say
