"""What a call would return, found without running it: shapes, strides, and who shares memory.

Single operators and whole compiled pieces are run under fake tensors with concrete shapes. Both
are remembered by the layout of their arguments, since the layers of a model repeat each other.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from cgkit import torch_hooks
from cgkit.splitting.matching import operator_name
from cgkit.tensor_trees import map_tensors
from cgkit.torch_hooks import OpOverload, TorchDispatchMode
from cgkit.tracing.frames import user_line

_aten = torch.ops.aten
# Operators that read a tensor on the host inside, though their fake implementation does not.
_READ_INSIDE = {_aten._linalg_check_errors}
_INDEX_PUT = {_aten.index_put, _aten.index_put_, _aten._index_put_impl_, _aten._unsafe_index_put}


class NotRecordableError(Exception):
    """A call that no graph can repeat; the recorder adds the line and makes it a CaptureError."""


class ReadInsideError(Exception):
    """An operator that reads a tensor on the host; the recorder makes it a HostReadError."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A tensor without its bytes. ``offset`` and strides count elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    conj: bool = False
    neg: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorLayout:
        if tensor.layout is not torch.strided:
            raise NotRecordableError(
                f"a tensor of layout {tensor.layout}: only strided tensors can be recorded"
            )
        return cls(
            tuple(tensor.size()),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.device,
            tensor.is_conj(),
            tensor.is_neg(),
        )


class FromArgument(NamedTuple):
    """An output that is (``layout`` None), or is a view of, argument number ``argument``."""

    argument: int
    layout: TensorLayout | None


class OnNewStorage(NamedTuple):
    """An output on the new storage number ``storage``; several outputs may name the same one."""

    storage: int
    layout: TensorLayout


class PieceLayout(NamedTuple):
    """The outputs of a piece: FromArgument, OnNewStorage, or a plain value; and its storages' bytes."""

    outputs: tuple[Any, ...]
    storage_bytes: tuple[int, ...]
    storage_dtypes: tuple[torch.dtype, ...]


def leaves(value: Any) -> list[Any]:
    """What nested tuples and lists hold, in order (dicts are leaves: no operator returns one)."""
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


class Layouts:
    """Finds and remembers layouts. One serves all recordings of a platform."""

    def __init__(self) -> None:
        self._calls: dict[Any, Any] = {}
        self._by_graph: weakref.WeakKeyDictionary[Callable[..., Any], _Memo] = weakref.WeakKeyDictionary()
        self._by_content: weakref.WeakValueDictionary[Any, _Memo] = weakref.WeakValueDictionary()

    def of_call(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What ``op`` returns, with a TensorLayout for each tensor.

        Raises what the operator's fake implementation raises (wrong shapes, data dependence, no
        fake implementation), and NotRecordableError.
        """
        key = (op, torch.get_default_dtype(), _key(tuple(args)), _key(dict(kwargs)))
        try:
            known = self._calls.get(key)
        except TypeError:  # an argument that cannot be hashed: not worth remembering
            return _run_call(op, args, kwargs)
        if known is None:
            known = self._calls[key] = (_run_call(op, args, kwargs),)
        return known[0]

    def of_piece(self, graph: Callable[..., Any], args: Sequence[Any]) -> PieceLayout:
        """The outputs of ``graph(*args)``, with the memory that they share among each other and with
        ``args``. Pieces with equal content are looked at once. ``graph``: a piece's ``on_fakes``."""
        memo = self._by_graph.get(graph)
        if memo is None:
            memo = self._by_graph[graph] = self._by_content.setdefault(_content(graph), _Memo())
        key = _piece_key(args)
        if key not in memo:
            memo[key] = _run_piece(graph, args)
        return memo[key]


class _Memo(dict[Any, PieceLayout]):
    """A dict that can be referenced weakly."""


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return replace(TensorLayout.of(value), offset=0)
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *map(_key, value))
    if isinstance(value, dict):
        return tuple((name, _key(item)) for name, item in value.items())
    if isinstance(value, torch.Generator):
        return ("generator", str(value.device))
    return (type(value), value)  # 1, 1.0 and True are equal, and not the same argument


def _run_call(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    given: list[tuple[torch.Tensor, tuple[int, ...]]] = []

    def fake(_: str, tensor: torch.Tensor) -> torch.Tensor:
        made = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )  # on a storage of its own: what an operator returns anew does not depend on sharing
        made = torch_hooks.with_lazy_bits(made, tensor.is_conj(), tensor.is_neg())
        given.append((made, tuple(tensor.size())))
        return made

    with torch.inference_mode(False), torch.no_grad(), torch_hooks.fake_tensor_mode():
        result = op(*map_tensors(fake, tuple(args)), **map_tensors(fake, dict(kwargs)))
    for made, size in given:
        if tuple(made.size()) != size:
            raise NotRecordableError(
                f"{op} would resize the tensor that it writes, from {list(size)} to {list(made.size())}: "
                "give it one of the right shape"
            )
    return map_tensors(lambda _, tensor: TensorLayout.of(tensor), result)


