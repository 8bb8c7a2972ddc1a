"""Which arguments are dynamic, read from annotations; explicit dims checked."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, Union

import pytest
import torch
from torch import Tensor, nn

from cgkit.errors import TraceError
from cgkit.tracing import infer_dynamic_arg_dims, normalise_dims, trace
from tests.tracing.models import Mlp

if TYPE_CHECKING:
    from somewhere import AlsoTensor, Config


@dataclasses.dataclass
class Fields:
    hidden: torch.Tensor
    count: int = 0


class IntermediateTensors:
    tensors: dict[str, Tensor]


class Settings:
    width: int
    name: str


# Strings throughout, because of `from __future__ import annotations`.
def strings(
    self,
    a: torch.Tensor,
    b: Tensor | None,
    c: Optional[torch.Tensor],  # noqa: UP045
    d: Union[torch.LongTensor, None],  # noqa: UP007
    e: list[torch.Tensor],
    f: dict[str, Tensor] | None,
    g: Annotated[torch.Tensor, "(tokens, width)"],
    h: Fields,
    i: IntermediateTensors | None,
    j: nn.Parameter,
    k: AlsoTensor,
    no_int: int,
    no_settings: Settings,
    no_literal: Literal["Tensor"],
    no_module: nn.Module,
    no_unknown: Config,
    no_any: Any,
    no_annotation,
    *rest: torch.Tensor,
    only: torch.Tensor | None = None,
    **kwargs: torch.Tensor,
): ...


def test_every_kind_of_annotation_as_string():
    yes = [*"abcdefghijk", "rest", "only"]
    assert infer_dynamic_arg_dims(strings) == dict.fromkeys(yes, (0,))


def test_annotations_as_objects():
    def forward(x, y, z): ...

    forward.__annotations__ = {"x": torch.FloatTensor, "y": Optional[Fields], "z": Settings}  # noqa: UP045
    assert infer_dynamic_arg_dims(forward) == {"x": (0,), "y": (0,)}


def test_a_bound_method_and_one_behind_a_wrapper():
    assert set(infer_dynamic_arg_dims(Mlp().forward)) == {"x", "bias"}

    @functools.wraps(Mlp.forward)
    def wrapper(*args, **kwargs): ...

    assert set(infer_dynamic_arg_dims(wrapper)) == {"x", "bias"}


def test_names_that_only_a_closure_knows():
    class Local:
        value: torch.Tensor

    def forward(x: Local):
        return Local

    assert infer_dynamic_arg_dims(forward) == {"x": (0,)}


SIGNATURE = inspect.signature(lambda x, y=None: None)


def test_explicit_dims_in_every_form():
    dims = normalise_dims(SIGNATURE, {"x": [0, -1, 0], "y": {1: "tokens"}})
    assert dims == {"x": (0, -1), "y": (1,)}
    assert normalise_dims(SIGNATURE, {"x": 0}) == {"x": (0,)}


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ({"z": 0}, "'z', which is not an argument of forward; it takes x, y"),
        ({"x": "0"}, "'0' is not a dimension"),
        ({"x": None}, "None is not a dimension"),
        ({"x": [1.5]}, "1.5, which is not a whole number"),
        ({"x": [True]}, "True, which is not a whole number"),
    ],
)
def test_bad_dims_are_refused_by_name(dims, message):
    with pytest.raises(TraceError, match=message):
        normalise_dims(SIGNATURE, dims)


def test_dims_that_the_tensor_does_not_have():
    with pytest.raises(TraceError, match=r"'x' dimension 2, but the tensor has shape \(3, 8\)"):
        trace(Mlp(), torch.randn(3, 8), dynamic_arg_dims={"x": 2})
    with pytest.raises(TraceError, match=r"'scale', but the first call gives it 0\.5, which holds no tensor"):
        trace(Mlp(), torch.randn(3, 8), scale=0.5, dynamic_arg_dims={"x": 0, "scale": 0})
    with pytest.raises(TraceError, match=r"calls two dimensions 't', but they have the sizes 3 and 8"):
        trace(Mlp(), torch.randn(3, 8), dynamic_arg_dims={"x": {0: "t", 1: "t"}})


def test_a_negative_dimension_is_marked():
    class Pool(nn.Module):
        def forward(self, x):
            return x.sum(-1)

    traced = trace(Pool(), torch.randn(3, 8), dynamic_arg_dims={"x": -1})
    (x,) = [graph_input for graph_input in traced.inputs if graph_input.kind == "argument"]
    assert x.dynamic_dims == (1,)
    data = torch.randn(3, 5)
    torch.testing.assert_close(traced(data), data.sum(-1))


def test_nothing_dynamic_must_be_said():
    class Plain(nn.Module):
        def forward(self, x):
            return x + 1

    with pytest.raises(TraceError, match=r"no argument of Plain.forward is annotated"):
        trace(Plain(), torch.randn(3))
    fixed = trace(Plain(), torch.randn(3), dynamic_arg_dims={})
    assert all(not graph_input.dynamic_dims for graph_input in fixed.inputs)
