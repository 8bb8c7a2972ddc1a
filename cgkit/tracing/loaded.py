"""A traced graph that another process traced: everything to run it by, and the graph itself on demand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

from cgkit.tracing.arguments import Arguments
from cgkit.tracing.traced_graph import GraphInput, TracedGraph
from cgkit.tracing.wrapper import TorchCompileWrapperWithCustomDispatcher


class LoadedTrace(TracedGraph):
    """A :class:`TracedGraph` out of the trace cache. It binds and runs like any other.

    ``graph_module``, ``example_inputs``, ``fake_mode`` and ``tracing_context`` are not stored: whoever asks for
    one of them has the model traced after all (:attr:`again`), which takes what a trace takes.
    """

    def __init__(
        self,
        *,
        model_name: str,
        inputs: list[GraphInput],
        code: CodeType,
        wrapper: TorchCompileWrapperWithCustomDispatcher,
        arguments: Arguments,
        other_mode: Callable[[], str],
        remake: Callable[[], TracedGraph],
        stored: Mapping[str, Any],
    ) -> None:
        """``stored``: ``traced_files``, ``dropped_guards``, ``enlarged``, ``side_effects``, ``num_outputs``,
        ``num_nodes``, ``written`` (positions, or None) and ``trace_seconds``, as they were."""
        self.model_name, self.inputs, self.code, self.wrapper = model_name, inputs, code, wrapper
        self.arguments, self.other_mode = arguments, other_mode
        self.original_code = wrapper.original_code_object
        self.traced_files = tuple(stored["traced_files"])
        self.dropped_guards, self.enlarged = tuple(stored["dropped_guards"]), tuple(stored["enlarged"])
        self.side_effects = tuple(stored["side_effects"])
        self.dispatch, self.executor, self._bound = "bytecode", None, None
        self.seconds = 0.0
        self.trace_seconds: float = stored["trace_seconds"]
        self.guards = ()
        self.codes = ()
        self._num_outputs: int = stored["num_outputs"]
        self._num_nodes: int = stored["num_nodes"]
        written = stored["written"]
        self.written = None if written is None else frozenset(written)
        self._remake = remake

    @functools.cached_property
    def again(self) -> TracedGraph:
        """The model traced in this process, now that somebody wants to see the graph."""
        return self._remake()

    @property
    def is_remade(self) -> bool:
        """Whether somebody has asked for the graph, so that it was traced in this process."""
        return "again" in self.__dict__

    @property
    def num_outputs(self) -> int:
        """How many values the graph returns."""
        return self._num_outputs

    @property
    def graph_module(self) -> Any:  # type: ignore[override]
        """Dynamo's graph, traced when this is first asked for."""
        return self.again.graph_module

    @property
    def example_inputs(self) -> list[Any]:  # type: ignore[override]
        """The fakes of that trace."""
        return self.again.example_inputs

    @property
    def fake_mode(self) -> Any:  # type: ignore[override]
        """Of that trace."""
        return self.again.fake_mode

    @property
    def tracing_context(self) -> Any:  # type: ignore[override]
        """Of that trace."""
        return self.again.tracing_context

    def _head(self) -> str:
        how = "and traced again for its graph" if self.is_remade else "no Dynamo in this process"
        return (
            f"TracedGraph of {self.model_name}: {self._num_nodes} nodes, loaded from the trace cache in "
            f"{self.seconds:.2f} s (traced in {self.trace_seconds:.2f} s by the process that stored it; {how})"
        )
