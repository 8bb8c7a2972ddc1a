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
from cgkit.tensor_trees import map_tensors, replace_tensors, tensor_leaves


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
        written: (args, kwargs) -> which tensors, by ``id``, the model changes in place: with own buffers the
            caller's tensors get the change too.
        copy_inputs: own buffers, filled by :meth:`fill`. False: the tensors of ``make_inputs``
            themselves are what the caller will pass again.
        make_buffer: (path, number of elements, a tensor of the type) -> memory for one argument; None: zeros.
    """

    def __init__(
        self,
        make_inputs: Callable[[int], Any],
        dims_of: Callable[[tuple, dict], DynamicDims],
        canonical: Callable[[tuple, dict], Call],
        largest: int,
        copy_inputs: bool = True,
        written: Callable[[tuple, dict], frozenset[int]] = lambda args, kwargs: frozenset(),
        make_buffer: Callable[[str, int, torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.make_inputs, self.canonical, self.copy_inputs = make_inputs, canonical, copy_inputs
        args, kwargs = self._make(largest)
        try:
            dims = dims_of(args, kwargs)
        except TypeError as error:
            raise _not_callable_so(largest, error) from error
        leaves = [leaf for leaf in _leaves(args, kwargs) if id(leaf[1]) in dims]
        self.paths = [path for path, _ in leaves]
        changed = written(args, kwargs) if copy_inputs else frozenset()
        self.written = [index for index, (_, tensor) in enumerate(leaves) if id(tensor) in changed]
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
        make_buffer = make_buffer or _zeros
        self._buffers = (
            [make_buffer(path, _extent(tensor), tensor) for path, tensor in leaves] if copy_inputs else []
        )
        self._prepare(largest, args, kwargs)
        if not copy_inputs:  # what recording may scribble over is the caller's
            views = self._views[largest]
            self._saved = [(views[index], views[index].clone()) for index in following]

    def _make(self, size: int) -> Call:
        try:
            return distinct(self.canonical(*as_call(self.make_inputs(size))))
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
        for path, tensor, dims in zip(self.paths, made, self.dims):
            if dims and all(tensor.shape[dim] != size for dim in dims):
                raise CaptureError(
                    f"make_inputs({size}) gave {path} the shape {tuple(tensor.shape)}, in which none of the "
                    f"dynamic dimensions {list(dims)} is {size}: it must return arguments for exactly the number "
                    "of tokens that it is asked for"
                )
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
        num_tokens = tensors[self._first].shape[self.dims[self._first][0]]
        for path, view, tensor, dims in zip(self.paths, self._views[size], tensors, self.dims):
            exact = tensor.shape == view.shape and tensor.dtype == view.dtype
            if exact and (num_tokens == size or not dims):
                view.copy_(tensor)
                continue
            self._check_fit(path, view, tensor, dims)
            for dim in dims:
                if view.shape[dim] == size and tensor.shape[dim] != num_tokens:
                    raise ReplayError(
                        f"{path} has {tensor.shape[dim]} in dimension {dim}, and {self.paths[self._first]} says "
                        f"that there are {num_tokens} tokens: both follow one count in what was recorded. Pass "
                        "equal sizes, or give capture a make_inputs in which they differ"
                    )
            view[tuple(slice(length) for length in tensor.shape)].copy_(tensor)
            for dim in dims:
                view.narrow(dim, tensor.shape[dim], view.shape[dim] - tensor.shape[dim]).zero_()
        return call

    def write_back(self, size: int, tensors: Sequence[torch.Tensor]) -> None:
        """Gives the caller's tensors what the model wrote into theirs in place."""
        views = self._views[size]
        for index in self.written:
            tensors[index].copy_(views[index][tuple(slice(length) for length in tensors[index].shape)])

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


def _extent(tensor: torch.Tensor) -> int:
    """In how many elements of one-dimensional memory every size of ``tensor`` fits, whatever its strides."""
    return 1 + sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride()))


def _zeros(_: str, extent: int, like: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False):  # else no later call outside of that mode could fill it
        return torch.zeros(extent, dtype=like.dtype, device=like.device)


def distinct(call: Call) -> Call:
    """The call with one tensor object an argument: two that are one tensor now may be two later."""
    seen: set[int] = set()

    def another(_: str, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in seen:
            return tensor.detach()
        seen.add(id(tensor))
        return tensor

    return Call(*map_tensors(another, tuple(call)))
