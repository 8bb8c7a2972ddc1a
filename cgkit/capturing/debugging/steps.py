"""A replayed step, piece by piece beside its eager run: what ``debug=True`` runs in place of the stitching code.

PIECEWISE: the split graph is gone through; each piece is replayed and run eagerly on copies of the same inputs, and
each value that a later piece reads must still be what it was when it was made. FULL: the recording keeps a copy of
what each piece and operator gave (a probe, recorded with the rest), and after the replay the step is gone through
eagerly, fed with the probes, so that each piece is judged by itself. A replay plan, by which PIECEWISE steps run
without ``debug=True``, runs after the pieces, and has to give the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from cgkit import forward_context, recording
from cgkit.capturing.debugging.copies import Kept, copied, share_memory, write
from cgkit.capturing.debugging.eager import run_on_copies, runs_apart, undisturbed
from cgkit.capturing.debugging.pieces import judge
from cgkit.capturing.plan_check import blame
from cgkit.config import CUDAGraphMode
from cgkit.errors import DamagedBufferError, WrongReplayError
from cgkit.forward_context import BatchDescriptor
from cgkit.numerics import first_apart, same_bits
from cgkit.splitting.register import registered_op_of
from cgkit.splitting.walk import walk
from cgkit.tensor_trees import tensor_leaves
from cgkit.torch_hooks import OpOverload, bound_argument, mutated_arguments, operator_of

if TYPE_CHECKING:
    from cgkit.capturing.captured import CapturedGraphs
    from cgkit.splitting import Piece

PIECEWISE, FULL = CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL


class DebugSteps:
    """Steps of one :class:`~cgkit.CapturedGraphs` under ``debug=True``.

    Attributes:
        compared: pieces and operators that were compared with their eager run, by name.
        not_compared: those that were not, with the reason.
    """

    def __init__(self, captured: CapturedGraphs, plain: Callable[..., Any]) -> None:
        self.captured, self.compiled, self.plain = captured, captured.compiled, plain
        self.split = captured.compiled.split
        self.compared: Counter[str] = Counter()
        self.not_compared: dict[str, str] = {}
        self.probes: dict[BatchDescriptor | None, list[tuple[str, str, list[torch.Tensor]]]] = {}
        self.backends = {backend.name: backend for backend in self.compiled.backends}
        traced = self.split.traced
        self.weights = {e.name for e in traced.inputs if e.is_weight} if traced is not None else set()
        self.last_use = {name: piece.index for piece in self.split.pieces for name in piece.input_names}

    def execute(self, *inputs: Any) -> Any:
        """In place of the stitched pieces: the graph's inputs -> its outputs."""
        context = forward_context.current_forward_context()
        mode = context.cudagraph_runtime_mode if context is not None else None
        if context is not None and mode is PIECEWISE and self.captured.lock.locked:
            wrappers = self.captured.pieces
            if all(context.batch_descriptor in wrapper.entries for wrapper in wrappers):
                return _Piecewise(self, context.batch_descriptor).run(inputs)
        if mode is FULL and context is not None and _is_recording():
            return self._recorded_with_probes(inputs, context.batch_descriptor)
        return self.plain(*inputs)

    # --- plans -----------------------------------------------------------------------------------

    def planned_step(self, run: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        """``run`` (piece by piece) and then the plan that serves this step, from the same state.

        Raises:
            WrongReplayError: the plan gives something else; names the call.
        """
        plans, key, metadata = self.captured.plans, context.batch_descriptor, context.attn_metadata
        plan = plans.plan_for(key, args, kwargs, metadata)
        if plan is None:
            plans.pass_over(key, args, kwargs, metadata)
            return run(*args, **kwargs)
        state = [tensor for _, tensor in tensor_leaves((args, kwargs, metadata))]
        before = Kept(state)
        output = run(*args, **kwargs)
        if self.not_compared:  # a piece draws random numbers: the plan would draw others
            self.not_compared.setdefault("the replay plan", "a piece draws random numbers")
            return output
        expected, after = copied(output), Kept(state)
        before.restore()
        with torch.no_grad():
            for call in plan.calls:
                call()
        apart = first_apart(expected, plan.result) or first_apart(after.values, after.tensors, path="written")
        if apart is not None:
            before.restore()
            why = blame(plan, before.tensors, self.captured.platform, self.captured.pool)
            after.restore()
            raise WrongReplayError(
                f"the replay plan of {tuple(key)} gives something else than the pieces one by one ({apart}). {why}. A "
                "prepared call may take for given only what it reads through ComingStep.fixed; or use "
                "replay_path='module'",
                "replayed",
                why.partition(":")[0] if why.startswith("submod") else "",
            )
        self.compared["the replay plan"] += 1
        return output

    # --- FULL ------------------------------------------------------------------------------------

    def _recorded_with_probes(self, inputs: Sequence[Any], key: BatchDescriptor | None) -> Any:
        probes = self.probes[key] = []

        def run_piece(piece: Piece, given: Sequence[Any]) -> Sequence[Any]:
            outputs = self.backends[piece.name](*given)
            probes.append((piece.name, "", [t.clone() for _, t in tensor_leaves(tuple(outputs))]))
            return outputs

        def run_call(piece: Piece, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            made = called(target, args, kwargs)
            seen = [*written_by(target, args, kwargs), *(t for _, t in tensor_leaves(made))]
            probes.append((piece.name, named(target), [t.clone() for t in seen]))
            return made

        return walk(self.split, inputs, run_piece, run_call)

    def full_step(
        self,
        replay: Callable[..., Any],
        key: BatchDescriptor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        metadata: Any,
    ) -> Any:
        """Replays a FULL step and compares it, piece by piece, with the eager one."""
        probes = self.probes.get(key)
        if probes is None:
            return replay(*args, **kwargs)
        state = [tensor for _, tensor in tensor_leaves((args, kwargs, metadata))]
        before = Kept(state)
        output = replay(*args, **kwargs)
        after = Kept(state)
        before.restore()
        try:
            self.compiled.bind(lambda *inputs: _Full(self, key, probes).run(inputs))(*args, **kwargs)
            for tensor, value in zip(after.tensors, after.values):
                if apart := first_apart(tensor, value, path="a tensor of the metadata or of the arguments"):
                    raise WrongReplayError(f"after the FULL step of {tuple(key)}: {apart}", "recorded")
        finally:
            after.restore()
        return output


def _is_recording() -> bool:
    if recording.active.recorder is not None:
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class _Piecewise:
    """One PIECEWISE step."""

    def __init__(self, steps: DebugSteps, key: BatchDescriptor | None) -> None:
        self.steps, self.key, self.captured = steps, key, steps.captured
        self.wrappers = dict(zip(steps.backends, steps.captured.pieces))
        self.made: dict[str, tuple[torch.Tensor, torch.Tensor, str]] = {}  # value, its bits, who made it

    def run(self, inputs: Sequence[Any]) -> Any:
        for name, value in zip(self.steps.split.inputs, inputs):
            if isinstance(value, torch.Tensor) and name not in self.steps.weights:
                self.note(name, value, "the call")
        return walk(self.steps.split, inputs, self.piece, self.call)

    def note(self, name: str, value: Any, by: str) -> None:
        if isinstance(value, torch.Tensor):
            self.made[name] = (value, value.detach().clone(), by)

    def piece(self, piece: Piece, given: Sequence[Any]) -> Sequence[Any]:
        steps, backend = self.steps, self.steps.backends[piece.name]
        held = {id(v) for n, v in zip(piece.input_names, given) if n in steps.weights}
        keep = lambda tensor: id(tensor) in held  # noqa: E731
        before = copied(tuple(given), keep)
        stateful = self.state_of(piece)
        expected = run_on_copies(piece.graph_module, given, keep)
        stateful.restore()
        outputs = self.wrappers[piece.name].call(*given)
        where = f"replaying {piece.name} at {tuple(self.key or ())}"
        if expected.random:
            steps.not_compared[piece.name] = "it draws random numbers"
        else:
            apart = runs_apart(expected, outputs, given, piece.graph_module, before)
            if apart is not None:
                found = judge(steps.compiled, backend, before, expected, apart, self.captured.platform)
                raise found.error(where)
            steps.compared[piece.name] += 1
        written = [now for now, was in zip(given, before) if _changed(now, was)]
        self.check_alive(piece, written, where)
        for name, value in zip(piece.output_names, outputs):
            self.note(name, value, piece.name)
        return outputs

    def state_of(self, piece: Piece) -> Kept:
        """What operators of a piece may write beside its inputs: the metadata's tensors."""
        context = forward_context.current_forward_context()
        own = any(
            registered_op_of(node.target) for node in piece.graph_module.graph.nodes if callable(node.target)
        )
        leaves = tensor_leaves(context.attn_metadata) if own and context is not None else ()
        return Kept(tensor for _, tensor in leaves)

    def call(self, piece: Piece, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = called(target, args, kwargs)
        where = f"after {named(target)} in {piece.name}"
        self.check_alive(piece, written_by(target, args, kwargs), where, named(target))
        return made

    def check_alive(
        self, piece: Piece, written: Sequence[torch.Tensor], where: str, by_operator: str = ""
    ) -> None:
        """Every value that is still to be read is as it was made, but for what was written on purpose."""
        last, returned = self.steps.last_use, self.steps.split.outputs
        for name, (value, bits, by) in list(self.made.items()):
            alive = last.get(name, -1) > piece.index or _names(returned, name)
            if not alive:
                del self.made[name]
            elif any(share_memory(value, each) for each in written):
                self.note(name, value, piece.name)
            elif not same_bits(value, bits):
                raise DamagedBufferError(
                    f"{where}: {name!r}, which {by} made and which is still to be read, is no longer what it was: "
                    f"{piece.name} writes memory that it does not say it writes (an undeclared in-place operator: name "
                    "the argument in mutates_args), or two recordings share memory that both need",
                    "replayed",
                    piece.name,
                    by_operator,
                )


class _Full:
    """The eager run of a FULL step, fed with what the replay gave."""

    def __init__(
        self, steps: DebugSteps, key: BatchDescriptor, probes: Sequence[tuple[str, str, list[torch.Tensor]]]
    ) -> None:
        self.steps, self.key, self.probes = steps, key, iter(probes)

    def run(self, inputs: Sequence[Any]) -> Any:
        with undisturbed(inputs):
            return walk(self.steps.split, inputs, self.piece, self.call)

    def next_probe(self, name: str, operator: str) -> list[torch.Tensor]:
        found = next(self.probes, None)
        if found is None or found[:2] != (name, operator):
            raise AssertionError(f"the eager step is at {name} {operator} and the recording at {found}")
        return found[2]

    def piece(self, piece: Piece, given: Sequence[Any]) -> Sequence[Any]:
        steps, backend = self.steps, self.steps.backends[piece.name]
        probe = self.next_probe(piece.name, "")
        held = {id(v) for n, v in zip(piece.input_names, given) if n in steps.weights}
        before = copied(tuple(given), lambda tensor: id(tensor) in held)
        expected = run_on_copies(piece.graph_module, given, lambda tensor: id(tensor) in held)
        with torch.no_grad():
            outputs = tuple(piece.graph_module(*given))
        leaves = [tensor for _, tensor in tensor_leaves(outputs)]
        if expected.random:
            steps.not_compared[piece.name] = "it draws random numbers"
        else:
            got = iter(probe)
            rebuilt = tuple(next(got) if isinstance(value, torch.Tensor) else value for value in outputs)
            apart = runs_apart(expected, rebuilt, expected.given, piece.graph_module, before)
            if apart is not None:
                found = judge(steps.compiled, backend, before, expected, apart, steps.captured.platform)
                raise found.error(f"replaying the FULL graph at {tuple(self.key)}")
            steps.compared[piece.name] += 1
        for tensor, value in zip(leaves, probe):
            write(tensor, value)
        return outputs

    def call(self, piece: Piece, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        probe = self.next_probe(piece.name, named(target))
        made = called(target, args, kwargs)
        seen = [*written_by(target, args, kwargs), *(t for _, t in tensor_leaves(made))]
        apart = first_apart(seen, probe, path=named(target))
        if apart is not None:
            raise WrongReplayError(
                f"replaying the FULL graph at {tuple(self.key)}: in {piece.name} the operator {named(target)} gives "
                f"something else than run now ({apart}). It is recorded with the rest, and what its Python code "
                "decided then (numbers, branches, which tensors) stays: leave it between the pieces (splitting_ops, "
                "PIECEWISE), or let it read everything on the device",
                "recorded",
                piece.name,
                named(target),
            )
        self.steps.compared[named(target)] += 1
        for tensor, value in zip(seen, probe):
            write(tensor, value)
        return made


def called(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the stitching code does: calls ``target`` (a string: the method of the first argument)."""
    if isinstance(target, str):
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)


def written_by(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call says it writes in place."""
    if isinstance(target, OpOverload):
        values = [bound_argument(target, name, args, kwargs) for name in mutated_arguments(target)]
    elif isinstance(target, str) and target.endswith("_") and not target.endswith("__"):
        values = [args[0]]
    elif "out" in kwargs:
        values = [kwargs["out"]]
    elif getattr(target, "__name__", "") in ("setitem", "iadd", "imul", "isub", "itruediv"):
        values = [args[0]]
    else:
        values = []
    return [tensor for _, tensor in tensor_leaves(values)]


def named(target: Any) -> str:
    """What to call a target in a message."""
    if isinstance(target, str):
        return f"Tensor.{target}"
    found = operator_of(target)
    return found[0] if found else getattr(target, "__name__", str(target))


def _changed(now: Any, was: Any) -> bool:
    return isinstance(now, torch.Tensor) and now is not was and not same_bits(now, was)


def _names(returned: Any, name: str) -> bool:
    return returned == name or (
        isinstance(returned, (tuple, list)) and any(_names(each, name) for each in returned)
    )
