"""A platform that replays by running the function again: enough to test what stands above one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cgkit.capturing import PoolBytes
from cgkit.tensor_trees import tensor_leaves


class FakeGraph:
    def __init__(self, platform: FakePlatform, fn: Callable[[], Any], output: Any) -> None:
        self.platform, self.fn, self.output = platform, fn, output
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for (_, old), (_, new) in zip(tensor_leaves(self.output), tensor_leaves(self.fn())):
            old.copy_(new)

    def num_nodes(self) -> int | None:
        return 1


class FakePlatform:
    """Runs what it records (the one thing that a real platform must not do)."""

    name = "fake"
    emulated = True

    def __init__(self, fail_after: int | None = None, error: Exception | None = None) -> None:
        self.graphs: list[FakeGraph] = []
        self.weak: list[Any] = []
        self.freed: list[Any] = []
        self.fail_after, self.error = fail_after, error

    def new_pool(self) -> list[int]:
        return []

    def record(self, fn: Callable[[], Any], pool: list[int]) -> tuple[FakeGraph, Any]:
        if self.fail_after is not None and len(self.graphs) >= self.fail_after:
            assert self.error is not None
            raise self.error
        output = fn()
        pool.append(1024)
        self.graphs.append(FakeGraph(self, fn, output))
        return self.graphs[-1], output

    def weak_ref(self, value: Any, pool: Any) -> Any:
        self.weak.append(value)
        return value

    def pool_bytes(self, pool: list[int]) -> PoolBytes:
        return PoolBytes(sum(pool), sum(pool))

    def free(self, pool: list[int]) -> None:
        self.freed.append(pool)
        pool.clear()

    def synchronize(self) -> None:
        pass


def out_of_memory(message: str) -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(message)
