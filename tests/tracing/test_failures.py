"""A model that cannot be traced: which line, why, what to do; and the process goes on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cgkit import compilation_counter, torch_hooks
from cgkit.errors import CgkitError, TraceError
from cgkit.tracing import failures, trace
from tests.tracing.models import Mlp


class Prints(nn.Module):
    def forward(self, x: torch.Tensor):
        print("x is", x)  # bad
        return x


class Branches(nn.Module):
    def forward(self, x: torch.Tensor):
        if x.sum() > 0:  # bad
            return x
        return x * 2


class FixesSize(nn.Module):
    def forward(self, x: torch.Tensor):
        return x.view(3, 8) + 1  # bad


class ComparesSize(nn.Module):
    def forward(self, x: torch.Tensor):
        return x if x.shape[0] == 3 else x + 1  # bad


class WrongShapes(nn.Module):
    def forward(self, x: torch.Tensor):
        return x @ torch.ones(3, 3)  # bad


class Raises(nn.Module):
    def forward(self, x: torch.Tensor):
        raise ValueError("not today")  # bad


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.prints = Prints()

    def forward(self, x: torch.Tensor):
        return self.prints(x) + 1


class Disabled(nn.Module):
    @torch.compiler.disable
    def forward(self, x: torch.Tensor):
        return x + 1


CASES = [
    (Prints, 'print("x is", x)', "print", "cgkit.register_op"),
    (Branches, "if x.sum() > 0:", "ata-dependent", "cgkit.register_op"),
    (FixesSize, "x.view(3, 8) + 1", "specialized", "leave that dimension out of dynamic_arg_dims"),
    (ComparesSize, "x.shape[0] == 3", "specialized", "leave that dimension out of dynamic_arg_dims"),
    (WrongShapes, "torch.ones(3, 3)", "reduction dim", "call the model eagerly"),
    (Raises, 'raise ValueError("not today")', "forward raises: ValueError('not today')", "eagerly"),
    (Inner, 'print("x is", x)', "print", "cgkit.register_op"),
]


@pytest.mark.parametrize("dispatch", ["bytecode", "guard_filter"])
@pytest.mark.parametrize(("cls", "line", "reason", "advice"), CASES, ids=[case[0].__name__ for case in CASES])
def test_the_line_the_reason_and_the_way_out(cls, line, reason, advice, dispatch, capfd):
    with pytest.raises(TraceError) as caught, compilation_counter.expect(num_graphs_seen=0):
        trace(cls(), torch.randn(3, 8), dispatch=dispatch)
    text = str(caught.value)
    assert f"{cls.__name__} cannot be traced" in text
    assert f"{__file__}:" in text and line in text
    assert reason in text and advice in text
    assert caught.value.__cause__ is not None
    assert torch_hooks.count_bytecode_hooks() == 0
    assert "Error while creating guard" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "shown",
    [
        "ValueError('not today')",
        "ValueError([ConstantVariable(str: 'not today')])",
        "ExceptionVariable(<class 'ValueError'>)([ConstantVariable(str: 'not today')])",
    ],
)
def test_an_exception_is_shown_as_it_was_raised(shown):
    assert failures._exception(shown) == "ValueError('not today')"


def test_a_second_good_model_works_after_a_bad_one():
    with pytest.raises(TraceError):
        trace(Branches(), torch.randn(3, 8))
    model = Mlp()
    traced = trace(model, torch.randn(3, 8))
    x = torch.randn(5, 8)
    torch.testing.assert_close(traced(x), model(x))


def test_forward_that_is_kept_from_dynamo():
    with pytest.raises(TraceError, match=r"Disabled[\s\S]*torch\.compiler\.disable"):
        trace(Disabled(), torch.randn(3, 8))


def test_dynamo_switched_off():
    with torch.compiler.set_stance("force_eager"), pytest.raises(TraceError, match="made no graph"):
        trace(Mlp(), torch.randn(3, 8))


def test_a_forward_that_computes_nothing():
    class Empty(nn.Module):
        def forward(self, x: torch.Tensor):
            return 3

    with pytest.raises(TraceError, match="Empty"):
        trace(Empty(), torch.randn(3, 8))


def test_a_forward_that_assigns_a_global():
    class Assigns(nn.Module):
        def forward(self, x: torch.Tensor):
            global _last_size
            _last_size = 7
            return x + 1

    with pytest.raises(TraceError, match="assigns the global _last_size"):
        trace(Assigns(), torch.randn(3, 8))


_last_size = 0


def test_unknown_dispatch_and_not_a_module():
    with pytest.raises(TraceError, match="dispatch='magic' is unknown; use 'bytecode' or 'guard_filter'"):
        trace(Mlp(), torch.randn(3, 8), dispatch="magic")
    with pytest.raises(TraceError, match="needs a module with a forward, got int"):
        trace(3, torch.randn(3, 8))


def test_a_call_that_forward_does_not_take():
    with pytest.raises(TypeError, match="nope"):
        trace(Mlp(), torch.randn(3, 8), nope=1)


def test_an_error_inside_the_backend_is_not_dressed_up(monkeypatch):
    def gone():
        raise torch_hooks.gone("side effects")

    monkeypatch.setattr(torch_hooks, "dynamo_side_effects", gone)
    with pytest.raises(CgkitError, match="has no side effects as cgkit knows it"):
        trace(Mlp(), torch.randn(3, 8))
