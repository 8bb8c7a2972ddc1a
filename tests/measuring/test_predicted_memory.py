"""The memory model of a plan against the prediction of the very list, on a small model."""

import itertools

import pytest

from cgkit.measuring.plan_sizes import plan_capture_sizes
from cgkit.measuring.pool_model import SEGMENT, PoolModel, predicted_memory
from cgkit.measuring.predict_pool import predict_pool
from tests.capturing.models import Layers, toy

SIZES = (1, 16, 64, 300)


@pytest.fixture(scope="module")
def compiled():
    return toy("cpu", Layers(3, 1024), width=1024)


@pytest.mark.parametrize("allocator", ["emulated", "cuda"])
def test_no_list_takes_more_and_all_up_to_a_size_take_just_that(compiled, allocator):
    arguments = {"mode": "PIECEWISE", "allocator": allocator}
    several = predicted_memory(compiled, SIZES, **arguments)
    one = PoolModel.of(predict_pool(compiled, SIZES, **arguments))
    for number in range(1, len(SIZES) + 1):
        for sizes in itertools.combinations(SIZES, number):
            predicted = predict_pool(compiled, sizes, **arguments).reserved_bytes
            assert predicted <= several.bytes(sizes) <= predicted + (allocator == "cuda") * SEGMENT, sizes
            assert one.bytes(sizes) >= predicted, sizes
            if sizes == SIZES[:number]:
                assert several.bytes(sizes) == predicted


def test_a_plan_from_a_prediction_keeps_its_budget(compiled):
    model = predicted_memory(compiled, SIZES, mode="PIECEWISE", allocator="cuda")
    budget = model.bytes([1, 16, 64])
    cost = {1: (1.0, 9.0), 300: (4.0, 9.0)}
    arguments = {"memory": model, "mode": "PIECEWISE", "splits": 3, "candidates": SIZES}
    plan = plan_capture_sizes({1: 5, 12: 4, 60: 3, 200: 5}, cost, budget, **arguments)
    assert plan.sizes and 300 not in plan.sizes
    predicted = predict_pool(compiled, plan.sizes, mode="PIECEWISE", allocator="cuda")
    assert predicted.reserved_bytes <= plan.pool_bytes <= budget
