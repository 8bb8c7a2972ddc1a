"""The arguments of the first call: what is faked for the trace, and what later calls must repeat.

A trace without guards is right only for calls that look like the first one. Sizes of dynamic
dimensions may change; what is None, and the numbers, flags and strings that were baked into the
graph, may not. The article says the first in "support_torch_compile: 类装饰器背后发生了什么" (an argument
that is None once must be None for life) and trusts the caller; here each call is checked, which
costs about a microsecond.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch

from cgkit.errors import TraceError
from cgkit.tensor_trees import map_tensors
from cgkit.tracing.annotations import DynamicDims
from cgkit.tracing.assumptions import Like

#: Stands for "anything but None" in what is expected of an argument.
GIVEN = type("GIVEN", (), {"__repr__": lambda self: "GIVEN"})()

_CONSTANTS = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device)


def is_constant(value: Any) -> bool:
    """Whether Dynamo bakes ``value`` into the graph (a number, a flag, a string, None, ...)."""
    return isinstance(value, _CONSTANTS)


def signature_of(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> inspect.Signature:
    """The signature that fits the call: that of the wrapped function, or else of the wrapper.

    Raises:
        TypeError: the call fits neither, as a plain call would.
    """
    signature = inspect.signature(forward)
    try:
        signature.bind(*args, **kwargs)
        return signature
    except TypeError:
        outer = inspect.signature(forward, follow_wrapped=False)
        try:
            outer.bind(*args, **kwargs)
            return outer
        except TypeError:
            pass
        raise


class Arguments:
    """What every later call has in common with the first one.

    Args:
        model: the model's name, for messages.
        signature: of ``forward``, without ``self``.
        args, kwargs: the first call.
    """

    def __init__(
        self, model: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.model = model
        self.signature = signature
        self.values = _by_label(signature, args, kwargs)
        self.expected = {
            label: value if isinstance(value, _CONSTANTS) else GIVEN for label, value in self.values.items()
        }
        self._plans: dict[Any, tuple[Any, ...]] = {}  # by style: a count, or (count, *keywords)
        self._caught = _caught(signature, kwargs)
        self._in_order = False

    def expect(self, assumed: dict[str, Like], in_order: bool = False) -> None:
        """Also check what the trace takes for granted of arguments that are no constants.

        Args:
            in_order: forward goes through its ``**kwargs``, so that their order is part of the graph.
        """
        self._in_order = in_order
        self.expected.update(
            {label: like for label, like in assumed.items() if self.expected[label] is GIVEN}
        )
        self._plans.clear()

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises TraceError, naming the argument, if a call does not fit the trace.

        Each style of calling (how many positional, which keywords) is worked out once.
        """
        if kwargs:
            plan = self._plans.get((len(args), *kwargs)) or self._plan(args, kwargs)
            values: Iterable[Any] = (*args, *kwargs.values())
        else:
            plan = self._plans.get(len(args)) or self._plan(args, kwargs)
            values = args
        for value, expected in zip(values, plan):
            if type(expected) is Like:
                try:
                    if expected.look(value) != expected.expected:
                        self._refuse(args, kwargs)
                except (AttributeError, LookupError, TypeError):
                    self._refuse(args, kwargs)
            elif expected is GIVEN:
                if value is None:
                    self._refuse(args, kwargs)
            elif value is not expected and (type(value) is not type(expected) or value != expected):
                self._refuse(args, kwargs)

    def _labels(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, int], dict[str, Any]]:
        """For one style of calling: label -> position in (*args, *kwargs.values()), and the defaults."""
        count = len(args)
        markers = [_Position(index) for index in range(count + len(kwargs))]
        by_label = _by_label(self.signature, tuple(markers[:count]), dict(zip(kwargs, markers[count:])))
        passed = {label: value.index for label, value in by_label.items() if isinstance(value, _Position)}
        return passed, {label: value for label, value in by_label.items() if label not in passed}

    def _plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        passed, defaults = self._labels(args, kwargs)
        for label in [*passed, *defaults]:
            if label not in self.expected:
                raise TraceError(
                    f"{self.model} was traced without an argument {label!r}; the graph cannot use it"
                )
        caught = _caught(self.signature, kwargs)
        if self._in_order and caught != self._caught and set(caught) == set(self._caught):
            raise TraceError(
                f"the forward of {self.model} goes through its keyword arguments, which were "
                f"{', '.join(self._caught)} when the model was traced and are {', '.join(caught)} now: their "
                "order is part of the graph. Pass them in the same order in every call"
            )
        for label, expected in self.expected.items():
            if label not in passed:
                self._compare(label, defaults.get(label), expected)
        plan: list[Any] = [None] * len(passed)
        for label, position in passed.items():
            plan[position] = self.expected[label]
        self._plans[(len(args), *kwargs) if kwargs else len(args)] = tuple(plan)
        return tuple(plan)

    def _compare(self, label: str, value: Any, expected: Any) -> None:
        if type(expected) is Like and value is not None:
            if not expected.fits(value):
                self._differs(label, expected, value)
            return
        if expected is GIVEN and value is not None:
            return
        if expected is not GIVEN and type(value) is type(expected) and value == expected:
            return
        if expected is None or value is None:
            was = "None" if expected is None else "given"
            now = "None" if value is None else f"a {type(value).__name__}"
            raise TraceError(
                f"argument {label!r} of {self.model} was {was} when the model was traced and is {now} now: "
                "the graph holds one of the two paths only. Pass it the same way in every call, or trace a "
                "second model for the other way"
            )
        raise TraceError(
            f"argument {label!r} of {self.model} was {expected!r} when the model was traced and is "
            f"{value!r} now: numbers, flags and strings are baked into the graph. Pass the same value, "
            "or make it a tensor"
        )

    def _differs(self, label: str, expected: Like, value: Any) -> NoReturn:
        what, was, now = expected.difference(label, value)
        raise TraceError(
            f"argument {label!r} of {self.model} does not fit the trace: {what} was {was!r} then and is {now!r} "
            "now. The graph was made for the first, and compiled code does not look again: pass it alike in "
            "every call, name a dimension that changes in dynamic_arg_dims, or trace a second model"
        )

    def _refuse(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        values = (*args, *kwargs.values())
        for label, position in self._labels(args, kwargs)[0].items():
            self._compare(label, values[position], self.expected[label])
        raise AssertionError("the quick check refused what the slow one accepts")


class _Position:
    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def _caught(signature: inspect.Signature, kwargs: dict[str, Any]) -> tuple[str, ...]:
    """The keywords that ``**kwargs`` of the signature catches, as the call orders them."""
    parameter = inspect.Parameter
    by_name = (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    named = {each.name for each in signature.parameters.values() if each.kind in by_name}
    return tuple(name for name in kwargs if name not in named)


def _by_label(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """``{"x": ..., "rest[0]": ..., "flag": ...}``: a call's arguments by name, defaults filled in."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    labelled: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            labelled.update({f"{name}[{index}]": entry for index, entry in enumerate(value)})
        elif kind is inspect.Parameter.VAR_KEYWORD:
            labelled.update(value)
        else:
            labelled[name] = value
    return labelled


def stand_ins(
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dims: DynamicDims,
    mark: Callable[[torch.Tensor, int], None],
) -> tuple[tuple[Any, ...], dict[str, Any], list[str]]:
    """The call that is traced: every tensor replaced by another handle, dynamic dimensions marked.

    Another handle, so that no mark stays on the caller's tensor, and so that two arguments that
    happen to be one tensor now (or a buffer of the model) may be two later. A dynamic dimension of
    size 0 or 1 becomes 2, since Dynamo takes 0 and 1 for constants; nothing is computed with it.

    Returns:
        args, kwargs, and for each enlarged argument ``"name: (1, 8) -> (2, 8)"``.

    Raises:
        TraceError: a dimension that the tensor does not have, or a named argument without a tensor.
    """
    enlarged: list[str] = []

    def replace(label: str, wanted: tuple[int, ...], tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_nested:
            raise TraceError(
                f"argument {label!r} is a nested tensor, whose rows have sizes of their own: a recorded graph has one "
                "token count. Pass its values() and offsets() as two tensors"
            )
        rank = tensor.dim()
        out = [dim for dim in wanted if not -rank <= dim < rank]
        if out and rank:
            raise TraceError(
                f"dynamic_arg_dims gives {label!r} dimension {out[0]}, but the tensor has shape "
                f"{tuple(tensor.shape)}"
            )
        marked = sorted({dim % rank for dim in wanted}) if rank else []
        handle = tensor.data
        shape = [2 if dim in marked and size < 2 else size for dim, size in enumerate(tensor.shape)]
        if shape != list(tensor.shape):
            enlarged.append(f"{label}: {tuple(tensor.shape)} -> {tuple(shape)}")
            order = sorted(range(rank), key=tensor.stride, reverse=True)
            handle = torch.empty_permuted(shape, order, dtype=tensor.dtype, device=tensor.device)
        for dim in marked:
            mark(handle, dim)
        return handle

    bound = signature.bind(*args, **kwargs)
    given = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if name not in given:
            continue
        value = given[name]
        if parameter.kind is parameter.VAR_KEYWORD:
            given[name] = {key: _replaced(key, entry, dims, replace) for key, entry in value.items()}
        elif parameter.kind is parameter.VAR_POSITIONAL:
            given[name] = tuple(_replaced(name, entry, dims, replace) for entry in value)
        else:
            given[name] = _replaced(name, value, dims, replace)
    bound.arguments.update(given)
    return bound.args, bound.kwargs, enlarged


Replace = Callable[[str, tuple[int, ...], torch.Tensor], torch.Tensor]


def _replaced(name: str, value: Any, dims: DynamicDims, replace: Replace) -> Any:
    if name not in dims:
        return replace(name, (), value) if isinstance(value, torch.Tensor) else value
    if isinstance(value, _CONSTANTS) and value is not None:
        raise TraceError(
            f"dynamic_arg_dims names {name!r}, but the first call gives it {value!r}, which holds no tensor"
        )
    wanted = dims[name]
    return map_tensors(lambda label, tensor: replace(label, wanted, tensor), value, name)
