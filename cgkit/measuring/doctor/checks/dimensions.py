"""Dimensions that were to be dynamic and became a number."""

from __future__ import annotations

from collections.abc import Iterator

from cgkit.measuring.doctor.findings import Finding, at_innermost
from cgkit.measuring.doctor.patient import Patient
from cgkit.measuring.doctor.registry import check


@check("specialised-dim", "zero-one", "uneven-sizes")
def dimensions(patient: Patient) -> Iterator[Finding]:
    """Each specialised dimension with its line; example sizes 0 and 1, traced as 2; more than one token count."""
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
    sizes = patient.dynamic_sizes
    if len(set(sizes.values())) > 1 and patient.config.mode:
        said = ", ".join(f"{name} = {size}" for name, size in sizes.items())
        yield Finding(
            "uneven-sizes",
            "warning",
            f"the dynamic dimensions have different sizes in the example ({said}), and a recording has one token count "
            "that all of them follow: such a call is refused",
            "leave out of dynamic_arg_dims what does not follow the token count, or give capture a make_inputs in "
            "which they differ",
            again="cgkit.capture(compiled, make_inputs=...)",
        )
