"""Sizes 0 and 1: Dynamo takes them for constants, so the trace is for 2 and more, without a guard that says so."""

from __future__ import annotations

from collections.abc import Iterator

from cgkit import torch_hooks
from cgkit.measuring.doctor.branching import parting
from cgkit.measuring.doctor.checks.dropped_guards import tried
from cgkit.measuring.doctor.findings import Finding, at
from cgkit.measuring.doctor.patient import Patient
from cgkit.measuring.doctor.registry import check


@check("zero-one")
def zero_one(patient: Patient) -> Iterator[Finding]:
    """A batch of one, model against trace: a branch on it leaves no guard, the answer for 2 is silently taken."""
    traced = patient.traced
    if traced is None:
        return
    for text in traced.enlarged:
        yield Finding(
            "zero-one",
            "info",
            f"the example has a dynamic dimension of size 0 or 1, which Dynamo takes for a constant; it was traced "
            f"larger ({text})",
            "nothing to do; an example with 2 or more is traced as it is",
            again="cgkit.trace(model, *example_inputs).enlarged",
        )
    if not patient.is_dynamic or not patient.num_tokens:
        return
    for guard in torch_hooks.size_guards(traced.fake_mode):
        if guard.holds(dict.fromkeys(map(str, guard.expression.free_symbols), 1)) is False:
            return  # there is a guard: dropped-guard tells it
    severity, meaning = tried(patient, [1])
    if severity == "info":
        return
    yield Finding(
        "zero-one",
        severity,
        f"a size of 1 takes another path here than the sizes that were traced (2 and more), and no guard says so: "
        f"{meaning}",
        "make the code the same for one token and many (no branch on the size, no squeeze() without a dimension)",
        again="cgkit.trace(model, *example_inputs)(*one_token)",
        **at(parting(patient, 1, 2)),
    )