def _content(graph: Callable[..., Any]) -> Any:
    """Equal only for graphs that compute the same; how their nodes are called (the layers' parameters
    have their own names) plays no part. Stored code is one object for equal pieces."""
    if not isinstance(graph, fx.GraphModule):
        return id(graph)
    numbers = {node: number for number, node in enumerate(graph.graph.nodes)}

    def part(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return ("node", numbers[value])
        if isinstance(value, (tuple, list)):
            return (type(value).__name__, *map(part, value))
        if isinstance(value, dict):
            return ("dict", *((name, part(item)) for name, item in value.items()))
        if isinstance(value, slice):
            return ("slice", part(value.start), part(value.stop), part(value.step))
        return (type(value), value)

    parts: list[Any] = []
    for node in numbers:
        if node.op in ("get_attr", "call_module"):  # what it owns is its own
            return id(graph)
        target = None if node.op in ("placeholder", "output") else node.target
        parts.append((node.op, target, part(node.args), part(node.kwargs)))
    content = tuple(parts)
    try:
        hash(content)
    except TypeError:
        return id(graph)
    return content


def _piece_key(args: Sequence[Any]) -> Any:
    first: dict[int, int] = {}  # which arguments share a storage decides which outputs do
    parts: list[Any] = []
    for index, arg in enumerate(args):
        if isinstance(arg, torch.Tensor):
            parts.append((TensorLayout.of(arg), first.setdefault(torch_hooks.storage_key(arg), index)))
        else:
            parts.append(_key(arg))
    return tuple(parts)


def reads_inside(op: Any, args: Sequence[Any]) -> bool:
    """Whether ``op`` reads a tensor on the host though a fake run of it does not: ``x[mask] = many values`` looks for
    the true ones there first (a single value does not), ``torch.cond`` asks which branch."""
    if isinstance(op, torch_hooks.HigherOrderOperator):
        return op.name() in torch_hooks.READ_A_PREDICATE
    if op.overloadpacket in _READ_INSIDE:
        return True
    if op.overloadpacket not in _INDEX_PUT or args[2].numel() == 1:
        return False
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


class _ReadsInside(TorchDispatchMode):
    """Raises ReadInsideError at the operators that :func:`reads_inside` names."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if reads_inside(func, args):
            raise ReadInsideError(str(func))
        return func(*args, **(kwargs or {}))


class _AtNode(fx.Interpreter):
    """Knows which node is running."""

    at: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        self.at = n
        return super().run_node(n)


def _run_on_fakes(graph: Callable[..., Any], args: Sequence[Any]) -> tuple[list[Any], Any]:
    """(the fake arguments, what ``graph`` gave for them)."""
    mode = torch_hooks.fake_tensor_mode(allow_real_inputs=True)
    fakes = [mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
    with mode, _ReadsInside():
        return fakes, graph(*fakes)


def _say_where(error: Exception, graph: Callable[..., Any], args: Sequence[Any]) -> None:
    """Gives an error of a piece the node at which it was raised: ``node_name``, ``node_line`` ("file:line: source")."""
    if not isinstance(graph, fx.GraphModule):
        return
    again = _AtNode(graph)
    with contextlib.suppress(Exception):
        _run_on_fakes(again.run, args)
    if again.at is not None and again.at.op != "output":
        line = user_line(again.at)
        said = "{}:{}: {}".format(*line) if line is not None else ""
        error.__dict__.update(node_name=operator_name(again.at), node_line=said)


def _run_piece(graph: Callable[..., Any], args: Sequence[Any]) -> PieceLayout:
    with torch.inference_mode(False), torch.no_grad(), torch_hooks.modes_put_back():
        try:
            fakes, results = _run_on_fakes(graph, args)
        except Exception as error:
            _say_where(error, graph, args)
            raise
    results = results if isinstance(results, (tuple, list)) else (results,)
    arguments = {
        torch_hooks.storage_key(fake): index
        for index, fake in reversed(list(enumerate(fakes)))
        if isinstance(fake, torch.Tensor)
    }
    new: dict[int, int] = {}
    nbytes: list[int] = []
    dtypes: list[torch.dtype] = []
    outputs: list[Any] = []
    for result in results:
        if not isinstance(result, torch.Tensor):
            outputs.append(result)
            continue
        identity = torch_hooks.storage_key(result)
        if identity in arguments:
            same = [index for index, fake in enumerate(fakes) if fake is result]
            outputs.append(
                FromArgument(same[0], None)
                if same
                else FromArgument(arguments[identity], TensorLayout.of(result))
            )
            continue
        if identity not in new:
            new[identity] = len(new)
            nbytes.append(result.untyped_storage().nbytes())
            dtypes.append(result.dtype)
        outputs.append(OnNewStorage(new[identity], TensorLayout.of(result)))
    return PieceLayout(tuple(outputs), tuple(nbytes), tuple(dtypes))
