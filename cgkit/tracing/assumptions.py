"""What a trace takes for granted of its arguments, beyond which of them are None.

Dynamo writes a guard for everything that it reads; without guards nobody looks any more. Those on
what a *call* brings are cheap to look at again, and a wrong one is the worst kind of wrong: compiled
code reads float64 as float32, a dataclass whose optional field is given now keeps the path without
it. So they are collected here and become one generated expression an argument. Guards on what the
model keeps (its attributes) stay dropped, but for the one that everybody changes: ``train()``/``eval()``.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Sequence
from inspect import Parameter, Signature
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

Guard = tuple[str, str, Any]
CONSTANTS = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, enum.Enum)
#: Further values that say by ``==`` whether they are the same; a function or a class is equal to itself only.
_COMPARED = (
    *CONSTANTS,
    complex,
    set,
    frozenset,
    torch.layout,
    torch.memory_format,
    type,
    BuiltinFunctionType,
)
_HERE = "\0"  # stands for the argument in a fact's text: no name and no key's repr can hold it
_FACTS_OF_TENSOR = (f"{_HERE}.dtype", f"{_HERE}.is_cuda", f"{_HERE}.dim()")
_CALLED = {"type": type, "len": len, "tuple": tuple, "hasattr": hasattr}  # by the texts of facts


class Like:
    """What a later argument must have in common with the first one, as (text, value) pairs.

    ``look(argument) == expected`` is the whole check; :data:`_HERE` in a text stands for the argument.
    """

    __slots__ = ("expected", "look", "texts")

    def __init__(self, facts: Iterable[tuple[str, Any]]) -> None:
        found = dict(facts)
        self.texts = tuple(found)
        self.expected = tuple(found.values())
        body = "".join(text.replace(_HERE, "v") + ", " for text in self.texts)
        scope = {"__builtins__": {}, **_CALLED}
        self.look: Callable[[Any], tuple[Any, ...]] = eval(f"lambda v: ({body})", scope)  # our own text

    def fits(self, value: Any) -> bool:
        """Whether ``value`` is like the first argument in all that the graph depends on."""
        try:
            return self.look(value) == self.expected
        except (AttributeError, LookupError, TypeError):
            return False

    def difference(self, label: str, value: Any) -> tuple[str, Any, Any]:
        """(what, as traced, as it is now) of the first thing that differs."""
        scope = {"__builtins__": {}, **_CALLED, "v": value}
        for text, expected in zip(self.texts, self.expected):
            try:
                now = eval(text.replace(_HERE, "v"), scope)
            except (AttributeError, LookupError, TypeError) as error:
                now = f"not there ({error})"
            if now != expected:
                return text.replace(_HERE, label), expected, now
        raise AssertionError("nothing differs")  # the caller compared before


def assumptions(
    signature: Signature, values: dict[str, Any], inputs: Iterable[Any], guards: Sequence[Guard]
) -> dict[str, Like]:
    """For each argument (by label) that the graph depends on: what must stay as it is.

    Args:
        values: the first call, by label (``"x"``, ``"rest[0]"``).
        inputs: the graph's inputs, whose ``source``, ``dtype`` and ``shape`` say what it reads.
        guards: Dynamo's, which say what else was looked at (:func:`cgkit.torch_hooks.dynamo_guards`).
    """
    facts: dict[str, list[tuple[str, Any]]] = {}
    for entry in inputs:
        place = _place(signature, entry.source)
        if entry.kind == "argument" and entry.dtype is not None and place is not None:
            label, path = place
            static = [(f".shape[{d}]", int(n)) for d, n in enumerate(entry.shape) if n.isdecimal()]
            of_tensor = [entry.dtype, entry.device.type == "cuda", len(entry.shape)]
            known = [
                (text.replace(_HERE, _HERE + path), value) for text, value in zip(_FACTS_OF_TENSOR, of_tensor)
            ]
            facts.setdefault(label, []).extend(known + [(_HERE + path + dim, n) for dim, n in static])
    for source, kind, key in guards:
        place = _place(signature, source)
        if place is not None and place[0] in values:
            facts.setdefault(place[0], []).extend(_facts(values[place[0]], _HERE + place[1], kind, key))
    return {label: Like(found) for label, found in facts.items() if found}


def goes_through_keywords(signature: Signature, guards: Sequence[Guard]) -> bool:
    """Whether forward went through what its ``**kwargs`` caught, in whatever order that came."""
    caught = [name for name, each in signature.parameters.items() if each.kind is Parameter.VAR_KEYWORD]
    return any(
        kind == "DICT_KEYS_MATCH" and source == f"L[{name!r}]"
        for name in caught
        for source, kind, _ in guards
    )


def _facts(argument: Any, text: str, kind: str, key: Any) -> list[tuple[str, Any]]:
    """What the guard ``kind`` at ``text`` (inside of the argument) says."""
    try:
        value = eval(text.replace(_HERE, "v"), {"__builtins__": {}, "v": argument})  # Dynamo's text
    except Exception:  # sources of values that the first call does not show (iterators, closures)
        return []
    if kind == "SEQUENCE_LENGTH" and hasattr(value, "__len__"):
        return [(f"len({text})", len(value))]
    if kind.endswith("_CONTAINS") and isinstance(key, (str, int)):
        return [(f"({key!r} in {text})", key in value)]
    if kind == "HASATTR" and isinstance(key, str):
        return [(f"hasattr({text}, {key!r})", hasattr(value, key))]
    if kind == "DICT_KEYS_MATCH":  # only where forward goes through them: then their order counts
        return [(f"tuple({text})", tuple(value))]
    if kind.endswith("_MATCH"):
        return _facts_of_value(value, text, kind)
    return []


def _facts_of_value(value: Any, text: str, kind: str) -> list[tuple[str, Any]]:
    """That ``value`` is this one, or of this type."""
    if isinstance(value, FunctionType):  # as Dynamo: a lambda that is made anew at each call is the same
        return [(f"{text}.__code__", value.__code__)]
    if isinstance(value, _COMPARED):
        kept = frozenset(value) if isinstance(value, set) else value  # the caller may change it later
        return [(f"type({text})", type(value)), (text, kept)]
    return [(f"type({text})", type(value))] if kind == "TYPE_MATCH" else []


def _place(signature: Signature, source: str) -> tuple[str, str] | None:
    """Dynamo's ``L['b'].hidden`` as (label of the argument, path inside of it)."""
    match = re.match(r"L\['(\w+)'\]", source)
    parameter = signature.parameters.get(match.group(1)) if match else None
    if match is None or parameter is None:
        return None
    label, path = match.group(1), source[match.end() :]
    if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
        inner = re.match(r"\[(\d+)\]|\['(\w+)'\]", path)
        if inner is None:
            return None
        label = inner.group(2) or f"{label}[{inner.group(1)}]"
        path = path[inner.end() :]
    return label, path


