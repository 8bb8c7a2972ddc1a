"""What is put in the place of parts of a recorded step, for a while: replays, checks and operators that do nothing.

Only data is swapped, as :mod:`cgkit.marks` does: a replay in a wrapper's table, the function behind an operator, the
calls of a replay plan. The code around them is the code that serves, and all is back when the block ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from cgkit import marks
from cgkit.capturing import CapturedGraphs
from cgkit.config import CUDAGraphMode
from cgkit.errors import CaptureError
from cgkit.forward_context import BatchDescriptor
from cgkit.splitting import register_op, registered_ops
from cgkit.splitting.register import DirectCall, direct_call


class FixedStep(Protocol):
    """A step on fixed buffers: what it is called with, its key, and what it returns."""

    mode: CUDAGraphMode
    key: BatchDescriptor
    ids: Any
    positions: Any
    output: Any


@contextmanager
def empty_attention(*recordings: CapturedGraphs) -> Iterator[None]:
    """Operators between the pieces do nothing in the block, also where the replay plans of ``recordings`` have bound
    them; nothing is registered again, which would make plans void."""
    with ExitStack() as undo:
        for captured in recordings:
            for _, direct in _operators_of(captured):
                _put(direct, nothing, undo)
            plans: Any = getattr(captured, "plans", None)
            for key in list(plans.ready) if plans is not None else ():
                HollowPlan(plans, key).no_attention(undo)
        yield


class Hollow:
    """What is put in the place of parts of a module path or a full graph."""

    def __init__(self, captured: CapturedGraphs, step: FixedStep) -> None:
        self.captured, self.key = captured, step.key
        full = step.mode is CUDAGraphMode.FULL
        self.wrappers = [captured.full] if full else captured.pieces
        output = step.output
        self.empty: Callable[..., Any] = lambda *args: output
        if full:
            return
        entries = iter([wrapper.entries[step.key].output for wrapper in captured.pieces])
        self.execute = captured.compiled.stitch(lambda backend: _constant(next(entries)))
        traced = captured.compiled.split.traced
        fixed = None if traced is None else traced.bind_fixed(self.execute, (step.ids, step.positions))
        if fixed is None:
            raise CaptureError(
                "the weights of this model cannot be bound, so its module path cannot be taken apart"
            )
        self.fixed: Callable[..., Any] = fixed

    def no_replays(self, undo: ExitStack) -> None:
        """Replays do nothing."""
        for wrapper in self.wrappers:
            assert wrapper is not None
            _, *rest = wrapper._replays[self.key]
            marks.swap_item(wrapper._replays, self.key, (nothing, *rest), undo)

    def no_check(self, undo: ExitStack) -> None:
        """The addresses are said to be what they were: the comparison stays, reading them goes."""
        for wrapper in self.wrappers:
            assert wrapper is not None
            replay, output, _, addresses = wrapper._replays[self.key]
            said = (replay, output, _constant(addresses), addresses)
            marks.swap_item(wrapper._replays, self.key, said, undo)

    def no_wrappers(self, undo: ExitStack) -> None:
        """Each piece returns its recorded outputs at once."""
        marks.swap_attribute(self.captured, "_fixed", self.fixed, undo)

    def no_stitching(self, undo: ExitStack) -> None:
        """No piece is called at all."""
        marks.swap_attribute(self.captured, "_fixed", self.empty, undo)

    # --- operators between pieces ----------------------------------------------------------------

    def no_attention(self, undo: ExitStack) -> None:
        """Operators between pieces do nothing."""
        for _, direct in _operators_of(self.captured):
            _put(direct, nothing, undo)

    def dispatched(self, undo: ExitStack) -> None:
        """They go through torch's dispatcher."""
        for name, direct in _operators_of(self.captured):
            _put(direct, registered_ops()[name].overload, undo)

    def empty_dispatched(self, undo: ExitStack) -> None:
        """They go through torch's dispatcher and do nothing there."""
        for name, direct in _operators_of(self.captured):
            _put(direct, _empty_operator(name), undo)


def _operators_of(captured: CapturedGraphs) -> list[tuple[str, DirectCall]]:
    """The operators of ``register_op`` in the splitting pieces: ``ns::name`` and how they are called."""
    pieces = [piece for piece in captured.compiled.split.pieces if piece.is_splitting]
    names = {op.replace(".", "::", 1) if "::" not in op else op for piece in pieces for op in piece.ops}
    known = registered_ops()
    plain = sorted({name.removesuffix(".default") for name in names} & known.keys())
    found = [(name, direct_call(known[name].overload)) for name in plain]
    return [(name, direct) for name, direct in found if direct is not None]


class HollowPlan:
    """What is put in the place of parts of a replay plan."""

    def __init__(self, plans: Any, key: BatchDescriptor) -> None:
        self.plans, self.key = plans, key
        self.planned = [row.plan for row in plans.rows if row.key == key and row.plan is not None]

    def _swap(self, undo: ExitStack, stages: tuple[str, ...]) -> None:
        """Only what belongs to ``stages`` is called."""
        ready = self.plans.ready[self.key]
        choices = []
        for plan, (known, _, result) in zip(self.planned, ready.choices):
            kept = [call for one in plan.planned if one.stage in stages for call in one.calls]
            choices.append((known, tuple(kept), result))
        marks.swap_item(self.plans.ready, self.key, ready._replace(choices=tuple(choices)), undo)

    def no_attention(self, undo: ExitStack) -> None:
        """Replays only."""
        self._swap(undo, ("replay",))

    def no_calls(self, undo: ExitStack) -> None:
        """Nothing is called."""
        self._swap(undo, ())

    def no_check(self, undo: ExitStack) -> None:
        """And the step is said to be the one that was laid out."""
        ready = self.plans.ready[self.key]
        # which of the choices a step takes does not matter: none calls anything
        known = ready.choices[0][0]
        choices = tuple((known, (), result) for _, _, result in ready.choices)
        swapped = ready._replace(read=_constant(known), choices=choices)
        marks.swap_item(self.plans.ready, self.key, swapped, undo)


def _put(direct: DirectCall, call: Callable[..., Any], undo: ExitStack) -> None:
    """Sets the function behind an operator until ``undo``, without telling who has bound the old one."""
    old = direct.call
    direct.call = call
    undo.callback(setattr, direct, "call", old)


def _empty_operator(name: str) -> Any:
    """An operator of the same schema as ``name`` that does nothing, in a namespace of its own."""
    known = registered_ops()[name]
    own = f"cgkit_host::{name.replace('::', '_')}"
    if own not in registered_ops():
        function = _same_signature(known.op_func)
        register_op(own.split("::")[1], function, known.mutates_args, namespace="cgkit_host")
    return registered_ops()[own].overload


def _same_signature(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    return nothing


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args: value


def nothing(*args: Any, **kwargs: Any) -> None:
    return None
