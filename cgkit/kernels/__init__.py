"""Operators with a Triton and a torch form: attention over a paged KV cache, and cheap launches.

Nothing here imports Triton until a kernel is launched on CUDA, so the package works without it.
"""

from cgkit.kernels.paged_attention import (
    PagedMetadata,
    attend,
    paged_attention,
    paged_attention_torch,
    write_kv,
    write_kv_torch,
)

__all__ = [
    "PagedMetadata",
    "attend",
    "paged_attention",
    "paged_attention_torch",
    "write_kv",
    "write_kv_torch",
]
