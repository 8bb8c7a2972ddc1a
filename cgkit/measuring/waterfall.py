"""Where a device's memory goes: weights, KV cache, activations, graph pool, context and other, free.

The bar that is missing from most memory budgets is the graphs' (vLLM issue 19186: out of memory at the end of
capture, after everything else had been fitted in; the article's "显存账", the memory bill).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from cgkit.display import Shown
from cgkit.errors import CgkitError
from cgkit.forward_context import set_forward_context
from cgkit.measuring.predict_pool import step_peak_bytes

if TYPE_CHECKING:
    from cgkit.serving import Runner

PARTS = ("weights", "KV cache", "activations", "graph pool", "context and other", "free")


@dataclass(frozen=True)
class Waterfall(Shown):
    """Bytes by part, in the order of :data:`PARTS`; they add up to ``total_bytes``.

    ``how`` says of each part where its figure is from. ``emulated``: the graph pool is the emulated platform's.
    """

    model: str
    device: str
    parts: dict[str, int]
    how: dict[str, str]
    emulated: bool
    about: dict[str, str] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """The device's memory, or without a device the sum of what is known."""
        return sum(self.parts.values())

    def to_frame(self) -> Any:
        """A row a part: ``part``, ``bytes``, ``start_bytes`` (where its bar begins), ``share``, ``how``."""
        import pandas as pd

        rows, start = [], 0
        for part, count in self.parts.items():
            share = count / self.total_bytes if self.total_bytes else 0.0
            rows.append((part, count, start, share, self.how[part]))
            start += count
        return pd.DataFrame(rows, columns=["part", "bytes", "start_bytes", "share", "how"])

    def plot(self, about: Any = None, *, ax: Any = None) -> Any:
        """A bar a part, each beginning where the one before ends."""
        from cgkit.plotting.memory_charts import waterfall
        from cgkit.plotting.style import About

        about = about or About(self.model, device=self.device, emulated=self.emulated, **self.about)
        return waterfall(self.to_frame(), about, ax=ax)

    def __repr__(self) -> str:
        lines = [f"Waterfall of {self.model} on {self.device}{' (emulated graphs)' if self.emulated else ''}"]
        lines += [
            f"  {part:<18} {count:>18,} bytes  ({self.how[part]})" for part, count in self.parts.items()
        ]
        return "\n".join([*lines, f"  {'together':<18} {self.total_bytes:>18,} bytes"])


def waterfall(runner: Runner, *, total_bytes: int | None = None, num_tokens: int | None = None) -> Waterfall:
    """The waterfall of a runner whose graphs are recorded (or not: then the pool has 0 bytes).

    On a GPU ``context and other`` is what the driver says is used beyond all that is named: the CUDA context, loaded
    kernels, executable graphs (which lie outside of every pool), other tensors and other processes.

    Args:
        total_bytes: without a GPU, the size of the device to budget for; None: there is nothing free to show.
        num_tokens: the step whose activations are counted; None: the largest that the runner allows.

    Raises:
        CgkitError: the parts are larger than ``total_bytes``.
    """
    tokens = num_tokens or runner.max_num_batched_tokens
    captured = runner.executor.captured
    cuda = runner.device.type == "cuda"
    pool = captured.pool_bytes.reserved if captured is not None else 0
    weights = _unique_bytes([*runner.model.parameters(), *runner.model.buffers()])
    cache = _unique_bytes(t for pair in runner.kv_cache.caches.values() for t in pair)
    activations = _measured_peak(runner, tokens) if cuda else _computed_peak(runner, tokens)
    parts = {"weights": weights, "KV cache": cache, "activations": activations, "graph pool": pool}
    how = {
        "weights": "counted",
        "KV cache": "counted",
        "activations": f"{'measured' if cuda else 'computed'}: a compiled step of {tokens} tokens at its peak",
        "graph pool": "reserved by the pool" + ("" if cuda else " of the emulated platform"),
    }
    total: int | None
    if cuda:
        total, other = _other_bytes(runner.device, weights + cache + pool, pool)
        how |= {"context and other": "what the driver says is used, less the above", "free": "the rest"}
    else:
        total, other = total_bytes, 0
        how |= {
            "context and other": "no device: unknown",
            "free": "the rest of the budget" if total else "no device",
        }
    parts["context and other"] = other
    used = sum(parts.values())
    if total is not None and used > total:
        raise CgkitError(
            f"the parts take {used:,} bytes and total_bytes is {total:,}: a smaller KV cache, fewer or smaller "
            "sizes, or a larger device"
        )
    parts["free"] = (total or used) - used
    device = torch.cuda.get_device_name(runner.device) if cuda else "cpu"
    emulated = captured is not None and captured.platform.emulated
    about = {"mode": runner.executor.mode.name, "batch": f"steps of up to {tokens} tokens"}
    return Waterfall(runner.model.config.name, device, parts, how, emulated, about)


def _unique_bytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _computed_peak(runner: Runner, tokens: int) -> int:
    compiled = runner.executor.compiled
    return step_peak_bytes(compiled, tokens) if compiled is not None else 0


def _measured_peak(runner: Runner, tokens: int) -> int:
    """What one step without graphs needs on top of what is there; its tokens have no slot in the KV cache."""
    inputs, forward = runner.inputs, runner.executor.forward
    metadata = inputs.fill_dummy(tokens, decode_only=False)
    for _ in range(2):  # the first run may load kernels and take workspaces
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad(), set_forward_context(metadata):
            forward(inputs.input_ids[:tokens], inputs.positions[:tokens])
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    return peak


def _other_bytes(device: torch.device, named: int, pool: int) -> tuple[int, int]:
    """The device's memory, and what is used of it by nothing of ``named`` (of which ``pool`` are the pool's)."""
    torch.cuda.empty_cache()  # what a step left cached is free
    free, total = torch.cuda.mem_get_info(device)
    return total, max(0, total - free - named)
