"""What a compiled graph says about its inputs: which follow the token count, which are weights.

The traced graph tells it through Dynamo's own sources (``L['x']``, ``L['batch'].hidden``), which
are Python expressions over the arguments of ``forward``; a graph that came without a model tells it
through the symbolic shapes of its examples.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from cgkit.capturing.static_inputs import Call, DynamicDims, distinct
from cgkit.errors import CaptureError
from cgkit.tensor_trees import replace_tensors, tensor_leaves
from cgkit.tracing.buffer_writes import written_arguments

if TYPE_CHECKING:
    from cgkit.compiling import CompiledGraph


class _Collected(Exception):  # noqa: N818 - no error
    """Raised instead of running the graph, once its inputs are known."""


class ModelInputs:
    """The inputs of ``compiled``, as the capture stage needs to know them."""

    def __init__(self, compiled: CompiledGraph) -> None:
        self.compiled = compiled
        self.traced = compiled.split.traced

    @functools.cached_property
    def examples(self) -> Sequence[Any]:
        """The graph's example inputs; of a model that was loaded they are made when they are needed."""
        return self.compiled.split.example_inputs or ()

    @property
    def device(self) -> torch.device | None:
        """Where the model lies: the device of its first tensor."""
        if self.traced is not None:
            return next((entry.device for entry in self.traced.inputs if entry.device is not None), None)
        return next((value.device for value in self.examples if isinstance(value, torch.Tensor)), None)

    def activations(self, names: Sequence[str]) -> tuple[int, ...]:
        """The positions in ``names`` (a piece's inputs) of what is no weight and may move each step."""
        held = {entry.name for entry in self.traced.inputs if entry.is_weight} if self.traced else set()
        return tuple(index for index, name in enumerate(names) if name not in held)

    def canonical(self, args: tuple, kwargs: dict) -> Call:
        """The call in one form: by position where that is possible, by keyword otherwise.

        Raises:
            TypeError: the model cannot be called so.
        """
        if self.traced is None or not kwargs:
            return Call(args, kwargs)
        bound = self.traced.arguments.signature.bind(*args, **kwargs)
        return Call(bound.args, bound.kwargs)

    def dims_of(self, args: tuple, kwargs: dict) -> DynamicDims:
        """The tensors that the graph reads of this call, by ``id``, and their dynamic dimensions."""
        if self.traced is None:
            pairs = [(arg, example) for arg, example in zip(args, self.examples) if _is_tensor(arg)]
            return {id(arg): _symbolic_dims(example) for arg, example in pairs}
        bound = self.traced.arguments.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        found: dict[int, tuple[int, ...]] = {}
        for entry in self.traced.inputs:
            if entry.kind == "argument":
                try:
                    value = eval(entry.source, {"__builtins__": {}, "L": bound.arguments})  # Dynamo's text
                except Exception as error:
                    raise CaptureError(
                        f"make_inputs gives no {entry.source}, which the model was traced with ({error!r}); "
                        "it must return the arguments of forward, built like those of the first call"
                    ) from error
                self._check_like_the_trace(entry, value)
                found[id(value)] = entry.dynamic_dims
        return found

    @staticmethod
    def _check_like_the_trace(entry: Any, value: Any) -> None:
        static = {d: int(n) for d, n in enumerate(entry.shape) if n.isdecimal()}
        fits = _is_tensor(value) and value.dtype == entry.dtype and value.dim() == len(entry.shape)
        if entry.dtype is not None and not (fits and all(value.shape[d] == n for d, n in static.items())):
            got = f"{value.dtype}, shape {tuple(value.shape)}" if _is_tensor(value) else repr(value)
            raise CaptureError(
                f"make_inputs gives for {entry.source}: {got}; the model was traced with {entry.dtype}, shape "
                f"({', '.join(entry.shape)}), in which only the symbols may be other numbers"
            )

    def written(self, args: tuple, kwargs: dict) -> frozenset[int]:
        """The arguments that forward changes in place, by ``id``."""
        if self.traced is None:
            return frozenset()
        bound = self.traced.arguments.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        sources = [self.traced.inputs[index].source for index in written_arguments(self.traced)]
        return frozenset(
            id(eval(source, {"__builtins__": {}, "L": bound.arguments}))  # Dynamo's text
            for source in sources
        )

    def default_inputs(self, num_tokens: int) -> Call:
        """Zeros of the shapes that the model was traced with, ``num_tokens`` long; other values as they were.

        Raises:
            CaptureError: the graph came without a model, so that nothing says how it is called.
        """
        if self.traced is None:
            raise CaptureError("give make_inputs: this graph has no model whose first call could be imitated")
        arguments = self.traced.arguments
        args, kwargs = distinct(_call_of(arguments.signature, arguments.values))
        into = {}
        for tensor, dims in self._examples_of(args, kwargs):
            shape = [num_tokens if dim in dims else size for dim, size in enumerate(tensor.shape)]
            into[id(tensor)] = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
        return self.canonical(replace_tensors(args, into), replace_tensors(kwargs, into))

    def _examples_of(self, args: tuple, kwargs: dict) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
        dims = self.dims_of(args, kwargs)
        leaves = [*tensor_leaves(args), *tensor_leaves(kwargs)]
        return [(tensor, dims[id(tensor)]) for _, tensor in leaves if dims.get(id(tensor))]

    def weights(self, args: tuple, kwargs: dict) -> list[tuple[str, torch.Tensor]]:
        """Parameters, buffers and attributes as the bytecode fetches them at this moment, by source."""
        traced = self.traced
        if traced is None:
            return []
        found: list[tuple[str, torch.Tensor]] = []

        def collect(*inputs: Any) -> Any:
            found.extend((entry.source, inputs[entry.index]) for entry in traced.inputs if entry.is_weight)
            raise _Collected

        with suppress(_Collected):
            self.compiled.bind(collect)(*args, **kwargs)
        return [(name, value) for name, value in found if _is_tensor(value)]

    def checker(self) -> Callable[[tuple, dict], None]:
        """Refuses calls that do not fit the trace (another None, another number)."""
        return self.traced.check_arguments if self.traced is not None else lambda args, kwargs: None


def _call_of(signature: Any, values: dict[str, Any]) -> Call:
    """(args, kwargs) from the labels of ``Arguments``: ``{"x": ..., "rest[0]": ..., "flag": ...}``."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            args += [value for label, value in values.items() if label.startswith(f"{name}[")]
        elif parameter.kind is parameter.VAR_KEYWORD:
            known = set(signature.parameters)
            kwargs |= {k: v for k, v in values.items() if k not in known and "[" not in k}
        elif parameter.kind is parameter.KEYWORD_ONLY:
            kwargs[name] = values[name]
        else:
            args.append(values[name])
    return Call(tuple(args), kwargs)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _symbolic_dims(example: Any) -> tuple[int, ...]:
    if not _is_tensor(example):
        return ()
    return tuple(dim for dim, size in enumerate(example.shape) if isinstance(size, torch.SymInt))
