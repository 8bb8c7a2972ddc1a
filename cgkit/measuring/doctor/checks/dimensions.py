"""Dimensions that were to be dynamic and became a number."""

from __future__ import annotations

from collections.abc import Iterator

from cgkit.measuring.doctor.findings import Finding, at_innermost
from cgkit.measuring.doctor.patient import Patient
from cgkit.measuring.doctor.registry import check


@check("specialised-dim", "zero-one")
def dimensions(patient: Patient) -> Iterator[Finding]:
    """Each specialised dimension with the line that did it; example sizes 0 and 1, which are traced as 2."""
    for one in patient.specialised:
        yield Finding(
            "specialised-dim",
            "error",
            f"{one.name} is to change from call to call, but this line makes it the constant {one.size}: a reshape "
            "with a number, a comparison with a size, or a tensor of a fixed size beside it",
            f"take the size from the tensor ({one.name}, or -1 in a reshape) instead of a number; or, if it never "
            f"changes, leave {one.argument!r} out of dynamic_arg_dims",
            again="cgkit.trace(model, *example_inputs)",
            **at_innermost(one.frames),
        )
    if patient.traced is not None:
        for text in patient.traced.enlarged:
            yield Finding(
                "zero-one",
                "info",
                f"the example has a dynamic dimension of size 0 or 1, which Dynamo takes for a constant; it was traced "
                f"larger ({text})",
                "nothing to do; an example with 2 or more is traced as it is",
                again="cgkit.trace(model, *example_inputs).enlarged",
            )
