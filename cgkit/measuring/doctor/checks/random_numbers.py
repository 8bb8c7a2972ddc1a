"""Random numbers inside a recording."""

from __future__ import annotations

from collections.abc import Iterator

from cgkit.measuring.doctor.findings import Finding
from cgkit.measuring.doctor.observe import observe
from cgkit.measuring.doctor.patient import Patient
from cgkit.measuring.doctor.registry import check


@check("random-numbers")
def random_numbers(patient: Patient) -> Iterator[Finding]:
    """Lines that draw, from the default generator or from one of their own."""
    seen = observe(patient)
    for sight in seen.own_generators:
        yield Finding(
            "random-numbers",
            "error",
            f"{sight.operator} draws from a generator of its own, which a recorded graph does not advance: each replay "
            "would draw the same numbers, or capture refuses",
            "draw from the default generator, or draw outside of forward and pass the numbers in",
            again="torch.cuda.CUDAGraph.register_generator_state",
            **sight.where(),
        )
    for sight in seen.random:
        yield Finding(
            "random-numbers",
            "info",
            f"{sight.operator} draws from the default generator: each replay draws new numbers, but not those that an "
            "eager run with the same seed draws",
            "model.eval() if it is dropout that was left on; else nothing to do",
            **sight.where(),
        )
