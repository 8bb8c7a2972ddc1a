"""From the lock on, replaying steps fetch no weights: right all the same, and only where that is possible."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import cgkit
from cgkit import BatchDescriptor, CompilationConfig, set_forward_context

CONFIG = CompilationConfig(compiler="eager", cudagraph_copy_inputs=False)


def shape_of_result(kind: str, x: torch.Tensor):
    return {
        "tensor": x,
        "tuple": (x, x + 1),
        "nested": {"a": [x, None], "b": (x * 2,)},
        "argument": (x,),
    }[kind]


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind, self.calls = nn.Linear(4, 4), kind, 0

    def forward(self, x: torch.Tensor) -> object:
        if self.kind == "number":
            self.calls += 1
            return self.linear(x)
        return shape_of_result(self.kind, self.linear(x))


@pytest.fixture
def made(request):
    model, x = Model(request.param), torch.randn(4, 4)
    compiled = cgkit.compile_pieces(cgkit.split_graph(cgkit.trace(model, x), []), CONFIG)
    captured = cgkit.capture(compiled, [4], mode="PIECEWISE", make_inputs=lambda n: x[:n])
    yield model, x, captured
    captured.free()


def bytecode_ran(captured, call) -> bool:
    entered = []
    code = captured.compiled.split.traced.code
    sys.setprofile(lambda frame, event, _: entered.append(frame.f_code is code))
    try:
        call()
    finally:
        sys.setprofile(None)
    return any(entered)


@pytest.mark.parametrize("made", ["tensor", "tuple", "nested", "argument"], indirect=True)
def test_the_result_is_the_models_without_its_bytecode(made):
    model, x, captured = made
    mode = cgkit.CUDAGraphMode.PIECEWISE
    for _ in range(2):
        x.copy_(torch.randn(4, 4))
        with torch.no_grad():
            model.linear.weight.mul_(0.5)  # in place: the graphs see it
            expected = model.forward(x)
        with set_forward_context(None, cudagraph_runtime_mode=mode, batch_descriptor=BatchDescriptor(4)):
            got = captured.run(x)
            assert not bytecode_ran(captured, lambda: captured.run(x))
        torch.testing.assert_close(got, expected)
    assert bytecode_ran(captured, lambda: captured.run(x))  # outside of a step: the usual way


@pytest.mark.parametrize("made", ["number"], indirect=True)
def test_bytecode_that_does_more_is_kept(made):
    model, x, captured = made
    model.calls, mode = 7, cgkit.CUDAGraphMode.PIECEWISE
    with set_forward_context(None, cudagraph_runtime_mode=mode, batch_descriptor=BatchDescriptor(4)):
        assert bytecode_ran(captured, lambda: captured.run(x))
    assert model.calls == 1  # written by the bytecode: the number of the trace, for no guard looks at it
