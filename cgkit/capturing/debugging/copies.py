"""Copies of tensors that share memory among one another as the originals do; putting values and attributes back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from cgkit.tensor_trees import replace_tensors, tensor_leaves

_ALIGNMENT = 64
_CONTAINERS = (list, dict, set, deque)
_DEPTH = 3  # of containers in an attribute


def copied(value: Any, keep: Callable[[torch.Tensor], bool] = lambda tensor: False) -> Any:
    """``value`` with a copy of each tensor; what overlaps in memory overlaps in the copies.

    ``keep``: tensors that are left as they are (weights, which are only read).
    """
    tensors = [tensor for _, tensor in tensor_leaves(value) if not keep(tensor)]
    unique = list({id(tensor): tensor for tensor in tensors}.values())
    return replace_tensors(value, dict(zip(map(id, unique), copies_of(unique))))


def copies_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """One copy each, in order."""
    made: dict[int, torch.Tensor] = {}
    for group in _overlapping(tensors):
        if len(group) == 1:
            made[id(group[0])] = _alone(group[0])
        else:
            made.update(zip(map(id, group), _together(group)))
    return [made[id(tensor)] for tensor in tensors]


def overlap(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether any two of them share memory."""
    return any(len(group) > 1 for group in _overlapping(tensors))


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the memory of two tensors overlaps."""
    if one.device != other.device or not (_is_plain(one) and _is_plain(other)):
        return one is other
    (a, b), (c, d) = extent(one), extent(other)
    return a < d and c < b


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes from the first to behind the last element, as addresses; empty for an empty tensor."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
    return start, start + (last + 1) * tensor.dtype.itemsize


def write(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copies ``value`` into ``target``, also where several elements of it are one place in memory."""
    for dim, step in enumerate(target.stride()):
        if step == 0 and target.size(dim) > 1:
            target, value = target.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    target.copy_(value)


class Kept:
    """The values of some tensors at one moment; :meth:`restore` puts them back."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        unique = {id(tensor): tensor for tensor in tensors}
        self.tensors = list(unique.values())
        self.values = [tensor.detach().clone() for tensor in self.tensors]

    def restore(self) -> None:
        """Gives the tensors the values that they had."""
        with torch.no_grad():
            for tensor, value in zip(self.tensors, self.values):
                write(tensor.detach(), value)


class KeptAttributes:
    """The attributes of all modules of a model at one moment, and what lists, dicts, sets and deques among them (three
    deep) held; :meth:`restore` puts them back. Values of tensors are not looked at: :class:`Kept`."""

    def __init__(self, model: nn.Module) -> None:
        values = [vars(module) for module in model.modules()]
        self._held: list[Any] = [*values, *(i for v in values for i in _containers(v.values(), _DEPTH))]
        self._contents = [each.copy() for each in self._held]

    def restore(self) -> None:
        """Gives the modules the attributes that they had."""
        for each, old in zip(self._held, self._contents):
            each.clear()
            each.extend(old) if isinstance(each, (list, deque)) else each.update(old)


@contextmanager
def attributes_put_back(model: nn.Module) -> Iterator[None]:
    """After the block the attributes of all modules are what they were: :class:`KeptAttributes`."""
    kept = KeptAttributes(model)
    try:
        yield
    finally:
        kept.restore()


def _containers(values: Iterable[Any], depth: int) -> Iterator[Any]:
    for value in values:
        if isinstance(value, _CONTAINERS):
            yield value
            if depth > 1 and not isinstance(value, set):
                inside = value.values() if isinstance(value, dict) else value
                yield from _containers(list(inside), depth - 1)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


def _overlapping(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensors in groups whose memory overlaps."""
    groups: list[list[torch.Tensor]] = [[tensor] for tensor in tensors if not _is_plain(tensor)]
    placed = sorted(
        (
            (str(tensor.device), *extent(tensor), place)
            for place, tensor in enumerate(tensors)
            if _is_plain(tensor)
        ),
    )
    device, end = "", -1
    for where, start, stop, place in placed:
        if groups and where == device and start < end:
            groups[-1].append(tensors[place])
        else:
            groups.append([tensors[place]])
            device, end = where, start
        end = max(end, stop)
    return groups


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if not _is_plain(tensor):
        return tensor.clone()
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    write(made, tensor)
    return made


def _together(group: list[torch.Tensor]) -> list[torch.Tensor]:
    start = min(extent(tensor)[0] for tensor in group)
    start -= start % _ALIGNMENT
    size = max(extent(tensor)[1] for tensor in group) - start
    size += -size % _ALIGNMENT
    memory = torch.empty(size, dtype=torch.uint8, device=group[0].device)
    made = []
    for tensor in group:
        offset = (tensor.data_ptr() - start) // tensor.dtype.itemsize
        view = memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), offset)
        write(view, tensor.detach())
        made.append(view)
    return made
