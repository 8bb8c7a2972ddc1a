"""One watched run of the model: what of it reads values on the host, draws random numbers, or cannot be recorded.

A model with a trace runs node by node: each node of a recorded piece is first *recorded* by the emulated
platform, whose rules are those of a stream that is capturing, and then run for real, so that a node that cannot
be recorded does not hide the next one. A model without a trace runs as it is, under a watch that lets everything
pass and writes down what a capture would refuse.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from cgkit import forward_context, torch_hooks
from cgkit.capturing.debugging.eager import as_written
from cgkit.capturing.emulated import EmulatedGraph, EmulatedPlatform
from cgkit.config import CUDAGraphMode
from cgkit.errors import CaptureError, HostReadError
from cgkit.forward_context import ForwardContext, current_forward_context
from cgkit.measuring.doctor.findings import at, at_message, stack_of
from cgkit.measuring.doctor.patient import Patient
from cgkit.numerics import random_states
from cgkit.splitting.matching import operator_name
from cgkit.splitting.values import fake_value
from cgkit.tensor_trees import tensor_leaves
from cgkit.torch_hooks import TorchDispatchMode
from cgkit.tracing.frames import TORCH_FOLDER, Frame, frames_in, user_line

_HERE = os.path.dirname(__file__) + os.sep
_CALLS = ("call_function", "call_method", "call_module")
_READS = {
    torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.item, torch.Tensor.__array__,
    torch.Tensor.__repr__, torch.Tensor.__format__, torch.Tensor.__dlpack__,
}  # fmt: skip


@dataclass(frozen=True)
class Sight:
    """Something that was seen: the operator or method, the user's line, the error that recording raises, and how
    the line was reached (from the outermost)."""

    operator: str
    frame: Frame | None
    error: str = ""
    frames: tuple[Frame, ...] = ()

    def where(self) -> dict[str, Any]:
        """The fields of a finding that say where: ``file``, ``line``, ``source``, ``stack``."""
        way = (*self.frames, self.frame) if self.frame else self.frames
        return {**at(self.frame), "stack": stack_of(way)}


@dataclass
class Observation:
    """What a watched run showed. ``refused``: why there was none, or it ended early."""

    host_reads: list[Sight] = field(default_factory=list)
    forbidden: list[Sight] = field(default_factory=list)
    random: list[Sight] = field(default_factory=list)
    own_generators: list[Sight] = field(default_factory=list)
    outside: list[tuple[Sight, torch.Tensor]] = field(default_factory=list)
    context_reads: list[Sight] = field(default_factory=list)
    refused: str = ""


def observe(patient: Patient) -> Observation:
    """The watched run of this patient, made once."""
    if "observation" not in patient.notes:
        seen = patient.notes["observation"] = Observation()
        with contextlib.redirect_stdout(io.StringIO()), patient.unharmed():
            try:
                (_run_model if patient.traced is None else _run_nodes)(patient, seen)
            except Exception as error:  # the model's own
                seen.refused = f"the model fails on the example: {type(error).__name__}: {error}"
    return patient.notes["observation"]


def _run_model(patient: Patient, seen: Observation) -> None:
    args, kwargs = patient.copies()
    watch = _Watch(seen)
    with as_written(), watch.reads, watch:
        patient.model(*args, **kwargs)


def _run_nodes(patient: Patient, seen: Observation) -> None:
    split = patient.split
    assert split is not None
    inputs = graph_inputs(patient)
    records = patient.device.type == "cpu" and bool(patient.config.mode)
    if not records:
        seen.refused = (
            "nothing is to be recorded (cudagraph_mode is NONE)"
            if not patient.config.mode
            else f"the emulated platform records CPU tensors, and the model is on {patient.device}: of what a capture "
            "forbids, only reads on the host were looked for; move it to the CPU for the rest"
        )
    _NodeByNode(patient, seen, records).run(*inputs)


class _Collected(Exception):  # noqa: N818 - no error: the inputs are there
    pass


def graph_inputs(patient: Patient, call: Any = None) -> list[Any]:
    """What the graph gets in a call (None: copies of the example): the model's own weights, and the arguments."""
    found: list[Any] = []

    def collect(*inputs: Any) -> Any:
        found.extend(inputs)
        raise _Collected

    args, kwargs = patient.copies() if call is None else call
    assert patient.traced is not None
    with contextlib.suppress(_Collected):
        patient.traced.bind(collect)(*args, **kwargs)
    return found


