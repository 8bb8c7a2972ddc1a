"""The example recorded at its own size and replayed: do inputs stay where they are, is the result the same?"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from cgkit.capturing import capture
from cgkit.compiling import compile_pieces
from cgkit.errors import CgkitError, HostReadError, MovedInputError, TraceError
from cgkit.forward_context import current_forward_context
from cgkit.measuring.doctor.compare import difference
from cgkit.measuring.doctor.findings import Finding, at_message
from cgkit.measuring.doctor.observe import observe
from cgkit.measuring.doctor.patient import Patient, cannot, cannot_run
from cgkit.measuring.doctor.registry import NotCheckedError, check
from cgkit.tensor_trees import replace_tensors, tensor_leaves
from cgkit.tracing.buffer_writes import find_buffer_writes

_AGAIN = "cgkit.capture(cgkit.compile_pieces(cgkit.split_graph(traced)), [num_tokens])(*example_inputs)"


@check("moved-input", "replay-differs", "capture-forbidden", "host-sync")
def replayed(patient: Patient) -> Iterator[Finding]:
    """Records with the eager adaptor and replays twice, the second time with the rows turned around."""
    _needs(patient)
    try:
        differs = _replay_twice(patient)
    except MovedInputError as error:
        yield _failed(
            "moved-input", error, "write into a buffer that is kept (an out-parameter of the operator)"
        )
    except HostReadError as error:
        yield _failed("host-sync", error, "move the line to an eager piece (a splitting operator)")
    except CgkitError as error:
        yield _failed("capture-forbidden", error, "see the message")
    except Exception as error:  # the model's own
        raise NotCheckedError(cannot_run(error)) from error
    else:
        if differs:
            yield Finding(
                "replay-differs",
                "error",
                f"recorded and replayed, the model computes something else than eagerly ({differs})",
                "look at the other findings; then compare piece by piece",
                again=_AGAIN,
            )


def _needs(patient: Patient) -> None:
    traced, context = patient.traced, current_forward_context()
    if traced is None or not patient.is_dynamic:
        raise NotCheckedError("no trace with a dynamic dimension, so nothing to record")
    if not patient.num_tokens:
        raise NotCheckedError("the example has no tokens: give one that has")
    if len(set(patient.dynamic_sizes.values())) > 1:
        raise NotCheckedError("the example has more than one token count")
    if not patient.config.mode:
        raise NotCheckedError("nothing is to be recorded (cudagraph_mode is NONE)")
    if context is not None and context.attn_metadata is not None:
        raise NotCheckedError("a forward context with metadata is set: recording would write where it points")
    try:
        writes = [write for write in find_buffer_writes(traced) if write.holds_tensor]
    except TraceError as error:
        raise NotCheckedError(cannot(error)) from error
    seen = observe(patient)
    if writes or seen.host_reads or seen.forbidden or seen.own_generators:
        raise NotCheckedError("the model cannot be recorded as it is")


def _replay_twice(patient: Patient) -> str:
    """ "" or how a replay differs from the eager model."""
    assert patient.split is not None
    config = replace(patient.eager_config, cudagraph_copy_inputs=True)
    random = bool(observe(patient).random)
    with patient.unharmed(), contextlib.redirect_stdout(io.StringIO()):
        captured = capture(compile_pieces(patient.split, config))
        try:
            for make in (patient.copies, lambda: _turned(patient)):
                args, kwargs = make()
                got = captured(*args, **kwargs)
                args, kwargs = make()  # anew: the model may write its inputs
                expected = patient.model(*args, **kwargs)
                differs = "" if random else difference(expected, got)
                if differs:
                    args, kwargs = make()
                    if difference(expected, patient.model(*args, **kwargs)):
                        differs += "; two eager runs differ as well: something counts, or was never written"
                    return differs
        finally:
            captured.free()
    return ""


def _turned(patient: Patient) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example with the rows of each dynamic argument in the opposite order."""
    assert patient.traced is not None
    args, kwargs = patient.copies()
    bound = patient.signature.bind(*args, **kwargs)
    bound.apply_defaults()
    scope = {"__builtins__": {}, "L": bound.arguments}
    leaves = {id(tensor) for _, tensor in [*tensor_leaves(args), *tensor_leaves(kwargs)]}
    into: dict[int, torch.Tensor] = {}
    for entry in patient.traced.inputs:
        if entry.kind == "argument" and entry.dynamic_dims:
            tensor = eval(entry.source, scope)  # Dynamo's text
            if id(tensor) in leaves:
                into[id(tensor)] = tensor.flip(entry.dynamic_dims[0])
    return replace_tensors(args, into), replace_tensors(kwargs, into)


def _failed(code: str, error: CgkitError, fix: str) -> Finding:
    return Finding(code, "error", cannot(error), fix, again=_AGAIN, **at_message(str(error)))
