"""Canaries: bytes of a known pattern around static buffers, which nobody may write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from cgkit.capturing.debugging.copies import extent
from cgkit.errors import DamagedBufferError

#: Bytes on each side; a multiple of every alignment that kernels count on.
MARGIN = 512
_PATTERN = 0xC5


class Canary(NamedTuple):
    """The bytes before and behind one buffer."""

    name: str
    before: torch.Tensor
    behind: torch.Tensor


def guarded(name: str, extent_elements: int, like: torch.Tensor) -> tuple[torch.Tensor, Canary]:
    """A zeroed one-dimensional buffer like ``like`` with a canary on each side."""
    size = extent_elements * like.dtype.itemsize
    room = size + -size % 16
    with torch.inference_mode(False):  # else no later call outside of that mode could fill it
        memory = torch.zeros(room + 2 * MARGIN, dtype=torch.uint8, device=like.device)
        before, behind = memory[:MARGIN], memory[MARGIN + size :]
        before.fill_(_PATTERN)
        behind.fill_(_PATTERN)
        buffer = memory[MARGIN : MARGIN + room].view(like.dtype)[:extent_elements]
    return buffer, Canary(name, before, behind)


def check(canaries: Sequence[Canary], where: str) -> None:
    """Raises DamagedBufferError if somebody wrote beside a buffer."""
    for name, before, behind in canaries:
        for side, margin in (("before", before), ("behind", behind)):
            wrong = (margin != _PATTERN).nonzero()
            if len(wrong):
                at = int(wrong[-1 if side == "before" else 0])
                distance = MARGIN - at if side == "before" else at
                raise DamagedBufferError(
                    f"{where}: {len(wrong)} bytes {side} the static buffer of {name} were written, the nearest "
                    f"{distance} bytes {'before its beginning' if side == 'before' else 'behind its end'}: an operator "
                    "writes out of bounds (a view with the wrong size or stride, an index beyond the batch)"
                )


class Neighbours:
    """The bytes around tensors that are the caller's, as they are before a step."""

    def __init__(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        self.kept: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        for name, tensor in tensors:
            if tensor.layout is not torch.strided or tensor.numel() == 0:
                continue
            storage = tensor.untyped_storage()
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            start, end = (place - storage.data_ptr() for place in extent(tensor))
            for around in (whole[max(0, start - MARGIN) : start], whole[end : end + MARGIN]):
                if len(around):
                    self.kept.append((name, around, around.clone()))

    def check(self, where: str) -> None:
        """Raises DamagedBufferError if a step has written there."""
        for name, around, was in self.kept:
            if not torch.equal(around, was):
                raise DamagedBufferError(
                    f"{where}: {int((around != was).sum())} bytes beside {name} were written, which belong to no row "
                    "of this step: an operator writes out of bounds (a view with the wrong size or stride, an index "
                    "beyond the batch)"
                )
