import gc
from dataclasses import dataclass

import pytest
import torch

from cgkit import events
from cgkit.capturing import CUDAGraphOptions, CUDAGraphWrapper
from cgkit.counters import compilation_counter
from cgkit.errors import (
    CaptureError,
    CaptureLockedError,
    HostReadError,
    MovedInputError,
    ReplayError,
)
from cgkit.forward_context import BatchDescriptor, CaptureLock, set_forward_context
from tests.capturing.fakes import FakePlatform


def step(mode="PIECEWISE", tokens=4, uniform=False, metadata=None):
    from cgkit.config import CUDAGraphMode

    key = BatchDescriptor(tokens, uniform)
    return set_forward_context(metadata, cudagraph_runtime_mode=CUDAGraphMode[mode], batch_descriptor=key)


def wrap(fn, mode="PIECEWISE", **options):
    platform = FakePlatform()
    lock = CaptureLock("toy")
    wrapper = CUDAGraphWrapper(
        fn, mode, platform, platform.new_pool(), name="piece", lock=lock, options=CUDAGraphOptions(**options)
    )
    return wrapper, platform


def double(x):
    return (x * 2,)


def test_passes_through_outside_of_a_step_and_in_other_modes():
    wrapper, platform = wrap(double)
    x = torch.ones(4)
    assert torch.equal(wrapper(x)[0], x * 2)
    for mode in ("NONE", "FULL"):
        with step(mode):
            assert torch.equal(wrapper(x)[0], x * 2)
    assert platform.graphs == [] and wrapper.entries == {}


def test_records_once_a_key_and_replays_the_same_output_object():
    wrapper, platform = wrap(double)
    x = torch.ones(4)
    with compilation_counter.expect(num_cudagraph_captured=2):
        for _ in range(3):
            with step(tokens=4):
                first = wrapper(x)
            with step(tokens=2):
                wrapper(x[:2])
    assert [graph.replays for graph in platform.graphs] == [2, 2]
    x.fill_(5)
    with step(tokens=4):
        again = wrapper(x)
    assert again is first
    assert torch.equal(again[0], torch.full((4,), 10.0))


def test_uniform_decode_is_another_key():
    wrapper, platform = wrap(double)
    x = torch.ones(4)
    for uniform in (False, True, False):
        with step(tokens=4, uniform=uniform):
            wrapper(x)
    assert len(platform.graphs) == 2


def test_a_moved_input_raises_with_argument_piece_and_both_addresses():
    wrapper, _ = wrap(lambda x, y: (x + y,), arg_names=("hidden", "residual"))
    x, y = torch.ones(4), torch.ones(4)
    with step():
        wrapper(x, y)
    other = torch.ones(4)
    with step(), pytest.raises(MovedInputError) as caught:
        wrapper(x, other)
    message = str(caught.value)
    for part in ("piece", "'residual' (args[1])", hex(y.data_ptr()), hex(other.data_ptr())):
        assert part in message
    with step():
        wrapper(x, y)  # the entry is as it was


def test_only_the_checked_arguments_are_compared_unless_debugging():
    x, weight, other = torch.ones(4), torch.ones(4), torch.ones(4)
    wrapper, platform = wrap(lambda x, w: (x * w,), checked=(0,))
    with step():
        wrapper(x, weight)
        wrapper(x, other)
        assert platform.graphs[0].replays == 1
        with pytest.raises(MovedInputError):
            wrapper(other, weight)
    wrapper, _ = wrap(lambda x, w: (x * w,), checked=(0,), debug=True)
    with step():
        wrapper(x, weight)
        with pytest.raises(MovedInputError, match=r"args\[1\]"):
            wrapper(x, other)


@dataclass
class Batch:
    hidden: torch.Tensor
    extra: dict


def test_tensors_inside_arguments_are_found():
    wrapper, _ = wrap(lambda batch, *, scale: (batch.hidden * scale,))
    batch, scale = Batch(torch.ones(4), {"mask": torch.ones(4)}), torch.ones(4)
    with step():
        wrapper(batch, scale=scale)
        wrapper(Batch(batch.hidden, dict(batch.extra)), scale=scale)
        with pytest.raises(MovedInputError, match=r"args\[0\]\.extra\['mask'\]"):
            wrapper(Batch(batch.hidden, {"mask": torch.ones(4)}), scale=scale)
        with pytest.raises(MovedInputError, match=r"kwargs\['scale'\]"):
            wrapper(batch, scale=torch.ones(4))
        with pytest.raises(ReplayError, match="built otherwise"):
            wrapper(Batch(batch.hidden, {}), scale=scale)


