"""An emulated graph: the calls that were recorded, and replay, which repeats exactly those."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from cgkit import recording
from cgkit.capturing.emulated_layouts import leaves
from cgkit.capturing.emulated_pool import EmulatedPool
from cgkit.errors import CaptureError, ReplayError
from cgkit.tensor_trees import number_leaves, tensor_leaves


class TapedCall(NamedTuple):
    """One node: ``function(*args, **kwargs)``, whose results go to ``outputs``.

    The tensors among the arguments are the recorded addresses: weak where they lie in the pool,
    owning aliases where they do not. ``outputs`` has one entry a result: the recorded tensor, or
    None for a result that is an argument (in place, ``out=``, a view) or no tensor.
    """

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    outputs: tuple[torch.Tensor | None, ...]

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", None) or type(self.function).__name__

    def run(self) -> None:
        results = leaves(self.function(*self.args, **self.kwargs))
        if not self.outputs:
            return
        if len(results) != len(self.outputs):
            raise ReplayError(f"{self.name} gave {len(results)} results, {len(self.outputs)} were recorded")
        for result, output in zip(results, self.outputs):
            if output is not None:
                _put(result, output, self.name)


class EmulatedGraph:
    """What :meth:`EmulatedPlatform.record` gives. Not a fast thing, only one with the same contract."""

    def __init__(self, tape: list[TapedCall], pool: EmulatedPool, inference: bool) -> None:
        self._tape = tape
        self._pool = pool
        pool.graphs.add(self)
        # Inference tensors may be written only in the mode in which they were made.
        self._grad_guard: Callable[[], AbstractContextManager[Any]] = (
            torch.inference_mode if inference else torch.no_grad
        )

    def replay(self) -> None:
        """Repeats the recorded calls on the recorded addresses, in order.

        Raises:
            ReplayError: the pool was freed, or a call no longer gives what was recorded.
            CaptureError: called while this thread records.
        """
        if self._pool.freed:
            raise ReplayError("the pool of this emulated graph was freed; record it again into a new pool")
        if recording.active.recorder is not None:
            raise CaptureError("an emulated graph was replayed inside a recording; replay it outside")
        # Casts were recorded as calls of their own; autocast must not add others.
        with self._grad_guard(), torch.autocast("cpu", enabled=False):
            for number, call in enumerate(self._tape):
                try:
                    call.run()
                except Exception as error:
                    error.add_note(f"while replaying call {number} of {len(self._tape)}: {call.name}")
                    raise

    def clear(self) -> None:
        """Lets go of every recorded tensor; called when the pool is freed."""
        self._tape.clear()

    def num_nodes(self) -> int:
        """How many calls were recorded; an opaque compiled piece is one."""
        return len(self._tape)

    @property
    def calls(self) -> tuple[TapedCall, ...]:
        """What a replay repeats, in order."""
        return tuple(self._tape)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in the graph's pool."""
        return self._pool.holds(tensor)

    def outside(self) -> list[tuple[str, torch.Tensor]]:
        """(name of the call, tensor) of each tensor that a replay reads or writes and that the pool does not own."""
        return [
            (call.name, leaf)
            for call in self._tape
            for leaf in leaves([list(call.args), list(call.kwargs.values())])
            if isinstance(leaf, torch.Tensor) and not self._pool.holds(leaf)
        ]

    def to_frame(self) -> Any:
        """A DataFrame, a row a recorded call: ``call``, ``name``, ``outputs`` (shapes), the addresses that it
        ``reads``, the Python ``numbers`` among its arguments (frozen), and the addresses that it ``writes``
        ("in place" where it has no output of its own)."""
        import pandas as pd

        rows = [
            {
                "call": i,
                "name": c.name,
                "outputs": [tuple(o.shape) for o in c.outputs if o is not None],
                "reads": _addresses([c.args, c.kwargs]),
                "numbers": ", ".join(str(number) for _, number in number_leaves([c.args, c.kwargs])),
                "writes": _addresses(c.outputs) or "in place",
            }
            for i, c in enumerate(self._tape)
        ]
        return pd.DataFrame(rows, columns=["call", "name", "outputs", "reads", "numbers", "writes"])

    def __repr__(self) -> str:
        return f"EmulatedGraph({len(self._tape)} recorded calls, emulated)"


def _addresses(value: Any) -> str:
    return ", ".join(hex(tensor.data_ptr()) for _, tensor in tensor_leaves(value))


def _put(result: torch.Tensor, output: torch.Tensor, name: str) -> None:
    """Copies a result to its recorded place, bit for bit."""
    if result.shape != output.shape or result.dtype != output.dtype:
        raise ReplayError(
            f"{name} gave {result.dtype}{list(result.shape)}, "
            f"but {output.dtype}{list(output.shape)} was recorded: if this very call was recorded, the fake "
            "implementation of an operator in it says another shape or type than the operator gives "
            "(torch.library.opcheck)"
        )
    for dim, step in enumerate(output.stride()):
        if step == 0 and output.size(dim) > 1:  # an expanded output: its elements are one place in memory
            output, result = output.narrow(dim, 0, 1), result.narrow(dim, 0, 1)
    output.copy_(result)
