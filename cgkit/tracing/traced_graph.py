"""The artefact of stage 1: one graph, and Dynamo's bytecode around it."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import fx

from cgkit import torch_hooks
from cgkit.display import Shown, drawn
from cgkit.errors import TraceError
from cgkit.tracing.arguments import Arguments
from cgkit.tracing.fixed_weights import with_fixed_weights
from cgkit.tracing.frames import user_line
from cgkit.tracing.node_text import constants, leaves, reads_from
from cgkit.tracing.wrapper import TorchCompileWrapperWithCustomDispatcher


@dataclass(frozen=True)
class GraphInput:
    """One placeholder of a traced graph.

    ``kind`` is "argument", "symint" (a size, as a number), "parameter", "buffer", "attribute" (a
    tensor kept by the model otherwise) or "other" (a global, a closure). ``source`` is where the
    bytecode fetches it. ``shape`` is text, with the trace's symbols; for a symint the symbol.
    """

    index: int
    name: str
    kind: str
    source: str
    dynamic_dims: tuple[int, ...]
    shape: tuple[str, ...]
    dtype: torch.dtype | None
    device: torch.device | None

    @property
    def is_weight(self) -> bool:
        """Whether the model holds it, so that it is the same tensor in every call."""
        return self.kind in ("parameter", "buffer", "attribute")


@dataclass(repr=False, eq=False)
class TracedGraph(Shown):
    """One graph for one model instance, with what the later stages need of the trace.

    Attributes:
        model_name: the class of the model.
        graph_module: Dynamo's graph, untouched: weights are placeholders, operators are torch-level.
        example_inputs: one per placeholder: a fake tensor, a SymInt or an int. Weights are fake too.
        fake_mode: in which they were faked; it owns the symbols.
        tracing_context: of the compilation; :meth:`tracing` re-enters it.
        inputs: what each placeholder is.
        code, original_code: Dynamo's bytecode, and the code that it was made from.
        traced_files: the files of every function that was inlined: a cache key must hold them.
        dropped_guards: what the trace assumed of its symbols, as text. Nobody checks it any more.
        enlarged: first-call arguments of size 0 or 1 that were traced as 2.
        seconds: what the trace took.
        arguments: what later calls must have in common with the first.
        other_mode: says which mode (autocast, train/eval) is another one than at the trace, or "".
        guards, codes: what Dynamo looked at, and the functions that it inlined: for the trace cache.
        written: which inputs forward changes in place, once that was found out.
        origin: what the trace cache had to say, in a sentence; "" where it was not asked.
    """

    model_name: str
    graph_module: fx.GraphModule
    example_inputs: list[Any]
    fake_mode: Any
    tracing_context: Any
    inputs: list[GraphInput]
    code: CodeType
    original_code: CodeType
    traced_files: tuple[str, ...]
    dropped_guards: tuple[str, ...]
    enlarged: tuple[str, ...]
    seconds: float
    dispatch: str
    arguments: Arguments
    side_effects: tuple[torch_hooks.SideEffect, ...] = ()
    wrapper: TorchCompileWrapperWithCustomDispatcher | None = field(default=None)
    executor: GuardFilterExecutor | None = field(default=None)
    other_mode: Callable[[], str] = field(default=lambda: "")
    guards: tuple[tuple[str, str, Any], ...] = ()
    codes: tuple[CodeType, ...] = ()
    written: frozenset[int] | None = None
    origin: str = ""
    _bound: Callable[..., Any] | None = field(default=None, init=False)

    @property
    def num_outputs(self) -> int:
        """How many values the graph returns."""
        output = next(node for node in self.graph_module.graph.nodes if node.op == "output")
        return len(output.args[0])

    def bind(self, execute: Callable[..., Sequence[Any]]) -> Callable[..., Any]:
        """A callable like ``model.forward`` that runs ``execute`` in place of the graph.

        Args:
            execute: called with the graph's inputs in the order of :attr:`inputs`; returns a list or
                tuple with the graph's outputs.

        Returns:
            A function for any number of threads. It refuses (TraceError) a call whose arguments do
            not fit the trace, turns gradients off if they are on, and passes no guard. Like
            ``forward``, it runs no hooks of the model itself (those of its children are in the graph).
        """
        assert self.wrapper is not None
        if self.executor is not None:
            return self._checked(self.executor.bind(self.wrapper.compiled_callable, execute))
        return self._checked(self.wrapper.function(0, execute))

    def bind_fixed(
        self, execute: Callable[..., Sequence[Any]], args: tuple[Any, ...]
    ) -> Callable[..., Any] | None:
        """As :meth:`bind`, for calls like ``args`` (positional), with the weights that the model has now.

        None where the bytecode has more to do than to fetch; see :mod:`cgkit.tracing.fixed_weights`.
        """
        run = with_fixed_weights(self, execute, args)
        return None if run is None else self._checked(run)

    def _checked(self, run: Callable[..., Any]) -> Callable[..., Any]:
        check, gradients_on, no_grad = self.check_arguments, torch.is_grad_enabled, torch.no_grad

        def forward(*args: Any, **kwargs: Any) -> Any:
            check(args, kwargs)
            try:
                if gradients_on():
                    with no_grad():
                        return run(*args, **kwargs)
                return run(*args, **kwargs)
            except AssertionError as error:  # Inductor's, where a stride or a size is another one
                raise self._unlike_the_example(error, args, kwargs) from error
            except RuntimeError as error:
                if _RUNTIME_ASSERTION not in str(error):
                    raise
                raise TraceError(
                    f"{self.model_name} was traced under an assumption on sizes that this call breaks "
                    f"({' '.join(str(error).split())}; u0, u1, ... count what depends on values). Another size took "
                    "another path, or was refused, in forward itself: make the code the same for every size, or trace "
                    "a second model"
                ) from error

        return forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the graph as it was traced, uncompiled, on a call like ``model.forward``'s."""
        if self._bound is None:
            self._bound = self.bind(self.graph_module)
        return self._bound(*args, **kwargs)

    def check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises TraceError, naming the argument or the mode, if the call does not fit the trace."""
        self.arguments.check(args, kwargs)
        if self.other_mode():
            raise TraceError(
                f"{self.model_name}: {self.other_mode()}; the graph holds what the first mode does. Switch back, "
                "or let it be traced again in the new mode (a new instance, or cgkit.reset())"
            )

    def _unlike_the_example(
        self, error: AssertionError, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What to raise for an assertion of compiled code: TraceError with the inputs beside the example."""
        if "expected size" not in str(error):
            return error
        bound = self.arguments.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        lines = []
        for entry, example in zip(self.inputs, self.example_inputs):
            if entry.kind == "argument" and isinstance(example, torch.Tensor):
                now = eval(entry.source, {"__builtins__": {}, "L": bound.arguments})  # Dynamo's text
                traced = f"({', '.join(entry.shape)}), strides ({', '.join(map(str, example.stride()))})"
                lines.append(
                    f"{entry.source}: {tuple(now.shape)}, strides {now.stride()}; traced as {traced}"
                )
        return TraceError(
            f"an input of {self.model_name} has a size or a layout that the compiled graph was not made for "
            f"({str(error).splitlines()[0]}).\n  "
            + "\n  ".join(lines)
            + "\nSizes with one symbol must be equal; pass strided views as x.contiguous()"
        )

    @contextmanager
    def tracing(self) -> Iterator[Any]:
        """Re-enters the trace's context, so that a compiler finds its symbols and fake mode."""
        with torch_hooks.in_tracing_context(self.tracing_context) as context:
            yield context

    @property
    def operators(self) -> list[str]:
        """The names of the graph's operators, in order, with repetitions."""
        return [operator_name(node) for node in self.graph_module.graph.nodes if node.op in _CALLS]

    def draw(self, engine: str = "auto") -> Any:
        """All operators of the graph as a picture (needs ``cgkit[plot]``); a deep model is better drawn
        split (:meth:`cgkit.SplitGraph.draw`). ``engine``: "dot", "own" or "auto" (dot where there is one)."""
        return drawn(self, engine=engine)

    def to_frame(self) -> Any:
        """A DataFrame, one row a node: node, op, operator, shape, dtype, users, file, line, source; and
        what pictures need: role ("weight", "value", "number", "call", "output"), reads_from (nodes),
        constants, and fetched_from (where the model keeps a weight, or the argument's name)."""
        import pandas as pd

        rows = []
        kinds = {entry.name: entry for entry in self.inputs}
        takes = reads_from(self.graph_module.graph.nodes)
        for node in self.graph_module.graph.nodes:
            value = node.meta.get("example_value")
            tensor = isinstance(value, torch.Tensor)
            file, line, text = user_line(node) or ("", 0, "")
            rows.append(
                {
                    "node": node.name,
                    "op": node.op,
                    "operator": operator_name(node),
                    "shape": str(tuple(map(str, value.shape))).replace("'", "") if tensor else "",
                    "dtype": str(value.dtype).removeprefix("torch.") if tensor else "",
                    "users": len(node.users),
                    "file": file,
                    "line": line,
                    "source": text,
                    "role": _role(node, kinds),
                    "reads_from": takes[node.name],
                    "constants": constants(leaves(node)) if node.op in _CALLS else "",
                    "fetched_from": plain_source(kinds[node.name].source) if node.name in kinds else "",
                }
            )
        return pd.DataFrame(rows)

    def __repr__(self) -> str:
        kinds: dict[str, int] = {}
        for graph_input in self.inputs:
            kinds[graph_input.kind] = kinds.get(graph_input.kind, 0) + 1
        held = ", ".join(f"{count} {kind}{'s' * (count > 1)}" for kind, count in kinds.items())
        lines = [
            self._head(),
            f"  inputs: {len(self.inputs)} ({held})",
        ]
        for graph_input in self.inputs:
            if graph_input.kind == "argument":
                dtype = str(graph_input.dtype).removeprefix("torch.")
                lines.append(f"    {graph_input.source:<24} ({', '.join(graph_input.shape)}) {dtype}")
        if self.enlarged:
            lines.append(f"  traced larger than called: {'; '.join(self.enlarged)}")
        if self.dropped_guards:
            lines.append(f"  assumed, and checked by nobody: {'; '.join(self.dropped_guards)}")
        if self.origin:
            lines.append(f"  trace cache: {self.origin}")
        return "\n".join(lines)

    def _head(self) -> str:
        return (
            f"TracedGraph of {self.model_name}: {len(self.graph_module.graph.nodes)} nodes, "
            f"{len(self.operators)} operators, traced in {self.seconds:.2f} s"
        )


