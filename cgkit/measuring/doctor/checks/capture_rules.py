"""What a stream that is capturing forbids: reading values on the host, other memory for a tensor, ..."""

from __future__ import annotations

from collections.abc import Iterator

from cgkit.measuring.doctor.findings import Finding, at_message
from cgkit.measuring.doctor.observe import Sight, observe
from cgkit.measuring.doctor.patient import Patient
from cgkit.measuring.doctor.registry import NotCheckedError, check

_AGAIN = "cgkit.get_platform('emulated').record(lambda: model(*example_inputs), pool)"


@check("host-sync", "capture-forbidden")
def capture_rules(patient: Patient) -> Iterator[Finding]:
    """Each line that cannot be recorded, by the emulated platform's rules."""
    seen = observe(patient)
    if patient.cut_region is not None:
        yield _cut_region(str(patient.cut_region))
    for sight in seen.host_reads:
        yield host_sync(sight)
    for sight in seen.forbidden:
        yield Finding(
            "capture-forbidden",
            "error",
            f"{sight.operator} cannot be recorded: {' '.join(sight.error.split())}",
            "move the line to an eager piece (a splitting operator), or out of forward",
            again=_AGAIN,
            stream=sight_stream(),
            **sight.where(),
        )
    if seen.refused:
        raise NotCheckedError(seen.refused)


def _cut_region(message: str) -> Finding:
    return Finding(
        "capture-forbidden",
        "error",
        "the model cannot be cut: a region of autocast begins before a splitting operator and ends after it, and each "
        "piece is recorded by itself",
        "leave the region before the splitting operator and enter it again behind it; or put the whole call of the "
        "model into it; or do not cut (level=2)",
        again="cgkit.split_graph(cgkit.trace(model, *example_inputs), splitting_ops)",
        **at_message(message),
    )


def sight_stream() -> str:
    """Which stream an operator inside of a recorded piece is called on."""
    return "the stream that is capturing (the current one when the piece is recorded)"


def host_sync(sight: Sight) -> Finding:
    """The finding for one read of a value on the host."""
    waits = sight.operator.startswith("torch.cuda.")
    what = "is called in forward" if waits else "reads a tensor's value on the host"
    return Finding(
        "host-sync",
        "error",
        f"{sight.operator} {what}: the CPU waits for the GPU, and a capturing stream refuses it",
        "keep it a tensor operation (torch.where instead of a branch, a mask instead of nonzero), pass the number in, "
        "or move the line to an eager piece (a splitting operator)",
        again=_AGAIN,
        stream=sight_stream(),
        **sight.where(),
    )
