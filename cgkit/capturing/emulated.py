"""The emulated platform: recorded graphs without a GPU. Same contract, same hazards, no speed.

The article's "录制与回放" (record and replay) needs a CUDA device. This platform keeps its contract on
any machine: recording runs nothing, replay repeats exactly what was recorded on exactly the
recorded addresses, and the pool's memory is shared. ``EMULATED.md`` beside this file says how.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from cgkit import recording, torch_hooks
from cgkit.capturing.emulated_layouts import Layouts
from cgkit.capturing.emulated_pool import EmulatedPool
from cgkit.capturing.emulated_recorder import EmulatedRecorder
from cgkit.capturing.emulated_tape import EmulatedGraph
from cgkit.capturing.pool_bytes import PoolBytes
from cgkit.errors import CaptureError
from cgkit.tensor_trees import map_tensors

T = TypeVar("T")


class EmulatedPlatform:
    """Implements ``GraphPlatform`` (``cgkit/capturing/platform.py``) on CPU tensors.

    Args:
        limit_bytes: each new pool refuses to reserve more than so many bytes; None: no limit.
    """

    name = "emulated"
    emulated = True

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self._layouts = Layouts()

    def new_pool(self) -> EmulatedPool:
        """An empty pool."""
        return EmulatedPool(self.limit_bytes)

    def record(self, fn: Callable[[], T], pool: EmulatedPool) -> tuple[EmulatedGraph, T]:
        """Calls ``fn`` once, recording what it would do to tensors, and doing nothing of it.

        Host code runs now and never again: Python numbers freeze. Random operators are recorded as
        calls, so that each replay draws new numbers. ``fn`` runs without gradients.

        Returns:
            The graph, and what ``fn`` returned: owning tensors in the pool that hold a sentinel
            (NaN, True, bytes of 0x5A) until the first replay.

        Raises:
            HostReadError: ``fn`` reads a value on the host; the message has the line.
            CaptureError: this thread already records; ``fn`` does what a graph cannot repeat.
            CaptureOutOfMemoryError: the pool cannot grow as needed.
            Whatever ``fn`` raises. In each case what this recording took is back in the pool.
        """
        if recording.active.recorder is not None:
            raise CaptureError("this thread is already recording a graph; a recording cannot hold another")
        recorder = EmulatedRecorder(pool, self._layouts)
        mark = pool.mark()
        inference = torch.is_inference_mode_enabled()
        casts_are_kept = torch.is_autocast_cache_enabled()
        recording.active.recorder = recorder
        # A cast of a weight that autocast kept from a recording would be a sentinel for eager code.
        torch.set_autocast_cache_enabled(False)
        try:
            with torch_hooks.modes_put_back(), torch.no_grad(), recorder:
                output = fn()
        except BaseException:
            pool.rollback(mark)
            raise
        finally:
            torch.set_autocast_cache_enabled(casts_are_kept)
            recording.active.recorder = None
        return EmulatedGraph(recorder.tape, pool, inference), output

    def weak_ref(self, value: T, pool: EmulatedPool) -> T:
        """``value`` with each tensor of the pool made non-owning: the next recording may reuse its
        memory. Tensors that lie elsewhere stay as they are."""
        with torch_hooks.without_dispatch_modes():
            return map_tensors(lambda _, tensor: pool.weak(tensor), value)

    def holds(self, tensor: torch.Tensor, pool: EmulatedPool) -> bool:
        """Whether the tensor's memory belongs to ``pool``."""
        return pool.holds(tensor)

    def pool_bytes(self, pool: EmulatedPool) -> PoolBytes:
        """Bytes that the pool reserves, and those of them that owning tensors occupy."""
        return pool.bytes()

    def peak_bytes(self, pool: EmulatedPool) -> int:
        """The most bytes that owning tensors occupied at once (``pool.reset_peak()`` begins anew)."""
        return pool.peak_allocated

    def begin_peak(self, pool: EmulatedPool) -> int:
        """Begins to look for the peak of one recording; returns what :meth:`end_peak` needs."""
        so_far = pool.peak_allocated
        pool.reset_peak()
        return so_far

    def end_peak(self, pool: EmulatedPool, so_far: int) -> int:
        """The most bytes occupied at once since :meth:`begin_peak`; the pool's own peak goes on."""
        inside = pool.peak_allocated
        pool.peak_allocated = max(so_far, inside)
        return inside

    def free(self, pool: EmulatedPool) -> None:
        """Gives the pool's memory back; replaying its graphs raises ReplayError from then on."""
        pool.free()

    def synchronize(self) -> None:
        """Nothing to wait for: replay returns when its work is done."""

    def __repr__(self) -> str:
        return "EmulatedPlatform(no GPU: same contract and hazards, no speed)"


__all__ = ["EmulatedGraph", "EmulatedPlatform", "EmulatedPool", "PoolBytes"]
