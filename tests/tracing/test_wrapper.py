"""The article's dispatcher on one instance."""

from __future__ import annotations

import pytest
import torch

from cgkit import torch_hooks
from cgkit.errors import TraceError
from cgkit.tracing import TorchCompileWrapperWithCustomDispatcher
from tests.tracing.models import Branchy, Mlp


def test_the_first_call_compiles_and_later_ones_skip_the_guards():
    wrapper = TorchCompileWrapperWithCustomDispatcher(Branchy(), "eager")
    assert wrapper(torch.ones(4)).tolist() == [2.0] * 4
    assert wrapper(torch.ones(3)).tolist() == [2.0] * 3  # wrong on purpose: eager says 100
    assert len(wrapper.compiled_codes) == 1
    assert wrapper.compiled_codes[0] is not wrapper.original_code_object


def test_with_guards_dynamo_compiles_a_second_code_and_both_can_be_chosen():
    wrapper = TorchCompileWrapperWithCustomDispatcher(Branchy(), "eager")
    with wrapper.hooked():
        assert wrapper.compiled_callable(torch.ones(4)).tolist() == [2.0] * 4
        assert wrapper.compiled_callable(torch.ones(3)).tolist() == [100.0] * 3
    assert len(wrapper.compiled_codes) == 2
    x = torch.ones(2)
    with wrapper.dispatch_to_code(0):
        assert wrapper.forward(x).tolist() == [2.0] * 2
        with wrapper.dispatch_to_code(1):
            assert wrapper.forward(x).tolist() == [100.0] * 2
        assert wrapper.forward(x).tolist() == [2.0] * 2
    assert wrapper.forward(x).tolist() == [100.0] * 2  # the model itself


def test_dispatching_leaves_the_class_alone():
    code = Mlp.forward.__code__
    model, other = Mlp(1), Mlp(3)
    wrapper = TorchCompileWrapperWithCustomDispatcher(model, "eager")
    x = torch.randn(2, 8)
    expected = other(x)
    wrapper(x)
    with wrapper.dispatch_to_code(0):
        assert Mlp.forward.__code__ is code
        torch.testing.assert_close(other(x), expected)


def test_hook_sees_only_its_own_instance():
    first, second = (TorchCompileWrapperWithCustomDispatcher(Mlp(1), "eager") for _ in range(2))
    x = torch.randn(2, 8)
    with first.hooked():
        second(x)
    assert (len(first.compiled_codes), len(second.compiled_codes)) == (0, 1)
    assert torch_hooks.count_bytecode_hooks() == 0


def test_a_compilation_that_does_not_exist():
    wrapper = TorchCompileWrapperWithCustomDispatcher(Mlp(), "eager")
    with pytest.raises(TraceError, match="no compilation 0: 0 were made"), wrapper.dispatch_to_code(0):
        pass
