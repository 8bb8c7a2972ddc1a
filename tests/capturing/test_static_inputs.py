import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cgkit.capturing import StaticInputs
from cgkit.capturing.static_inputs import Call, as_call
from cgkit.errors import CaptureError, ReplayError


def inputs(make, dims, largest=8, **options):
    def dims_of(args, kwargs):
        return {id(arg): dim for arg, dim in zip((*args, *kwargs.values()), dims)}

    return StaticInputs(make, dims_of, Call, largest, **options)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6))
def test_buffers_stay_and_hold_exactly_the_last_call(counts):
    made = inputs(lambda n: (torch.zeros(n, 3), torch.zeros(2, n, dtype=torch.long)), [(0,), (1,)])
    addresses = {tensor.data_ptr() for tensor in made.at(8).args}
    for count in counts:
        size = min(s for s in (1, 2, 4, 8) if s >= count)
        x, ids = torch.randn(count, 3), torch.randint(1, 9, (2, count))
        assert made.num_tokens((x, ids), {}) == count
        (a, b), _ = made.fill(size, made.tensors((x, ids), {}))
        assert {a.data_ptr(), b.data_ptr()} == addresses  # every size begins where the largest does
        assert a.shape == (size, 3) and b.shape == (2, size) and b.is_contiguous()
        assert torch.equal(a[:count], x) and torch.equal(b[:, :count], ids)
        assert not a[count:].any() and not b[:, count:].any()


def test_static_tensors_are_copied_and_unread_ones_are_left_alone():
    unread = torch.zeros(2)
    made = StaticInputs(
        lambda n: (torch.zeros(n), torch.zeros(3), unread),
        lambda args, kwargs: {id(args[0]): (0,), id(args[1]): ()},
        Call,
        4,
    )
    (_, static, other), _ = made.fill(2, made.tensors((torch.ones(2), torch.full((3,), 5.0), None), {}))
    assert torch.equal(static, torch.full((3,), 5.0)) and other is unread


def test_what_make_inputs_may_return():
    x = torch.zeros(1)
    assert as_call(x) == Call((x,), {})
    assert as_call((x, 3)) == Call((x, 3), {})
    assert as_call({"x": x}) == Call((), {"x": x})
    assert as_call(Call((x,), {"y": 1})) == Call((x,), {"y": 1})


def test_nothing_dynamic_is_refused():
    with pytest.raises(CaptureError, match="no argument of the model has a dynamic dimension"):
        inputs(lambda n: (torch.zeros(3),), [()])


def test_another_structure_for_another_size_is_refused():
    made = inputs(lambda n: (torch.zeros(n),) if n == 8 else (), [(0,)])
    with pytest.raises(CaptureError, match=r"make_inputs\(2\) is built otherwise than make_inputs\(8\)"):
        made.at(2)


def test_a_missing_or_wrong_argument_is_named():
    made = inputs(lambda n: (torch.zeros(n), torch.zeros(n)), [(0,), (0,)])
    with pytest.raises(ReplayError, match=r"expected at args\[0\], args\[1\]"):
        made.tensors((torch.zeros(2),), {})
    with pytest.raises(ReplayError, match=r"args\[1\] was a tensor at capture and is a int now"):
        made.tensors((torch.zeros(2), 3), {})
    with pytest.raises(ReplayError, match=r"args\[1\] is a torch.float32 tensor of shape \(3,\)"):
        made.fill(2, (torch.zeros(2), torch.zeros(3)))


def test_own_buffers_are_passed_through_and_restored():
    buffer = torch.arange(8.0)
    made = inputs(lambda n: buffer[:n], [(0,)], copy_inputs=False)
    (view,), _ = made.at(4)
    assert view.data_ptr() == buffer.data_ptr()
    buffer.fill_(float("nan"))
    made.restore()
    assert torch.equal(buffer, torch.arange(8.0))
