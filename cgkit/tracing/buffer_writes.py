"""Does ``forward`` write tensors that the model keeps?

Implements the article's "哪些代码写在 CUDA Graph 下会出事" (which code goes wrong under CUDA graphs): a
replay runs no Python, so an attribute that forward assigns is assigned once and never again; and a
tensor that forward changes in place is changed by every warm-up as well.

The article's check (``"update" in co_names``) is :func:`article_check`; ``exhibit.py`` shows what it
misses and where it fires for nothing. Ours looks at what is really written: assignments are read
from the side effects that Dynamo will replay after the graph, in-place writes are found by running
the graph under fake tensors and watching which storages the operators' schemas write to.
Operators outside of ATen are exempt: an operator that declares what it mutates (``register_op``) is
how state is written on purpose.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import fx

from cgkit import torch_hooks
from cgkit.errors import BufferWriteError, TraceError
from cgkit.tracing.decompile import decompile
from cgkit.tracing.frames import innermost_outside_torch, user_line
from cgkit.tracing.traced_graph import TracedGraph


@dataclass(frozen=True)
class BufferWrite:
    """One write, in forward, of something that the model (or a global) keeps.

    ``name`` is the path from the model ("child.buf"); ``how`` what was done ("assigned",
    "in place: aten::add_"). ``holds_tensor`` False: a Python value, frozen as it was in the trace,
    which is reported but not refused.
    """

    name: str
    how: str
    file: str
    line: int
    source: str
    holds_tensor: bool = True

    def __str__(self) -> str:
        return f"{self.name} ({self.how}) at {self.file}:{self.line}\n      {self.source}"


def find_buffer_writes(traced: TracedGraph) -> list[BufferWrite]:
    """Every write of a kept tensor or attribute in the traced forward, assignments first.

    Not found to be writes: local containers, arguments of forward, and operators outside of ATen.

    Raises:
        TraceError: the graph cannot be run under fake tensors, so that nothing can be said.
    """
    return _assignments(traced) + _in_place(traced)


def raise_on_buffer_writes(traced: TracedGraph) -> None:
    """Raises BufferWriteError if the traced forward writes tensors that the model keeps."""
    writes = [write for write in find_buffer_writes(traced) if write.holds_tensor]
    if not writes:
        return
    how, text = decompile(traced.code)
    listed = "\n  ".join(str(write) for write in writes)
    raise BufferWriteError(
        f"{traced.model_name}.forward writes tensors that it keeps, which a recorded graph cannot do right: "
        f"Python does not run at a replay, and warm-ups write as well.\n  {listed}\n"
        "Return the value instead; or write it through an operator that declares what it mutates "
        f"(cgkit.register_op); or switch graphs off (cudagraph_mode='NONE').\n"
        f"The compiled forward ({how}):\n{text}"
    )


def written_arguments(traced: TracedGraph) -> frozenset[int]:
    """Which of the graph's inputs are arguments that forward changes in place (by position).

    Operators of every namespace count: what a schema declares as mutated is written.

    Raises:
        TraceError: as :func:`find_buffer_writes`.
    """
    if traced.written is not None:
        return traced.written
    owners: dict[Any, str] = {}
    for graph_input, example in zip(traced.inputs, traced.example_inputs):
        if isinstance(example, torch.Tensor) and graph_input.kind == "argument":
            owners.setdefault(torch_hooks.storage_key(example), str(graph_input.index))
    watch = _WriteWatch(owners, every_operator=True)
    _run_watched(traced, watch)
    traced.written = frozenset(int(write.name) for write in watch.found)
    return traced.written


def article_check(code: CodeType) -> bool:
    """The article's own check: whether Dynamo's bytecode names anything ``update``. An exhibit."""
    return "update" in code.co_names


# --- assignments -----------------------------------------------------------------------------


def _assignments(traced: TracedGraph) -> list[BufferWrite]:
    arguments = set(traced.arguments.signature.parameters)
    found = []
    for effect in traced.side_effects:
        target = effect.target
        root = re.match(r"L\['([^']+)'\]", target)
        if root and root.group(1) in arguments:
            continue
        if root is None and not effect.holds_tensor:  # a library's own bookkeeping in a global
            continue
        name, member = _written_name(effect, target)
        file, line, text = _written_at(effect, member, traced)
        found.append(BufferWrite(name, effect.how, file, line, text, effect.holds_tensor))
    return found


def _written_name(effect: torch_hooks.SideEffect, target: str) -> tuple[str, str]:
    """(path as a user says it, the last part of it)."""
    registered = re.search(r"(?:\.__dict__\['_(?:buffers|parameters)'\]|\._(?:buffers|parameters))$", target)
    if registered and effect.attribute is None:  # nn.Module keeps buffers in a dict of its own
        target = target[: registered.start()]
        path, member = f"{target}.{effect.key}", str(effect.key)
        return _from_model(path), member
    if effect.attribute is not None:
        return _from_model(f"{target}.{effect.attribute}"), effect.attribute
    path = _from_model(target)
    return (path if effect.key is None else f"{path}[{effect.key!r}]"), path.rpartition(".")[2]


def _from_model(path: str) -> str:
    return path.removeprefix("L['self'].").replace("G['", "global ['")


def _written_at(effect: torch_hooks.SideEffect, member: str, traced: TracedGraph) -> tuple[str, int, str]:
    """The user's line of a write: of all writes to the object, the one that speaks of the member."""
    lines = [line for line in map(innermost_outside_torch, effect.stacks) if line is not None]
    for line in lines:
        if re.search(rf"\b{re.escape(member)}\b", line[2]):
            return line
    if lines:
        return lines[0]
    return traced.original_code.co_filename, traced.original_code.co_firstlineno, "(line not known)"


