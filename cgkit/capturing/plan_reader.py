"""What a replay plan compares once a step: is this the step that it was laid out for?

One generated expression, evaluated once a step in place of one a piece: whether the arguments are the ones of the
recording (the objects themselves, which a runner passes; other objects are looked at closer), the addresses of
all tensors that the plan reads, and what prepared calls take of the metadata for given. The comparison is one of two
flat tuples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cgkit.tensor_trees import tensor_leaves

#: ``read(args, kwargs, metadata)``: a tuple to be compared with the one of the recording.
Read = Callable[[tuple[Any, ...], dict[str, Any], Any], tuple[Any, ...]]
#: What ``read`` raises where a step is built otherwise than the recording.
BUILT_OTHERWISE = (AttributeError, LookupError, TypeError)


def step_reader(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    metadata: Any,
    paths: Sequence[str],
    fixed: Sequence[str] | None,
    check: Callable[[tuple[Any, ...], dict[str, Any]], None],
    other_mode: Callable[[], str] | None = None,
) -> tuple[Read, tuple[str, ...]]:
    """The expression for a call like this one, and what stands at each place of its tuple.

    Args:
        paths: of the tensors among the arguments that the plan reads (``args[0]``, ``kwargs['x'].y``).
        fixed: attributes of the metadata that must stay as they are; None: the plan takes nothing of the metadata.
        check: raises for arguments that do not fit the trace; asked for objects other than those of the recording.
        other_mode: not "" where autocast or train/eval is another one than at the trace: bound operators would heed it.
    """
    scope: dict[str, Any] = {
        "__builtins__": {},
        "len": len,
        "fits": _other_objects(args, kwargs, paths, check),
    }
    same = [f"len(args) == {len(args)}", f"len(kwargs) == {len(kwargs)}"]
    for place, value in [
        *((f"args[{i}]", v) for i, v in enumerate(args)),
        *((f"kwargs[{k!r}]", v) for k, v in kwargs.items()),
    ]:
        name = f"given{len(scope)}"
        scope[name] = value
        same.append(f"{place} is {name}")
    parts = [(f"({' and '.join(same)}) or fits(args, kwargs)", "the arguments")]
    if other_mode is not None:
        scope["other_mode"] = other_mode
        parts.append(("other_mode()", "the model's mode"))
    if fixed is not None:
        parts.append(("metadata is None", "the metadata"))
        parts += [(f"metadata.{name}", f"metadata.{name}") for name in fixed]
    parts += [(f"{path}.data_ptr()", path) for path in paths]
    if fixed is not None:
        parts += _tables(metadata, scope)
        in_tables = tuple(f"{path}[" for text, path in parts if text.startswith("tuple("))
        leaves = [path for path, _ in tensor_leaves(metadata, "metadata")]
        parts += [(f"{path}.data_ptr()", path) for path in leaves if not path.startswith(in_tables)]
    source = f"lambda args, kwargs, metadata: ({''.join(text + ', ' for text, _ in parts)})"
    return eval(source, scope), tuple(what for _, what in parts)  # our own text


def _tables(metadata: Any, scope: dict[str, Any]) -> list[tuple[str, str]]:
    """Dicts of tensors, or of tuples of them, that the metadata holds (a cache a layer): many tensors at once.

    Whether each entry is the very object of the recording, and where the tensors of these objects lie: half the time of
    reaching each one by its expression.
    """
    parts = []
    attributes = {path.split("[")[0] for path, _ in tensor_leaves(metadata, "metadata") if "[" in path}
    for path in sorted(attributes):
        table = eval(path, {"__builtins__": {}, "metadata": metadata})  # our own text
        entries = list(table.values()) if type(table) is dict else []
        tensors = [tensor for entry in entries for tensor in (entry if type(entry) is tuple else (entry,))]
        if not entries or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            continue
        number = len(scope)
        scope |= {"tuple": tuple, "map": map, "id": id, "data_ptr": torch.Tensor.data_ptr}
        scope |= {
            f"entries{number}": entries,
            f"tensors{number}": tensors,
        }  # kept: an id is not given out twice
        parts.append((f"tuple(map(id, {path}.values()))", path))
        parts.append((f"tuple(map(data_ptr, tensors{number}))", path))
    return parts


def _other_objects(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    paths: Sequence[str],
    check: Callable[[tuple[Any, ...], dict[str, Any]], None],
) -> Callable[[tuple[Any, ...], dict[str, Any]], bool]:
    """Whether other objects mean the same call: they fit the trace, the tensors are laid out alike, and what is no
    tensor is equal."""
    body = "".join(f"{path}.shape, {path}.stride(), {path}.dtype, " for path in paths)
    layouts: Callable[..., Any] = eval(f"lambda args, kwargs: ({body})", {"__builtins__": {}})  # our own text
    recorded = layouts(args, kwargs)
    plain = [(i, v) for i, v in enumerate(args) if not _holds_tensors(v)]
    named = [(k, v) for k, v in kwargs.items() if not _holds_tensors(v)]
    count, keywords = len(args), len(kwargs)

    def fits(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        check(args, kwargs)
        return (
            len(args) == count
            and len(kwargs) == keywords
            and layouts(args, kwargs) == recorded
            and all(args[i] is v or args[i] == v for i, v in plain)
            and all(kwargs[k] is v or kwargs[k] == v for k, v in named)
        )

    return fits


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or any(True for _ in tensor_leaves(value, "v"))
