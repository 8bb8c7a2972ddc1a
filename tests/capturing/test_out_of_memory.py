"""Memory runs out while recording: everything is freed, and the message helps."""

import re

import pytest
import torch

from cgkit.capturing import capture
from cgkit.capturing.captured import _alive
from cgkit.capturing.emulated import EmulatedPlatform
from cgkit.capturing.out_of_memory import requested_bytes, show_bytes
from cgkit.errors import CaptureError, CaptureOutOfMemoryError
from tests.capturing.fakes import FakePlatform, out_of_memory
from tests.capturing.models import Layers, Toy, toy

CUDA_TEXT = "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 1.00 GiB\nmore"


def test_after_two_sizes():
    made = toy("cpu")
    platform = FakePlatform(fail_after=7, error=out_of_memory(CUDA_TEXT))
    alive = len(_alive)
    with pytest.raises(CaptureOutOfMemoryError) as caught:
        capture(made, [1, 2, 4, 8], platform=platform)
    message = str(caught.value)
    for part in (
        "recording 2 tokens in mode PIECEWISE",
        "2 of the planned recordings were complete",
        "the graphs' pool held 7.0 KiB and 2.0 MiB more were asked for",
        "cudagraph_capture_sizes=[4, 8]",
    ):
        assert part in message
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert caught.value.__cause__.__traceback__ is None  # its frames would keep the tensors
    assert len(platform.freed) == 1 and len(_alive) == alive
    assert not made.lock.locked
    x = torch.randn(2, 8)
    assert torch.equal(made(x), Toy()(x))
    assert torch.equal(capture(made, [4, 8])(x)[:2], Toy()(x))


def test_at_the_largest_size_the_message_estimates_what_would_fit():
    platform = FakePlatform(fail_after=1, error=out_of_memory("Tried to allocate 3.00 KiB"))
    platform.free_bytes = lambda: 1024
    with pytest.raises(CaptureOutOfMemoryError, match=r"4 tokens would fit \(an estimate\)"):
        capture(toy("cpu"), [1, 2, 4, 8], platform=platform)
    platform = FakePlatform(fail_after=0, error=out_of_memory("no numbers"))
    with pytest.raises(CaptureOutOfMemoryError, match="Not even the largest size fitted: use sizes below 8"):
        capture(toy("cpu"), [1, 8], platform=platform)


def test_in_the_second_mode_the_first_is_named():
    platform = FakePlatform(fail_after=6, error=out_of_memory("x"))
    with pytest.raises(CaptureOutOfMemoryError, match="What fitted: cudagraph_mode='PIECEWISE' alone"):
        capture(toy("cpu"), [1, 2], mode="FULL_AND_PIECEWISE", platform=platform)


def test_the_emulated_pool_has_a_limit():
    made = toy("cpu", Layers(2, 256), width=256)
    needed = capture(made, [8, 64]).pool_bytes.reserved
    with pytest.raises(CaptureOutOfMemoryError, match=re.escape("recording 64 tokens")):
        capture(made, [8, 64], platform=EmulatedPlatform(limit_bytes=needed // 3))
    captured = capture(made, [8, 64], platform=EmulatedPlatform(limit_bytes=needed))
    x = torch.randn(8, 256)
    assert torch.equal(captured(x), made(x))


@pytest.mark.gpu
def test_on_a_gpu_the_process_works_on():
    made = toy("cuda", Layers(2, 1024), width=1024)
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(max(free - 64 * 2**20, 0), dtype=torch.uint8, device="cuda")
    with pytest.raises(CaptureOutOfMemoryError):
        capture(made, [2**15, 2**16])
    del hog
    torch.cuda.empty_cache()
    x = torch.randn(3, 1024, device="cuda")
    captured = capture(made, [4])
    torch.testing.assert_close(captured(x), made(x))


def test_cuda_itself_may_refuse():
    refused = torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'")
    platform = FakePlatform(fail_after=1, error=refused)
    with pytest.raises(CaptureOutOfMemoryError, match="CUDA error: out of memory"):
        capture(toy("cpu"), [1, 2], platform=platform)
    other = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(CaptureError) as caught:
        capture(toy("cpu"), [1, 2], platform=FakePlatform(fail_after=1, error=other))
    assert not isinstance(caught.value, CaptureOutOfMemoryError)


def test_reading_what_was_asked_for():
    assert requested_bytes(out_of_memory(CUDA_TEXT)) == 2 * 2**20
    assert requested_bytes(ValueError("nothing")) is None
    shown = [show_bytes(n) for n in (5, 2048, 3 * 2**20, 2**30)]
    assert shown == ["5 bytes", "2.0 KiB", "3.0 MiB", "1.0 GiB"]
