"""One key's whole PIECEWISE step as a flat tuple of calls: the replay plan, and how it is laid out.

Between pieces the module path builds an argument list, looks the piece's entry up, compares addresses and
dispatches an operator, although at a recorded size nothing of it ever comes out otherwise: the pieces' outputs lie
where they were recorded, and so does everything that an operator between them reads. So the split graph is gone
through once, with the recorded outputs in place of values, and what remains to be done is written down: replay this
graph, launch this attention. A step is then ``for call in calls: call()``.

Not in the article, whose pieces call one another through the split module (heading "两层封装：为什么是
PiecewiseBackend 套着 CUDAGraphWrapper", two layers of wrapping): what that costs a piece is measured in
``cgkit bench host``.

What cannot be laid out is refused with the reason, and the module path serves it:

- an operator between pieces that makes a new tensor: its address is another one at each step;
- one that reads a tensor on the host, or is nothing that can be bound (a Python function of torch's);
- a key that some piece never recorded, or whose recorded inputs are not what the pieces before it write;
- a model whose ``forward`` does something beside returning tensors (it sets an attribute at each call).

A view of a static tensor between two operators is made once, here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from cgkit.errors import CgkitError
from cgkit.forward_context import BatchDescriptor
from cgkit.splitting.prepare import ComingStep
from cgkit.splitting.register import DirectCall, direct_call, registered_op_of
from cgkit.splitting.walk import walk
from cgkit.tensor_trees import tensor_leaves
from cgkit.torch_hooks import OpOverload, TorchDispatchMode, bound_argument, operator_of, written_arguments

if TYPE_CHECKING:
    from cgkit.capturing.wrapper import CUDAGraphWrapper
    from cgkit.compiling import CompiledGraph
    from cgkit.splitting import Piece


class Refusal(Exception):  # noqa: N818 - not an error: the module path takes over
    """Why no plan is laid out; ``str()`` is the sentence that is shown."""


@dataclass(frozen=True)
class PlannedCall:
    """One thing that a step does: replay a piece, or run one operator between pieces.

    ``calls`` are what the plan calls, in order; ``plain`` is the same without preparation; ``writes`` are the static
    tensors that it fills. ``how`` says in words what ``calls`` are.
    """

    stage: str  # "replay", "attention" or "splitting"
    piece: str
    what: str
    calls: tuple[Callable[[], Any], ...]
    plain: Callable[[], Any]
    writes: tuple[torch.Tensor, ...]
    how: str


@dataclass(frozen=True)
class ReplayPlan:
    """What a step of one key calls, and under which conditions.

    ``result`` is what the model returns, the same object at each step; its tensors are overwritten by the next one.
    ``fixed`` are the metadata's attributes that prepared calls take for given, None without prepared calls: then any
    metadata will do, since every operator reads the step's own.
    """

    key: BatchDescriptor
    planned: tuple[PlannedCall, ...]
    calls: tuple[Callable[[], Any], ...]
    result: Any
    fixed: Mapping[str, Any] | None
    operators: tuple[DirectCall, ...] = field(repr=False)

    @property
    def num_replays(self) -> int:
        """How many graphs a step replays."""
        return sum(one.stage == "replay" for one in self.planned)


def lay_out(
    compiled: CompiledGraph,
    wrappers: Sequence[CUDAGraphWrapper],
    key: BatchDescriptor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    coming: ComingStep,
) -> ReplayPlan:
    """The plan of ``key`` for a call with these arguments (the static ones of its size).

    Args:
        wrappers: the pieces' wrappers, in order, with ``key`` recorded.
        coming: metadata and stream of the steps that it is for.

    Raises:
        Refusal: it cannot be laid out; see above.
    """
    return _Layout(compiled, wrappers, key, coming).run(args, kwargs)


class _Taken(Exception):  # noqa: N818 - ends a call once the graph's inputs are known
    """The graph's inputs were collected."""


