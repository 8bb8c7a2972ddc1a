"""Models written to break the road: each call is right, or refused with a named cause; never silently wrong.

Without ``debug=True`` some of what users do cannot be seen for free. Those are listed here, with what tells of them;
under it none may pass, and what was right must not be refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import cgkit
from cgkit.errors import WrongResultError
from tests.fuzz import moves
from tests.fuzz.programs import CALLS, CRASH, EQUAL, WRONG, draw, outcomes

#: What passes in silence without ``debug=True`` -> what says so.
SILENT = {
    "BranchOnSize": "doctor's dropped-guard",
    "BranchOnOne": "doctor's zero-one",
    "MeanOverTokens": "doctor's mixed-rows",
    "WritesX": "debug only: arguments that share memory, written in place",
    "WritesY": "debug only: arguments that share memory, written in place",
    "Counts": "doctor's frozen-number",
    "Raises": "doctor's dropped-guard",
    "Sums": "doctor's mixed-rows",
}
#: Tried in every run; the others when there is time.
QUICK = ("BranchOnOne", "MeanOverTokens", "WritesX", "Counts", "InputsAndMore", "AsEighths")
CAUSES = {
    "BranchOnOne": "no guard",
    "MeanOverTokens": "padded with",
    "WritesX": "share memory",
    "Counts": "steps",
}
NAMES = [cls.__name__ for cls in (*moves.MOVES, *moves.ENDS)]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Guards that fail and make no difference are logged, hundreds of times."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def program(name: str) -> tuple[list[type[nn.Module]], type[nn.Module]]:
    cls = getattr(moves, name)
    return ([cls], moves.Itself) if issubclass(cls, moves.Move) else ([moves.Plain], cls)


def bad(found: dict[str, str], *kinds: str) -> dict[str, str]:
    return {name: outcome for name, outcome in found.items() if outcome.startswith(kinds)}


def try_both_ways(name: str, mode: str) -> tuple[dict[str, str], dict[str, str]]:
    plain = outcomes(*program(name), cudagraph_mode=mode)
    assert not bad(plain, CRASH)
    assert bool(bad(plain, WRONG)) <= (name in SILENT), bad(plain, WRONG)
    checked = outcomes(*program(name), cudagraph_mode=mode, debug=True)
    assert not bad(checked, CRASH, WRONG)
    assert set(checked) == set(plain)
    refused = {call: checked[call] for call in plain if plain[call] == EQUAL and checked[call] != EQUAL}
    if bad(plain, WRONG):
        refused.pop("recording", None)  # of sizes that would be wrong: refused before one of them is served
    assert not refused, "debug refuses what is right"
    return plain, checked


@pytest.mark.parametrize("name", QUICK)
def test_a_move_that_is_hard_on_graphs(name):
    """The list above is no wish: what is in it is wrong without a word, and debug names the cause."""
    plain, checked = try_both_ways(name, "PIECEWISE")
    assert bool(bad(plain, WRONG)) == (name in SILENT)
    said = [outcome for outcome in checked.values() if "WrongResultError" in outcome]
    assert bool(said) == (name in SILENT)
    assert all(CAUSES[name] in outcome for outcome in said), said


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_move_and_every_end():
    for name in NAMES:
        try_both_ways(name, "PIECEWISE")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_silent_moves_and_every_end_in_one_graph():
    for name in dict.fromkeys([*SILENT, *(cls.__name__ for cls in moves.ENDS)]):
        assert not bad(outcomes(*program(name), cudagraph_mode="FULL", debug=True), CRASH, WRONG), name


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL", "FULL_AND_PIECEWISE", "NONE"])
def test_programs_by_chance(mode):
    for seed in range(3):
        parts = draw(f"{mode} {seed}")
        assert not bad(outcomes(*parts, cudagraph_mode=mode, debug=True), CRASH, WRONG), parts


@pytest.mark.parametrize(
    ("mode", "parts", "end", "call", "said"),
    [
        ("FULL", ["Counts"], "AsIntegers", "other values", "moves.0.steps"),
        ("NONE", ["BranchOnSize", "WritesY", "WritesBuffer"], "AsIntegers", "one", "The trace itself"),
        ("PIECEWISE", ["WritesX", "Random"], "InputsAndMore", "overlapping", "share memory"),
        ("FULL_AND_PIECEWISE", ["Random", "Attends"], "Sums", "padded", "padded with"),
        ("FULL_AND_PIECEWISE", ["MeanOverTokens"], "AsEighths", "padded", "padded with"),
        ("NONE", ["Raises", "Selects"], "Itself", "above", "assumption on sizes"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else str(value).replace(" ", "_"),
)
def test_what_once_passed_in_silence(mode, parts, end, call, said):
    """Found by other seeds: flags and numbers of one byte, random numbers beside a fault, an assertion of torch's."""
    found = outcomes(
        [getattr(moves, part) for part in parts], getattr(moves, end), cudagraph_mode=mode, debug=True
    )
    assert not bad(found, CRASH, WRONG)
    assert said in found[call], found[call]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["WritesX", "ViewsOfOne"])
def test_a_first_call_of_another_kind(name):
    """What the trace is made from decides what it is right for."""
    for first in (
        "one",
        "empty",
        "strided",
        "one tensor twice",
        "overlapping",
        "integers",
        "complex",
        "eighths",
    ):
        found = outcomes(*program(name), first=first, cudagraph_mode="PIECEWISE", debug=True)
        assert not bad(found, CRASH, WRONG), first


def test_the_fuzz_can_see_what_is_wrong(monkeypatch):
    """A replay that is off by one in one value is found by the fuzz, and refused under debug."""
    whole = cgkit.CapturedGraphs.__call__

    def off(self, *args, **kwargs):
        result = whole(self, *args, **kwargs)
        return (
            result.index_fill(0, torch.tensor([0]), 7.0)
            if isinstance(result, torch.Tensor) and len(result)
            else result
        )

    monkeypatch.setattr(cgkit.CapturedGraphs, "__call__", off)
    assert bad(outcomes([moves.Plain], moves.Itself, cudagraph_mode="PIECEWISE"), WRONG)
    checked = outcomes([moves.Plain], moves.Itself, cudagraph_mode="PIECEWISE", debug=True)
    assert not bad(checked, WRONG) and "WrongResultError" in checked["other values"]
    assert set(checked) <= {*CALLS, "recording"}


def test_a_call_beside_its_forward_leaves_the_model_as_it_was():
    @cgkit.support_torch_compile
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[int] = []
            self.scale = 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(x, 0.0, True) * self.scale

    config = cgkit.CompilationConfig(compiler="eager", cudagraph_mode="NONE", debug=True)
    model = Keeps(compilation_config=config)  # type: ignore[call-arg]
    x = torch.ones(3, 2)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert torch.equal(model(x), x * 2)
    assert torch.equal(state, torch.get_rng_state())
    model.scale = 3.0
    with pytest.raises(WrongResultError, match="a value that has changed since"):
        model(x)
    cgkit.reset()
