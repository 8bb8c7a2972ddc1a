"""``debug=True`` around a whole call of a model: the same call of its own ``forward`` beside it.

The checks around pieces and replays (``capturing/debugging``) judge each by what it was given. What they cannot see is
what the trace left out and what padding brought in: a branch on a batch of one leaves no guard, a mean over the tokens
has the padded rows in it, Python counters stand still, arguments that share memory were traced as if they did not. Here
the result is compared with what the user wrote.

Every way in is covered: a decorated model's call, a :class:`~cgkit.CapturedGraphs` that was made by hand
(:class:`CheckedGraphs`), a runner's step. Not covered is what records nothing and has no road behind it: a
``CompiledGraph`` called by hand runs as it is, and :func:`cgkit.bisect` looks into it.

Where forward draws random numbers, no two runs agree, compiled ones least of all. So there the trace is run in place of
the pieces, through the same padding and copying, and in it and in forward all that is drawn is one and the same number:
what the trace left out and what padding brought in still shows. What compiling and recording made of the random pieces
does not.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from cgkit import forward_context, torch_hooks
from cgkit.capturing.captured import CapturedGraphs
from cgkit.capturing.debugging.copies import Kept, attributes_put_back, copied, overlap
from cgkit.capturing.debugging.eager import PinnedRandom, in_float64, run_on_copies
from cgkit.compiling import CompiledGraph
from cgkit.errors import CgkitError, WrongResultError
from cgkit.numerics import Apart, first_apart, tensors_apart
from cgkit.tensor_trees import tensor_leaves
from cgkit.tracing import TracedGraph
from cgkit.tracing.buffer_writes import find_buffer_writes, written_arguments
from cgkit.tracing.own_code import own_forward


class Whole(Protocol):
    """What is needed here of a decorated model's :class:`cgkit.pipeline.CompiledModel`, and of others' parts."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def traced(self) -> TracedGraph | None: ...
    @property
    def compiled(self) -> CompiledGraph | None: ...
    @property
    def captured(self) -> CapturedGraphs | None: ...


@dataclass(frozen=True)
class Parts:
    """A model and what the stages made of it. ``captured``: the graphs that a call goes through, with its copies and
    padding; None where the caller pads (a runner) or nothing is recorded."""

    model: nn.Module
    compiled: CompiledGraph
    captured: CapturedGraphs | None = None

    @property
    def traced(self) -> TracedGraph | None:
        """The trace."""
        return self.compiled.split.traced


class CheckedGraphs(CapturedGraphs):
    """Recorded graphs under ``debug=True``: each call beside the model's own forward, if the trace knows its model."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As :class:`CapturedGraphs`, and what :func:`beside_forward` raises."""
        return self._beside(*args, **kwargs)

    def unchecked(self, *args: Any, **kwargs: Any) -> Any:
        """The call alone."""
        return CapturedGraphs.__call__(self, *args, **kwargs)

    @functools.cached_property
    def _beside(self) -> Callable[..., Any]:
        traced = self.compiled.split.traced
        model = traced.wrapper.owner if traced is not None and traced.wrapper is not None else None
        if not isinstance(model, nn.Module):
            return self.unchecked
        ref: weakref.ref[CapturedGraphs] = weakref.ref(
            self
        )  # a cycle would keep the graphs until the next collection

        def call(*args: Any, **kwargs: Any) -> Any:
            return CapturedGraphs.__call__(ref(), *args, **kwargs)  # type: ignore[arg-type]

        return beside_forward(_PartsOf(ref, model), call)


@dataclass(frozen=True)
class _PartsOf:
    """The parts of graphs that are held weakly."""

    ref: weakref.ref[CapturedGraphs]
    model: nn.Module

    @property
    def captured(self) -> CapturedGraphs | None:
        return self.ref()

    @property
    def compiled(self) -> CompiledGraph | None:
        captured = self.ref()
        return None if captured is None else captured.compiled

    @property
    def traced(self) -> TracedGraph | None:
        compiled = self.compiled
        return None if compiled is None else compiled.split.traced


