"""What one step tells everything below it, and the lock that ends capturing.

Implements the article's "BatchDescriptor 与 forward context：回放 key 的设计" (BatchDescriptor and
forward context: the design of the replay key). The dispatcher decides once per step; wrappers read
the decision here and trust it.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from cgkit.config import CUDAGraphMode
from cgkit.errors import CaptureLockedError, CgkitError


class BatchDescriptor(NamedTuple):
    """The replay key: two batches with equal descriptors can share a recorded graph.

    ``num_tokens`` counts tokens after padding. ``uniform_decode`` says that every request
    contributes the same number of tokens (one, in plain decode), which decides the attention's
    path; it is False also for a uniform batch that uses a graph made for any batch.
    """

    num_tokens: int
    uniform_decode: bool = False

    @property
    def non_uniform(self) -> BatchDescriptor:
        """The same size, as the key of a graph that supports any batch."""
        return BatchDescriptor(self.num_tokens, False)


@dataclass(slots=True)
class ForwardContext:
    """What a step tells everything below it.

    ``attn_metadata`` is whatever the splitting operators of the model expect (block table, lengths,
    ...), or None. ``cudagraph_runtime_mode`` is NONE, PIECEWISE or FULL, never a composite.
    """

    attn_metadata: Any = None
    cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE
    batch_descriptor: BatchDescriptor | None = None


class _Current(threading.local):
    context: ForwardContext | None = None


_current = _Current()


class set_forward_context:  # noqa: N801 - the article's name, used as a context manager
    """Context manager: everything called in the block sees this step's context. Per thread.

    A class and not a generator, because it stands on the replay path.
    """

    __slots__ = ("_context", "_outer")

    def __init__(
        self,
        attn_metadata: Any = None,
        *,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
        batch_descriptor: BatchDescriptor | None = None,
    ) -> None:
        self._context = ForwardContext(attn_metadata, cudagraph_runtime_mode, batch_descriptor)

    def __enter__(self) -> ForwardContext:
        self._outer = _current.context
        _current.context = self._context
        return self._context

    def __exit__(self, *exc_info: object) -> None:
        _current.context = self._outer


def get_forward_context() -> ForwardContext:
    """The context of the step that is running in this thread.

    Raises:
        CgkitError: no step is running.
    """
    context = _current.context
    if context is None:
        raise CgkitError(
            "no forward context is set: call the model inside "
            "`with cgkit.set_forward_context(attn_metadata): ...`, or through a runner"
        )
    return context


def current_forward_context() -> ForwardContext | None:
    """The context of the running step, or None outside of one (the wrappers' cheap read)."""
    return _current.context


class CaptureLock:
    """Says whether recording and compiling are still allowed for one model.

    The article's ``set_cudagraph_capturing_enabled(False)``: after capture an unseen key must raise
    instead of being recorded while requests wait. The article's switch is one per process; ours is
    one per compiled model, so that a notebook can hold a finished model beside one at work.
    """

    __slots__ = ("_locked", "_was_locked", "after", "model")

    def __init__(self, model: str = "model") -> None:
        self.model = model
        #: What was to be recorded or compiled after the lock: (what, "refused" or "unlocked on purpose").
        self.after: deque[tuple[str, str]] = deque(maxlen=200)
        self._locked = self._was_locked = False

    @property
    def locked(self) -> bool:
        """Whether capturing is over. Setting it to False by hand is possible, and what happens then is noted."""
        return self._locked

    @locked.setter
    def locked(self, value: bool) -> None:
        self._locked = value
        if value:
            self._was_locked = True

    def reopen(self) -> None:
        """Capturing begins (again): recording and compiling are allowed, and are no surprise."""
        self._locked = self._was_locked = False

    def check(self, what: str) -> None:
        """Raises CaptureLockedError if ``what`` would happen after the lock; notes it in :attr:`after`."""
        if self._was_locked:
            self.after.append((what, "refused" if self._locked else "unlocked on purpose"))
        if self._locked:
            raise CaptureLockedError(
                f"{what}, but capturing of {self.model} is finished and locked. Either the key is "
                "missing from cudagraph_capture_sizes / compile_sizes (add it and capture again), "
                "or unlock on purpose with `lock.locked = False`"
            )
