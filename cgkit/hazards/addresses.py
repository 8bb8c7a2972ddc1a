"""Graphs that read where something was: a fresh tensor, a buffer that was replaced, a result that is no more."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cgkit.hazards.exhibit import WRONG, Exhibit, Symptom, said_by
from cgkit.hazards.road import captured, compared, findings, numbers, record
from cgkit.splitting import register_op


def _attention_into(x: Tensor, out: Tensor) -> None:
    out.copy_(x.flip(-1))


def _attention_anew(x: Tensor) -> Tensor:
    return x.flip(-1)


register_op("attention_into", _attention_into, ["out"], namespace="cgkit_hazards")
register_op(
    "attention_anew", _attention_anew, [], fake_impl=lambda x: torch.empty_like(x), namespace="cgkit_hazards"
)

#: Splitting operator that writes into what it is given; other exhibits cut at it too.
ATTENTION_INTO = "cgkit_hazards::attention_into"

# --- a splitting operator that returns a new tensor ------------------------------------------------


class ReturnsAnew(nn.Module):
    """Attention gives a new tensor at each step."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.cgkit_hazards.attention_anew(x + 1) * 2


class WritesInto(nn.Module):
    """Attention writes into a tensor of the piece before it."""

    def forward(self, x: Tensor) -> Tensor:
        y = x + 1
        out = torch.empty_like(y)
        torch.ops.cgkit_hazards.attention_into(y, out)
        return out * 2


def _two_pieces(model: type[nn.Module], device: str) -> Symptom:
    """Piece, operator, piece: the pieces as bare graphs, the operator between them as it is."""
    x, fresh = torch.zeros(4, device=device), model is ReturnsAnew
    (first, y), *_ = record(device, lambda: x + 1)
    first()
    out = _attention_anew(y) if fresh else torch.empty_like(y)
    second, result = record(device, lambda: out * 2)[0]
    kept = []
    for step in (1.0, 2.0):
        x.fill_(step)
        first()
        if fresh:
            kept.append(_attention_anew(y))  # lies somewhere else than `out` did
        else:
            _attention_into(y, out)
        second()
    right = (x + 1).flip(-1) * 2
    return compared(result, right, "the second piece gives")


_OPS: dict[Any, str] = {
    ReturnsAnew: "cgkit_hazards::attention_anew",
    WritesInto: "cgkit_hazards::attention_into",
}
FRESH_TENSOR = Exhibit(
    "fresh-tensor",
    "A splitting operator returns a new tensor",
    (9,),
    "garbage tokens and no error: vLLM PR#53915, PR#37395",
    "the piece after it was recorded with the address of the first such tensor, and goes on reading there",
    ReturnsAnew,
    WritesInto,
    _two_pieces,
    lambda model, device: findings(
        "moved-input", model(), torch.ones(8, 4, device=device), splitting_ops=[_OPS[model]], compiler="eager"
    ),
    kind=WRONG,
    tool="doctor",
)

# --- a buffer that is replaced after the recording ------------------------------------------------------


class Table(nn.Module):
    """Reads a table that it owns."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table


def replace(model: Table) -> None:
    """Weights are updated by putting another tensor in their place."""
    model.table = nn.Parameter(torch.full_like(model.table, 3), requires_grad=False)


def write_in_place(model: Table) -> None:
    """Weights are updated where they are."""
    model.table.copy_(torch.full_like(model.table, 3))


def _update_unnoticed(update: Any, device: str) -> Symptom:
    model, x = Table().to(device), torch.ones(4, device=device)
    replay, result = record(device, lambda: model(x))[0]
    kept = model.table  # so that its memory is not given to another tensor: it could be
    with torch.no_grad():
        update(model)
    replay()
    right = x * model.table
    del kept
    return compared(result, right, "the replay gives")


def _update_checked(update: Any, device: str) -> str:
    model, x = Table().to(device), torch.ones(4, 4, device=device)
    graphs = captured(model, x, [4], debug=True)
    with torch.no_grad():
        update(model)
    return said_by(lambda: graphs(x))


REPLACED_BUFFER = Exhibit(
    "replaced-buffer",
    "A tensor that the graph reads is replaced",
    (10,),
    "cudaErrorIllegalAddress in a PIECEWISE replay: vLLM#40038 (a table of the host baked into the graph)",
    "a graph holds addresses and no tensors: it reads the old memory, whoever owns it by now",
    replace,
    write_in_place,
    _update_unnoticed,
    _update_checked,
    kind=WRONG,
    tool="debug=True",
)

# --- a result that the next replay overwrites -----------------------------------------------------------


def keep_the_output(step: Any, first: Tensor, second: Tensor) -> Tensor:
    """Takes the first step's result, and looks at it after the second step."""
    kept = step(first)
    step(second)
    return kept + 0


def copy_the_output(step: Any, first: Tensor, second: Tensor) -> Tensor:
    """Copies it before the next step."""
    kept = step(first).clone()
    step(second)
    return kept + 0


def _two_steps(use: Any, device: str) -> Symptom:
    x = torch.zeros(4, device=device)
    replay, result = record(device, lambda: x * 10)[0]

    def step(value: Tensor) -> Tensor:
        x.copy_(value)
        replay()
        return result

    one, two = torch.full_like(x, 1), torch.full_like(x, 2)
    got = use(step, one, two)
    return Symptom(
        not torch.equal(got, one * 10),
        f"the first step's result reads {numbers(got)}, and was {numbers(one * 10)}",
    )


class TimesTen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 10


def _two_steps_checked(use: Any, device: str) -> str:
    x = torch.ones(4, 4, device=device)
    graphs = captured(TimesTen(), x, [4], debug=True)
    graphs.clone_outputs = False
    return said_by(lambda: use(graphs, x, x * 2))


OVERWRITTEN_OUTPUT = Exhibit(
    "overwritten-output",
    "A result is read after the next replay",
    (21,),
    "'accessing tensor output of CUDAGraphs that has been overwritten': pytorch#148439, #144386, #170604, #122192",
    "the output lies in the graph's own memory, and each replay writes there",
    keep_the_output,
    copy_the_output,
    _two_steps,
    _two_steps_checked,
    kind=WRONG,
    tool="debug=True",
)

EXHIBITS = (FRESH_TENSOR, REPLACED_BUFFER, OVERWRITTEN_OUTPUT)
