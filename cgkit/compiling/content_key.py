"""When are two pieces equal? A key made of their content, and what it was made of.

Implements what the article says in "split_graph 的切图算法" (the cutting algorithm): the pieces
between two layers share one compilation, because Inductor goes by the graph's content and not by
the piece's number. Inductor finds that out after most of its work; this key is taken before it.

The content is the graph with its names taken off (nodes and inputs by position, symbols by their
first appearance), what is known of each input (dtype, device, shape, strides, offset, shared
storage), constants by value, and how the compiler is set. It is kept as lines of text, so that two
keys that should be equal can be compared line by line (:func:`diff_keys`).
"""

from __future__ import annotations

import difflib
import enum
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import fx

from cgkit import torch_hooks
from cgkit.compiling.assumptions import assumed_in
from cgkit.compiling.fakes import storage_groups
from cgkit.config import Shape


@dataclass(frozen=True)
class ContentKey:
    """The content of one piece at one shape. Equal ``lines`` mean: one compilation serves both."""

    lines: tuple[str, ...]
    #: Objects that stand in ``lines`` by identity; kept, so that no other takes their identity.
    by_identity: tuple[Any, ...] = field(default=(), compare=False, repr=False)

    @property
    def digest(self) -> str:
        """16 hexadecimal digits of the lines' SHA-256."""
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()[:16]

    @property
    def portable(self) -> bool:
        """Whether the key means the same in another process (nothing stands in it by identity)."""
        return not self.by_identity

    def __repr__(self) -> str:
        return f"ContentKey({self.digest}, {len(self.lines)} lines)"


def diff_keys(one: ContentKey, other: ContentKey) -> list[str]:
    """The lines in which two keys differ: ``- `` only in ``one``, ``+ `` only in ``other``."""
    return [line for line in difflib.ndiff(one.lines, other.lines) if line.startswith(("- ", "+ "))]


def content_key(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    shape: Shape = None,
    compiler: Mapping[str, Any] | None = None,
) -> ContentKey:
    """The key of a piece.

    Args:
        graph_module: the piece's graph, straight from Dynamo.
        inputs: one a placeholder: fake tensors, SymInts, numbers.
        shape: the token count of a static compilation, a range, None for the general shape.
        compiler: how the compiler is set, by name.
    """
    text = _Text(torch_hooks.fake_mode_of(inputs))
    lines = [f"shape {'general' if shape is None else shape}"]
    lines += [f"compiler {name} = {text.of(value)}" for name, value in sorted((compiler or {}).items())]
    lines += text.inputs(inputs)
    lines += text.graph(graph_module)
    return ContentKey((*lines, *text.symbol_lines()), tuple(text.by_identity))


def process_settings() -> dict[str, Any]:
    """What decides about generated code besides the graph, as far as it can change in a process."""
    autocast = {
        f"autocast {device}": torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        for device in ("cpu", "cuda")
    }
    return {
        **autocast,
        "torch": torch.__version__,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "default_dtype": torch.get_default_dtype(),
    }


