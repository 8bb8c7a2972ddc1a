"""``register_op``: the one way to make an operator at which a graph can be cut.

Implements the article's "切分算子：splitting_ops 与「铰链」" (splitting operators, the hinges), where it is
vLLM's ``direct_register_custom_op``. A splitting operator is a black box for Dynamo, and it writes
its result into a buffer that the caller allocated (an out-parameter). So the buffer belongs to the
recorded piece before it and keeps its address, while the operator itself runs anew at each step.
"""

from __future__ import annotations

import inspect
import threading
import typing
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.library import Library, infer_schema

from cgkit.errors import SplitError
from cgkit.splitting.prepare import Prepare
from cgkit.torch_hooks import OpOverload, destroy_library, register_fake_in


@dataclass(frozen=True)
class RegisteredOp:
    """An operator that :func:`register_op` made: what was given, and what torch made of it."""

    name: str  # "namespace::op"
    op_func: Callable[..., Any]
    mutates_args: tuple[str, ...]
    schema: str  # "(Tensor query, ..., Tensor(a3!) output) -> ()"
    dispatch_key: str
    overload: OpOverload
    #: Parameters (text) by which the operator looks something up, and does nothing else with them.
    lookup_args: tuple[str, ...] = ()
    #: Gives a launch with everything in its place, for replay plans (:mod:`cgkit.splitting.prepare`).
    prepare: Prepare | None = None


class DirectCall:
    """An operator's implementation, to be called without torch's dispatcher: ``direct.call(...)``.

    The dispatcher costs 4 to 5 us of host time a call, which between replayed pieces is as much as a
    replay. An operator of :func:`register_op` has one Python function for every device, runs without
    gradients and declares what it writes, so nothing is left for the dispatcher to decide. ``call`` follows
    when the operator is registered again; who has bound the function itself is told (:meth:`tell`).
    """

    __slots__ = ("_bound_by", "call")

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self._bound_by: weakref.WeakSet[Any] = weakref.WeakSet()

    def tell(self, holder: Any) -> None:
        """From now on ``holder.operator_changed()`` is called when ``call`` is replaced."""
        self._bound_by.add(holder)

    def replace(self, call: Callable[..., Any]) -> None:
        """Sets ``call``, and tells those who bound the old one (or a launch that was prepared for it)."""
        self.call = call
        for holder in list(self._bound_by):
            holder.operator_changed()


@dataclass
class _Entry:
    """A registered operator and the two libraries that hold it.

    The definition and the implementation live apart, so that a new implementation (a notebook's
    cell run again) leaves the definition alone: graphs traced before go on, with the new function.
    """

    op: RegisteredOp
    fake_impl: Callable[..., Any]
    definition: Library
    implementation: Library
    direct: DirectCall


_EVERY_DEVICE = "CompositeExplicitAutograd"
_entries: dict[str, _Entry] = {}
_lock = threading.Lock()


