"""Faults to plant: a compiler that makes a mistake, so that there is something to search for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from cgkit.compiling.adaptors import EagerAdaptor


class WrongCompiler(EagerAdaptor):
    """Runs pieces operator by operator, and takes one function for another in them.

    Args:
        mistakes: which for which, as ``{torch.tanh: torch.sigmoid}``.
    """

    name = "wrong"

    def __init__(self, mistakes: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        self.mistakes = dict(mistakes)

    def compile(self, graph_module: fx.GraphModule, inputs: Any, fake_mode: Any, runtime_shape: Any) -> Any:
        own = copy.deepcopy(graph_module)
        for node in own.graph.nodes:
            if node.op == "call_function":
                node.target = self.mistakes.get(node.target, node.target)
        own.recompile()
        return super().compile(own, inputs, fake_mode, runtime_shape)
