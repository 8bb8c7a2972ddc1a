"""Later calls must look like the first one."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from cgkit.errors import TraceError
from cgkit.tracing import Arguments, trace
from tests.tracing.models import Mlp

X = torch.ones(2)


def forward(a, b=None, *rest, flag=True, size=1.0, **more): ...


def arguments(*args, **kwargs):
    return Arguments("Model", inspect.signature(forward), args, kwargs)


@pytest.mark.parametrize(
    ("first", "later"),
    [
        (((X,), {}), ((X, None), {})),
        (((X,), {}), ((), {"a": X})),
        (((X,), {}), ((X,), {"flag": True, "size": 1.0, "b": None})),
        (((X, X), {}), ((X,), {"b": X})),
        (((X, X, X), {}), ((X, X, X), {})),
        (((X,), {"other": X}), ((), {"other": X, "a": X})),
    ],
)
def test_calls_that_mean_the_same_are_accepted_twice(first, later):
    checked = arguments(*first[0], **first[1])
    for call in (first, later, later):
        checked.check(*call)


@pytest.mark.parametrize(
    ("first", "later", "message"),
    [
        (((X,), {}), ((X, X), {}), "'b' of Model was None when the model was traced and is a Tensor now"),
        (((X, X), {}), ((X,), {}), "'b' of Model was given when the model was traced and is None now"),
        (((X, X), {}), ((X, None), {}), "'b' of Model was given .* is None now"),
        (((X,), {}), ((X,), {"b": X}), "'b' of Model was None .* is a Tensor now"),
        (((X,), {"flag": False}), ((X,), {}), "'flag' of Model was False .* is True now"),
        (((X,), {}), ((X,), {"size": 2.0}), "'size' of Model was 1.0 .* is 2.0 now"),
        (((X,), {}), ((X,), {"flag": 1}), "'flag' of Model was True .* is 1 now"),
        (((X,), {"flag": 7}), ((X,), {"flag": X}), "'flag' of Model was 7 .* is tensor"),
        (((X,), {}), ((X,), {"other": X}), "without an argument 'other'"),
        (((X, X, X), {}), ((X, X), {}), r"'rest\[0\]' of Model was given .* is None now"),
        (((X, X), {}), ((X, X, X), {}), r"without an argument 'rest\[0\]'"),
    ],
)
def test_calls_that_do_not_fit_name_the_argument(first, later, message):
    checked = arguments(*first[0], **first[1])
    checked.check(*first)
    for _ in range(2):
        with pytest.raises(TraceError, match=message):
            checked.check(*later)


def test_a_call_that_no_forward_takes_is_a_type_error():
    with pytest.raises(TypeError):
        arguments(X).check((), {})


@pytest.mark.parametrize("dispatch", ["bytecode", "guard_filter"])
def test_none_and_not_none_through_a_model(dispatch):
    model = Mlp()
    without = trace(model, torch.randn(3, 8), dispatch=dispatch)
    x = torch.randn(3, 8)
    with pytest.raises(TraceError, match="'bias' of Mlp was None"):
        without(x, x)
    torch.testing.assert_close(without(x), model(x))
    given = trace(model, x, x, dispatch=dispatch)
    with pytest.raises(TraceError, match="'bias' of Mlp was given"):
        given(x)
    torch.testing.assert_close(given(x, x), model(x, x))


class Weighted(nn.Module):
    def forward(self, x: torch.Tensor, **more):
        for weight, each in enumerate(more.values(), start=1):
            x = x + weight * each
        return x


class Named(nn.Module):
    def forward(self, x: torch.Tensor, **more):
        return x + more["a"] + 2 * more["b"]


def test_the_order_of_keywords_counts_only_where_forward_goes_through_them():
    x, sizes = torch.ones(3, 2), {"x": 0, "a": 0, "b": 0}
    weighted = trace(Weighted(), x, a=x, b=3 * x, dynamic_arg_dims=sizes)
    torch.testing.assert_close(weighted(a=x, x=x, b=5 * x), 12 * x)
    for _ in range(2):
        with pytest.raises(TraceError, match=r"were a, b when the model was traced and are b, a now"):
            weighted(x, b=3 * x, a=x)
    named = trace(Named(), x, a=x, b=3 * x, dynamic_arg_dims=sizes)
    torch.testing.assert_close(named(x, b=5 * x, a=x), 12 * x)
