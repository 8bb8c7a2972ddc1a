"""What guards cost where nothing ever changes: right, and paid for at each step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cgkit.hazards.exhibit import SLOW, Exhibit, Symptom
from cgkit.hazards.road import findings
from cgkit.tracing import trace

#: So many weights, each with its guards.
_WEIGHTS = 100
_CALLS = 100
#: A guarded call is slow if it takes so many times what the same bytecode takes without guards. Two calls without
#: guards differ by up to a tenth; with them 1.5 (a fast host) to 4 times were seen.
_MUCH = 1.3


class ManyWeights(nn.Module):
    """Looks at all of its weights and returns a view: there is no work, so that the guards are most of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(4), False) for _ in range(_WEIGHTS))

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            last = scale
        return x.unsqueeze(last.dim())


def with_guards(model: nn.Module, example: Tensor) -> Callable[..., Any]:
    """Each call asks first whether everything is as it was at the trace."""
    return torch.compile(model.forward, backend="eager")


def without_guards(model: nn.Module, example: Tensor) -> Callable[..., Any]:
    """The same graph, called at once."""
    return trace(model, example)


_LEVEL = {with_guards: 1, without_guards: 3}


def _timed(way: Any, device: str) -> Symptom:
    model, x = ManyWeights().to(device), torch.ones(4, 4, device=device)
    with torch.no_grad():
        calls = [way(model, x), without_guards(model, x)]
        best = [float("inf")] * 2
        for _ in range(_CALLS):  # in turn: the clock of a machine drifts
            for number, call in enumerate(calls):
                started = time.perf_counter()
                call(x)
                best[number] = min(best[number], time.perf_counter() - started)
    here, least = (seconds * 1e6 for seconds in best)
    return Symptom(
        here > _MUCH * least,
        f"the fastest of {_CALLS} calls takes {here:.0f} us on the host, and {least:.0f} us past the guards",
    )


GUARDED_STEP = Exhibit(
    "guarded-step",
    "Guards are evaluated at each step",
    (18,),
    "0.31 to 0.84 ms of each step: vLLM PR#11217",
    "Dynamo's guards on every weight and module are asked at each call; in a model that serves, none ever fails",
    with_guards,
    without_guards,
    _timed,
    lambda way, device: findings(
        "guard-cost",
        ManyWeights().to(device),
        torch.ones(8, 4, device=device),
        severity="info",
        level=_LEVEL[way],
    ),
    kind=SLOW,
    tool="doctor",
)

EXHIBITS = (GUARDED_STEP,)
