"""The article's buffer check beside ours, on small models: what it misses, where it fires for nothing.

Exhibit for "哪些代码写在 CUDA Graph 下会出事" (which code goes wrong under CUDA graphs).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cgkit.tracing.buffer_writes import article_check, find_buffer_writes
from cgkit.tracing.trace import trace


class _Stateful(nn.Module):
    buf: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("buf", torch.zeros(4))
        self.last: Any = None


class ReplacesBuffer(_Stateful):
    """``self.buf = self.buf + 1``"""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.buf = self.buf + 1
        return x + self.buf


class AssignsAttribute(_Stateful):
    """``self.last = x * 2``"""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x * 2
        return x + self.last


class AddsInPlace(_Stateful):
    """``self.buf.add_(1)``"""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.buf.add_(1)
        return x + self.buf


class SetsItem(_Stateful):
    """``self.buf[0] = 1``"""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.buf[0] = 1.0
        return x + self.buf


class ScalesView(_Stateful):
    """``self.buf.view(-1).mul_(2)``"""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.buf.view(-1).mul_(2)
        return x + self.buf


class UpdatesLocalDict(_Stateful):
    """``d = {}; d.update(y=x * 2)`` (writes nothing that is kept)"""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: dict[str, torch.Tensor] = {}
        outputs.update(y=x * 2)
        return outputs["y"] + self.buf


class WritesNothing(_Stateful):
    """``return x + self.buf``"""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.buf


EXHIBITS = (
    ReplacesBuffer,
    AssignsAttribute,
    AddsInPlace,
    SetsItem,
    ScalesView,
    UpdatesLocalDict,
    WritesNothing,
)


def buffer_check_exhibit() -> Any:
    """A DataFrame, one row a small model: what its forward does, and what the two checks say.

    Columns: ``forward``, ``writes`` (the truth, found by running it eagerly), ``article_fires``,
    ``cgkit_fires``, ``article_is`` ("right", "misses it", "fires for nothing").
    """
    import pandas as pd

    rows = []
    for cls in EXHIBITS:
        writes = _writes_when_run(cls())
        traced = trace(cls(), torch.ones(3, 4))
        article = article_check(traced.code)
        ours = any(write.holds_tensor for write in find_buffer_writes(traced))
        verdict = "right" if article == writes else ("misses it" if writes else "fires for nothing")
        rows.append(
            {
                "forward": (cls.__doc__ or "").replace("`", ""),
                "writes": writes,
                "article_fires": article,
                "cgkit_fires": ours,
                "article_is": verdict,
            }
        )
    return pd.DataFrame(rows)


def _writes_when_run(model: _Stateful) -> bool:
    buffer, last = model.buf, model.last
    version = buffer._version
    with torch.no_grad():
        model(torch.ones(3, 4))
    return model.buf is not buffer or buffer._version != version or model.last is not last
