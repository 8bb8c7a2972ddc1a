"""The exercises of notebook 01 tell right from nearly right and from wrong."""

from tests.exercises.solved import check, pytest, solutions, well_formed

SOLVED = solutions("01")
BUSY, STEP, BOUND = (SOLVED[f"solution_01_{number}"] for number in (1, 2, 3))


def test_the_solutions_are_right():
    well_formed("01")


def without_memory(spans):
    """Forgets how far it has counted when one span lies inside another."""
    total, last = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, last))
        last = end
    return total


@pytest.mark.parametrize(
    ("answer", "outcome", "says"),
    [
        (lambda spans: sum(end - start for start, end in spans), "nearly", "counts twice"),
        (without_memory, "nearly", "inside another"),
        (
            lambda spans: max(e for _, e in spans) - min(s for s, _ in spans) if spans else 0,
            "wrong",
            "lists are off",
        ),
        (lambda spans: max(spans), "wrong", "ValueError"),
    ],
)
def test_busy_time(answer, outcome, says):
    verdict = check("01-1", answer)
    assert verdict.outcome == outcome and says in verdict.say


@pytest.mark.parametrize(
    ("answer", "outcome", "says"),
    [
        (lambda cpu, gpu: sum(map(max, cpu, gpu)), "nearly", "no launch run ahead"),
        (lambda cpu, gpu: max(sum(cpu), sum(gpu)), "nearly", "lower bound"),
        (lambda cpu, gpu: sum(cpu) + sum(gpu), "wrong", "steps are off"),
    ],
)
def test_queued_step(answer, outcome, says):
    verdict = check("01-2", answer)
    assert verdict.outcome == outcome and says in verdict.say


def forgets_one(rows, batch):
    return {mode: "GPU" if mode == "compiled" else side for mode, side in BOUND(rows, batch).items()}


@pytest.mark.parametrize(
    ("answer", "outcome", "says"),
    [
        (forgets_one, "nearly", "One mode is off"),
        (lambda rows, batch: dict.fromkeys(BOUND(rows, batch), "CPU"), "wrong", "cases are off"),
        (lambda rows, batch: {}, "wrong", "cases are off"),
    ],
)
def test_who_is_slower(answer, outcome, says):
    verdict = check("01-3", answer)
    assert verdict.outcome == outcome and says in verdict.say


@pytest.mark.parametrize(
    ("answer", "outcome", "says"),
    [
        (lambda layers: (layers, layers + 1), "nearly", "other order"),
        (lambda layers: (layers, layers), "nearly", "One graph off"),
        (lambda layers: (1, 0), "wrong", "recorded were"),
    ],
)
def test_count_launches(answer, outcome, says):
    verdict = check("01-4", answer)
    assert verdict.outcome == outcome and says in verdict.say