def register_op(
    op_name: str,
    op_func: Callable[..., Any],
    mutates_args: Sequence[str],
    fake_impl: Callable[..., Any] | None = None,
    dispatch_key: str = "CompositeExplicitAutograd",
    namespace: str = "cgkit",
    lookup_args: Sequence[str] = (),
    prepare: Prepare | None = None,
) -> OpOverload:
    """Makes ``op_func`` the operator ``torch.ops.<namespace>.<op_name>``.

    May be called again, for instance by running a notebook's cell a second time: with the same
    schema the implementation is replaced (also in graphs that exist already); with another one the
    operator is defined anew (graphs that hold the old one are then dead).

    Args:
        op_name: the operator's name, without namespace.
        op_func: the implementation. Its annotations give the schema: ``torch.Tensor``, ``int``,
            ``float``, ``bool``, ``str``, optionals and lists of them; strings are fine.
        mutates_args: the parameters that it writes in place. Undeclared writes are lost by compilers.
        fake_impl: the same call on tensors without data: returns tensors of the right shape, writes
            nothing. May be left out if ``op_func`` returns nothing.
        dispatch_key: for which dispatch key ``op_func`` is the kernel: the default serves every device.
        namespace: the operator's namespace.
        lookup_args: parameters of type ``str`` by which ``op_func`` looks something up and does nothing else
            (a layer's name): pieces that differ in them alone share one compilation. ``fake_impl`` must not
            depend on them.
        prepare: does once, for all steps of a replay plan, what ``op_func`` would do at each; see
            :mod:`cgkit.splitting.prepare`. None: a plan calls ``op_func`` with its arguments in place.

    Returns:
        The operator, to be called directly (``torch.ops.ns.name`` finds it too).

    Raises:
        SplitError: the signature is not one of an operator, or the operator belongs to someone else.
            Nothing is left half-registered.

    Source: the article's "切分算子：splitting_ops 与「铰链」" (splitting operators, the hinges);
    vLLM's ``direct_register_custom_op``. Unlike there, an operator that returns a value must bring a
    fake implementation: torch would otherwise run the real one while tracing.
    """
    name = f"{namespace}::{op_name}"
    if not (op_name.isidentifier() and namespace.isidentifier()):
        raise SplitError(f"{name!r} is no operator's name: op_name and namespace must be Python identifiers")
    schema = _infer_schema(name, op_func, mutates_args)
    _check_lookup_args(name, op_func, lookup_args)
    if fake_impl is None:
        if not schema.endswith("-> ()"):
            raise SplitError(
                f"{name} returns a value (schema {schema}) but has no fake_impl: give a function that "
                "returns tensors of the right shape and dtype without computing, or write into an "
                "out-parameter named in mutates_args and return nothing"
            )
        fake_impl = _returns_nothing
    with _lock:
        old = _entries.get(name)
        if old is not None and old.op.schema != schema:
            _forget(name)
            old = None
        definition = old.definition if old else _define(name, namespace, schema)
        try:
            if old:
                destroy_library(old.implementation)
            implementation = _implement(name, op_func, fake_impl, dispatch_key, namespace)
        except SplitError:
            if old:  # goes on as it was
                was = old.op
                old.implementation = _implement(name, was.op_func, old.fake_impl, was.dispatch_key, namespace)
            else:
                destroy_library(definition)
            raise
        overload = getattr(getattr(torch.ops, namespace), op_name).default
        op = RegisteredOp(
            name, op_func, tuple(mutates_args), schema, dispatch_key, overload, tuple(lookup_args), prepare
        )
        direct = old.direct if old else DirectCall(op_func)
        direct.replace(op_func if dispatch_key == _EVERY_DEVICE else overload)
        _entries[name] = _Entry(op, fake_impl, definition, implementation, direct)
        return overload


def direct_call(target: Any) -> DirectCall | None:
    """How to call the operator ``target`` without the dispatcher; None for one that was not made here."""
    with _lock:
        return next((entry.direct for entry in _entries.values() if entry.op.overload is target), None)


def overload_of(direct: DirectCall) -> Any:
    """The operator that ``direct`` calls (of one that is gone: what says so)."""
    with _lock:
        found = (entry.op.overload for entry in _entries.values() if entry.direct is direct)
        return next(found, direct.call)


def registered_op_of(target: Any) -> RegisteredOp | None:
    """What was registered as ``target`` (an overload, or the packet ``torch.ops.ns.name``); None: nothing."""
    with _lock:
        for entry in _entries.values():
            if entry.op.overload is target or entry.op.overload.overloadpacket is target:
                return entry.op
    return None


def resolved_signature(op_func: Callable[..., Any]) -> inspect.Signature:
    """The signature of ``op_func`` with types for annotations."""
    return inspect.signature(_with_real_annotations(op_func))


def registered_ops() -> dict[str, RegisteredOp]:
    """The operators made by :func:`register_op`, by ``"namespace::op"`` (a copy)."""
    with _lock:
        return {name: entry.op for name, entry in _entries.items()}


