"""What a recording cannot hold, or holds although it should not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cgkit.hazards.exhibit import STOPS, WRONG, Exhibit, Symptom
from cgkit.hazards.road import compared, findings, record
from cgkit.splitting import register_op

# --- a call that no capture allows -----------------------------------------------------------------------


class ScalesByItem(nn.Module):
    """Fetches the largest number to the host."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.max().item()


class ScalesByTensor(nn.Module):
    """Leaves it on the device."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.max()


def _record_plainly(model: type[nn.Module], device: str) -> Symptom:
    x = torch.ones(4, device=device)
    try:
        record(device, lambda: model()(x))
    except Exception as error:
        return Symptom(True, f"recording stops: {type(error).__name__}")
    return Symptom(False, "it can be recorded")


FORBIDDEN_CALL = Exhibit(
    "forbidden-call",
    "The host reads a value while a graph is recorded",
    (12,),
    "'operation not permitted when stream is capturing': vLLM#9094, pytorch#87794, vLLM PR#53818",
    "nothing runs during a recording, so there is no value to read; a copy, an allocation elsewhere or another "
    "stream are refused for like reasons",
    ScalesByItem,
    ScalesByTensor,
    _record_plainly,
    lambda model, device: findings("host-sync", model(), torch.ones(8, 4, device=device), compiler="eager"),
    kind=STOPS,
    tool="doctor",
)

# --- attention inside of a recorded piece -----------------------------------------------------------------

#: How many tokens are in the batch, as the host knows it: what a forward context holds for a real attention.
LENGTH = [2]


def _attend_first(x: Tensor, out: Tensor) -> None:
    out.copy_(x[: LENGTH[0]].mean(0).expand_as(out))


register_op("attention_of_first", _attend_first, ["out"], namespace="cgkit_hazards")


class AttendsFirst(nn.Module):
    """Looks at the tokens that the batch has, by a number of the host."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        out = torch.empty_like(y)
        torch.ops.cgkit_hazards.attention_of_first(y, out)
        return out + 1


def attention_is_recorded() -> list[str]:
    """``splitting_ops`` of a model whose attention nobody named."""
    return []


def attention_is_cut_out() -> list[str]:
    """The same with its attention named."""
    return ["cgkit_hazards::attention_of_first"]


def _another_length(ops: Any, device: str) -> Symptom:
    """The step as one bare graph, or as two with attention called between them, as ``ops`` says."""
    x = torch.arange(16.0, device=device).reshape(4, 4)
    out, LENGTH[0] = torch.empty_like(x), 2

    def attend(y: Tensor) -> Tensor:
        _attend_first(y, out)
        return out

    if ops():
        (first, y), (second, result) = record(device, lambda: x * 2, lambda: out + 1)
        steps = [first, lambda: attend(y), second]
    else:
        replay, result = record(device, lambda: attend(x * 2) + 1)[0]
        steps = [replay]
    LENGTH[0] = 4
    for step in steps:
        step()
    right = attend(x * 2) + 1
    return compared(result, right, "with 4 tokens the replay gives")


ATTENTION_INSIDE = Exhibit(
    "attention-inside",
    "Attention was recorded inside of a piece",
    (11,),
    "every draft silently rejected: vLLM#53030; corrupt text: torchtitan PR#3685",
    "an operator that was not named as a splitting operator is recorded with the lengths of the recording",
    attention_is_recorded,
    attention_is_cut_out,
    _another_length,
    lambda ops, device: findings(
        "dynamic-operator",
        AttendsFirst(),
        torch.ones(8, 4, device=device),
        compiler="eager",
        splitting_ops=ops() or None,
    ),
    kind=WRONG,
    tool="doctor",
)

EXHIBITS = (FORBIDDEN_CALL, ATTENTION_INSIDE)
