"""The exercises of notebook 00 tell right from nearly right and from wrong."""

import torch

from tests.exercises.solved import check, pytest, solutions, well_formed

SOLVED = solutions("00")
PREDICT, WASTE = SOLVED["solution_00_1"], SOLVED["solution_00_2"]


def test_the_solutions_are_right():
    well_formed("00")


@pytest.mark.parametrize(
    ("answer", "outcome", "says"),
    [
        (lambda layers, sizes: {**PREDICT(layers, sizes), "compilations": 3}, "nearly", "from two layers on"),
        (
            lambda layers, sizes: {**PREDICT(layers, sizes), "graphs": layers * len(sizes)},
            "nearly",
            "number of graphs",
        ),
        (lambda layers, sizes: {"pieces": layers}, "wrong", "there were 5"),
    ],
)
def test_predict_counters(answer, outcome, says):
    verdict = check("00-1", answer)
    assert verdict.outcome == outcome and says in verdict.say


def of_real(batch, sizes):
    padded = min((size for size in sizes if size >= batch), default=batch)
    return (padded - batch) / batch


@pytest.mark.parametrize(
    ("answer", "outcome", "says"),
    [
        (of_real, "nearly", "over real tokens"),
        (
            lambda batch, sizes: WASTE(batch, sizes) if batch <= max(sizes) else 1.0,
            "nearly",
            "above the largest",
        ),
        (lambda batch, sizes: torch.tensor(WASTE(batch, sizes)), "right", "In all"),  # in 32 bits
        (lambda batch, sizes: round(WASTE(batch, sizes), 3), "wrong", "you say 0."),
        (lambda batch, sizes: 0.0, "wrong", "cases are off"),
        (lambda batch, sizes: WASTE(batch, [*sizes, 0][:3]), "wrong", "cases are off"),
    ],
)
def test_padding_share(answer, outcome, says):
    verdict = check("00-2", answer)
    assert verdict.outcome == outcome and says in verdict.say


def twice(step, batches):
    return [(step(batch), step(batch))[1].clone() for batch in batches]


@pytest.mark.parametrize(
    ("answer", "outcome", "says"),
    [
        (twice, "nearly", "6 calls for 3"),
        (lambda step, batches: [step(batch) for batch in batches], "wrong", "[False, False, True]"),
        (lambda step, batches: [step(batches[0]).clone()], "wrong", "1 results for 3"),
    ],
)
def test_collect_outputs(answer, outcome, says):
    verdict = check("00-3", answer)
    assert verdict.outcome == outcome and says in verdict.say
