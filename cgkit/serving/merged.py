"""Projections that read the same input, multiplied as one.

q, k and v of attention, and gate and up of the MLP, are three and two products of one input. A decode step is bound by
reading weights, and a small weight is read slowly: on an H200 at batch 1 the key projection of Llama-3.1-8B (8 MiB)
came at 1.25 TB/s, the gate projection (117 MiB) at 3.8. One product of the rows of all is one kernel that reads
at the larger one's rate. The layout is that of vLLM's ``QKVParallelLinear`` and ``MergedColumnParallelLinear``.

Checkpoints keep the parts under the names of ``transformers``. So does a model's ``state_dict`` here: it has the parts
(as views of the merged weight), and ``load_state_dict`` takes them; ``named_parameters`` has what is multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cgkit.errors import ServingError


class MergedProjections(nn.Module):
    """A module with one merged projection, whose parts a state dict names one by one.

    A subclass calls :meth:`merge` once its projection is there.
    """

    def merge(self, name: str, parts: Mapping[str, int]) -> None:
        """Says that the rows of the child ``name`` are those of ``parts`` (name -> number of rows), in order."""

        # Functions of the module, not closures: a model can be pickled.
        self.register_state_dict_post_hook(partial(_split, name, dict(parts)))
        self.register_load_state_dict_pre_hook(partial(_join, name, dict(parts)))


def _split(
    name: str,
    parts: dict[str, int],
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    local_metadata: Any,
) -> None:
    """The parts in the place of the merged projection, in a state dict that is being made."""
    entries, own = list(state.items()), f"{prefix}{name}."
    state.clear()  # made anew, so that the parts stand where the merged one stood
    for key, value in entries:
        if not key.startswith(own):
            state[key] = value
            continue
        field = key[len(own) :]
        for part, rows in zip(parts, _rows_of(value, field, list(parts.values()))):
            state[f"{prefix}{part}.{field}"] = rows


def _join(
    name: str, parts: dict[str, int], module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any
) -> None:
    """The merged projection in the place of its parts, in a state dict that is being loaded."""
    for field, put_together in (("weight", joined), ("weight_scale", _one_scale)):
        keys = [f"{prefix}{part}.{field}" for part in parts]
        if all(key in state for key in keys):
            state[f"{prefix}{name}.{field}"] = put_together([state.pop(key) for key in keys])


def _rows_of(value: Tensor, field: str, rows: list[int]) -> list[Tensor]:
    """A merged field's parts: a weight by its rows; scales (1, rows) by column; one number is everybody's."""
    if value.numel() == 1 and field != "weight":
        return [value] * len(rows)
    return list(value.split(rows, dim=0 if field == "weight" else -1))


def _one_scale(scales: list[Tensor]) -> Tensor:
    """The scales of FP8 parts as the merged weight has them.

    Raises:
        ServingError: the parts have a number each, and not the same one.
    """
    if scales[0].dim():
        return torch.cat(scales, dim=-1)
    if any(not torch.equal(scale, scales[0]) for scale in scales):
        raise ServingError(
            f"FP8 parts with scales {[float(scale) for scale in scales]} cannot be merged: a merged weight has one. "
            "Quantise them to the largest, as cgkit.serving.llama_fp8.quantize does"
        )
    return scales[0]


def joined(parts: list[Tensor]) -> Tensor:
    """The parts' rows one after the other, (sum of rows, in). Parts that lie so in memory already (views of one
    tensor) are not copied."""
    first, total = parts[0], sum(part.shape[0] for part in parts)
    if first.is_meta or not _one_after_the_other(parts):
        return torch.cat(parts)
    return first.as_strided((total, first.shape[1]), (first.shape[1], 1))


def _one_after_the_other(parts: list[Tensor]) -> bool:
    """Whether each part begins where the one before ends, in one storage."""
    expected = parts[0].data_ptr()
    for part in parts:
        if not part.is_contiguous() or part.data_ptr() != expected:
            return False
        if part.untyped_storage().data_ptr() != parts[0].untyped_storage().data_ptr():
            return False
        expected += part.numel() * part.element_size()
    return all(part.dtype is parts[0].dtype and part.shape[1:] == parts[0].shape[1:] for part in parts)