def mode_check(model: Any, inputs: Iterable[Any], guards: Sequence[Guard]) -> Callable[[], str]:
    """A function that says "" or, in a sentence, which mode is another one than at the trace.

    Looked at: autocast, and ``training`` of the first module whose forward asks for it.
    """
    device = next((entry.device.type for entry in inputs if entry.device is not None), "cpu")
    known = torch.amp.is_autocast_available(device)  # no such thing as autocast on "meta"
    autocast = torch.is_autocast_enabled if known else lambda device_type: False
    was_on = autocast(device)
    asked = _first_that_asks(model, guards)
    owner, training = asked if asked is not None else (None, False)

    def check() -> str:
        if autocast(device) is not was_on:
            return f"autocast was {_on(was_on)} when the model was traced and is {_on(not was_on)} now"
        if owner is not None and owner.training is not training:
            was, now = ("train()", "eval()") if training else ("eval()", "train()")
            return f"the model was in {was} when it was traced and is in {now} now"
        return ""

    return check


def _on(flag: bool) -> str:
    return "on" if flag else "off"


def _first_that_asks(model: Any, guards: Sequence[Guard]) -> tuple[torch.nn.Module, bool] | None:
    """The first module whose ``training`` Dynamo had to look at."""
    for source, _, _ in guards:
        match = re.fullmatch(r"L\['\w+'\](.*)\.training", source)
        if match:
            try:
                owner = eval(f"model{match.group(1)}", {"__builtins__": {}, "model": model})  # Dynamo's text
            except Exception:
                continue
            if isinstance(owner, torch.nn.Module):
                return owner, owner.training
    return None
