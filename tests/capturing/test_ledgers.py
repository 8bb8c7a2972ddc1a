"""The ledgers: what they say after steps that were counted beside, and what counting costs a step."""

import dis
import warnings

import pytest
import torch

import cgkit
from cgkit.capturing import CaptureSizes, CudagraphDispatcher, capture
from cgkit.errors import CaptureError, CaptureLockedError, MovedInputError
from cgkit.forward_context import BatchDescriptor, set_forward_context
from tests.capturing.models import Layers, Toy, compiled, toy


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_steps_by_mode_and_the_keys_that_were_tried():
    captured = capture(toy("cpu"), [2, 4], mode="FULL_AND_PIECEWISE")
    for tokens in (1, 1, 3, 4, 9):
        captured(torch.zeros(tokens, 8))
    with set_forward_context(None, batch_descriptor=BatchDescriptor(3, True)):
        captured(torch.zeros(3, 8))
    ledgers = captured.ledgers
    assert ledgers.modes == {"FULL": 1, "PIECEWISE": 4, "NONE": 1} and ledgers.off_the_ladder == 1
    rows = {(row["num_tokens"], row["uniform_decode"]): row for row in ledgers.dispatch_rows()}
    assert {at: row["steps"] for at, row in rows.items()} == {
        (1, False): 2, (3, False): 1, (3, True): 1, (4, False): 1, (9, False): 1
    }  # fmt: skip
    assert rows[1, False]["num_padded_tokens"] == 2 and rows[1, False]["replayed_key"] == "(2, False)"
    assert rows[3, True]["keys_tried"] == "FULL(4, decode): taken"
    assert rows[9, False]["why_missed"] == "above the largest PIECEWISE size"
    assert "without a graph: 1 steps of 9 tokens" in repr(ledgers)
    assert ledgers.to_frame()["steps"].sum() == 6 and ledgers.modes_frame()["steps"].sum() == 6


def test_the_ledger_of_dispatch_by_hand_and_a_new_beginning():
    dispatcher = CudagraphDispatcher("PIECEWISE", CaptureSizes([2, 4]))
    dispatcher.initialize_cudagraph_keys()
    dispatcher.dispatch(BatchDescriptor(4))
    dispatcher.dispatch(BatchDescriptor(3))
    assert [(n, count) for n, _, count, _ in dispatcher.decisions()] == [(3, 1), (4, 1)]
    dispatcher.initialize_cudagraph_keys()
    assert dispatcher.decisions() == []


@pytest.mark.parametrize("negative", [-1, -4])
def test_a_count_below_zero_takes_no_route(negative):
    dispatcher = CudagraphDispatcher("PIECEWISE", CaptureSizes([2, 4]))
    dispatcher.initialize_cudagraph_keys()
    assert dispatcher.route(negative).key is None


def test_one_warning_when_traffic_falls_off_the_ladder():
    captured = capture(toy("cpu"), [2, 4])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        captured(torch.zeros(4, 8))
        assert not caught
        captured(torch.zeros(5, 8))
        captured(torch.zeros(6, 8))
    (warning,) = caught
    assert "a call of 5 tokens runs without a graph" in str(warning.message) and "end at 4" in str(
        warning.message
    )


