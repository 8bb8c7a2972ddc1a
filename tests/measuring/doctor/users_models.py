"""Models as people bring them: each once made doctor, or a call under ``debug=True``, fail, say something untrue, or
leave something behind."""

from __future__ import annotations

import logging
import random
import warnings
from typing import Any

import numpy as np
import torch
from torch import nn

X = torch.arange(32.0).reshape(4, 8) / 8

_seen = {"calls": 0}


@torch.library.custom_op("users::counts", mutates_args=())
def counts(x: torch.Tensor) -> torch.Tensor:
    _seen["calls"] += 1
    return x + _seen["calls"]


@torch.library.custom_op("users::writes", mutates_args=())
def writes(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)  # and its schema says that it writes nothing
    return x * 2


@torch.library.custom_op("users::sums", mutates_args=())
def sums(x: torch.Tensor) -> torch.Tensor:
    return x.sum(-1)


for _operator in (counts, writes, sums):  # the last is another shape than it gives
    _operator.register_fake(torch.empty_like)


class User(nn.Module):
    """``forward(x)``: (tokens, 8). ``args``: an example."""

    args: tuple[Any, ...] = (X,)


class Vmaps(User):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: row * row.sum())(x)


class EvenRows(User):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0] // 2, 2, 8).flip(1).reshape(x.shape[0], 8)


class Scripted(User):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is deprecated, and in use
            self.part = torch.jit.script(nn.BatchNorm1d(8).eval())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x)


class Logs(User):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logging.getLogger("users").info("rows %s", x.shape)
        return x + 1


class Convolves(User):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(1, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.unsqueeze(1)).flatten(1)


class Keeps(User):
    """Lists, dicts of lists, counters: all of it forward's own bookkeeping."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.by_name: dict[str, list[int]] = {"sizes": []}
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.sizes.append(x.shape[0])
        self.by_name["sizes"].append(x.shape[0])
        return x + 1


class DrawsInPython(User):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * random.random() + np.random.rand()


class Sorted(User):
    """Refuses values that doctor tries beside the example's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x[0, 0] <= x[-1, 0]).any())
        return x + 1


class Mixes(User):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


class Moves(User):
    """Each call another one: the graph holds the first."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return x * self.step


class Counts(User):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return counts(x)


class CountsItsCalls(User):
    """Divides by how often it was called, and a batch of one or two takes another way."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = x / self.calls
        return y * 10 if len(x) < 3 else y


class CountsElsewhere(User):
    """The same, and no attribute tells how often."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return counts(x) * 10 if len(x) < 3 else counts(x)


class WritesInSecret(User):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return writes(x)


class WrongFake(User):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sums(x) + 1


class Conditional(User):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda t: t * 2, lambda t: t - 1, (x,))


class ReadsAnItem(User):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return y * x[0, 0].item()


@torch.compile(backend="eager", fullgraph=True)
def _compiled(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda t: t * 2, lambda t: t - 1, (x,))


class CompilesInside(User):
    """As ``flex_attention`` does, when it is called outside of a trace."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _compiled(x)


class FailsInAutocast(User):
    """In the graph autocast is entered and left by nodes; what fails lies between them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return (x @ x.t()) * x[0, 0].item()


class Rest(User):
    args = (X, X)

    def forward(self, *xs: torch.Tensor) -> torch.Tensor:
        return xs[0] * 2 + xs[1]


class OwnForward(User):
    """An instance's forward is not that of its class."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.other  # type: ignore[method-assign]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def other(self, x: torch.Tensor) -> torch.Tensor:
        return x * 100


class Takes(User):
    args = (torch.nested.nested_tensor([X, X[:1]], layout=torch.jagged),)

    def forward(self, x: Any) -> torch.Tensor:
        return x * 2


def line_of(model: nn.Module, text: str) -> int:
    """The number of the line of a model's class that has ``text`` in it."""
    import inspect

    lines, first = inspect.getsourcelines(type(model))
    return next(first + number for number, line in enumerate(lines) if text in line)
