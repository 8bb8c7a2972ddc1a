"""Models that are broken in one way each, and their fixed twins."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from cgkit.forward_context import current_forward_context
from cgkit.splitting import register_op

A_GLOBAL = torch.ones(4)
A_SCALAR = torch.tensor(2.0)


class Prints(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        print(y)  # breaks
        return y * 2


class PrintsNot(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + 1) * 2


class TwoBreaks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + x.sum().item()  # first
        if y.sum() > 3:  # second
            y = y * 2
        return y


class NoBreaks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + x.sum(-1, keepdim=True)
        return torch.where(y.sum(-1, keepdim=True) > 3, y * 2, y)


class Raises(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.ones(5)  # a row has 4


class RaisesNot(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.ones(4, device=x.device)


class ReshapesByNumber(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = x.reshape(8, 2, 2)  # a number
        b = y * 2 if y.shape[0] == 6 else y  # a comparison
        return a.sum() + b.sum()


class ReshapesBySize(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.reshape(-1, 2, 2) + 1, y * 2


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if len(x) >= 4 else x * 100  # another result


class BranchesHigh(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if len(x) < 4 else x * 100


class BranchesToTheSame(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if len(x) >= 4 else x + x


class MixesRows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y = y - y.mean(0)  # mixes
        return y + 1


class LooksBack(nn.Module):
    """A row depends on those before it: what stands behind it is not in it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(0)


class TakesTheLast(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[-1] * 2  # the last


class NotAnnotated(nn.Module):
    def forward(self, x):
        return x * 2


class TakesMany(nn.Module):
    def forward(self, *xs: torch.Tensor) -> torch.Tensor:
        return xs[0] + xs[1]


class Slots:
    """An object whose attributes cannot be listed, so that nothing is found in it."""

    __slots__ = ("hidden",)
    hidden: torch.Tensor

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class TakesSlots(nn.Module):
    def forward(self, slots: Slots) -> torch.Tensor:
        return slots.hidden * 2


class WritesItsInput(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x if len(x) >= 4 else x * 1


class MaybeMask(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
        return (x if mask is None else x * mask) * scale


class WritesBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(x.sum(0))  # writes
        return x + self.seen


class ReturnsBuffer(WritesBuffer):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen = self.seen + x
        return x + seen, seen


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1  # frozen
        return x * self.steps


class CountsNot(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


class SelectsByMask(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].sum() + x.sum()  # nonzero


class SelectsByNumber(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        columns = torch.zeros(2, dtype=torch.int64, device=x.device)
        return torch.where(x > 0, x, 0).sum(-1) + x[:, columns].sum(-1)


class Inverts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(x.T @ x + torch.eye(4))  # checks for singularity on the host


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(x.shape, generator=self.generator)  # its own


class DefaultGenerator(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(x.shape, device=x.device)  # the default


class ReadsGlobal(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * A_GLOBAL


class ReadsScalar(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * A_SCALAR


class ReadsOwn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("own", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.own


def _attention_into(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x.flip(-1))


def _fresh(x: torch.Tensor) -> torch.Tensor:
    return x.flip(-1)


def _named(x: torch.Tensor, out: torch.Tensor, layer: str) -> None:
    out.copy_(x)


def _syncs(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * x[0, 0].item())  # reads on the host


def _resizes(x: torch.Tensor, out: torch.Tensor) -> None:
    scratch = torch.empty(0)
    scratch.resize_(x.shape)  # other memory
    out.copy_(scratch.copy_(x))


CACHE = torch.ones(8, 4)


def _fetches(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x + CACHE)


class Together(nn.Module):
    """All of it on the current stream."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1


class AsideUnwaited(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.side = torch.cuda.Stream()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(self.side):
            y = x * 2  # aside
        return y + 1


class AsideUnjoined(AsideUnwaited):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            y = x * 2  # aside
        return y + 1


class AsideJoined(AsideUnwaited):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            y = x * 2  # aside
        torch.cuda.current_stream().wait_stream(self.side)
        return y + 1


class AsideByEvents(AsideUnwaited):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        torch.cuda.current_stream().record_event().wait(self.side)
        with torch.cuda.stream(self.side):
            y.copy_(x)  # aside
            done = self.side.record_event()
        done.wait()
        return y + 1


class Waits(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch.cuda.synchronize()  # waits
        return y + 1


class MakesOnCpu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(4)
        return x * steps.to(x.device)  # copied


class MixesCpu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.arange(4)  # beside


class Pins(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(4).pin_memory()  # pinned
        return x * steps.to(x.device, non_blocking=True)


class ReadsBack(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x.sum(0).to("cpu")  # back


class Unregistered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale  # unregistered


class MakesThere(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.arange(4, device=x.device)


class OneByOne(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        return y * 100 if len(x) == 1 else y * 2  # one


class OneLikeMany(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        return y + y if len(x) == 1 else y * 2


class Kept(nn.Module):
    """Its weights and a number may be replaced after the trace."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def _by_the_step(x: torch.Tensor, out: torch.Tensor) -> None:
    context = current_forward_context()
    metadata = None if context is None else context.attn_metadata
    torch.mul(x, 1.0 if metadata is None else metadata.factor, out=out)


@cache
def register() -> None:
    """The operators that the models call."""
    space = {"namespace": "doctor_test"}
    register_op("attention_into", _attention_into, ["out"], **space)
    register_op("fresh", _fresh, [], fake_impl=lambda x: torch.empty_like(x), **space)
    register_op("named", _named, ["out"], **space)
    register_op("named_well", _named, ["out"], lookup_args=["layer"], **space)
    register_op("fetches", _fetches, ["out"], **space)
    register_op("by_the_step", _by_the_step, ["out"], **space)
    register_op("syncs", _syncs, ["out"], **space)
    register_op("resizes", _resizes, ["out"], **space)


class CallsOperator(nn.Module):
    """An operator that writes into what it is given."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.operator = getattr(torch.ops.doctor_test, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        out = torch.empty_like(y)
        self.operator(y, out)
        return out * 2


class CallsFresh(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.doctor_test.fresh(x + 1) * 2


class Layers(nn.Module):
    """Layers that differ in a name alone; attention cuts between them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.operator = getattr(torch.ops.doctor_test, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in range(3):
            out = torch.empty_like(x)
            self.operator(x * 2, out, f"layer.{layer}")
            x = torch.empty_like(out)
            torch.ops.doctor_test.attention_into(out + 1, x)
        return x
