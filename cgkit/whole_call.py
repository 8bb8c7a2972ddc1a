"""``debug=True`` around a whole call of a decorated model: the same call of its own ``forward`` beside it.

The checks around pieces and replays (``capturing/debugging``) judge each by what it was given. What they cannot see is
what the trace left out and what padding brought in: a branch on a batch of one leaves no guard, a mean over the tokens
has the padded rows in it, Python counters stand still, arguments that share memory were traced as if they did not. Here
the result is compared with what the user wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from cgkit import forward_context
from cgkit.capturing import CapturedGraphs
from cgkit.capturing.debugging.copies import Kept, copied, overlap
from cgkit.capturing.debugging.eager import in_float64, run_on_copies
from cgkit.compiling import CompiledGraph
from cgkit.errors import WrongResultError
from cgkit.numerics import first_apart, tensors_apart
from cgkit.tensor_trees import tensor_leaves
from cgkit.tracing import TracedGraph
from cgkit.tracing.buffer_writes import find_buffer_writes, written_arguments


class CompiledModel(Protocol):
    """What is needed here of :class:`cgkit.pipeline.CompiledModel`."""

    traced: TracedGraph | None
    compiled: CompiledGraph | None
    captured: CapturedGraphs | None

    @property
    def model(self) -> nn.Module:
        """The decorated instance."""
        ...


def beside_forward(state: CompiledModel, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` with the model's own forward run before it, on copies, and the results compared.

    Buffers, attributes, metadata and the random state are after that run as they were before it. Where forward draws
    random numbers nothing is compared.

    Raises (when called):
        WrongResultError: the result is another one, or forward refuses the call; the message has the cause.
        Whatever ``call`` raises.
    """

    def checked(*args: Any, **kwargs: Any) -> Any:
        given = (args, kwargs)
        before = copied(given)
        expected, error = _eager(state.model, given)
        result = call(*args, **kwargs)
        if error is not None:
            raise WrongResultError(
                f"{_name(state)} answers a call that its own forward refuses ({type(error).__name__}: {error}): that "
                "line is not in the graph. Make the check outside of forward, before the call"
            ) from error
        assert expected is not None
        if expected.random:
            return result
        apart = first_apart(
            {"output": expected.outputs, "arguments": expected.given},
            {"output": result, "arguments": given},
            lambda: {"output": _reference(state, before, expected.outputs), "arguments": expected.given},
            "",
            unwritten=expected.unwritten,
        )
        if apart is not None:
            raise WrongResultError(
                f"{_name(state)} gives something else than its own forward ({apart}). {_cause(state, before, expected)}"
            )
        return result

    return checked


def _name(state: CompiledModel) -> str:
    return type(state.model).__name__


def _eager(model: nn.Module, given: Any) -> tuple[Any, Exception | None]:
    forward = type(model).forward
    with _left_as_it_was(model):
        try:
            return run_on_copies(lambda args, kwargs: forward(model, *args, **kwargs), given), None
        except Exception as error:  # the model's own
            return None, error


@contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Buffers, the metadata's tensors and the modules' attributes (lists and dicts one level deep) are put back."""
    context = forward_context.current_forward_context()
    metadata = context.attn_metadata if context is not None else None
    values = [vars(module) for module in model.modules()]
    attributes = [dict(each) for each in values]
    inner = [value for each in values for value in each.values() if type(value) in (list, dict)]
    contents = [value.copy() for value in inner]
    held = [tensor for each in values for _, tensor in tensor_leaves(list(each.values()))]
    kept = Kept([*(tensor for _, tensor in tensor_leaves(metadata)), *model.buffers(), *held])
    try:
        yield
    finally:
        for each, old in zip(values, attributes):
            each.clear()
            each.update(old)
        for now, was in zip(inner, contents):
            now.clear()
            now.extend(was) if isinstance(now, list) else now.update(was)
        kept.restore()


def _reference(state: CompiledModel, before: Any, expected: Any) -> Any:
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


def _cause(state: CompiledModel, before: Any, expected: Any) -> str:
    """Why, in a sentence or two: the first reason that holds."""
    traced = state.traced
    tensors = [tensor for _, tensor in tensor_leaves(before)]
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


def _differs(state: CompiledModel, run: Callable[..., Any], before: Any, expected: Any) -> bool:
    """Whether the trace, or the compiled pieces, give something else too; True where they raise."""
    args, kwargs = copied(before)
    try:
        with _left_as_it_was(state.model), torch.no_grad():
            got = run(*args, **kwargs)
    except Exception:
        return True
    return first_apart(expected.outputs, got, lambda: _reference(state, before, expected.outputs)) is not None
