"""Small benchmarks of the kernels, for a machine with a CUDA device: ``python -m cgkit.kernels.bench``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

from cgkit.errors import CgkitError
from cgkit.torch_hooks import LaunchStream


def _decode_arguments(batch: int, heads: int, kv_heads: int, head_dim: int, context: int) -> tuple[Any, ...]:
    """What :func:`cgkit.kernels.attend` takes, for a decode batch in bfloat16 with blocks of 16."""
    if not torch.cuda.is_available():
        raise CgkitError("the kernel benchmarks need a CUDA device, and torch finds none")
    block_size, width = 16, -(-context // 16)
    new = lambda *shape: torch.randn(*shape, dtype=torch.bfloat16, device="cuda")  # noqa: E731
    caches = [new(batch * width + 1, block_size, kv_heads, head_dim) for _ in range(2)]
    table = torch.arange(1, batch * width + 1, dtype=torch.int32, device="cuda").view(batch, width)
    metadata = SimpleNamespace(
        block_table=table,
        seq_lens=torch.full((batch,), context, dtype=torch.int32, device="cuda"),
        query_start_loc=torch.arange(batch + 1, dtype=torch.int32, device="cuda"),
        token_to_req=torch.arange(batch, dtype=torch.int32, device="cuda"),
        slot_mapping=table[:, (context - 1) // block_size].long() * block_size + (context - 1) % block_size,
        decode_only=True,
    )
    query, key, value = (
        new(batch, heads, head_dim),
        new(batch, kv_heads, head_dim),
        new(batch, kv_heads, head_dim),
    )
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


class _Spy:
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

    arguments = _decode_arguments(1, 32, 8, 64, 256)
    cached, spy = triton_decode._launch, _Spy()
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


def bench_decode(
    batches: tuple[int, ...] = (1, 8, 32), contexts: tuple[int, ...] = (256, 4096), layers: int = 16
) -> list[dict[str, float]]:
    """Device microseconds of one decode launch: ``layers`` launches in a CUDA graph, replayed.

    One row for each batch, context, head shape and tuning (tile, num_warps, num_stages). Each launch has
    caches of its own, as layers have, so that small caches do not simply stay in the L2 cache.
    """
    from cgkit.kernels import attend, triton_decode
    from cgkit.kernels.launch import CachedLaunch

    rows = []
    usual_launch, usual_tile = triton_decode._launch, triton_decode.TILE
    try:
        for heads, head_dim in [(32, 64), (16, 128), (32, 128)]:
            for batch in batches:
                for context in contexts:
                    shape = (batch, heads, 8, head_dim, context)
                    steps = [_decode_arguments(*shape) for _ in range(layers)]
                    for tile, warps, stages in [
                        (64, 4, 3),
                        (64, 4, 2),
                        (128, 4, 2),
                        (128, 8, 2),
                        (32, 4, 4),
                        (64, 2, 3),
                    ]:
                        triton_decode.TILE = tile
                        triton_decode._plans.clear()
                        triton_decode._launch = CachedLaunch(
                            usual_launch.kernel, num_warps=warps, num_stages=stages
                        )
                        us = _graph_us(partial(_each, attend, steps)) / layers
                        rows.append(
                            {
                                "batch": batch, "context": context, "heads": heads, "head_dim": head_dim,
                                "tile": tile, "num_warps": warps, "num_stages": stages, "device_us": us,
                            }
                        )  # fmt: skip
    finally:
        triton_decode._launch, triton_decode.TILE = usual_launch, usual_tile
        triton_decode._plans.clear()
    return rows


def _each(call: Callable[..., Any], steps: list[tuple[Any, ...]]) -> None:
    for step in steps:
        call(*step)


def _graph_us(call: Callable[[], Any], replays: int = 50) -> float:
    """Device microseconds of ``call``, recorded once and replayed (the median of replays by events)."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return median(times)


if __name__ == "__main__":
    print(json.dumps({"launch_host_us": bench_launch(), "decode": bench_decode()}, indent=1))
