"""Dimensions that were to be dynamic and became a number."""

from __future__ import annotations

from collections.abc import Iterator

from cgkit.measuring.doctor.findings import Finding, at, at_innermost
from cgkit.measuring.doctor.patient import Patient
from cgkit.measuring.doctor.registry import check
from cgkit.tracing import infer_dynamic_arg_dims


@check("specialised-dim", "uneven-sizes", "nothing-dynamic")
def dimensions(patient: Patient) -> Iterator[Finding]:
    """Each specialised dimension with its line; more than one token count."""
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
    if _all_static(patient):
        yield Finding(
            "specialised-dim",
            "error",
            "arguments that are to change from call to call are in the graph, and none of their dimensions is dynamic: "
            "every other size would be refused",
            "give the tensors as plain arguments or in a dataclass, and compare no size with a number",
            again="cgkit.trace(model, *example_inputs).inputs",
        )
    if patient.given_dims is None and not infer_dynamic_arg_dims(patient.model.forward):
        yield Finding(
            "nothing-dynamic",
            "warning",
            "no argument of forward is annotated as a tensor, so that it is unknown which sizes change from call to "
            "call: cgkit.trace refuses the model as it is, and here it was traced for these sizes only",
            "annotate the tensors (`x: torch.Tensor`), or pass dynamic_arg_dims={'x': 0}",
            again="cgkit.trace(model, *example_inputs)",
            **at(patient.head),
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


def _all_static(patient: Patient) -> bool:
    """Whether dimensions were marked, their tensors are in the graph, and nothing is dynamic without a reason found."""
    if patient.traced is None or patient.specialised or patient.is_dynamic:
        return False
    marked = (
        patient.given_dims
        if patient.given_dims is not None
        else infer_dynamic_arg_dims(patient.model.forward)
    )
    roots = tuple(f"L['{name}']" for name in marked)
    return any(
        entry.kind == "argument" and entry.shape and entry.source.startswith(roots)
        for entry in patient.traced.inputs
    )
