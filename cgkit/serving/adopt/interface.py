"""cgkit's attention as one that ``transformers`` can be told to use.

``transformers`` looks its attention up by name (``AttentionInterface``), each time a layer runs. Two names are
registered: one notes how each layer calls (and computes plain causal attention, so that the layers after it see
something of the right shape), one is the splitting operator over the paged KV cache. Neither has a mask function
(``AttentionMaskInterface``) on purpose: for a name that has none, ``transformers`` makes no mask and skips everything
that would prepare one. A function that returns None does as well, but leaves in the graph what looks for packed
sequences. Which token may see which is known from the step's metadata.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cgkit.serving.attention import attention
from cgkit.serving.tokenizer import need

PROBE, PAGED = "cgkit_probe", "cgkit_paged"
#: The attribute of an attention module that holds the name of its KV cache.
LAYER_NAME = "cgkit_layer_name"


@dataclass(frozen=True)
class AttentionCall:
    """How one layer called its attention: with shapes (batch, heads, tokens, head_dim), and with what else."""

    module: nn.Module
    query: torch.Size
    key: torch.Size
    value: torch.Size
    dtype: torch.dtype  # of the keys
    mask: Any
    scaling: float | None
    options: dict[str, Any]  # what else was passed and is not None


_calls: ContextVar[list[AttentionCall] | None] = ContextVar("cgkit_attention_calls", default=None)


def probing_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Notes the call; computes causal attention where the shapes allow it, else returns zeros."""
    calls = _calls.get()
    if calls is not None:
        given = {name: option for name, option in options.items() if option is not None}
        shapes = query.shape, key.shape, value.shape
        calls.append(AttentionCall(module, *shapes, key.dtype, attention_mask, scaling, given))
    if query.shape[2] != key.shape[2] or query.shape[1] % key.shape[1]:
        out = query.new_zeros(*query.shape[:-1], value.shape[-1])
    else:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """(1, heads, tokens, head_dim) of one flat stream -> (1, tokens, heads, head_dim), by the splitting operator.

    ``options`` were looked at when the model was adopted; none of them is left that changes the result.
    """
    # Whole rows, as the operator's kernels read them: the copy is part of the piece before it, where it fuses.
    query, key, value = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    return attention(query, key, value, getattr(module, LAYER_NAME), scaling)[None], None


def register() -> None:
    """Makes both attentions known to ``transformers``; may be called again."""
    transformers = need("transformers")
    for name, function in ((PROBE, probing_attention), (PAGED, paged_attention)):
        transformers.AttentionInterface.register(name, function)


def use_attention(model: nn.Module, name: str) -> None:
    """Has every layer of ``model`` look up the attention ``name`` from now on."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    for config in configs.values():
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = name


@contextmanager
def noted_calls() -> Iterator[list[AttentionCall]]:
    """The calls of :func:`probing_attention` within the block, in order."""
    calls: list[AttentionCall] = []
    token = _calls.set(calls)
    try:
        yield calls
    finally:
        _calls.reset(token)