# --- in place --------------------------------------------------------------------------------


def _in_place(traced: TracedGraph) -> list[BufferWrite]:
    owners: dict[Any, str] = {}
    for graph_input, example in zip(traced.inputs, traced.example_inputs):
        if isinstance(example, torch.Tensor) and (graph_input.is_weight or graph_input.kind == "other"):
            owners.setdefault(torch_hooks.storage_key(example), _from_model(graph_input.source))
    if not owners:
        return []
    watch = _WriteWatch(owners)
    _run_watched(traced, watch)
    return watch.found


def _run_watched(traced: TracedGraph, watch: _WriteWatch) -> None:
    interpreter = _NodeByNode(traced.graph_module, watch)
    try:
        with traced.tracing(), torch_hooks.running_fake(traced.fake_mode), watch:
            # Looking must leave no trace: what asks a size as a number would fix the token count to the example's.
            with torch_hooks.without_new_guards(traced.fake_mode):
                interpreter.run(*traced.example_inputs)
    except Exception as error:
        raise TraceError(
            f"cannot check {traced.model_name} for writes to its own tensors: node {interpreter.at} fails "
            f"under fake tensors ({type(error).__name__}: {error}). Trace without check_buffer_writes "
            "and switch graphs off"
        ) from error


class _NodeByNode(fx.Interpreter):
    """Runs a graph and tells the watch which node is running."""

    def __init__(self, graph_module: fx.GraphModule, watch: _WriteWatch) -> None:
        super().__init__(graph_module, garbage_collect_values=True)
        self.watch = watch
        self.at = "(none)"

    def run_node(self, n: fx.Node) -> Any:
        self.at = n.name
        self.watch.node = n
        return super().run_node(n)


class _WriteWatch(torch_hooks.TorchDispatchMode):
    """Sees every operator, and whether its schema writes to a storage that the model keeps."""

    supports_higher_order_operators = True

    def __init__(self, owners: dict[Any, str], every_operator: bool = False) -> None:
        super().__init__()
        self.every_operator = every_operator
        self.owners = owners
        self.node: fx.Node | None = None
        self.found: list[BufferWrite] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        watched = getattr(func, "namespace", "") in _WATCHED and not _declares_its_writes(self.node)
        if self.every_operator or watched:
            for value in _written_arguments(func, args, kwargs):
                for tensor in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(tensor, torch.Tensor):
                        self._written(func, tensor)
        return func(*args, **kwargs)

    def _written(self, func: Any, tensor: torch.Tensor) -> None:
        name = self.owners.get(torch_hooks.storage_key(tensor))
        if name is None or self.node is None:
            return
        file, line, text = user_line(self.node) or ("?", 0, f"(node {self.node.name})")
        write = BufferWrite(name, f"in place: {func.name()}", file, line, text)
        if write not in self.found:
            self.found.append(write)


_WATCHED = ("aten", "prims", "prim")

#: Operators whose schema does not say that they write their running statistics in training.
_UNDECLARED = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")


def _written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments of a call that the operator writes to, as its schema says."""
    if not hasattr(func, "_schema"):  # a higher-order operator: what is in it comes by itself
        return []
    names = torch_hooks.mutated_arguments(func)
    undeclared = func.name().removeprefix("aten::").partition(".")[0] in _UNDECLARED
    if undeclared and torch_hooks.bound_argument(func, "training", args, kwargs):
        names += ["running_mean", "running_var"]
    return [torch_hooks.bound_argument(func, name, args, kwargs) for name in names]


def _declares_its_writes(node: fx.Node | None) -> bool:
    """Whether the node calls an operator outside of ATen, whose schema says what it mutates."""
    target = node.target if node is not None else None
    if isinstance(target, torch_hooks.OpOverloadPacket):
        return str(target).partition(".")[0] not in _WATCHED
    return isinstance(target, torch_hooks.OpOverload) and target.namespace not in _WATCHED
