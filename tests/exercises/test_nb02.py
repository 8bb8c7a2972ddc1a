"""The checks of notebook 02: the solutions are right, and nearly right is told from wrong."""

import runpy
import types
from pathlib import Path

import pytest
import torch
from torch import nn

import cgkit
from cgkit import torch_hooks
from cgkit.exercises import check, exercises_of, nb02, solution

SOLUTIONS = runpy.run_path(str(Path(__file__).parents[2] / "notebooks" / "solutions" / "02.py"))


@pytest.mark.parametrize("id", [each.id for each in exercises_of("02")])
def test_the_solution_is_right(id):
    verdict = check(id, SOLUTIONS[f"solution_{id.replace('-', '_')}"])
    assert verdict, verdict
    assert "line" in solution(id)


def test_the_counter():
    answer = SOLUTIONS["solution_02_1"]
    assert check("02-1", {**answer, "torch.compile": 2}).outcome == "nearly"
    assert check("02-1", dict.fromkeys(answer, 7)).outcome == "wrong"
    assert "Not as measured" in check("02-1", {}).say


def test_what_is_noticed():
    answer = SOLUTIONS["solution_02_2"]
    off = check("02-2", {**answer, "model.norm.eps = 0.5": "followed"})
    assert off.outcome == "nearly" and "model.norm.eps" in off.say
    assert check("02-2", dict.fromkeys(answer, "followed")).outcome == "wrong"
    assert "'positions=None'" in check("02-2", {k: v for k, v in answer.items() if k != "positions=None"}).say
    assert nb02.SCALE == 2.0


def test_the_repaired_model():
    class AsksWhetherSmall(nn.Module):
        def forward(self, x: torch.Tensor):
            if x.shape[0] > 5000:
                return x
            scaled = x / (1 + torch.arange(x.shape[0]))[:, None]
            return scaled.view(-1, 2, 4).softmax(-1).view(-1, 8)

    class NotAtOne(nn.Module):
        def forward(self, x: torch.Tensor):
            scaled = x / (1 + torch.arange(x.shape[0]))[:, None]
            return scaled.view(-1, 2, 4).softmax(-1).view(-1, 8).squeeze(0)

    assert check("02-3", nb02.OneSize).outcome == "wrong"
    assert check("02-3", nn.Identity()).outcome == "wrong"
    small = check("02-3", AsksWhetherSmall)
    assert small.outcome == "nearly" and "5000" in small.say, small
    one = check("02-3", NotAtOne)
    assert one.outcome == "nearly" and "not at one" in one.say


def test_guards_put_back():
    def one_for_each_size(model):
        traces = {}

        def run(x):
            if x.shape[0] not in traces:
                traces[x.shape[0]] = cgkit.trace(model, x)
            return traces[x.shape[0]](x)

        return run

    assert check("02-4", one_for_each_size).outcome == "nearly"
    assert "LongOrShort" in check("02-4", lambda model: cgkit.trace(model, torch.ones(4, 8))).say
    assert "model itself" in check("02-4", lambda model: model).say


def compiled_code(model, x, remove=True):
    codes = []
    handle = torch_hooks.register_bytecode_hook(lambda old, new: codes.append(new))
    torch.compile(model.forward, fullgraph=True, backend="eager")(x)
    if remove:
        handle.remove()
    return codes[0], handle


def test_the_dispatcher():
    def keeps_the_class(model, x):
        type(model).forward.__code__ = compiled_code(model, x)[0]
        return model.forward

    handles = []

    def keeps_the_hook(model, x):
        code, handle = compiled_code(model, x, remove=False)
        handles.append(handle)
        run = types.FunctionType(code, type(model).forward.__globals__)
        return lambda x: run(model, x)

    assert check("02-5", keeps_the_class).outcome == "nearly"
    assert check("02-5", keeps_the_hook).outcome == "nearly"
    handles[0].remove()
    asks = check("02-5", lambda model, x: torch.compile(model.forward, backend="eager"))
    assert asks.outcome == "wrong" and "guard was asked" in asks.say
    assert check("02-5", lambda model, x: lambda x: x).outcome == "wrong"
    by_hand = check("02-5", lambda model, x: lambda x: x * model.weight)
    assert by_hand.outcome == "wrong" and "never compiled" in by_hand.say
    assert nb02.Switch("minus")(torch.full((1, 8), 3.0)).sum() == 8
