"""A piece run eagerly, on copies: what a replay of it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import fx

from cgkit.capturing.debugging.copies import copied, overlap
from cgkit.numerics import Apart, first_apart, mark_unwritten, python_random_put_back, random_states
from cgkit.tensor_trees import map_tensors, tensor_leaves
from cgkit.torch_hooks import TorchDispatchMode, is_random

_aten = torch.ops.aten
_ONLY_ALLOCATE = {
    _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.empty_permuted,
    _aten.new_empty, _aten.new_empty_strided,
}  # fmt: skip
_TO_FLOAT64 = {"float", "half", "bfloat16"}


class EagerRun(NamedTuple):
    """``outputs``; ``given``: the copies of the inputs, as the run left them; ``random``: it drew random numbers;
    ``unwritten``: the types of memory that it made and need not have filled, in which NaN (a pattern) stands for
    "nobody wrote this"."""

    outputs: Any
    given: Sequence[Any]
    random: bool
    unwritten: frozenset[torch.dtype]


def as_written() -> AbstractContextManager[Any]:
    """Inside, what a model has compiled by itself (a part of it, flex attention) runs uncompiled.

    Under a dispatch mode Dynamo would give it up, and not try again in any later call of the process.
    """
    return torch.compiler.set_stance("force_eager")


def run_on_copies(
    run: Callable[..., Any], given: Sequence[Any], keep: Callable[[torch.Tensor], bool] = lambda tensor: False
) -> EagerRun:
    """Calls ``run`` with copies of ``given`` (but of what ``keep`` keeps). The random state stays as it is."""
    own = copied(tuple(given), keep)
    with undisturbed(given) as drew, as_written(), MarkingAllocations() as marks, torch.no_grad():
        outputs = run(*own)
        random = drew()
    return EagerRun(outputs, own, random, frozenset(marks.seen))


def in_float64(graph_module: fx.GraphModule, given: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """What ``graph_module`` gives for ``given`` if everything is computed in float64, and its inputs after that.

    Raises whatever an operator raises that knows no float64; ValueError where inputs share memory.
    """
    if overlap([tensor for _, tensor in tensor_leaves(tuple(given))]):
        raise ValueError("inputs share memory, which their float64 copies would not")
    own = map_tensors(lambda _, tensor: _wide(tensor), copied(tuple(given)))
    with undisturbed(given), torch.no_grad():
        return _InFloat64(graph_module).run(*own), own


def runs_apart(
    expected: EagerRun, got: Any, after: Any, graph_module: fx.GraphModule, given: Any
) -> Apart | None:
    """How a run that gave ``got``, and left its inputs as ``after``, differs from the eager one of ``graph_module``.

    ``given``: the inputs before.
    """
    return first_apart(
        {"output": tuple(expected.outputs), "input": tuple(expected.given)},
        {"output": tuple(got), "input": tuple(after)},
        lambda: in_float64(graph_module, given),
        "",
        unwritten=expected.unwritten,
    )


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
        return tensor.detach().to(torch.float64)
    return tensor.detach().to(torch.complex128) if tensor.is_complex() else tensor


@contextmanager
def undisturbed(given: Any) -> Iterator[Callable[[], bool]]:
    """The random state is after the block as it was before (Python's and NumPy's too); yields a function that says
    whether somebody drew."""
    devices = sorted({t.device.index for _, t in tensor_leaves(given) if t.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), python_random_put_back() as drew_in_python:

        def states() -> list[torch.Tensor]:
            return [torch.get_rng_state(), *(torch.cuda.get_rng_state(index) for index in devices)]

        before = states()
        yield lambda: drew_in_python() or not all(map(torch.equal, before, states()))


class MarkingAllocations(TorchDispatchMode):
    """Fills what is only allocated with what shows that nobody wrote it."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if getattr(func, "overloadpacket", None) in _ONLY_ALLOCATE:
            self.seen.add(made.dtype)
            mark_unwritten(made)
        return made


class PinnedRandom(TorchDispatchMode):
    """All that is drawn is one number: 0.5, True, 0. A dropout keeps everything."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not is_random(func):
            return func(*args, **(kwargs or {}))
        if func is _aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        before = random_states()
        made = func(*args, **(kwargs or {}))
        if all(map(torch.equal, before, random_states())):
            return made  # it may draw and did not: an attention without a dropout
        for _, tensor in tensor_leaves(made):
            tensor.fill_(0.5 if tensor.is_floating_point() else tensor.dtype is torch.bool)
        return made


class _InFloat64(fx.Interpreter):
    """Runs a graph with every lesser floating type replaced by float64."""

    def run_node(self, n: fx.Node) -> Any:
        with self._set_current_node(n) if hasattr(self, "_set_current_node") else _nothing():
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            target: Any = n.target
            if n.op == "call_method" and target in _TO_FLOAT64:
                target = "double"
            wide: Any = fx.node.map_aggregate((args, kwargs), _float64)
            return getattr(self, n.op)(target, *wide)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _float64(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        if value.is_floating_point and value.itemsize > 1:
            return torch.float64
        return torch.complex128 if value.is_complex else value
    return value