def test_a_decode_batch_within_the_ladder_that_no_graph_serves():
    """vllm-ascend#16049: the size that a batch is padded to is larger than any decode batch, so it was not recorded."""
    dispatcher = CudagraphDispatcher("FULL_DECODE_ONLY", CaptureSizes([2, 4, 8]))
    dispatcher.initialize_cudagraph_keys(dispatcher.planned_keys(uniform_sizes=[2, 4]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert dispatcher.route(6, False).key is None  # prefill runs without a graph by design
        assert not caught
        assert dispatcher.route(6, True) == dispatcher.route(6, True)
    assert len(caught) == 1 and "a decode batch of 6 tokens" in str(caught[0].message)
    assert [(n, u, c) for n, u, c, _ in dispatcher.decisions()] == [(6, False, 1), (6, True, 2)]


def test_addresses_captured_and_replayed(device):
    buffer = torch.randn(4, 8, device=device)
    made = compiled(Layers(1).to(device), buffer, cudagraph_copy_inputs=False)
    captured = capture(made, [4], make_inputs=lambda n: buffer[:n])
    captured(buffer)
    ledgers = captured.ledgers
    rows = ledgers.address_rows()
    assert not ledgers.moved and {"submod_0", "submod_2", "weights"} == {row["graph"] for row in rows}
    assert [row["captured_at"] for row in rows if row["input"].startswith("'l_x_'")] == [buffer.data_ptr()]
    other = buffer.clone()
    for _ in range(2):
        with pytest.raises(MovedInputError):
            captured(other)
    (row,) = ledgers.moved
    assert (
        row["replayed_at"] == other.data_ptr()
        and row["captured_at"] == buffer.data_ptr()
        and row["moved"] == 2
    )
    weight = made.split.traced.wrapper.owner.layers[0].weight
    weight.data = weight.data.clone()
    moved = ledgers.moved[-1]
    assert moved["graph"] == "weights" and moved["replayed_at"] == weight.data_ptr()
    assert f"{other.data_ptr():#x}" in repr(ledgers) and set(ledgers.addresses_frame()) == set(row)


def test_what_came_after_the_lock():
    captured = capture(toy("cpu"), [2])
    wrapper = captured.pieces[0]
    context = set_forward_context(
        None, cudagraph_runtime_mode=captured.mode, batch_descriptor=BatchDescriptor(3)
    )
    assert captured.ledgers.after_lock == []
    with context, pytest.raises(CaptureLockedError):
        wrapper(3, torch.zeros(3, 8))
    captured.lock.locked = False
    with context:
        wrapper(3, torch.zeros(3, 8))
    (first, refused), (second, allowed) = captured.ledgers.after_lock
    assert first == second and "submod_0 would be recorded at (3, False)" in first
    assert (refused, allowed) == ("refused", "unlocked on purpose")
    assert list(captured.ledgers.after_lock_frame()["outcome"]) == [refused, allowed]
    again = capture(captured.compiled, [2])  # begins anew: recording is no surprise
    assert len(again.ledgers.after_lock) == 2


def test_whose_ledgers():
    @cgkit.support_torch_compile
    class Mine(Toy):
        pass

    model = Mine(
        compilation_config=cgkit.CompilationConfig(
            compiler="eager", splitting_ops=["cgkit::toy_attention"], cudagraph_capture_sizes=[2]
        )
    )
    model(torch.zeros(2, 8))
    captured = cgkit.capture_model(model)
    model(torch.zeros(2, 8))
    assert (
        cgkit.ledgers(model).modes == cgkit.ledgers(captured).modes == {"FULL": 0, "PIECEWISE": 1, "NONE": 0}
    )
    with pytest.raises(CaptureError, match="no recorded graphs"):
        cgkit.ledgers(3)
    bundle = captured.ledgers._repr_mimebundle_()
    assert "captured addresses" in bundle["text/html"] and "PIECEWISE" in bundle["text/html"]
    cgkit.reset()


def test_counting_is_one_addition():
    """What a step's question costs: no call, no allocation of a key, one in-place addition."""
    names = [i.opname for i in dis.get_instructions(CudagraphDispatcher.route)]
    handler = next(i for i, name in enumerate(names) if name == "RETURN_VALUE")
    straight = names[:handler]
    assert sum(name.startswith("CALL") for name in straight) == 0
    assert sum(name in ("BUILD_TUPLE", "BUILD_MAP", "BUILD_LIST") for name in straight) == 0
    assert len([name for name in straight if name not in ("RESUME", "NOP", "CACHE")]) <= 24
