"""The adopted model held against the model itself, on a few tokens.

Rules about configurations foresee what they foresee. This does not: two requests stand in one stream, the longer one
enters in two steps and so reads its own keys out of the paged cache, and every logit is compared with what the model's
own attention gives for each request alone.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from cgkit.forward_context import set_forward_context
from cgkit.serving.adopt.model import AdoptedModel, copy_sharing_weights
from cgkit.serving.adopt.refusals import place_of, refuse
from cgkit.serving.attention import build_metadata
from cgkit.serving.kv_cache import PagedKVCache

#: How far a logit may be off, as a part of the largest: the order of sums differs, and nothing else may.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}

#: Tokens of the two requests, of the long one's first step, and of a block: its second step reads two blocks.
_LONG, _SHORT, _FIRST, _BLOCK = 21, 3, 17, 16


@torch.no_grad()
def check_against_own(adopted: AdoptedModel, original: Any) -> None:
    """Raises AdoptError where ``adopted`` does not compute what ``original`` computes."""
    long = min(_LONG, adopted.config.max_position_embeddings)
    short = min(_SHORT, long)
    device = adopted.lm_head.weight.device
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(adopted.config.vocab_size, (long + short,), generator=generator).to(device)
    requests = ids[:long], ids[long:]
    own = copy_sharing_weights(original)
    expected = [own(input_ids=each[None], use_cache=False).logits[0] for each in requests]
    hidden = _in_two_steps(adopted, *requests)
    adopted.head.settle(torch.cat(hidden))
    for which, (want, states) in enumerate(zip(expected, hidden)):
        got = adopted.compute_logits(states)
        largest = float(want.abs().max())
        off = float((got.float() - want.float()).abs().max())
        if not off <= TOLERANCE.get(want.dtype, 1e-3) * largest:  # NaN is off, too
            row = int((got.float() - want.float()).abs().amax(-1).argmax())
            refuse(
                original,
                f"through cgkit's attention its logits are off by {off:.3g} (the largest is {largest:.3g}), most at "
                f"token {row} of request {which}: {_why(adopted)}",
                place_of(type(adopted.body), "position"),
            )


def _why(adopted: AdoptedModel) -> str:
    if "position_ids" not in inspect.signature(adopted.run_body).parameters:
        return "its forward takes no position_ids and counts positions itself, from the start of each step"
    return "something in it depends on more than a token, its position and what causal attention brings"


def _in_two_steps(adopted: AdoptedModel, long: Tensor, short: Tensor) -> list[Tensor]:
    """Hidden states of both requests: the front of the long one beside the short one, then its rest."""
    config, weight = adopted.config, adopted.lm_head.weight
    cache = PagedKVCache(
        config.num_hidden_layers,
        1 + -(-len(long) // _BLOCK) + -(-len(short) // _BLOCK),
        _BLOCK,
        config.num_key_value_heads,
        config.head_dim,
        weight.dtype,
        weight.device,
        layer_names=adopted.attention_layers,
    )
    blocks = cache.allocator.alloc(-(-len(long) // _BLOCK)), cache.allocator.alloc(-(-len(short) // _BLOCK))
    first = min(_FIRST, len(long))

    def step(ids: Tensor, counts: list[int], lengths: list[int], owned: tuple[list[int], ...]) -> Tensor:
        metadata = build_metadata(
            counts, lengths, owned, _BLOCK, kv_caches=cache.caches, device=weight.device
        )
        with set_forward_context(metadata):
            return adopted(ids, metadata.positions)

    both = step(torch.cat([long[:first], short]), [first, len(short)], [first, len(short)], blocks)
    parts = [both[:first]]
    if first < len(long):
        parts.append(step(long[first:], [len(long) - first], [len(long)], blocks[:1]))
    return [torch.cat(parts), both[first:]]