def _role(node: fx.Node, kinds: dict[str, GraphInput]) -> str:
    if node.op in _CALLS:
        return "call"
    if node.op != "placeholder":
        return "constant" if node.op == "get_attr" else "output"
    entry = kinds.get(node.name)
    if entry is None:
        return "value"
    return "weight" if entry.is_weight else "number" if entry.kind == "symint" else "value"


class TraceFinishedError(Exception):
    """Raised where the graph would be called for the first time: the trace is done, nothing runs."""


class GuardFilterExecutor:
    """Hands a call through Dynamo's own dispatch to the executor that the caller bound.

    With every guard filtered out, Dynamo runs the one entry it has; the graph's place is taken by
    :meth:`run`, which looks up in this thread what to execute. Today's vLLM does it so
    (``TorchCompileWithNoGuardsWrapper``), with one backend.
    """

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self._local = threading.local()

    def run(self, *inputs: Any) -> Any:
        """What the backend returned: called by Dynamo's bytecode with the graph's inputs."""
        execute = getattr(self._local, "execute", None)
        if execute is None:
            raise TraceFinishedError
        return execute(*inputs)

    def traced_again(self) -> TraceError:
        """The error for a second backend call: Dynamo no longer has the first graph."""
        error = TraceError(
            f"Dynamo wants to trace {self.model_name} a second time: its cache was cleared "
            "(torch._dynamo.reset()), and with dispatch='guard_filter' the graph is kept there. "
            "Trace the model again, or use dispatch='bytecode', which keeps its own"
        )
        self._local.error = error
        return error

    def bind(self, compiled: Callable[..., Any], execute: Callable[..., Any]) -> Callable[..., Any]:
        """``compiled`` with ``execute`` in the graph's place."""
        local = self._local

        def run(*args: Any, **kwargs: Any) -> Any:
            outer = getattr(local, "execute", None)
            local.execute = execute
            try:
                return compiled(*args, **kwargs)
            except Exception as error:
                cause, local.error = getattr(local, "error", None), None
                if cause is not None:
                    raise cause from error
                raise
            finally:
                local.execute = outer

        return run