class _Text:
    """Writes a graph and its inputs as text in which no name of the model is left."""

    def __init__(self, fake_mode: Any) -> None:
        self.fake_mode = fake_mode
        self.symbols: dict[Any, Any] = {}
        self.by_identity: list[Any] = []

    # --- inputs ---

    def inputs(self, values: Sequence[Any]) -> list[str]:
        groups = list(storage_groups(values).values())
        shared = {index: number for number, group in enumerate(groups) for index in group}
        return [f"input {i}: {self.input(value, shared.get(i))}" for i, value in enumerate(values)]

    def input(self, value: Any, shared: int | None) -> str:
        if not isinstance(value, torch.Tensor):
            return self.of(value)
        parts = [self.of(value.dtype), str(value.device), f"shape {self.sizes(value.shape)}"]
        if value.layout is torch.strided:
            parts.append(f"stride {self.sizes(value.stride())} offset {self.of(value.storage_offset())}")
        else:
            parts.append(str(value.layout))
        if shared is not None:
            parts.append(f"in shared storage {shared} of {self.of(value.untyped_storage().nbytes())} bytes")
        flags = [name for name in ("requires_grad", "is_conj", "is_neg") if _flag(value, name)]
        return " ".join([*parts, *flags])

    def sizes(self, sizes: Sequence[Any]) -> str:
        return "(" + ", ".join(self.symbolic(s) if _is_symbolic(s) else str(s) for s in sizes) + ")"

    # --- symbols ---

    def symbolic(self, value: Any) -> str:
        expression = torch_hooks.symbolic_expression(value)
        free: set[Any] = getattr(expression, "free_symbols", set())
        for symbol in sorted(free - self.symbols.keys(), key=str):
            self.symbols[symbol] = type(symbol)(f"d{len(self.symbols)}", **symbol.assumptions0)
        return str(expression.xreplace(self.symbols) if free else expression)

    def symbol_lines(self) -> list[str]:
        lines, assumed = [], assumed_in(self.fake_mode)
        for symbol, name in self.symbols.items():
            known_range, example = torch_hooks.symbol_facts(self.fake_mode, symbol)
            known_range = assumed.range_without(symbol, known_range)
            lines.append(f"symbol {name}: {known_range}, example {example}")
        return lines

    # --- the graph ---

    def graph(self, module: fx.GraphModule, indent: str = "") -> list[str]:
        number: dict[fx.Node, int] = {}
        lines = []
        for index, node in enumerate(module.graph.nodes):
            number[node] = index
            lines.append(f"{indent}%{index} = {self.node(module, node, number, indent)}")
        return lines

    def node(self, module: fx.GraphModule, node: fx.Node, number: dict[fx.Node, int], indent: str) -> str:
        if node.op == "placeholder":
            return "input"
        arguments = [self.of(a, number) for a in node.args]
        named = dict(node.kwargs)
        if (call := torch_hooks.triton_call(named)) is not None:
            # The kernel by identity: its file is not traced, so nobody would see that it changed on disk.
            arguments.append(f"kernel={self.identity(call[0])}")
            named = {**named, "kernel_idx": None, "constant_args_idx": call[1]}
        arguments += [f"{name}={self.of(value, number)}" for name, value in sorted(named.items())]
        inside = f"({', '.join(arguments)})"
        if node.op == "get_attr":
            return f"constant {self.attribute(module, node.target, indent)}"
        if node.op == "call_module":
            return f"call {self.attribute(module, node.target, indent)}{inside}"
        if node.op == "call_function":
            return f"{self.function(node.target)}{inside}"
        return f"{node.op} {node.target if node.op == 'call_method' else ''}{inside}"

    def attribute(self, module: fx.GraphModule, path: Any, indent: str) -> str:
        value: Any = module
        for name in str(path).split("."):
            value = getattr(value, name)
        if isinstance(value, fx.GraphModule):
            return "\n".join(["graph", *self.graph(value, indent + "  ")])
        return self.of(value)

    def function(self, target: Any) -> str:
        if isinstance(target, torch_hooks.OpOverload | torch_hooks.OpOverloadPacket):
            return f"op {target}"
        if isinstance(target, torch_hooks.HigherOrderOperator):
            return f"higher order op {target.name()}"
        name = str(getattr(target, "__qualname__", None) or getattr(target, "__name__", ""))
        # torch.cat says that it belongs to no module, Tensor methods to a private base class, and functions of torch._C
        # to an object of pybind11 (Dynamo of torch 2.11 keeps such a call where a ModuleList is sliced).
        method = f"Tensor.{getattr(target, '__name__', '')}"
        own = getattr(target, "__module__", None) or ""
        last = name.rpartition(".")[2]
        for module, path in ((own, name), ("torch", last), ("torch", method), ("torch._C", last)):
            if _resolves(module, path, target):
                return f"{module}.{path}"
        return self.identity(target)

    # --- values ---

    def of(self, value: Any, number: Mapping[fx.Node, int] | None = None) -> str:
        """``value`` as text that is equal for equal values only."""
        if isinstance(value, fx.Node):
            return f"%{number[value]}" if number is not None else self.identity(value)
        if _is_symbolic(value):
            return f"{type(value).__name__} {self.symbolic(value)}"
        if isinstance(value, torch.Tensor):
            return self.constant(value)
        if isinstance(value, enum.Enum):
            return f"{type(value).__module__}.{value}"
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
            return str(value)
        if isinstance(value, slice):
            return f"slice({', '.join(self.of(v, number) for v in (value.start, value.stop, value.step))})"
        if isinstance(value, tuple | list):
            kind = "[" if isinstance(value, list) else "("
            return kind + ", ".join(self.of(v, number) for v in value) + ("]" if kind == "[" else ")")
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{self.of(k)}: {self.of(v, number)}" for k, v in value.items()) + "}"
        if value is Ellipsis or isinstance(value, range):
            return repr(value)
        if callable(uuid := getattr(value, "uuid", None)) and (known := uuid()) is not None:
            return f"{type(value).__qualname__} {known}"  # a graph pass names itself
        if callable(value) and not isinstance(value, torch.nn.Module):
            return self.function(value)
        return self.identity(value)

    def constant(self, value: torch.Tensor) -> str:
        """A tensor that the graph holds: its layout, and its bytes by hash."""
        layout = self.input(value, None)
        if torch_hooks.is_fake(value) or value.layout is not torch.strided or value.is_meta:
            return f"{layout} {self.identity(value)}"
        # cloned, since what has one element counts as contiguous whatever its strides
        plain = value.detach().resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format)
        content = plain.flatten().view(torch.uint8).numpy().tobytes()
        return f"{layout} sha256 {hashlib.sha256(content).hexdigest()}"

    def identity(self, value: Any) -> str:
        """Text for what cannot be compared by value: equal to itself only."""
        self.by_identity.append(value)
        return f"object {type(value).__module__}.{type(value).__qualname__} at {id(value):#x}"


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def _flag(tensor: torch.Tensor, name: str) -> bool:
    value = getattr(tensor, name)
    return bool(value() if callable(value) else value)


def _resolves(module: str, name: str, target: Any) -> bool:
    """Whether ``module.name`` is ``target`` itself: then the name says all."""
    if not module or not name or "<" in name:
        return False
    try:
        value: Any = import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError, ValueError):
        return False
    return value is target
