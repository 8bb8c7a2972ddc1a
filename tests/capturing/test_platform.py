import gc

import pytest
import torch

from cgkit.capturing import CUDAGraphWrapper, get_platform
from cgkit.capturing.emulated import EmulatedPlatform
from cgkit.capturing.platform import GraphPlatform, peak_bytes, reserved_bytes, session
from cgkit.config import CUDAGraphMode
from cgkit.errors import CaptureError, ConfigError
from cgkit.forward_context import BatchDescriptor, set_forward_context


def test_which_platform_answers():
    assert isinstance(get_platform("auto", "cpu"), EmulatedPlatform)
    assert isinstance(get_platform("emulated"), EmulatedPlatform)
    assert isinstance(get_platform("emulated", "cpu"), GraphPlatform)
    with pytest.raises(ConfigError, match=r"records on a GPU|needs a GPU"):
        get_platform("cuda", "cpu")
    with pytest.raises(ConfigError, match="repeats operators on the CPU"):
        get_platform("emulated", "cuda:0")
    with pytest.raises(ConfigError, match="'metal' is unknown"):
        get_platform("metal")


def test_a_platform_says_which_it_is():
    from cgkit.capturing.cuda import CudaPlatform

    assert repr(CudaPlatform("cuda:1")) == "CudaPlatform(cuda:1)"
    assert "no GPU" in repr(get_platform("emulated"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_cuda_is_refused_with_the_way_out():
    for arguments in (("cuda",), ("cuda", "cuda"), ("auto", "cuda")):
        with pytest.raises(ConfigError, match=r"needs a GPU.*use 'emulated' or 'auto'"):
            get_platform(*arguments)


def record(platform, pool, fn):
    with session(platform), torch.no_grad():
        fn()  # warm-up
        return platform.record(fn, pool)


def test_record_and_replay(device):
    platform = get_platform("auto", device)
    pool = platform.new_pool()
    x = torch.ones(256, device=device)
    graph, y = record(platform, pool, lambda: x * 2 + 1)
    for value in (3.0, 5.0):
        x.fill_(value)
        graph.replay()
        platform.synchronize()
        assert torch.equal(y, torch.full_like(x, 2 * value + 1))
    assert platform.pool_bytes(pool).reserved >= 1024
    assert reserved_bytes(platform, pool) > 0 and peak_bytes(platform, pool) > 0
    platform.free(pool)


def test_weak_references_only_of_what_lies_in_the_pool(device):
    platform = get_platform("auto", device)
    pool = platform.new_pool()
    x = torch.ones(2**20, device=device)
    graph, (inside, view) = record(platform, pool, lambda: (x * 2, x[1:]))
    allocated = platform.pool_bytes(pool).allocated
    weak = platform.weak_ref({"a": (inside.view(2, -1).T,), "b": [view], "c": 3}, pool)
    assert weak["b"][0] is view and weak["c"] == 3
    (alias,) = weak["a"]
    assert (
        alias.data_ptr() == inside.data_ptr() and alias.shape == (2**19, 2) and alias.stride() == (1, 2**19)
    )
    del inside
    gc.collect()
    assert platform.pool_bytes(pool).allocated <= allocated - 2**22  # the weak one owns nothing
    graph.replay()
    platform.synchronize()
    assert torch.equal(alias, torch.full_like(alias, 2.0))
    platform.free(pool)


def test_a_later_recording_reuses_what_only_weak_references_show(device):
    platform = get_platform("auto", device)
    pool = platform.new_pool()
    x = torch.ones(2**20, device=device)
    addresses = []
    for _ in range(3):
        _, y = record(platform, pool, lambda: x + 1)
        addresses.append(y.data_ptr())
        y = platform.weak_ref(y, pool)
    assert len(set(addresses)) == 1
    platform.free(pool)


@pytest.mark.gpu
def test_a_forbidden_call_leaves_the_process_usable():
    platform = get_platform("cuda")
    pool = platform.new_pool()
    x = torch.ones(8, device="cuda")
    wrapper = CUDAGraphWrapper(
        lambda t: (t * t.sum().item(),), CUDAGraphMode.FULL, platform, pool, name="reads"
    )
    with (
        set_forward_context(cudagraph_runtime_mode=CUDAGraphMode.FULL, batch_descriptor=BatchDescriptor(8)),
        pytest.raises(CaptureError, match="reads could not be recorded") as caught,
    ):
        wrapper(x)
    cause = caught.value.__cause__
    assert isinstance(cause, RuntimeError) and "when stream is capturing" in str(cause), repr(cause)
    del caught, cause
    torch.cuda.synchronize()
    assert not torch.cuda.is_current_stream_capturing()
    kept = record(platform, pool, lambda: x * 3)
    torch.cuda.manual_seed(3)
    drawn = torch.rand(8, device="cuda")
    for _ in range(2):  # twice: each refused capture spoils one of the allocator's ids
        with pytest.raises(RuntimeError, match="when stream is capturing"):
            platform.record(lambda: x * x.sum().item(), pool)
        torch.cuda.manual_seed(3)  # the generator does not believe in a capture under way
        assert torch.equal(torch.rand(8, device="cuda"), drawn)
        graph, y = record(platform, pool, lambda: x * 2)
        pinned = torch.ones(8).pin_memory()  # the allocator of pinned memory works on too
        graph.replay()
        platform.synchronize()
        assert torch.equal(y, torch.full_like(x, 2.0)) and torch.equal(pinned.cuda(), x)
        assert platform.pool_bytes(pool).reserved >= platform.quick_reserved_bytes(pool) > 0
    kept[0].replay()
    platform.synchronize()
    assert torch.equal(kept[1], torch.full_like(x, 3.0))
    assert platform.weak_ref(kept[1], pool) is not kept[1]  # what lies under the old id is the pool's still
    del kept, graph, y
    platform.free(pool)
    torch.cuda.empty_cache()
    assert platform.pool_bytes(pool).reserved == 0


@pytest.mark.gpu
def test_nodes_can_be_counted_where_graphs_are_kept():
    pytest.importorskip("cuda.bindings.runtime")
    from cgkit.capturing.cuda import CudaPlatform

    platform = CudaPlatform(keep_graphs=True)
    pool = platform.new_pool()
    x = torch.ones(8, device="cuda")
    graph, _ = record(platform, pool, lambda: torch.sin(x * 2))
    assert graph.num_nodes() == 2
    graph.replay()
    platform.free(pool)
    assert get_platform("cuda").record(lambda: x + 1, get_platform("cuda").new_pool())[0].num_nodes() is None


@pytest.mark.gpu
def test_recordings_do_not_nest():
    platform = get_platform("cuda")
    pool = platform.new_pool()
    x = torch.ones(8, device="cuda")
    with pytest.raises(CaptureError, match="do not nest"):
        platform.record(lambda: platform.record(lambda: x + 1, pool), pool)
