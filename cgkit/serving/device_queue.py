"""When device work runs, seen from the host: at once, later and announced by an event, or as late as possible.

A step is handed over as a piece of work that reads staging memory of the host and leaves tokens in other memory
of the host. On a GPU the work is launched and runs some time later, in order, on one stream. On a CPU it runs
at once, so nothing can ever go wrong there. :class:`LateQueue` is a CPU that behaves like the slowest of GPUs:
what was handed over runs when somebody waits for it and not before, so that memory which is written too early
*is* read too late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

#: Steps that may be on their way at once, hence staging areas and events: one runs while the next is prepared.
DEPTH = 2


class DeviceQueue(Protocol):
    """One stream of work. ``slot`` is below :data:`DEPTH`; each is waited for before it is marked again."""

    def submit(self, work: Callable[[], Any]) -> None:
        """Puts ``work`` behind what was submitted before."""

    def mark(self, slot: int) -> None:
        """Notes that everything submitted so far belongs to ``slot``."""

    def wait(self, slot: int) -> None:
        """Returns when what was submitted before ``mark(slot)`` is done."""


class DirectQueue:
    """The CPU as it is: work runs where it is submitted."""

    def submit(self, work: Callable[[], Any]) -> None:
        """Runs ``work``."""
        work()

    def mark(self, slot: int) -> None:
        """Nothing to note: it is done."""

    def wait(self, slot: int) -> None:
        """Nothing to wait for."""


class CudaQueue:
    """A GPU's current stream. ``work`` launches kernels and copies; an event tells when they are done."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._events = [torch.cuda.Event() for _ in range(DEPTH)]

    def submit(self, work: Callable[[], Any]) -> None:
        """Launches ``work``, which returns before it is done."""
        work()

    def mark(self, slot: int) -> None:
        """Records the slot's event."""
        self._events[slot].record()

    def wait(self, slot: int) -> None:
        """Waits for the slot's event."""
        self._events[slot].synchronize()


class LateQueue:
    """Runs nothing before somebody waits for it: what a test that wants to see a race hands to an engine.

    Attributes:
        submitted, done: pieces of work so far.
    """

    def __init__(self) -> None:
        self._queue: deque[Callable[[], Any] | int] = deque()
        self.submitted = self.done = 0

    def submit(self, work: Callable[[], Any]) -> None:
        """Keeps ``work`` for later."""
        self.submitted += 1
        self._queue.append(work)

    def mark(self, slot: int) -> None:
        """Puts a mark behind what is kept."""
        self._queue.append(slot)

    def wait(self, slot: int) -> None:
        """Runs what stands before the slot's mark, and no more."""
        while slot in self._queue:
            item = self._queue.popleft()
            if isinstance(item, int):
                if item == slot:
                    return
                continue
            item()
            self.done += 1


def queue_for(device: torch.device) -> DeviceQueue:
    """The queue of a device as it is."""
    return CudaQueue(device) if device.type == "cuda" else DirectQueue()