class _Layout:
    def __init__(
        self,
        compiled: CompiledGraph,
        wrappers: Sequence[CUDAGraphWrapper],
        key: BatchDescriptor,
        coming: ComingStep,
    ) -> None:
        self.compiled, self.key, self.coming = compiled, key, coming
        names = [backend.name for backend in compiled.backends]
        self.wrappers = dict(zip(names, wrappers))
        self.planned: list[PlannedCall] = []
        self.operators: list[DirectCall] = []
        self.prepared = self.follows_stream = False

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ReplayPlan:
        backends = self.compiled.backends
        if len(self.wrappers) != len(backends):
            raise Refusal(
                f"{len(backends)} pieces have {len(self.wrappers)} wrappers: those without one were never recorded"
            )
        traced = self.compiled.split.traced
        if traced is not None and traced.side_effects:
            raise Refusal(f"forward of {self.compiled.model_name} sets attributes of the model at each call")
        inputs = self.graph_inputs(args, kwargs)
        outputs = walk(self.compiled.split, inputs, self.replay, self.between)
        result = self.compiled.bind(lambda *_: outputs)(*args, **kwargs)
        fixed = {name: getattr(self.coming.metadata, name) for name in sorted(self.coming.fixed_names)}
        calls = [call for one in self.planned for call in one.calls]
        if self.follows_stream or (self.prepared and self.coming.stream is not None):
            calls.insert(0, self.coming.stream.follow)
        return ReplayPlan(
            self.key,
            tuple(self.planned),
            tuple(calls),
            result,
            fixed if self.prepared else None,
            tuple(self.operators),
        )

    def graph_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        taken: list[Any] = []

        def take(*inputs: Any) -> Any:
            taken.extend(inputs)
            raise _Taken

        try:
            self.compiled.bind(take)(*args, **kwargs)
        except _Taken:
            return taken
        raise Refusal(f"a call of {self.compiled.model_name} does not reach its graph")

    # --- pieces ----------------------------------------------------------------------------------

    def replay(self, piece: Piece, given: Sequence[Any]) -> Sequence[Any]:
        """Writes down the replay of ``piece``; its recorded outputs."""
        wrapper = self.wrappers[piece.name]
        entry = wrapper.entries.get(self.key)
        if entry is None:
            raise Refusal(f"{piece.name} was not captured at {tuple(self.key)}")
        args, metadata = tuple(given), self.coming.metadata
        try:
            now = entry.reader.read(args, {}, metadata)
        except (AttributeError, LookupError, TypeError) as error:
            raise Refusal(f"{piece.name} was captured with arguments of another kind ({error})") from error
        if now != entry.addresses:
            where = f"{piece.name} at {tuple(self.key)}"
            raise Refusal(str(entry.reader.moved(where, entry.addresses, args, {}, metadata)))
        writes = tuple(tensor for _, tensor in tensor_leaves(entry.output))
        replay, how = entry.graph.replay, "graph replay"
        prepare = getattr(entry.graph, "prepared_replay", None)
        direct = prepare(self.coming.stream) if prepare and self.coming.stream is not None else None
        if direct is not None:
            self.follows_stream, how = True, "cuGraphLaunch"
        calls = (direct or replay,)
        self.planned.append(PlannedCall("replay", piece.name, "graph", calls, replay, writes, how))
        return entry.output

    # --- between pieces --------------------------------------------------------------------------

    def between(self, piece: Piece, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Writes down the call of one operator between pieces; what it returns."""
        if isinstance(target, OpOverload) and not target.is_view:
            return self.bind(piece, target, args, kwargs)
        try:
            with _OnlyViews():
                made = (
                    getattr(args[0], target)(*args[1:], **kwargs)
                    if isinstance(target, str)
                    else target(*args, **kwargs)
                )
        except _RunsAnOperatorError as error:
            raise Refusal(
                f"{piece.name} calls {_named(target)} between recorded pieces ({error}), which is no operator that can "
                "be bound to its arguments: make it one with register_op, its result in an out-parameter"
            ) from None
        if not any(True for _ in tensor_leaves(made)):
            raise Refusal(f"{piece.name} calls {_named(target)}, which gives no tensor but {made!r}")
        return made

    def bind(self, piece: Piece, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = written_arguments(op)
        if any(name is None for name in written):
            raise Refusal(
                f"{piece.name} calls {_named(op)}, which makes a new tensor at each step, so what reads it cannot be "
                "bound: let it write into an out-parameter (register_op(..., mutates_args=['output']))"
            )
        direct = direct_call(op)
        if direct is not None:
            self.operators.append(direct)
        plain = partial(direct.call if direct is not None else op, *args, **kwargs)
        calls, how = self.prepare(op, args, kwargs)
        name = _named(op)
        self.planned.append(
            PlannedCall(
                "attention" if "attention" in name else "splitting",
                piece.name,
                name,
                (plain,) if calls is None else calls,
                plain,
                tuple(_written_tensors(op, args, kwargs)),
                how,
            )
        )
        results = [bound_argument(op, str(name), args, kwargs) for name in written]
        return results[0] if len(results) == 1 else tuple(results) if results else None

    def prepare(
        self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Callable[[], Any], ...] | None, str]:
        """What the operator's ``prepare`` gives (None: nothing), and in words how it is called."""
        registered = registered_op_of(op)
        if registered is None or registered.prepare is None:
            return None, "bound call"
        try:
            made = registered.prepare(self.coming, *args, **kwargs)
        except CgkitError as error:
            raise Refusal(f"{registered.name} cannot be prepared: {error}") from error
        if made is None:
            return None, "bound call (nothing to prepare)"
        self.prepared = True
        calls = (made,) if callable(made) else tuple(made)
        return calls, " + ".join(getattr(call, "how", "prepared call") for call in calls)


class _RunsAnOperatorError(Exception):
    """Something else than a view would run."""


class _OnlyViews(TorchDispatchMode):
    """Lets views through and nothing else."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view:
            raise _RunsAnOperatorError(str(func))
        return func(*args, **(kwargs or {}))


def _written_tensors(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    registered = registered_op_of(op)
    names = registered.mutates_args if registered else [n for n in written_arguments(op) if n is not None]
    values = [bound_argument(op, name, args, kwargs) for name in names]
    return [tensor for _, tensor in tensor_leaves(values)]


def _named(target: Any) -> str:
    if isinstance(target, str):
        return f"Tensor.{target}"
    found = operator_of(target)
    return found[0] if found else f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"