class _NodeByNode(fx.Interpreter):
    """Records each node of the pieces that are to be recorded, and runs it for real.

    ``records``: the emulated platform can do it. Where it cannot (tensors on a GPU), what reads values on the host is
    still written down.
    """

    def __init__(self, patient: Patient, seen: Observation, records: bool) -> None:
        split = patient.split
        assert split is not None
        super().__init__(split.graph_module)
        self.assignment, self.seen, self.records = split.assignment, seen, records
        self.recording = bool(patient.config.mode)
        self.everything = patient.config.mode.has_mode(CUDAGraphMode.FULL)
        self.platform = EmulatedPlatform()
        self.watch = _Watch(seen)
        self.unforeseen = False

    def run_node(self, n: fx.Node) -> Any:
        if n.op not in _CALLS:
            return super().run_node(n)
        recorded = self.recording and self._is_recorded(n) and not _sets_a_mode(n)
        if recorded and self.records:
            self._record(n)
        self.watch.node, self.watch.only_random = n, self.records or not recorded
        with self.watch:
            made = super().run_node(n)
        if recorded and not self.unforeseen and _unforeseen(fake_value(n), made):
            self.unforeseen = True  # what follows is computed from it
            error = f"its fake implementation says {_listed(fake_value(n))}, and it gives {_listed(made)}"
            frames = tuple(frames_in(n.stack_trace or ""))
            self.seen.forbidden.append(Sight(called(n), user_line(n), error, frames))
        return made

    def _is_recorded(self, n: fx.Node) -> bool:
        piece = self.assignment.piece_of.get(n)
        return self.everything or (piece is not None and not self.assignment.is_splitting[piece])

    def _record(self, n: fx.Node) -> None:
        pool = self.platform.new_pool()
        try:
            with _noting_context() as reads:
                graph, _ = self.platform.record(lambda: super(_NodeByNode, self).run_node(n), pool)
            self._note_outside(n, graph)
            if reads and not self.assignment.is_splitting[self.assignment.piece_of[n]]:
                sight = Sight(called(n), user_line(n), frames=tuple(frames_in(n.stack_trace or "")))
                self.seen.context_reads.append(sight)
        except CaptureError as error:
            place = at_message(str(error))
            inside = (
                bool(place)
                and not place["file"].startswith(_HERE)
                and not place["file"].startswith(TORCH_FOLDER)
            )
            frame = (place["file"], place["line"], place["source"]) if inside else user_line(n)
            kind = self.seen.host_reads if isinstance(error, HostReadError) else self.seen.forbidden
            sight = Sight(called(n), frame, str(error), tuple(frames_in(n.stack_trace or "")))
            if sight not in kind:
                kind.append(sight)
        finally:
            self.platform.free(pool)

    def _note_outside(self, n: fx.Node, graph: EmulatedGraph) -> None:
        """Tensors that the operator fetched by itself: they are not among what the node is given."""
        given = {
            _storage(value) for _, value in tensor_leaves([self.env[each] for each in n.all_input_nodes])
        }
        for name, tensor in graph.outside():
            if _storage(tensor) not in given and tensor.dim():
                sight = Sight(
                    f"{called(n)} ({name})", user_line(n), frames=tuple(frames_in(n.stack_trace or ""))
                )
                if all(_storage(tensor) != _storage(other) for _, other in self.seen.outside):
                    self.seen.outside.append((sight, tensor))


def _unforeseen(foreseen: Any, made: Any) -> bool:
    """Whether a node gave another type, or another shape as far as that does not change, than its fake run."""
    wanted, found = ([tensor for _, tensor in tensor_leaves(value)] for value in (foreseen, made))
    if not wanted:
        return False
    return len(wanted) != len(found) or any(
        one.dtype != other.dtype
        or one.dim() != other.dim()
        or any(type(size) is int and size != now for size, now in zip(one.shape, other.shape))
        for one, other in zip(wanted, found)
    )


def _listed(made: Any) -> str:
    kinds = [f"{tensor.dtype}{list(tensor.shape)}" for _, tensor in tensor_leaves(made)]
    return ", ".join(kinds) or "no tensor"


