"""Operators inside a recorded piece whose work depends on more than shapes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from cgkit import torch_hooks
from cgkit.config import CUDAGraphMode
from cgkit.measuring.doctor.findings import Finding, at
from cgkit.measuring.doctor.observe import observe
from cgkit.measuring.doctor.patient import Patient
from cgkit.measuring.doctor.registry import NotCheckedError, check
from cgkit.splitting.matching import operator_name
from cgkit.tracing.frames import user_line

_LOOKS_DYNAMIC = re.compile(r"attention|attn|paged|kv_cache|varlen", re.I)
_OF_TORCH = ("aten", "prims", "prim", "higher_order")


@check("dynamic-operator")
def dynamic_operators(patient: Patient) -> Iterator[Finding]:
    """Attention that was not registered as a splitting operator, in a piece that is recorded PIECEWISE: by its name, or
    because it asks what the step is."""
    if patient.split is None or not patient.config.mode.has_mode(CUDAGraphMode.PIECEWISE):
        return
    if patient.cut_region is not None:
        raise NotCheckedError("the model cannot be cut as the configuration says")
    seen = set()
    for piece in patient.split.capturable:
        for node in piece.graph_module.graph.nodes:
            name = operator_name(node) if node.op == "call_function" else ""
            if not _LOOKS_DYNAMIC.search(name) or name in seen:
                continue
            seen.add(name)
            custom = isinstance(node.target, (torch_hooks.OpOverload, torch_hooks.OpOverloadPacket))
            own = custom and name.split("::")[0].split(".")[0] not in _OF_TORCH
            yield Finding(
                "dynamic-operator",
                "warning" if own else "info",
                f"{name} stands inside {piece.name}, which is recorded: "
                + (
                    "if its work depends on the batch (lengths, a KV cache, a forward context), a replay repeats that "
                    "of the recording"
                    if own
                    else "it sees shapes and masks only, so a replay is right as long as every length is in those"
                ),
                f"name it in splitting_ops ({name!r}), so that it runs between the recorded pieces",
                again="cgkit.split_graph(cgkit.trace(model, *example_inputs))",
                **at(user_line(node)),
            )
    for sight in observe(patient).context_reads:
        name = sight.operator.removesuffix(".default")
        if name not in {each.replace("::", ".") for each in seen}:
            seen.add(name)
            yield Finding(
                "dynamic-operator",
                "warning",
                f"{name} stands inside a piece that is recorded, and reads the forward context on the host: "
                "a replay repeats the numbers and addresses of the recording",
                f"name it in splitting_ops ({name!r}), so that it runs between the recorded pieces",
                again="cgkit.split_graph(cgkit.trace(model, *example_inputs))",
                **sight.where(),
            )
