"""Which dimensions of which arguments change from call to call.

Implements the article's "support_torch_compile: 类装饰器背后发生了什么" (what happens behind the class
decorator): an argument annotated as a tensor, or as an object that carries tensors, is dynamic in
dimension 0, the token count.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from cgkit.errors import TraceError

#: dims by argument: ``{"x": (0,)}``.
DynamicDims = dict[str, tuple[int, ...]]

_TENSOR_TEXT = re.compile(r"\b\w*Tensors?\b")


def infer_dynamic_arg_dims(forward: Callable[..., Any]) -> DynamicDims:
    """The arguments of ``forward`` that are annotated as tensors, each with dimension 0.

    Understands ``torch.Tensor`` and its kin (``torch.LongTensor``), ``Optional``, ``X | None``,
    containers (``list[Tensor]``), ``Annotated``, classes whose fields are tensors or dicts of
    tensors (dataclasses, vLLM's IntermediateTensors), all also as strings. A string whose names
    exist only for the type checker is read as text: it counts if it speaks of a Tensor.

    Args:
        forward: a function or bound method. Wrappers made with ``functools.wraps`` are seen through.

    Returns:
        ``{argument: (0,)}``, empty if nothing is annotated as a tensor.
    """
    scope = _names_seen_by(forward)
    dims: DynamicDims = {}
    for name, parameter in inspect.signature(forward).parameters.items():
        annotation = parameter.annotation
        if annotation is inspect.Parameter.empty or parameter.kind is parameter.VAR_KEYWORD:
            continue
        if _carries_tensors(_resolve(annotation, scope), scope):
            dims[name] = (0,)
    return dims


def normalise_dims(
    signature: inspect.Signature,
    dynamic_arg_dims: Mapping[str, int | Iterable[int] | Mapping[int, Any]],
) -> DynamicDims:
    """Checks explicit dims against a signature: names exist, dims are whole numbers.

    A value is one dimension, several, or ``{dimension: label}`` (today's vLLM: dimensions with one
    label always have one size). Negative dimensions stay negative until a tensor's rank is known.

    Raises:
        TraceError: the name is not an argument, or the value no dimension.
    """
    dims: DynamicDims = {}
    any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    for name, value in dynamic_arg_dims.items():
        if name not in signature.parameters and not any_name:
            raise TraceError(
                f"dynamic_arg_dims names {name!r}, which is not an argument of forward; "
                f"it takes {', '.join(signature.parameters) or 'none'}"
            )
        entries = [value] if hasattr(value, "__index__") else value
        if isinstance(entries, (str, bytes)) or not isinstance(entries, Iterable):
            raise TraceError(
                f"dynamic_arg_dims[{name!r}]={value!r} is not a dimension; give an int or a list of ints"
            )
        whole = []
        for entry in entries:
            if isinstance(entry, bool) or not hasattr(entry, "__index__"):
                raise TraceError(f"dynamic_arg_dims[{name!r}] has {entry!r}, which is not a whole number")
            whole.append(entry.__index__())
        dims[name] = tuple(dict.fromkeys(whole))
    return dims


def _names_seen_by(forward: Callable[..., Any]) -> dict[str, Any]:
    """What a string annotation of ``forward`` may refer to: typing, its module, its closure."""
    function = inspect.unwrap(getattr(forward, "__func__", forward))
    scope: dict[str, Any] = {**vars(typing), "torch": torch, "Tensor": torch.Tensor}
    scope.update(getattr(function, "__globals__", {}))
    code = getattr(function, "__code__", None)
    for name, cell in zip(code.co_freevars if code else (), getattr(function, "__closure__", None) or ()):
        try:
            scope[name] = cell.cell_contents
        except ValueError:  # a cell that is not filled yet
            continue
    return scope


def _resolve(annotation: Any, scope: dict[str, Any]) -> Any:
    """A string annotation evaluated, or the string itself where its names do not exist at run time."""
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, dict(scope))
    except Exception:
        return annotation


def _carries_tensors(annotation: Any, scope: dict[str, Any], depth: int = 0) -> bool:
    annotation = _resolve(annotation, scope)
    if isinstance(annotation, str):
        return bool(_TENSOR_TEXT.search(annotation))
    if depth > 4 or annotation is None:
        return False
    arguments = typing.get_args(annotation)
    if arguments:
        if typing.get_origin(annotation) in (typing.Literal, Callable):
            return False
        return any(_carries_tensors(argument, scope, depth + 1) for argument in arguments)
    if isinstance(annotation, type(torch.LongTensor)):  # torch.LongTensor and its kin are no classes
        return True
    if not isinstance(annotation, type) or annotation in (int, float, bool, str, bytes, type):
        return False
    if issubclass(annotation, torch.Tensor):
        return True
    if annotation.__module__ == "builtins" or issubclass(annotation, torch.nn.Module):
        return False
    return _has_tensor_fields(annotation, depth)


def _has_tensor_fields(cls: type, depth: int) -> bool:
    """Whether a class declares fields that are tensors: a dataclass, or plain annotations."""
    scope = {**vars(typing), "torch": torch, **vars(sys.modules.get(cls.__module__, types))}
    if dataclasses.is_dataclass(cls):
        hints: Iterable[Any] = [field.type for field in dataclasses.fields(cls)]
    else:
        hints = [hint for base in cls.__mro__ for hint in inspect.get_annotations(base).values()]
    return any(_carries_tensors(hint, scope, depth + 1) for hint in hints)
