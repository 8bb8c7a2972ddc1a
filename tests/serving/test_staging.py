"""Staging areas: what is sent is what stood there when it was sent, however late it is copied."""

import pytest
import torch

from cgkit.serving.device_queue import LateQueue
from cgkit.serving.input_batch import PersistentBuffers

CPU = torch.device("cpu")


def seen_by_the_device(areas, ahead, steps=6):
    """Writes n into the buffer at step n and sends it; the device copies ``ahead`` steps later. Returns what it had."""
    queue, seen = LateQueue(), []
    buffers = PersistentBuffers({"a": ((3,), torch.int64), "b": ((5,), torch.int32)}, CPU)
    addresses = [tensor.data_ptr() for tensor in buffers.tensors.values()]
    buffers.stage_in(areas, queue)
    for step in range(steps + ahead):
        if step < steps:
            buffers.host["a"][:], buffers.host["b"][:] = step, -step
            buffers.send()
            queue.submit(lambda: seen.append((buffers.tensors["a"].tolist(), buffers.tensors["b"].tolist())))
            queue.mark(step)
        if step >= ahead:
            queue.wait(step - ahead)
    assert addresses == [tensor.data_ptr() for tensor in buffers.tensors.values()]
    return seen


RIGHT = [([step] * 3, [-step] * 5) for step in range(6)]


@pytest.mark.parametrize(
    ("areas", "ahead", "right"), [(1, 0, True), (1, 1, False), (2, 1, True), (2, 2, False), (3, 2, True)]
)
def test_one_area_more_than_steps_ahead_is_needed_and_enough(areas, ahead, right):
    assert (seen_by_the_device(areas, ahead) == RIGHT) == right


def test_a_part_that_is_sent_leaves_the_rest():
    queue = LateQueue()
    buffers = PersistentBuffers({"a": ((3,), torch.int64), "b": ((5,), torch.int32)}, CPU)
    buffers.stage_in(2, queue)
    buffers.host["a"][:], buffers.host["b"][:] = 1, 2
    buffers.send(start=buffers.starts["b"])
    buffers.host["b"][:] = 3
    buffers.send(stop=buffers.starts["b"])
    queue.mark(0)
    queue.wait(0)
    assert buffers.tensors["a"].tolist() == [1] * 3 and buffers.tensors["b"].tolist() == [2] * 5


def test_what_stood_in_the_buffers_stays_when_areas_come():
    buffers = PersistentBuffers({"a": ((3,), torch.int64)}, CPU)
    buffers.host["a"][:] = 7
    buffers.send()
    buffers.stage_in(2, LateQueue())
    assert buffers.host["a"].tolist() == buffers.tensors["a"].tolist() == [7] * 3
    buffers.host["a"][:] = 8
    assert buffers.tensors["a"].tolist() == [7] * 3
