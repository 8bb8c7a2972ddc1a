"""Tensors: which share a storage, and their lazy conjugates and negatives."""

from __future__ import annotations

import torch


def storage_key(tensor: torch.Tensor) -> int:
    """A number that two tensors share if and only if they share their storage (fake ones too).

    Valid while one of them is alive. Run on torch 2.11 (CUDA) and 2.13 (CPU).
    """
    return tensor.untyped_storage()._cdata


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that holds the numbers: without the wrappers of ``vmap`` and ``grad``. Run on torch 2.13 (CPU)."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def with_lazy_bits(tensor: torch.Tensor, conj: bool, neg: bool) -> torch.Tensor:
    """``tensor`` seen through a lazy conjugate and a lazy negative. Run on torch 2.13 (CPU)."""
    if conj:
        tensor = tensor.conj()
    return torch._neg_view(tensor) if neg else tensor
