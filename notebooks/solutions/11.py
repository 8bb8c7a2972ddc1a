"""Solutions of the exercises of notebook 11."""

import torch
from torch import nn

import cgkit


def solution_11_1(layers, sizes):
    """A cut a layer, L + 1 pieces around the cuts, and each of those once for each different size."""
    return {"pieces": 2 * layers + 1, "capturable": layers + 1, "graphs": (layers + 1) * len(set(sizes))}


class solution_11_2(nn.Module):  # noqa: N801
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.abs().max().clamp(min=1)


class solution_11_3(nn.Module):  # noqa: N801
    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen = seen + 1
        return x + seen, seen


def running_mean(x: torch.Tensor, output: torch.Tensor) -> None:
    count = torch.arange(1, x.shape[0] + 1, device=x.device)
    output.copy_(x.cumsum(0) / count[:, None])


cgkit.register_op("running_mean", running_mean, mutates_args=["output"], namespace="course11")


@cgkit.support_torch_compile
class solution_11_4(nn.Module):  # noqa: N801
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        mean = torch.empty_like(x)
        torch.ops.course11.running_mean(x, mean)
        return mean * 2