def unregister_op(name: str) -> None:
    """Removes the operator ``"namespace::op"``; graphs that hold it can no longer run.

    Raises:
        SplitError: :func:`register_op` made no such operator.
    """
    with _lock:
        if name not in _entries:
            known = ", ".join(sorted(_entries)) or "none"
            raise SplitError(f"{name!r} was not registered with register_op (registered: {known})")
        _forget(name)


def _forget(name: str) -> None:
    entry = _entries.pop(name)
    destroy_library(entry.implementation)
    destroy_library(entry.definition)
    entry.direct.replace(entry.op.overload)  # which is gone, and says so


def _check_lookup_args(name: str, op_func: Callable[..., Any], lookup_args: Sequence[str]) -> None:
    if isinstance(lookup_args, str):
        raise SplitError(f"{name}: lookup_args={lookup_args!r} must be a list: [{lookup_args!r}]")
    parameters = resolved_signature(op_func).parameters if lookup_args else {}
    for each in lookup_args:
        if each not in parameters or parameters[each].annotation is not str:
            raise SplitError(
                f"{name}: lookup_args has {each!r}, which is no parameter of type str; it has {list(parameters)}"
            )


def _returns_nothing(*args: Any, **kwargs: Any) -> None:
    """The fake implementation of every operator that only writes its out-parameters."""


def _infer_schema(name: str, op_func: Callable[..., Any], mutates_args: Sequence[str]) -> str:
    """The schema that ``op_func``'s annotations mean, as text from the first parenthesis on."""
    if isinstance(mutates_args, str):
        raise SplitError(f"{name}: mutates_args={mutates_args!r} must be a list: [{mutates_args!r}]")
    try:
        return infer_schema(_with_real_annotations(op_func), mutates_args=list(mutates_args))
    except (ValueError, TypeError, NameError, AssertionError) as error:
        raise SplitError(
            f"{name}: no operator schema can be made of {getattr(op_func, '__name__', op_func)!r} with "
            f"mutates_args={list(mutates_args)}: {error}. Annotate every parameter and the result with types "
            "that torch.library.infer_schema knows, and name only tensor parameters in mutates_args"
        ) from error


def _with_real_annotations(op_func: Callable[..., Any]) -> Callable[..., Any]:
    """``op_func`` (or a stand-in) whose annotations are types: ``from __future__ import annotations``
    and aliases of a notebook leave text that only the function's own globals can resolve."""
    signature = inspect.signature(op_func)
    if not any(isinstance(p.annotation, str) for p in signature.parameters.values()):
        return op_func
    hints = typing.get_type_hints(op_func)

    def stand_in() -> None: ...

    none_type_as_none = {key: None if hint is type(None) else hint for key, hint in hints.items()}
    stand_in.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[
            p.replace(annotation=none_type_as_none.get(p.name, p.annotation))
            for p in signature.parameters.values()
        ],
        return_annotation=none_type_as_none.get("return", signature.return_annotation),
    )
    return stand_in


def _define(name: str, namespace: str, schema: str) -> Library:
    op_name = name.split("::")[1]
    # asked for beforehand: torch refuses a name twice, but would add an overload to aten::add
    if hasattr(getattr(torch.ops, namespace), op_name):
        raise SplitError(
            f"{name} is already an operator, registered by someone else than register_op: "
            "choose another op_name or namespace"
        )
    library = Library(namespace, "FRAGMENT")
    try:
        library.define(op_name + schema)
    except RuntimeError as error:
        destroy_library(library)
        raise SplitError(f"{name} cannot be defined with the schema {schema}: {error}") from error
    return library


def _implement(
    name: str, op_func: Callable[..., Any], fake_impl: Callable[..., Any], dispatch_key: str, namespace: str
) -> Library:
    library = Library(namespace, "FRAGMENT")
    try:
        library.impl(name.split("::")[1], op_func, dispatch_key)
        register_fake_in(library, name.split("::")[1], fake_impl)
    except (RuntimeError, ValueError) as error:
        destroy_library(library)
        raise SplitError(
            f"{name} cannot be implemented for dispatch_key={dispatch_key!r}: {error}"
        ) from error
    return library
