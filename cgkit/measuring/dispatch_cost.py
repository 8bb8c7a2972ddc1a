"""What lies between a call and its graph: Dynamo's guards, Dynamo without guards, the bytecode alone.

For the article's "自定义 dispatcher：绕过 Dynamo guard 的全部原理", which puts the evaluation of the guards at tens of
microseconds a call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cgkit.tracing import trace
from cgkit.tracing.wrapper import TorchCompileWrapperWithCustomDispatcher

if TYPE_CHECKING:
    import pandas as pd

GUARDS, FILTERED, BYTECODE = "guards checked (torch.compile)", "guards filtered out", "bytecode alone"


def dispatch_cost(model: nn.Module, *args: Any, repeats: int = 60, inner: int = 5) -> pd.DataFrame:
    """Host time of a call whose graph does nothing, in three ways, taken in turn in one process.

    The graph is replaced by a function that returns an output made beforehand, so that only the way to it is
    timed: the guards, and the bytecode that fetches the weights from the model.

    Returns:
        A row a way: ``way``, ``us`` (median of ``repeats``, each of ``inner`` calls), ``low_us``, ``high_us``
        (quartiles), ``guards`` (how many Dynamo made), ``inputs`` (of the graph).
    """
    import pandas as pd

    traced = trace(model, *args)
    with torch.no_grad():
        output = [torch.zeros(1)] * traced.num_outputs
        ways: dict[str, Callable[..., Any]] = {
            GUARDS: TorchCompileWrapperWithCustomDispatcher(
                model, lambda graph, examples: lambda *inputs: output
            ).compiled_callable,
            FILTERED: trace(model, *args, dispatch="guard_filter").bind(lambda *inputs: output),
            BYTECODE: traced.bind(lambda *inputs: output),
        }
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for run in ways.values():
            run(*args)
        for _ in range(repeats):
            for way, run in ways.items():
                start = time.perf_counter()
                for _ in range(inner):
                    run(*args)
                taken[way].append((time.perf_counter() - start) / inner * 1e6)
    rows = [
        (way, median(us), *_quartiles(us), len(traced.guards), len(traced.inputs))
        for way, us in taken.items()
    ]
    return pd.DataFrame(rows, columns=["way", "us", "low_us", "high_us", "guards", "inputs"])


def _quartiles(values: list[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]
