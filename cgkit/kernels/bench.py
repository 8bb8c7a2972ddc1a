"""What launching the decode kernel costs the host: ``python -m cgkit.kernels.bench``, on a machine with a CUDA device.

The kernel's own time: ``cgkit bench kernels``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

from cgkit.errors import CgkitError
from cgkit.torch_hooks import LaunchStream


def decode_arguments(
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    context: int,
    *,
    max_context: int | None = None,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Any, ...]:
    """What :func:`cgkit.kernels.attend` takes, for a decode batch with blocks of 16.

    ``context``: tokens of each request, the new one included; the block table is as wide as ``max_context`` asks for.

    Raises:
        CgkitError: no CUDA device, and ``device`` is "cuda".
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise CgkitError("the kernel benchmarks need a CUDA device, and torch finds none")
    block_size, width = 16, -(-context // 16)
    new = lambda *shape: torch.randn(*shape, dtype=dtype, device=device)  # noqa: E731
    caches = [new(batch * width + 1, block_size, kv_heads, head_dim) for _ in range(2)]
    table = torch.zeros(batch, max(width, -(-(max_context or 0) // 16)), dtype=torch.int32, device=device)
    table[:, :width] = torch.arange(1, batch * width + 1, device=device).view(batch, width)
    last = table[:, (context - 1) // block_size].long() * block_size + (context - 1) % block_size
    metadata = SimpleNamespace(
        block_table=table,
        seq_lens=torch.full((batch,), context, dtype=torch.int32, device=device),
        query_start_loc=torch.arange(batch + 1, dtype=torch.int32, device=device),
        token_to_req=torch.arange(batch, dtype=torch.int32, device=device),
        slot_mapping=last,
        decode_only=True,
    )
    query, key, value = (new(batch, count, head_dim) for count in (heads, kv_heads, kv_heads))
    return query, key, value, *caches, metadata, torch.empty_like(query), head_dim**-0.5


def _host_us(call: Callable[[], Any], calls: int = 50) -> float:
    """Host microseconds of one call, the device kept out of it: few enough calls to fit the queue."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    taken = time.perf_counter() - start
    torch.cuda.synchronize()
    return taken / calls * 1e6


class Spy:
    """Stands for a launch, and keeps what it was called with."""

    seen: tuple[Any, ...] = ()

    def __call__(self, *parts: Any) -> None:
        self.seen = parts

    def prepared(self, tensors: Any, constants: Any) -> None:
        return None


def bench_launch(rounds: int = 200) -> dict[str, float]:
    """Host microseconds (medians, rows interleaved) of the decode kernel's launch: ``plain`` through
    ``kernel[grid](...)``, ``direct`` through CachedLaunch, ``attend`` with all that comes before it, ``prepared`` as a
    replay plan launches it (``cuLaunchKernel`` where that is known, see ``how`` of the callable)."""
    from cgkit.kernels import attend, triton_decode
    from cgkit.kernels.launch import CachedLaunch
    from cgkit.kernels.paged_attention import prepare_attend

    arguments = decode_arguments(1, 32, 8, 64, 256)
    cached, spy = triton_decode._launch, Spy()
    triton_decode._launch = spy  # type: ignore[assignment]
    triton_decode._plans.clear()
    try:
        attend(*arguments)
    finally:
        triton_decode._launch = cached
        triton_decode._plans.clear()
    grid, tensors, numbers, constants = spy.seen
    launch = CachedLaunch(cached.kernel, **cached.options)
    rows: dict[str, Callable[[], Any]] = {
        "plain": lambda: cached.kernel[grid](*tensors, *numbers, *constants, **cached.options),
        "direct": lambda: launch(grid, tensors, numbers, constants),
        "attend": lambda: attend(*arguments),
    }
    prepared = prepare_attend(*(*arguments, LaunchStream(torch.cuda.current_device())))
    if prepared is not None:
        (rows["prepared"],) = prepared
    for call in rows.values():
        call()
        call()
    times: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(rounds):
        for name, call in rows.items():
            times[name].append(_host_us(call))
    return {name: median(values) for name, values in times.items()}


if __name__ == "__main__":
    print(json.dumps({"launch_host_us": bench_launch()}, indent=1))
