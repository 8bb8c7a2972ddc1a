"""The sizes to be recorded: batches above the largest, and gaps that pad a batch to a multiple of itself."""

from __future__ import annotations

from collections.abc import Iterator

from cgkit.errors import ConfigError
from cgkit.measuring.doctor.findings import Finding
from cgkit.measuring.doctor.patient import Patient
from cgkit.measuring.doctor.registry import check

#: A batch that is padded to more than so many times itself is told (2, 4 and 8 are steps of every engine's ladder).
_MUCH = 2.0
_AGAIN = "cgkit.CaptureSizes.resolve(config).to_frame()"


@check("above-largest", "size-gap", "size-never-run")
def sizes(patient: Patient) -> Iterator[Finding]:
    """What the list of sizes means for the batches that the configuration allows."""
    config = patient.config
    if not config.mode:
        return
    try:
        listed = patient.sizes
    except ConfigError as error:
        yield Finding("size-never-run", "error", str(error), "correct the sizes", again=_AGAIN)
        return
    if config.max_num_seqs > listed.largest:
        yield Finding(
            "above-largest",
            "warning",
            f"batches of {listed.largest + 1} to {config.max_num_seqs} requests (max_num_seqs) are above the largest "
            f"recorded size, {listed.largest}: they run without a graph",
            f"add {config.max_num_seqs} to cudagraph_capture_sizes, or set max_num_seqs={listed.largest}",
            again=_AGAIN,
        )
    limit = config.max_num_batched_tokens
    if limit is not None:
        for size in (size for size in listed if size > limit):
            yield Finding(
                "size-never-run",
                "warning",
                f"{size} is recorded, and no step has more than max_num_batched_tokens={limit} tokens",
                f"leave {size} out of cudagraph_capture_sizes",
                again=_AGAIN,
            )
    yield from _gaps(patient)


def _gaps(patient: Patient) -> Iterator[Finding]:
    before = 0
    for size in patient.sizes:
        first = before + 1
        if before and size > _MUCH * first and first <= patient.config.max_num_seqs:
            yield Finding(
                "size-gap",
                "warning",
                f"between {before} and {size} nothing is recorded: a batch of {first} runs as {size}, "
                f"{size / first:.1f} times its work",
                "add sizes between (`cgkit plan` finds the best list for a traffic and a budget)",
                again=_AGAIN,
            )
        before = size