def called(n: fx.Node) -> str:
    """What a node calls, in words that are the same in every process: no address of a function is in them."""
    if isinstance(n.target, (str, torch_hooks.OpOverload, torch_hooks.OpOverloadPacket)):
        return str(n.target)
    name = operator_name(n)
    return n.name if "<locals>" in name else name


def _sets_a_mode(n: fx.Node) -> bool:
    """Whether a node only enters or leaves a mode (autocast, gradients). It is no work of the GPU, and recording it and
    running it for real would enter the mode twice."""
    if n.op != "call_function" or isinstance(
        n.target, (torch_hooks.OpOverload, torch_hooks.OpOverloadPacket)
    ):
        return False
    handled = [*map(fake_value, n.all_input_nodes), fake_value(n)]
    return next(iter(tensor_leaves(handled)), None) is None


class _NotedContext(ForwardContext):
    """Notes that somebody asks what the step is."""

    reads: list[str]

    def __getattribute__(self, name: str) -> Any:
        if name in ("attn_metadata", "batch_descriptor"):
            object.__getattribute__(self, "reads").append(name)
        return super().__getattribute__(name)


@contextmanager
def _noting_context() -> Iterator[list[str]]:
    """Yields the names that are read of the forward context in the block."""
    before = current_forward_context()
    outer = before or ForwardContext()
    noted = _NotedContext(outer.attn_metadata, outer.cudagraph_runtime_mode, outer.batch_descriptor)
    noted.reads = []
    forward_context._current.context = noted
    try:
        yield noted.reads
    finally:
        forward_context._current.context = before


def _storage(tensor: torch.Tensor) -> int:
    return torch_hooks.unwrapped(tensor).untyped_storage().data_ptr()


class _Reads(TorchFunctionMode):
    """Writes down where Python reads a tensor past the dispatcher."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _READS:
            return func(*args, **(kwargs or {}))
        self.watch.note(self.watch.seen.host_reads, f"Tensor.{func.__name__}()")
        with self.watch.looking_away():
            return func(*args, **(kwargs or {}))


class _Watch(TorchDispatchMode):
    """Writes down the operators that read values on the host or draw random numbers; lets them all pass."""

    supports_higher_order_operators = True

    def __init__(self, seen: Observation) -> None:
        super().__init__()
        self.seen, self.only_random = seen, False
        self.node: fx.Node | None = None  # that is being run, where there is a graph
        self.away = False
        self.reads = _Reads(self)

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        before, self.away = self.away, True
        try:
            yield
        finally:
            self.away = before

    def note(self, kept: list[Sight], operator: str) -> None:
        if self.away:
            return
        if self.node is not None:
            frame, frames = user_line(self.node), frames_in(self.node.stack_trace or "")
        else:
            frames = calling_lines()
            frame = frames[-1] if frames else None
        sight = Sight(operator, frame, frames=tuple(frames))
        if all(other.frame != sight.frame for other in kept):
            kept.append(sight)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch_hooks.is_random(func):  # or may be: an attention draws only with a dropout
            return self._maybe_random(func, args, kwargs)
        if not self.only_random and torch_hooks.reads_values(func, args):
            self.note(self.seen.host_reads, str(func))
        return func(*args, **kwargs)

    def _maybe_random(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs.get("generator") is not None:
            self.note(self.seen.own_generators, str(func))
            return func(*args, **kwargs)
        before = random_states()
        result = func(*args, **kwargs)
        if any(not torch.equal(a, b) for a, b in zip(before, random_states())):
            self.note(self.seen.random, str(func))
        return result


def calling_lines() -> list[Frame]:
    """The lines of Python that led here, from the outermost: not torch's, not this folder's, not its caller's."""
    found: list[Frame] = []
    frame = sys._getframe(1)
    inside = False
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_HERE):
            if inside:
                break  # from here on it is doctor's caller
        elif not file.startswith((TORCH_FOLDER, "<frozen", "<eval_with_key>")) and not _is_hook(file):
            inside = True
            found.append((file, frame.f_lineno, ""))
        frame = frame.f_back  # type: ignore[assignment]
    return found[::-1]


def _is_hook(file: str) -> bool:
    return file.startswith(os.path.dirname(torch_hooks.__file__) + os.sep)
