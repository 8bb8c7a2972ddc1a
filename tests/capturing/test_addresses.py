from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cgkit.capturing import WeightLedger
from cgkit.capturing.addresses import AddressReader
from cgkit.errors import MovedInputError
from cgkit.tensor_trees import tensor_leaves


@dataclass(slots=True)
class Slotted:
    table: torch.Tensor
    number: int = 3


class Plain:
    def __init__(self, inner):
        self.inner = inner
        self.text = "x"


# Structures whose leaves are new tensors each time they are drawn.
TENSORS = st.builds(lambda: torch.zeros(1))
VALUES = st.recursive(
    st.one_of(TENSORS, st.none(), st.integers()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from(["a", "layer.0", "it's"]), inner, max_size=2),
        st.builds(Plain, inner),
        st.builds(lambda x: SimpleNamespace(field=x), inner),
    ),
    max_leaves=6,
)


@given(VALUES)
def test_each_path_is_an_expression_that_reaches_its_tensor(value):
    leaves = list(tensor_leaves(value, "root"))
    for path, tensor in leaves:
        assert eval(path, {"root": value}) is tensor
    reader = AddressReader(["root"], [path for path, _ in leaves])
    assert reader.read(value) == tuple(tensor.data_ptr() for _, tensor in leaves)


def test_slots_modules_and_cycles():
    slotted = Slotted(torch.zeros(1))
    assert [path for path, _ in tensor_leaves(slotted, "m")] == ["m.table"]
    assert list(tensor_leaves(torch.nn.Linear(2, 2), "m")) == []
    loop = SimpleNamespace(tensor=torch.zeros(1))
    loop.self = loop
    assert {id(tensor) for _, tensor in tensor_leaves(loop, "m")} == {id(loop.tensor)}  # and it ends


def test_the_ledger_of_weights_notices_a_replaced_parameter():
    layer = torch.nn.Linear(2, 2)
    ledger = WeightLedger(lambda: list(layer.named_parameters()))
    with torch.no_grad():
        layer.weight.copy_(torch.ones(2, 2))
    ledger.check("toy")
    layer.bias = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(MovedInputError, match="toy: input bias was recorded at"):
        ledger.check("toy")
