"""The paged KV cache: fixed tensors, and a list of free blocks.

A block holds ``block_size`` tokens of one request. The tensors are allocated once and never move, so
that recorded graphs may hold their addresses; what changes is the block table. After Kwon et al.,
"Efficient Memory Management for Large Language Model Serving with PagedAttention" (SOSP 2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from cgkit.errors import ServingError

#: The block that no request owns: padding and dummy runs point here, and it stays zero.
NULL_BLOCK = 0


def attention_layer_name(index: int) -> str:
    """The name under which layer ``index`` finds its cache, as the module is called in ``transformers``."""
    return f"model.layers.{index}.self_attn"


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """Blocks that ``num_tokens`` tokens of one request take."""
    return -(-num_tokens // block_size)


class BlockAllocator:
    """Hands out the numbers of free blocks, the last freed first; block 0 is never handed out."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ServingError(
                f"num_blocks={num_blocks}: block {NULL_BLOCK} is reserved for padding, so 2 are the least"
            )
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that can still be handed out."""
        return len(self._free)

    def alloc(self, count: int = 1) -> list[int]:
        """``count`` block numbers, all or none.

        Raises:
            ServingError: fewer are free; nothing is taken.
        """
        if count < 0:
            raise ServingError(f"alloc({count}): a number of blocks cannot be negative")
        if count > self.num_free:
            raise ServingError(
                f"the KV cache is full: {count} blocks wanted, {self.num_free} of {self.num_blocks - 1} "
                "free. Let requests finish first, serve fewer at a time, or make it with more num_blocks"
            )
        blocks = [self._free.pop() for _ in range(count)]
        self._taken.update(blocks)
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Takes ``blocks`` back.

        Raises:
            ServingError: one of them is not handed out (freed twice, say); none is taken back.
        """
        blocks = list(blocks)
        if len(set(blocks)) < len(blocks) or not self._taken.issuperset(blocks):
            raise ServingError(f"free({blocks}): not all of these blocks are handed out, or one stands twice")
        self._taken.difference_update(blocks)
        self._free.extend(reversed(blocks))

    def __repr__(self) -> str:
        return f"BlockAllocator({self.num_free} of {self.num_blocks - 1} blocks free)"


class PagedKVCache:
    """Keys and values of all layers, each ``(num_blocks, block_size, num_kv_heads, head_dim)``, zeroed.

    Attributes:
        caches: layer name -> (key_cache, value_cache), as ``AttentionMetadata.kv_caches`` wants it.
        allocator: the free blocks; one block number means the same block in every layer.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        layer_names: Sequence[str] | None = None,
    ) -> None:
        for name, size in [("num_layers", num_layers), ("block_size", block_size), ("head_dim", head_dim)]:
            if size < 1:
                raise ServingError(f"{name}={size}: a KV cache needs at least 1")
        names = list(layer_names or map(attention_layer_name, range(num_layers)))
        if len(set(names)) != num_layers:
            raise ServingError(f"layer_names has {len(set(names))} different names for {num_layers} layers")
        self.allocator = BlockAllocator(num_blocks)
        self.block_size = block_size
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        self.caches: dict[str, tuple[Tensor, Tensor]] = {
            name: (
                torch.zeros(shape, dtype=dtype, device=device),
                torch.zeros(shape, dtype=dtype, device=device),
            )
            for name in names
        }

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers' keys and values."""
        return sum(t.numel() * t.element_size() for pair in self.caches.values() for t in pair)

    @property
    def max_tokens(self) -> int:
        """Tokens that fit, over all requests (a request's last block may stay partly empty)."""
        return (self.allocator.num_blocks - 1) * self.block_size

    def __getitem__(self, layer_name: str) -> tuple[Tensor, Tensor]:
        return self.caches[layer_name]

    def __repr__(self) -> str:
        return (
            f"PagedKVCache({len(self.caches)} layers, {self.allocator.num_blocks} blocks of "
            f"{self.block_size} tokens, {self.num_bytes / 2**20:.1f} MiB, "
            f"{self.allocator.num_free} blocks free)"
        )
