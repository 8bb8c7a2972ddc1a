"""What forward writes and keeps: buffers, attributes that hold tensors, Python values."""

from __future__ import annotations

from collections.abc import Iterator

from cgkit.errors import TraceError
from cgkit.measuring.doctor.findings import Finding
from cgkit.measuring.doctor.patient import Patient, cannot
from cgkit.measuring.doctor.registry import NotCheckedError, check
from cgkit.tracing.buffer_writes import find_buffer_writes

_FIX = "return the value instead; or write it through an operator that declares what it mutates (cgkit.register_op)"


@check("buffer-write", "frozen-number")
def written(patient: Patient) -> Iterator[Finding]:
    """Every write of something that the model keeps."""
    if patient.traced is None:
        raise NotCheckedError("there is no graph to look for writes in")
    try:
        writes = find_buffer_writes(patient.traced)
    except TraceError as error:
        raise NotCheckedError(cannot(error)) from error
    for write in writes:
        where = {"file": write.file, "line": write.line, "source": write.source}
        if write.holds_tensor:
            yield Finding(
                "buffer-write",
                "error" if patient.config.mode else "warning",
                f"forward writes {write.name} ({write.how}): Python does not run at a replay, and warm-ups "
                "write as well",
                _FIX,
                again="cgkit.trace(model, *example_inputs, check_buffer_writes=True)",
                **where,  # type: ignore[arg-type]
            )
        else:
            yield Finding(
                "frozen-number",
                "warning",
                f"forward changes the Python value {write.name} ({write.how}): the graph holds what it was at the "
                "trace, and a replay runs no Python",
                "keep it in a tensor, count outside of forward, or pass it in as a tensor",
                again="cgkit.trace(model, *example_inputs).side_effects",
                **where,  # type: ignore[arg-type]
            )
