"""What a model may do that is hard on graphs: moves, each a layer; :mod:`tests.fuzz.programs` strings them together."""

from __future__ import annotations

import torch
from torch import nn

from cgkit.splitting import register_op

WIDTH = 4


def _attend(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x.flip(-1))


def _fresh(x: torch.Tensor) -> torch.Tensor:
    return x.flip(-1)


register_op("attend", _attend, ["out"], namespace="fuzz")
register_op("fresh", _fresh, [], fake_impl=torch.empty_like, namespace="fuzz")


def attend(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    torch.ops.fuzz.attend(x, out)
    return out


class Move(nn.Module):
    """``forward(x, y)``: both (tokens, WIDTH); returns (tokens, WIDTH)."""


class Plain(Move):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) + y


class Tied(Move):
    """One weight, two names."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.down.weight = self.up.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.down(self.up(x) * 0.5))


class Prints(Move):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        print(x.sum().item(), end="")
        return x + 1


class BranchOnValue(Move):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x - 1


class BranchOnSize(Move):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 3 else x - 1


class BranchOnOne(Move):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 3 if x.shape[0] == 1 else x - 1


class BranchOnNone(Move):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x if y.shape[0] == 0 else x + y


class ReadsBack(Move):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * float(x.abs().max())


class Selects(Move):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + x[x > 0].sum()


class MeanOverTokens(Move):
    """Padding is seen: the mean is over the padded rows too."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0, keepdim=True)


class WritesX(Move):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5)
        return x + y


class WritesY(Move):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y[:, 0] = x[:, 1]
        return x - y


class WritesBuffer(Move):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        return x + self.steps


class Counts(Move):
    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return x + self.steps


class Remembers(Move):
    """The step before is read in this one."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result = x + self.last
        self.last = x.detach().sum(0)
        return result


class Attends(Move):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return attend(x * 2) + 1


class FreshBetween(Move):
    """A splitting operator with a new output: it lies elsewhere in each step."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.ops.fuzz.fresh(x * 2) + 1


class Views(Move):
    """Views of views, written through one of them."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = x.clone()
        z.t()[0].add_(1)
        return z.view(-1, 2, 2).transpose(1, 2).reshape(-1, WIDTH)


class Reshapes(Move):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1).view(x.shape[0], WIDTH).unsqueeze(0).squeeze(0)


class Complex(Move):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = torch.view_as_complex(x.reshape(-1, 2, 2).contiguous())
        return torch.view_as_real(z * 1j).reshape(-1, WIDTH)


class Integers(Move):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + (x * 8).to(torch.int8).cumsum(-1).to(x.dtype)


class Eighths(Move):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + x.to(torch.float8_e4m3fn).to(x.dtype)


class Doubles(Move):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.double() / 3).to(x.dtype)


class ListOfRows(Move):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.stack([row * (i + 1) for i, row in enumerate(x.unbind(1))], 1)


class Slices(Move):
    """A size computed from a size, and the first half of the rows."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        half = x[: (x.shape[0] + 1) // 2]
        return torch.cat([half, x[half.shape[0] :] * 2])


class Raises(Move):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 7:
            raise ValueError("too many")
        return x + 1


class Tries(Move):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        try:
            return x + y.reshape(3, 3)
        except RuntimeError:
            return x * 4


class Random(Move):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + 0 * torch.rand_like(x)


MOVES: tuple[type[Move], ...] = tuple(Move.__subclasses__())


# --- what is returned ----------------------------------------------------------------------------


class End(nn.Module):
    """``forward(h, x, y)``: what the model returns, from its last layer and its arguments."""


class Itself(End):
    def forward(self, h, x, y):
        return h


class TheInput(End):
    def forward(self, h, x, y):
        return x


class InputsAndMore(End):
    def forward(self, h, x, y):
        return {"h": h, "again": h, "x": x, "nothing": None, "view": y[:, 1:3]}


class ViewsOfOne(End):
    def forward(self, h, x, y):
        return h, h[:, :2], h.t(), [h[0:1]]


class Twisted(End):
    """No contiguous layout, an expanded dimension."""

    def forward(self, h, x, y):
        return h.t().contiguous().t(), h[:, :1].expand(-1, 3)


class AsComplex(End):
    def forward(self, h, x, y):
        return torch.complex(h, y)


class AsIntegers(End):
    def forward(self, h, x, y):
        return h.argmax(-1), (h > 0)


class AsEighths(End):
    def forward(self, h, x, y):
        return h.to(torch.float8_e4m3fn)


class TheSize(End):
    def forward(self, h, x, y):
        return h, x.shape[0], "text"


class Sums(End):
    """No dimension of tokens is left: padding is in it."""

    def forward(self, h, x, y):
        return h.sum(0)


class Flat(End):
    def forward(self, h, x, y):
        return h.flatten()


ENDS: tuple[type[End], ...] = tuple(End.__subclasses__())
