"""Padding: is what a batch is filled up with in its result?"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from cgkit.errors import CgkitError
from cgkit.forward_context import current_forward_context
from cgkit.measuring.doctor.compare import difference
from cgkit.measuring.doctor.findings import Finding, at
from cgkit.measuring.doctor.observe import called, graph_inputs, observe
from cgkit.measuring.doctor.patient import Patient, cannot_run
from cgkit.measuring.doctor.registry import NotCheckedError, check
from cgkit.splitting.values import is_allocation
from cgkit.tensor_trees import replace_tensors, tensor_leaves
from cgkit.tracing.frames import user_line


@check("mixed-rows")
def mixed_rows(patient: Patient) -> Iterator[Finding]:
    """The trace on some rows, and on the same rows with others behind them: zeros, then rows of the example."""
    if patient.traced is None or not patient.is_dynamic or not patient.config.mode or not _pads(patient):
        return
    rows = patient.num_tokens - (patient.num_tokens > 2)
    context = current_forward_context()
    if not rows or len(set(patient.dynamic_sizes.values())) > 1:
        raise NotCheckedError("the example has no tokens, or more than one token count")
    if context is not None and context.attn_metadata is not None:
        raise NotCheckedError(
            "a forward context with metadata is set, which is that of the example's size alone"
        )
    if observe(patient).random:
        raise NotCheckedError("the model draws random numbers, so no two runs agree")
    try:
        alone = _run(patient, rows, 0, torch.zeros_like)
        if _first_apart(patient, alone, _run(patient, rows, 0, torch.zeros_like), rows) is not None:
            raise NotCheckedError("two runs of the same rows differ (something counts, or was never written)")
        for fill in (torch.zeros_like, lambda tensor: tensor):
            padded = _run(patient, rows, 2, fill)
            found = _first_apart(patient, alone, padded, rows)
            if found is not None:
                yield _finding(*found, rows)
                return
    except CgkitError as error:
        raise NotCheckedError(" ".join(str(error).split())) from error
    except Exception as error:  # the model's own
        raise NotCheckedError(cannot_run(error)) from error


def _finding(node: fx.Node | None, differs: str, rows: int) -> Finding:
    return Finding(
        "mixed-rows",
        "error",
        f"the result of {rows} tokens is another one if they are padded to {rows + 2} ({differs}): what a batch is "
        "padded with is in it" + (f", from {called(node)} on" if node is not None else ""),
        "work row by row (a sum, a mean, a sort over the tokens mixes them); or mask what is padding, by the metadata "
        "of the step; or record every size that comes (cudagraph_capture_sizes without gaps)",
        again="config.debug = True  # each padded call is compared with forward",
        **(at(user_line(node)) if node is not None else {}),
    )


def _pads(patient: Patient) -> bool:
    """Whether a batch that may come is padded: the sizes have gaps."""
    listed = set(patient.sizes)
    return any(size not in listed for size in range(1, patient.sizes.largest))


class _Kept(fx.Interpreter):
    """Keeps what each node gives."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__(graph_module)
        self.results: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op != "placeholder":
            self.results[n] = [tensor.detach().clone() for _, tensor in tensor_leaves(result)]
        return result


def _run(
    patient: Patient, rows: int, more: int, fill: Callable[[torch.Tensor], torch.Tensor]
) -> dict[fx.Node, list[torch.Tensor]]:
    """What each node gives for the first ``rows`` rows of the example with ``more`` behind them."""
    assert patient.traced is not None
    call = _call(patient, rows, more, fill)
    with patient.unharmed(), contextlib.redirect_stdout(io.StringIO()):
        runner = _Kept(patient.traced.graph_module)
        runner.run(*graph_inputs(patient, call))
    return runner.results


def _call(patient: Patient, rows: int, more: int, fill: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    args, kwargs = patient.call_of_size(rows + more)
    scope = patient.signature.bind(*args, **kwargs)
    scope.apply_defaults()
    assert patient.traced is not None
    into: dict[int, torch.Tensor] = {}
    for entry in patient.traced.inputs:
        if entry.kind == "argument" and entry.dynamic_dims:
            tensor = original = eval(
                entry.source, {"__builtins__": {}, "L": scope.arguments}
            )  # Dynamo's text
            for dim in entry.dynamic_dims:
                behind = tensor.narrow(dim, rows, more).flip(dim)
                tensor = torch.cat([tensor.narrow(dim, 0, rows), fill(behind)], dim)
            into[id(original)] = tensor
    return replace_tensors(args, into), replace_tensors(kwargs, into)


def _first_apart(
    patient: Patient,
    alone: dict[fx.Node, list[torch.Tensor]],
    padded: dict[fx.Node, list[torch.Tensor]],
    rows: int,
) -> tuple[fx.Node | None, str] | None:
    """The first node that the padding is in, if it is in the results; None if it is not."""
    assert patient.traced is not None
    output = next(node for node in patient.traced.graph_module.graph.nodes if node.op == "output")
    differs = _differs(alone[output], padded[output], rows)
    if not differs:
        return None
    # What was only allocated holds nothing yet that could be compared.
    computed = (node for node in alone if node is not output and not is_allocation(node))
    return next((node for node in computed if _differs(alone[node], padded[node], rows)), None), differs


def _differs(alone: list[torch.Tensor], padded: list[torch.Tensor], rows: int) -> str:
    cut = []
    for one, other in zip(alone, padded):
        for dim, (size, more) in enumerate(zip(one.shape, other.shape)):
            if size != more and one.dim() == other.dim():
                other = other.narrow(dim, 0, min(size, more))
        cut.append(other)
    return difference(alone, cut)
