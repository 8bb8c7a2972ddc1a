"""Tensors: which share a storage, and their lazy conjugates and negatives."""

from __future__ import annotations

import torch


def storage_key(tensor: torch.Tensor) -> int:
    """A number that two tensors share if and only if they share their storage (fake ones too).

    Valid while one of them is alive. Run on torch 2.11 (CUDA) and 2.13 (CPU).
    """
    return tensor.untyped_storage()._cdata


def with_lazy_bits(tensor: torch.Tensor, conj: bool, neg: bool) -> torch.Tensor:
    """``tensor`` seen through a lazy conjugate and a lazy negative. Run on torch 2.13 (CPU)."""
    if conj:
        tensor = tensor.conj()
    return torch._neg_view(tensor) if neg else tensor
