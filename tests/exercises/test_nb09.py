"""The exercises of notebook 09 tell right from nearly right and from wrong."""

import torch
from torch import nn

import cgkit
from cgkit.exercises import nb09
from tests.exercises.solved import check, pytest, solutions, well_formed

SOLVED = solutions("09")
CODES, Fixed, PIECES = (SOLVED[f"solution_09_{n}"] for n in (1, 2, 3))


def test_the_solutions_are_right():
    well_formed("09")


def test_the_last_patient_is_the_only_healthy_one():
    assert [name for name, codes in nb09.diagnoses().items() if not codes] == ["F"]
    named = set(CODES.values()) - {"none"}
    assert [len(named & set(codes)) for codes in nb09.diagnoses().values()] == [1, 1, 1, 1, 1, 0]


def test_the_suspect_is_wrong_in_several_pieces_and_bisect_names_the_first():
    model, inputs, options = nb09.suspect()
    assert cgkit.bisect(model, *inputs, **options).piece == nb09.guilty_pieces()[0]
    assert len(nb09.guilty_pieces()) == 3


class OnlyTheTable(Fixed):
    def __init__(self):
        super().__init__()
        del self.strength
        self.strength = 1.0

    def set_strength(self, number):
        self.strength = number


class OnlyTheNumber(Fixed):
    def load(self, values):
        self.table = values.clone()


class Borrows(Fixed):
    """Reads the caller's memory: right for as long as the caller leaves it alone."""

    def load(self, values):
        self.table.set_(values)


class WritesWhatItKeeps(Fixed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.strength.mul_(1)
        return super().forward(x)


class Another(nn.Module):
    def load(self, values):
        pass

    def set_strength(self, number):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def checked(same, result=lambda output: output.clone()):
    def make(replay, output, eager):
        def step():
            replay()
            if not same(output, eager()):
                raise ValueError("wrong")
            return result(output)

        return step

    return make


def close(**tolerances):
    return lambda one, other: torch.allclose(one, other, **tolerances)


def asserted(one, other):
    torch.testing.assert_close(one, other, rtol=1e-5, atol=0, equal_nan=True)
    return True


good = close(rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("id", "answer", "outcome", "says"),
    [
        ("09-1", {**CODES, "F": "buffer-write"}, "nearly", "Look at F"),
        ("09-1", {**CODES, "A": "graph-break", "C": "none"}, "wrong", "A (graph-break), C (none)"),
        ("09-1", {**CODES, "F": None}, "right", "harmless"),
        ("09-1", {}, "wrong", "0 of six"),
        ("09-2", OnlyTheTable, "nearly", "after set_strength gives"),
        ("09-2", OnlyTheNumber, "nearly", "after load gives"),
        ("09-2", WritesWhatItKeeps, "nearly", "buffer-write"),
        ("09-2", nb09.Gate, "wrong", "after load and after set_strength"),
        ("09-2", Another(), "wrong", "A class is asked for"),
        ("09-2", Another, "wrong", "Called by Python"),
        ("09-3", PIECES[:1], "nearly", "2 more"),
        ("09-3", PIECES[:2], "nearly", "is 1 more"),
        ("09-3", [*PIECES, "submod_0"], "wrong", "submod_0"),
        ("09-3", [], "wrong", "No piece"),
        ("09-4", checked(torch.equal), "nearly", "last bits"),
        ("09-4", checked(close(rtol=1e-5)), "nearly", "NaN at the same place"),
        ("09-4", checked(close(rtol=1e-2, equal_nan=True)), "nearly", "1.001"),
        ("09-4", checked(good, lambda output: output), "nearly", "overwrites"),
        ("09-4", checked(good, lambda output: None), "nearly", "does not return"),
        ("09-4", checked(asserted), "nearly", "AssertionError: a ValueError is asked for"),
        ("09-4", checked(lambda one, other: one + "x"), "wrong", "TypeError at `"),
        ("09-4", checked(lambda one, other: True), "wrong", "stale address"),
        ("09-4", lambda replay, output, eager: lambda: output, "wrong", "stale address"),
    ],
)
def test_nearly_right_and_wrong_answers(id, answer, outcome, says):
    verdict = check(id, answer)
    assert verdict.outcome == outcome and says in verdict.say, verdict