def test_metadata_is_compared_only_where_it_was_recorded():
    metadata, moved = {"slots": torch.zeros(4)}, {"slots": torch.zeros(4)}
    x = torch.ones(4)
    whole, _ = wrap(double, "FULL", check_metadata=True)
    with step("FULL", metadata=metadata):
        whole(x)
    with step("FULL", metadata=moved), pytest.raises(MovedInputError, match=r"metadata\['slots'\]"):
        whole(x)
    piece, platform = wrap(double)
    with step(metadata=metadata):
        piece(x)
    with step(metadata=moved):
        piece(x)
    assert platform.graphs[0].replays == 1


def test_an_unseen_key_after_the_lock_raises():
    wrapper, platform = wrap(double)
    x = torch.ones(4)
    with step(tokens=4):
        wrapper(x)
    wrapper.lock.locked = True
    with step(tokens=2), pytest.raises(CaptureLockedError, match=r"piece would be recorded at \(2, False\)"):
        wrapper(x[:2])
    with step(tokens=4):
        wrapper(x)
    assert len(platform.graphs) == 1


def test_a_mode_without_a_key_is_refused():
    wrapper, _ = wrap(double)
    from cgkit.config import CUDAGraphMode

    with set_forward_context(cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE):
        with pytest.raises(ReplayError, match="batch_descriptor is None"):
            wrapper(torch.ones(4))


def test_a_wrapper_has_one_plain_mode():
    with pytest.raises(CaptureError, match="FULL_AND_PIECEWISE"):
        wrap(double, "FULL_AND_PIECEWISE")


def test_what_cannot_be_recorded_leaves_the_wrapper_as_it_was():
    fails = [True]

    def sometimes(x):
        if fails[0]:
            raise RuntimeError("operation not permitted when stream is capturing")
        return (x,)

    wrapper, _ = wrap(sometimes)
    x = torch.ones(4)
    with step(), pytest.raises(CaptureError, match="not permitted when stream is capturing") as caught:
        wrapper(x)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert wrapper.entries == {}
    fails[0] = False
    with step():
        wrapper(x)
    assert len(wrapper.entries) == 1


def test_our_own_errors_and_out_of_memory_pass_unchanged():
    def read(x):
        raise HostReadError("line 3")

    def grow(x):
        raise torch.OutOfMemoryError("no")

    for fn, kind in ((read, HostReadError), (grow, torch.OutOfMemoryError)):
        wrapper, _ = wrap(fn)
        with step(), pytest.raises(kind) as caught:
            wrapper(torch.ones(4))
        assert type(caught.value) is kind


def test_the_collector_is_off_while_recording_and_as_before_afterwards():
    seen = []

    def look(x):
        seen.append(gc.isenabled())
        return (x,)

    for disable in (True, False):
        wrapper, _ = wrap(look, gc_disable=disable)
        with step():
            wrapper(torch.ones(4))
        assert gc.isenabled()
    assert seen == [False, True]


def test_which_output_is_weak_when():
    for options, returned, kept in [
        ({}, "strong", "weak"),
        ({"weak_ref_output": True}, "weak", "weak"),
        ({"weak_outputs": False}, "strong", "strong"),
    ]:
        wrapper, platform = wrap(lambda x: ("strong",), **options)
        platform.weak_ref = lambda value, pool: ("weak",)
        with step():
            assert wrapper(torch.ones(1)) == (returned,)
        (entry,) = wrapper.entries.values()
        assert entry.output == (kept,)


def test_the_event_tells_key_time_and_the_pools_growth():
    wrapper, _ = wrap(double, "FULL")
    with events.record(events.GraphCaptured) as log, step("FULL", 4, True):
        wrapper(torch.ones(4))
    (event,) = log
    assert (event.name, event.mode, event.num_tokens, event.uniform_decode) == ("piece", "FULL", 4, True)
    assert (event.pool_reserved_before_bytes, event.pool_reserved_after_bytes) == (0, 1024)
    assert event.emulated and event.seconds >= 0
    row = wrapper.to_frame().iloc[0]
    assert row["pool_growth_bytes"] == 1024 and row["checked_inputs"] == 1


def test_clear_forgets_and_records_again():
    wrapper, platform = wrap(double)
    x = torch.ones(4)
    for _ in range(2):
        with step():
            wrapper(x)
        wrapper.clear()
    assert len(platform.graphs) == 2
