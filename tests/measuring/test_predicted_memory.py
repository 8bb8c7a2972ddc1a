"""The memory model of a plan against the prediction of the very list, on a small model."""

import itertools

import pytest
import torch

import cgkit
from cgkit.measuring.plan_sizes import plan_capture_sizes
from cgkit.measuring.pool_model import SEGMENT, PoolModel, predicted_memory
from cgkit.measuring.predict_pool import predict_pool
from tests.capturing.models import Layers, toy
from tests.measuring.test_predict_pool import runner

SIZES = (1, 16, 64, 300)
GPU_SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)


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


@pytest.mark.gpu
@torch.no_grad()
def test_on_a_gpu_a_planned_list_takes_no_more_than_the_plan_says():
    made = runner("llama-3.2-1b", "cuda", torch.bfloat16, GPU_SIZES, "inductor")
    model = predicted_memory(made.executor.compiled, GPU_SIZES, mode="PIECEWISE")
    cost = {1: (1.2, 6.0), 64: (1.4, 6.0)}
    arguments = {"memory": model, "mode": "PIECEWISE", "splits": 16, "candidates": GPU_SIZES}
    plan = plan_capture_sizes({1: 4, 7: 3, 30: 2, 60: 5}, cost, model.bytes(GPU_SIZES), 4 * 17, **arguments)
    assert 0 < len(plan.sizes) <= 4
    captured = cgkit.capture(
        made.executor.compiled,
        plan.sizes,
        mode="PIECEWISE",
        make_inputs=lambda n: (made.inputs.input_ids[:n], made.inputs.positions[:n]),
        context=lambda key: made.inputs.fill_dummy(key.num_tokens, key.uniform_decode),
    )
    assert captured.num_graphs == plan.graphs
    assert captured.pool_bytes.reserved <= plan.pool_bytes
