"""Arguments that stay where they are: what the graphs read, and how a call gets into it.

Implements the article's "运行时包装：copy inputs 到静态缓冲区" (wrapping at run time: copying inputs
to static buffers). One buffer an argument, as large as the largest size needs; each size is a view of its
beginning. The article copies inside the Dynamo bytecode, at the graph's inputs; here the model's
arguments are copied, so that a FULL replay needs no bytecode at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from cgkit.errors import CaptureError, ReplayError
from cgkit.tensor_trees import replace_tensors, tensor_leaves


class Call(NamedTuple):
    """The arguments of one call of the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


#: For the tensors that a graph reads, by ``id``: the dimensions that follow the token count.
DynamicDims = Mapping[int, tuple[int, ...]]


def as_call(made: Any) -> Call:
    """What ``make_inputs`` returned: a tensor, a tuple or list, a dict of keywords, or a :class:`Call`."""
    if isinstance(made, Call):
        return made
    if isinstance(made, dict):
        return Call((), made)
    if isinstance(made, (tuple, list)) and not hasattr(made, "_fields"):
        return Call(tuple(made), {})
    return Call((made,), {})


class StaticInputs:
    """The model's arguments at each recorded size.

    Args:
        make_inputs: ``num_tokens`` -> arguments of that size.
        dims_of: (args, kwargs) -> which tensors the graph reads, and their dynamic dimensions.
        canonical: brings a call into one form (positional where possible).
        largest: the largest size; the buffers are made for it.
        copy_inputs: own buffers, filled by :meth:`fill`. False: the tensors of ``make_inputs``
            themselves are what the caller will pass again.
    """

    def __init__(
        self,
        make_inputs: Callable[[int], Any],
        dims_of: Callable[[tuple, dict], DynamicDims],
        canonical: Callable[[tuple, dict], Call],
        largest: int,
        copy_inputs: bool = True,
    ) -> None:
        self.make_inputs, self.canonical, self.copy_inputs = make_inputs, canonical, copy_inputs
        args, kwargs = self._make(largest)
        try:
            dims = dims_of(args, kwargs)
        except TypeError as error:
            raise _not_callable_so(largest, error) from error
        leaves = [leaf for leaf in _leaves(args, kwargs) if id(leaf[1]) in dims]
        self.paths = [path for path, _ in leaves]
        self.dims = [dims[id(tensor)] for _, tensor in leaves]
        following = [index for index, each in enumerate(self.dims) if each]
        if not following:
            raise CaptureError(
                "no argument of the model has a dynamic dimension, so there is no token count to "
                "record sizes of: name it when tracing (dynamic_arg_dims={'x': 0})"
            )
        self._first = following[0]
        for _, tensor in [leaves[index] for index in following]:
            if largest not in tensor.shape:
                raise CaptureError(
                    f"make_inputs({largest}) gave a tensor of shape {tuple(tensor.shape)}, in which "
                    f"no dimension is {largest}: it must return arguments for exactly the number of tokens "
                    "that it is asked for"
                )
        source = f"lambda args, kwargs: ({''.join(path + ', ' for path in self.paths)})"
        self._read: Callable[..., tuple[torch.Tensor, ...]] = eval(source, {"__builtins__": {}})
        self._calls: dict[int, Call] = {}
        self._views: dict[int, tuple[torch.Tensor, ...]] = {}
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.largest = largest
        self._buffers = [_flat_like(tensor) for _, tensor in leaves] if copy_inputs else []
        self._prepare(largest, args, kwargs)
        if not copy_inputs:  # what recording may scribble over is the caller's
            views = self._views[largest]
            self._saved = [(views[index], views[index].clone()) for index in following]

    def _make(self, size: int) -> Call:
        try:
            return self.canonical(*as_call(self.make_inputs(size)))
        except TypeError as error:
            raise _not_callable_so(size, error) from error

    def at(self, size: int) -> Call:
        """(args, kwargs) of ``size`` tokens, the same tensors each time."""
        if size not in self._calls:
            self._prepare(size, *self._make(size))
        return self._calls[size]

    def _prepare(self, size: int, args: tuple, kwargs: dict) -> None:
        try:
            made = self._read(args, kwargs)
        except (AttributeError, LookupError, TypeError) as error:
            raise CaptureError(
                f"make_inputs({size}) is built otherwise than make_inputs({self.largest}): {error}; "
                "it must return the same structure for every size"
            ) from error
        if self.copy_inputs:
            views = tuple(
                flat.as_strided(tensor.shape, tensor.stride()) for flat, tensor in zip(self._buffers, made)
            )
            for view, tensor in zip(views, made):
                view.copy_(tensor)
            into = {id(tensor): view for tensor, view in zip(made, views)}
            args, kwargs = replace_tensors(args, into), replace_tensors(kwargs, into)
        else:
            views = made
        self._calls[size], self._views[size] = Call(args, kwargs), views

    def num_tokens(self, args: tuple, kwargs: dict) -> int:
        """The token count of a call: the first dynamic dimension of the first argument that has one."""
        return self.tensors(args, kwargs)[self._first].shape[self.dims[self._first][0]]

    def tensors(self, args: tuple, kwargs: dict) -> tuple[torch.Tensor, ...]:
        """The tensors that the graph reads, in the order of the buffers.

        Raises:
            ReplayError: one is missing, or is no tensor.
        """
        try:
            found = self._read(args, kwargs)
        except (AttributeError, LookupError, TypeError) as error:
            raise ReplayError(
                f"the arguments are built otherwise than at capture ({type(error).__name__}: "
                f"{error}): tensors are expected at {', '.join(self.paths)}"
            ) from error
        for path, tensor in zip(self.paths, found):
            if not isinstance(tensor, torch.Tensor):
                raise ReplayError(f"{path} was a tensor at capture and is a {type(tensor).__name__} now")
        return found

    def fill(self, size: int, tensors: Sequence[torch.Tensor]) -> Call:
        """Copies ``tensors`` into the buffers of ``size`` and returns the arguments to run with.

        Padded rows become zero, so that a step's result does not depend on the steps before it (for
        token ids and positions 0 is a valid value).

        Raises:
            ReplayError: a tensor does not fit its buffer in type or in a static dimension.
        """
        call = self.at(size)
        for path, view, tensor, dims in zip(self.paths, self._views[size], tensors, self.dims):
            if tensor.shape == view.shape and tensor.dtype == view.dtype:
                view.copy_(tensor)
                continue
            self._check_fit(path, view, tensor, dims)
            view[tuple(slice(length) for length in tensor.shape)].copy_(tensor)
            for dim in dims:
                view.narrow(dim, tensor.shape[dim], view.shape[dim] - tensor.shape[dim]).zero_()
        return call

    def check_static(self, tensors: Sequence[torch.Tensor]) -> None:
        """Checks all but the dynamic dimensions: a graph without guards would take anything.

        Raises:
            ReplayError: a tensor differs in type or in a static dimension.
        """
        for path, view, tensor, dims in zip(self.paths, self._views[self.largest], tensors, self.dims):
            self._check_fit(path, view, tensor, dims, within=False)

    @staticmethod
    def _check_fit(
        path: str, view: torch.Tensor, tensor: torch.Tensor, dims: tuple[int, ...], within: bool = True
    ) -> None:
        fits = tensor.dtype == view.dtype and tensor.dim() == view.dim()
        fits = fits and all(
            got == room or (dim in dims and (got < room or not within))
            for dim, (got, room) in enumerate(zip(tensor.shape, view.shape))
        )
        if not fits:
            raise ReplayError(
                f"{path} is a {tensor.dtype} tensor of shape {tuple(tensor.shape)}, which does not "
                f"fit what was recorded: {view.dtype}, shape {tuple(view.shape)}, where only dimensions "
                f"{list(dims)} may differ. The graph holds exactly these; trace and capture again for others"
            )

    def restore(self) -> None:
        """Gives the caller's buffers back the values that they had before recording."""
        for tensor, saved in self._saved:
            tensor.copy_(saved)
        self._saved = []


def _not_callable_so(size: int, error: TypeError) -> CaptureError:
    return CaptureError(
        f"make_inputs({size}) gives no call of the model: {error}. It returns the model's "
        "arguments: a tensor, a tuple of positional ones, or a dict of keyword ones"
    )


def _leaves(args: tuple, kwargs: dict) -> list[tuple[str, torch.Tensor]]:
    return [*tensor_leaves(args, "args"), *tensor_leaves(kwargs, "kwargs")]


def _flat_like(tensor: torch.Tensor) -> torch.Tensor:
    """One-dimensional memory in which every size of ``tensor`` fits, whatever its strides."""
    extent = 1 + sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride()))
    return torch.zeros(extent, dtype=tensor.dtype, device=tensor.device)
