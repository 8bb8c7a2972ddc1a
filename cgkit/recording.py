"""Which emulated recording is running in this thread, if any.

The emulated platform records operators through a dispatch mode, but a compiled piece must be
recorded as one opaque call: its fused loops never pass the dispatcher, so they would run while
"recording". Whoever calls compiled code (the compile stage) therefore asks here first. It lies
below everything because the compile stage may not import the capture stage.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Recorder(Protocol):
    """What compiled code needs to know of an emulated recording."""

    def opaque_call(
        self,
        runnable: Callable[..., Sequence[Any]],
        on_fakes: Callable[..., Any],
        args: Sequence[Any],
    ) -> Sequence[Any]:
        """Records ``runnable(*args)`` without running it; ``on_fakes`` is the same piece uncompiled (its graph, or
        code), from which shapes, strides and aliasing of the outputs are found under fake tensors."""
        ...


class _Active(threading.local):
    recorder: Recorder | None = None


active = _Active()
