"""CUDA: non-owning tensors, the allocator's pools, the raw stream."""

from __future__ import annotations

from typing import Any

import torch

from cgkit.torch_hooks.versions import gone


def weak_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A CUDA tensor at the same address as ``tensor`` that does not own the memory.

    Two private constructors, those that torch's own CUDA graph trees use.

    Run on torch 2.11 (CUDA); 2.13 has them too.
    """
    storage = tensor.untyped_storage()
    metadata = {
        "nbytes": storage.nbytes(),
        "data_ptr": storage.data_ptr(),
        "size": tensor.shape,
        "stride": tensor.stride(),
        "dtype": tensor.dtype,
        "device": tensor.device,
        "storage_offset": tensor.storage_offset(),
    }
    try:
        make_storage = torch._C._construct_storage_from_data_pointer
        make_tensor: Any = torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata
    except AttributeError:
        raise gone("constructor of non-owning tensors") from None
    return make_tensor(metadata, make_storage(storage.data_ptr(), tensor.device, storage.nbytes()))


def pool_segments(pool: tuple[int, int]) -> list[tuple[int, int, int]]:
    """The segments of one CUDA memory pool: (address, total bytes, allocated bytes) each.

    ``torch.cuda.memory_snapshot`` filters by pool where it can; the key ``segment_pool_id``, which is
    not documented, makes sure. Run on torch 2.11 (CUDA); 2.13 has both.
    """
    return [(each["address"], each["total_size"], each["allocated_size"]) for each in _segments_of(pool)]


def _segments_of(pool: tuple[int, int]) -> list[dict[str, Any]]:
    try:
        segments = torch.cuda.memory_snapshot(pool)
    except TypeError:  # older: no such parameter
        segments = torch.cuda.memory_snapshot()
    if any("segment_pool_id" not in segment for segment in segments):
        raise gone("segment_pool_id in torch.cuda.memory_snapshot()")
    return [segment for segment in segments if tuple(segment["segment_pool_id"]) == tuple(pool)]


def pool_blocks(pool: tuple[int, int]) -> list[tuple[int, int, bool, list[tuple[int, bool]]]]:
    """The segments of one CUDA memory pool with their blocks, by address: (address, total bytes, whether it is
    of the small kind, [(bytes, in use) ...]).

    A block in use keeps the memory from being given out again, be it only until a stream has passed.
    Run on torch 2.11 (CUDA); 2.13 has the same keys.
    """
    found = []
    for segment in _segments_of(pool):
        blocks = [(block["size"], block["state"] != "inactive") for block in segment["blocks"]]
        found.append((segment["address"], segment["total_size"], segment["segment_type"] == "small", blocks))
    return sorted(found)


def end_failed_capture(device: int, pool: tuple[int, int]) -> bool:
    """Stops the allocator from feeding ``pool`` after a stream capture that CUDA refused to begin or end.

    ``CUDAGraph`` raises before it does so itself; the allocator would then believe for ever that a capture
    is under way. True if it did: the pool then counts one user more than it has, see :func:`release_pool`.
    Run on torch 2.11 (CUDA); 2.13 has it too.
    """
    stop: Any = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if stop is None:
        raise gone("torch._C._cuda_endAllocateToPool")
    try:
        stop(device, pool)
    except RuntimeError:  # the pool was not being fed: torch came so far itself
        return False
    return True


def end_generator_capture(device: int) -> None:
    """Lets the default generator of a device draw again after a stream capture that CUDA refused to end.

    ``CUDAGraph.capture_end`` raises before it tells the generator that the capture is over, and every later draw of
    the process then fails ("Offset increment outside graph capture"). A recording that succeeds tells it. Call it on
    a stream that may be captured. Run on torch 2.11 (CUDA).
    """
    number = torch.zeros(1, device=f"cuda:{device}")
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    number.zero_()
    graph.capture_end()
    graph.reset()


def release_pool(device: int, pool: tuple[int, int]) -> None:
    """Takes one user from a pool of the allocator, as ``CUDAGraph.reset`` does.

    A pool without users is never used again, so this comes last. Run on torch 2.11 (CUDA); 2.13 has it too.
    """
    torch._C._cuda_releasePool(device, pool)


def current_raw_stream(device_index: int) -> int:
    """The address of a device's current CUDA stream; by the public way where torch has no quicker one.

    Run on torch 2.11 (CUDA); 2.13 has it too.
    """
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw(device_index) if raw is not None else torch.cuda.current_stream(device_index).cuda_stream


def device_sleep(cycles: int) -> None:
    """Keeps the current CUDA stream busy for so many of the device's cycles; the host goes on.

    Run on torch 2.11 (CUDA).
    """
    torch.cuda._sleep(cycles)


def clear_cublas_workspaces() -> None:
    """Gives the workspaces of cuBLAS back to the allocator, as CUDAGraph Trees do before they record.

    Run on torch 2.11 (CUDA).
    """
    torch._C._cuda_clearCublasWorkspaces()