#: How torch begins what an assertion in the graph says.
_RUNTIME_ASSERTION = "Runtime assertion failed"
_CALLS = ("call_function", "call_method", "call_module")
_REGISTERED = re.compile(
    r"(?:\.__dict__\['_(?:modules|parameters|buffers)'\]|\._(?:modules|parameters|buffers))\['([^']+)'\]"
)


def operator_name(node: fx.Node) -> str:
    """What a node calls, as its author would say it (``linear``, ``cgkit.my_op``); "" for placeholders and
    the output. The full names, which ``splitting_ops`` takes, are the split stage's."""
    if node.op not in _CALLS:
        return ""
    if isinstance(node.target, str):
        return node.target
    if isinstance(node.target, (torch_hooks.OpOverload, torch_hooks.OpOverloadPacket)):
        return str(node.target)
    return getattr(node.target, "__name__", str(node.target))


def plain_source(source: str, self_name: str = "self") -> str:
    """``L['self'].__dict__['_modules']['embed']._parameters['weight']`` as ``L['self'].embed.weight``.

    ``self_name``: what forward calls its first parameter, if it is not "self".
    """
    plain = _REGISTERED.sub(r".\1", source)
    root = f"L['{self_name}']"
    return "L['self']" + plain.removeprefix(root) if plain.startswith(root) else plain
