"""Results that are handed out under ``debug=True``: read too late, they raise, and views of them show NaN.

A replay writes its results where it always does, so a result that somebody still holds becomes that of the next step,
in silence. Here the caller gets a copy; when the next replay begins, the copy is filled with NaN (integers: a pattern)
and marked, so that using it raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cgkit.capturing.debugging.copies import copied
from cgkit.errors import OverwrittenOutputError
from cgkit.numerics import mark_unwritten
from cgkit.tensor_trees import map_tensors, tensor_leaves

#: What may be asked of a tensor whose content is gone.
_HARMLESS = {
    "__get__", "__repr__", "__len__", "size", "dim", "stride", "numel", "data_ptr", "element_size", "is_contiguous",
    "storage_offset", "is_floating_point", "is_complex", "untyped_storage",
}  # fmt: skip


class StepOutput(torch.Tensor):
    """A result of a replay under ``debug=True``. What is computed with it is a plain tensor.

    Raises (when read after a later replay):
        OverwrittenOutputError: names both steps.
    """

    _plain: torch.Tensor
    _gone: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_opened(args, func), **_opened(kwargs or {}, func))


def _opened(value: Any, func: Any) -> Any:
    if isinstance(value, StepOutput):
        if value._gone and func.__name__ not in _HARMLESS:
            raise OverwrittenOutputError(value._gone)
        return value._plain
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(_opened(each, func) for each in value)
    if isinstance(value, dict):
        return {key: _opened(each, func) for key, each in value.items()}
    return value


class LentOutputs:
    """What one captured model has handed out and what is to be taken back at its next replay."""

    def __init__(self, model: str, owned: Callable[[torch.Tensor], bool]) -> None:
        """``owned``: whether a tensor lies in the graphs' memory, so that replays overwrite it."""
        self.model, self.owned = model, owned
        self.step = 0
        self._lent: list[StepOutput] = []

    def begin(self) -> None:
        """The next replay is about to overwrite what was handed out."""
        self.step += 1
        with torch.inference_mode(False), torch.no_grad():
            for path, output in enumerate(self._lent):
                output._gone = (
                    f"result {path} of step {self.step - 1} of {self.model} is read after step {self.step} has begun, "
                    "whose replay overwrites it. Copy what is needed longer than a step (output.clone()), or leave "
                    "clone_outputs on"
                )
                mark_unwritten(output._plain)
        self._lent = []

    def lend(self, value: Any) -> Any:
        """``value`` with copies of the tensors that the next replay will overwrite."""
        if not any(self.owned(tensor) for _, tensor in tensor_leaves(value)):
            return value
        with torch.inference_mode(False), torch.no_grad():
            own = copied(value, keep=lambda tensor: not self.owned(tensor))
        kept = {id(tensor) for _, tensor in tensor_leaves(value)}
        return map_tensors(lambda _, tensor: tensor if id(tensor) in kept else self._made(tensor), own)

    def _made(self, plain: torch.Tensor) -> StepOutput:
        output = plain.as_subclass(StepOutput)
        output._plain, output._gone = plain, ""
        self._lent.append(output)
        return output
