"""What to say when memory runs out while recording.

The article's "显存账：CUDA Graph 的池化与每档成本" (the memory bill: pooling and what each size costs)
warns that capture is where start-up dies (vLLM #19186, #49224, #57475). The message says how far
it came, what was asked for, and which sizes would fit.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from cgkit.config import CUDAGraphMode
from cgkit.errors import CaptureOutOfMemoryError
from cgkit.forward_context import BatchDescriptor

_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out: the allocator's own error, the emulated pool's, or CUDA's.

    The driver needs memory of its own, for a stream or for an instantiated graph, and torch reports its
    refusal as a plain ``AcceleratorError``.
    """
    if isinstance(error, torch.OutOfMemoryError | CaptureOutOfMemoryError):
        return True
    return isinstance(error, torch.AcceleratorError) and "out of memory" in str(error)


def requested_bytes(error: BaseException) -> int | None:
    """What the allocator was asked for, as far as its message tells."""
    given = getattr(error, "requested_bytes", None)
    if given is not None:
        return int(given)
    match = re.search(r"[Tt]ried to allocate ([\d.]+) (\w+)", str(error))
    return int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else None


def show_bytes(count: int) -> str:
    """``count`` in the unit that suits it."""
    for unit in ("GiB", "MiB", "KiB"):
        if count >= _UNITS[unit]:
            return f"{count / _UNITS[unit]:.1f} {unit}"
    return f"{count} bytes"


def capture_out_of_memory(
    error: BaseException,
    failed: tuple[CUDAGraphMode, BatchDescriptor],
    done: Sequence[tuple[CUDAGraphMode, BatchDescriptor]],
    sizes: Sequence[int],
    pool_reserved: int,
    available: int | None,
) -> CaptureOutOfMemoryError:
    """The error for a capture that failed at ``failed`` after ``done`` were complete.

    ``pool_reserved``: bytes that the graphs' pool held; ``available``: what the device could still
    have given, None if unknown.
    """
    mode, key = failed
    asked = requested_bytes(error)
    needed = pool_reserved + (asked or 0)
    had = "" if available is None else f", the device had {show_bytes(available)} left"
    want = "" if asked is None else f" and {show_bytes(asked)} more were asked for"
    return CaptureOutOfMemoryError(
        f"out of memory while recording {key.num_tokens} tokens in mode {mode.name} "
        f"({len(done)} of the planned recordings were complete): the graphs' pool held "
        f"{show_bytes(pool_reserved)}{want} (at least {show_bytes(needed)} needed{had}). Everything "
        f"recorded was freed. {_way_out(failed, done, sizes, needed, pool_reserved, available)} "
        f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'})"
    )


def _way_out(
    failed: tuple[CUDAGraphMode, BatchDescriptor],
    done: Sequence[tuple[CUDAGraphMode, BatchDescriptor]],
    sizes: Sequence[int],
    needed: int,
    pool_reserved: int,
    available: int | None,
) -> str:
    mode, key = failed
    fitted = sorted({each.num_tokens for each_mode, each in done if each_mode is mode})
    if fitted:
        return f"What fitted: cudagraph_capture_sizes={fitted}"
    if done:
        other = done[0][0].name
        return f"What fitted: cudagraph_mode={other!r} alone, with all its sizes"
    room = pool_reserved + (available or 0)
    estimate = key.num_tokens * room // needed if needed else 0
    below = [size for size in sizes if size <= estimate and size < key.num_tokens]
    if below:
        return (
            f"In proportion to its size, {below[-1]} tokens would fit (an estimate): "
            f"cudagraph_capture_sizes up to {below[-1]}, or free memory first (a smaller KV cache)"
        )
    return (
        f"Not even the largest size fitted: use sizes below {key.num_tokens}, free memory first (a "
        "smaller KV cache), or cudagraph_mode='NONE'"
    )
