"""Small models that several tests trace."""

from __future__ import annotations

import torch
from torch import nn


class Mlp(nn.Module):
    """Linear layers with a residual; ``depth`` is all that differs between instances."""

    def __init__(self, depth: int = 2, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, *, scale: float = 1.0
    ) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        if bias is not None:
            x = x + bias
        return x * scale


class Branchy(nn.Module):
    """Wrong without guards: the branch is taken once, at the trace."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if len(x) >= 4 else x * 100
