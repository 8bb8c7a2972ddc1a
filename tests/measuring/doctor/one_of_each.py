"""One broken model a code, and its fixed twin, each built without arguments: what ``cgkit doctor`` is given."""

from __future__ import annotations

import torch

from tests.measuring.doctor import models
from tests.measuring.doctor.models import *  # noqa: F403 - the command looks for classes in this file

models.register()


class Syncs(models.CallsOperator):
    def __init__(self) -> None:
        super().__init__("syncs")


class Resizes(models.CallsOperator):
    def __init__(self) -> None:
        super().__init__("resizes")


class Attends(models.CallsOperator):
    def __init__(self) -> None:
        super().__init__("attention_into")


class NamedLayers(models.Layers):
    def __init__(self) -> None:
        super().__init__("named")


class LayersNamedWell(models.Layers):
    def __init__(self) -> None:
        super().__init__("named_well")


class OneSize(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.sum() + y.sum()
