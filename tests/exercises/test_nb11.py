"""The exercises of notebook 11 tell right from nearly right and from wrong."""

import torch
from torch import nn

import cgkit
from cgkit.exercises import nb11
from tests.exercises.solved import check, pytest, solutions, well_formed

SOLVED = solutions("11")
RECORDS = SOLVED["solution_11_1"]


def test_the_solutions_are_right():
    well_formed("11")


@pytest.mark.parametrize(
    ("answer", "outcome", "says"),
    [
        (
            lambda n, sizes: {**RECORDS(n, sizes), "graphs": (n + 1) * len(sizes)},
            "nearly",
            "graphs, 2 layers",
        ),
        (lambda n, sizes: {**RECORDS(n, sizes), "pieces": n + 1}, "nearly", "pieces, 1 layers"),
        (lambda n, sizes: {}, "wrong", "you say None"),
        (lambda n: {}, "wrong", "TypeError"),
    ],
)
def test_predict_records(answer, outcome, says):
    verdict = check("11-1", answer)
    assert verdict.outcome == outcome and says in verdict.say, verdict


class Always(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.abs().max().clamp(min=1e-9)


class Zero(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0 + 7


@pytest.mark.parametrize(
    ("answer", "outcome", "says"),
    [
        (Always, "nearly", "small values"),
        (nb11.Clipped, "wrong", "graph-break"),
        (Zero, "wrong", "everywhere"),
    ],
)
def test_repair_branch(answer, outcome, says):
    verdict = check("11-2", answer)
    assert verdict.outcome == outcome and says in verdict.say, verdict


class InPlace(nn.Module):
    def forward(self, x: torch.Tensor, seen: torch.Tensor):
        seen += 1
        return x + seen, seen.clone()


class Forgets(nn.Module):
    def forward(self, x: torch.Tensor, seen: torch.Tensor):
        return x + 1, seen


@pytest.mark.parametrize(
    ("answer", "outcome", "says"), [(InPlace, "nearly", "in place"), (Forgets, "wrong", "not 1, 2, 3")]
)
def test_carry_count(answer, outcome, says):
    verdict = check("11-3", answer)
    assert verdict.outcome == outcome and says in verdict.say, verdict


def mean_of(x):
    mean = torch.empty_like(x)
    torch.ops.course11.running_mean(x, mean)
    return mean


@cgkit.support_torch_compile
class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return mean_of(x + 1) + mean_of(x + 1)


@cgkit.support_torch_compile
class FirstRow(nn.Module):
    """Adds what is zero only of one row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * mean_of(x + 1) + (x - x[:1])


@cgkit.support_torch_compile
class Unscaled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return mean_of(x + 1)


class Bare(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * mean_of(x + 1)


@cgkit.support_torch_compile
class NoOperator(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * (x + 1).cumsum(0) / torch.ones_like(x).cumsum(0)


@pytest.mark.parametrize(
    ("answer", "outcome", "says"),
    [
        (Twice, "nearly", "cut 2 times"),
        (FirstRow, "nearly", "[3, 5, 8]"),
        (Unscaled, "wrong", "At no size"),
        (NoOperator, "wrong", "holds no operator"),
        (Bare, "wrong", "not decorated"),
    ],
)
def test_build_running_mean(answer, outcome, says):
    verdict = check("11-4", answer)
    assert verdict.outcome == outcome and says in verdict.say, verdict
