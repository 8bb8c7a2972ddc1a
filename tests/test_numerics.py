"""Two results compared: what is rounding, what is memory that nobody wrote, and what is wrong."""

import pytest
import torch

from cgkit.numerics import first_apart, mark_unwritten

FP8 = torch.float8_e4m3fn


def test_a_flag_that_differs_is_not_taken_for_memory_that_nobody_wrote():
    expected, got = torch.tensor([True, True, False]), torch.tensor([True, False, False])
    for unwritten in (False, {torch.float32}):
        assert first_apart(expected, got, unwritten=unwritten).elements == 1
    assert first_apart(expected, got, unwritten={torch.bool}) is None
    assert first_apart(expected, ~expected, unwritten={torch.bool}).elements == 1  # False is nobody's mark


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.int8, FP8], ids=str)
def test_memory_that_nobody_wrote_may_hold_anything(dtype):
    expected = torch.ones(2, 2).to(dtype)
    mark_unwritten(expected[:1])
    got = torch.ones(2, 2).to(dtype)
    assert first_apart(expected, got, unwritten={dtype}) is None
    assert first_apart(expected, got) is not None
    got[1] = got[1].float().mul(3).to(dtype)
    assert first_apart(expected, got, unwritten={dtype}).elements == 2


@pytest.mark.parametrize("dtype", [FP8, torch.float8_e5m2], ids=str)
def test_rounding_of_one_byte_numbers_leads_to_the_next_one_at_most(dtype):
    numbers = torch.arange(128, dtype=torch.uint8).view(dtype)
    numbers = numbers[numbers.float().isfinite()]
    assert first_apart(numbers[:-1], numbers[1:]) is None
    assert first_apart(numbers[1:], numbers[:-1]) is None
    apart = first_apart(numbers[:-3], numbers[3:])
    assert apart.elements > 0.9 * (len(numbers) - 3) and "the next one" in str(apart)
    small = torch.tensor([[0.1, 200.0]]).to(dtype)  # beside a large number too
    assert first_apart(small, torch.tensor([[0.2, 200.0]]).to(dtype)).elements == 1