def beside_forward(state: Whole, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` with the model's own forward run before it, on copies, and the results compared.

    Buffers, attributes, metadata and the random state are after that run as they were before it; and if the call is
    refused, they are so after both.

    Raises (when called):
        WrongResultError: the result is another one, or one of the two refuses the call; the message has the cause.
        Whatever ``call`` raises of cgkit's; what forward raises where both do.
    """

    @torch_hooks.modes_put_back()
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = (args, kwargs)
        before = copied(given)
        expected, error = _eager(state.model, given)
        kept = Kept(_state_tensors(state.model))
        try:
            result = _called(state, call, given, before, error)
            assert expected is not None
            apart = (
                _apart_without_chance(state, before)
                if expected.random
                else _apart(state, before, expected, result, given)
            )
        except BaseException:
            kept.restore()
            raise
        if apart is not None:
            kept.restore()  # before the cause is looked for: it runs the same call again
            raise WrongResultError(
                f"{_name(state)} gives something else than its own forward ({apart}). "
                f"{_cause(state, before, expected, apart)}"
            )
        return result

    return checked


def _called(state: Whole, call: Callable[..., Any], given: Any, before: Any, error: Exception | None) -> Any:
    """The result of the call; forward raised ``error`` or None."""
    try:
        result = call(*given[0], **given[1])
    except CgkitError:
        raise
    except Exception as failed:
        if error is not None:
            raise error from failed
        raise WrongResultError(
            f"{_name(state)} fails where its own forward does not ({type(failed).__name__}: "
            f"{' '.join(str(failed).split())}): the trace or the compiled pieces hold something that is not so for "
            "this call (a size, a count that depends on values). cgkit.bisect names the stage, cgkit.doctor the line"
        ) from failed
    if error is not None:
        raise WrongResultError(
            f"{_name(state)} answers a call that its own forward refuses ({type(error).__name__}: {error}): that "
            "line is not in the graph. Make the check outside of forward, before the call"
        ) from error
    return result


def _apart(state: Whole, before: Any, expected: Any, result: Any, given: Any) -> Apart | None:
    return first_apart(
        {"output": expected.outputs, "arguments": expected.given},
        {"output": result, "arguments": given},
        lambda: {"output": _reference(state, before, expected.outputs), "arguments": expected.given},
        "",
        unwritten=expected.unwritten,
    )


def _apart_without_chance(state: Whole, before: Any) -> Apart | None:
    """How the trace, run as the pieces would be, differs from forward where all that is drawn is one number."""
    expected, error = _eager(state.model, before, pinned=True)
    traced = state.traced
    if error is not None or traced is None:
        return None
    args, kwargs = copied(before)
    run = traced.bind(traced.graph_module)
    captured = state.captured
    with _left_as_it_was(state.model), torch.no_grad(), PinnedRandom():
        if captured is None or captured.inputs is None:
            got = run(*args, **kwargs)
        else:
            usual, captured.run = captured.run, run
            try:
                got = CapturedGraphs.__call__(captured, *args, **kwargs)
            finally:
                captured.run = usual
    return first_apart(
        {"output": expected.outputs, "arguments": expected.given},
        {"output": got, "arguments": (args, kwargs)},
        path="",
        unwritten=expected.unwritten,
    )


def _name(state: Whole) -> str:
    return type(state.model).__name__


def _eager(model: nn.Module, given: Any, pinned: bool = False) -> tuple[Any, Exception | None]:
    forward = own_forward(model)
    with _left_as_it_was(model), PinnedRandom() if pinned else nullcontext():
        try:
            return run_on_copies(lambda args, kwargs: forward(*args, **kwargs), given), None
        except Exception as error:  # the model's own
            return None, error


def _state_tensors(model: nn.Module) -> list[torch.Tensor]:
    context = forward_context.current_forward_context()
    metadata = context.attn_metadata if context is not None else None
    return [*(tensor for _, tensor in tensor_leaves(metadata)), *model.buffers()]


@contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Buffers, the metadata's tensors and the modules' attributes are put back."""
    held = [tensor for module in model.modules() for _, tensor in tensor_leaves(list(vars(module).values()))]
    kept = Kept([*_state_tensors(model), *held])
    try:
        with attributes_put_back(model):
            yield
    finally:
        kept.restore()


def _reference(state: Whole, before: Any, expected: Any) -> Any:
    """The trace's result in float64. Raises where there is none, or where the trace computes something else."""
    traced = state.traced
    assert traced is not None
    args, kwargs = copied(before)
    with _left_as_it_was(state.model):
        found = traced.bind(lambda *inputs: in_float64(traced.graph_module, inputs)[0])(*args, **kwargs)
    for (_, ours), (_, wide) in zip(tensor_leaves(expected), tensor_leaves(found), strict=True):
        if tensors_apart(ours, wide.to(ours.dtype), None) is not None:
            raise ValueError("the trace is no yardstick for the model: it computes something else")
    return found


def _cause(state: Whole, before: Any, expected: Any, apart: Apart) -> str:
    """Why, in a sentence or two: the first reason that holds."""
    traced = state.traced
    tensors = [tensor for _, tensor in tensor_leaves(before)]
    again, _ = _eager(state.model, before)
    if (
        again is None
        or first_apart(expected.outputs, again.outputs, unwritten=expected.unwritten) is not None
    ):
        return (
            "Two runs of forward itself on these arguments differ: something in it counts, or reads what is kept "
            "outside of the model (a global, an operator's own state, memory that nobody wrote). A replay repeats one "
            "run: pass it in as a tensor"
        )
    if apart.path.startswith("['arguments']") and (traced is None or not written_arguments(traced)):
        return (
            "forward changes an argument by an operator that does not say so, and the change stays in the buffer that "
            "the argument was copied into. Declare what the operator writes (mutates_args)"
        )
    if traced is not None and written_arguments(traced) and overlap(tensors):
        return (
            "Arguments of this call share memory, and forward writes one of them: the graph was traced for arguments "
            "that do not. Pass copies (x.clone()), or do not write arguments in place"
        )
    changed = [write for write in find_buffer_writes(traced) if not write.holds_tensor] if traced else []
    if changed:
        first = changed[0]
        return (
            f"forward changes the Python value {first.name} ({first.file}:{first.line}): the graph holds what it was "
            "when it was traced. Keep it in a tensor, or pass it in"
        )
    compiled = state.compiled.bind() if state.compiled is not None else None
    if (
        state.captured is not None
        and compiled is not None
        and not _differs(state, compiled, before, expected)
    ):
        return (
            "Compiled without a graph the same call is right: the rows that it is padded with are in the result (a sum "
            "or a mean over the tokens, an output without the token dimension), or the recording is stale. Mask them, "
            "or record this very size"
        )
    if traced is not None and _differs(state, traced, before, expected):
        sizes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        return (
            f"The trace itself computes something else for arguments of the sizes {sizes}: a branch of forward on a "
            "size (0 and 1 leave no guard), or on a value that has changed since. cgkit.doctor(model, *this_call) "
            "has the line"
        )
    return "The trace is right, so the compiler or the recording is not: cgkit.bisect finds the piece"


def _differs(state: Whole, run: Callable[..., Any], before: Any, expected: Any) -> bool:
    """Whether the trace, or the compiled pieces, give something else too; True where they raise."""
    args, kwargs = copied(before)
    try:
        with _left_as_it_was(state.model), torch.no_grad():
            got = run(*args, **kwargs)
    except Exception:
        return True
    return first_apart(expected.outputs, got, lambda: _reference(state, before, expected.outputs)) is not None
