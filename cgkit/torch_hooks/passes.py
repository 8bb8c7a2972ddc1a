"""Graph passes inside Inductor, and operators that were auto-functionalised."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from cgkit.torch_hooks.versions import gone


def custom_graph_pass(run: Callable[[fx.Graph], None], uuid: str) -> Any:
    """A ``CustomGraphPass`` for Inductor's option ``post_grad_custom_post_pass`` that calls ``run``.

    ``uuid`` enters the key of Inductor's cache. Run on torch 2.13 (CPU).
    """
    try:
        from torch._inductor.custom_graph_pass import CustomGraphPass
    except ImportError:
        raise gone("torch._inductor.custom_graph_pass.CustomGraphPass") from None

    class Pass(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            run(graph)

        def uuid(self) -> str:
            return uuid

        def __repr__(self) -> str:  # Inductor's messages and our keys show it
            return f"passes {uuid}"

    return Pass()


def auto_functionalized() -> Any:
    """The higher-order operator that stands for an out-parameter operator in a graph without in-place writes
    (the first version): ``auto_functionalized(op, **arguments)`` returns what ``op`` returns, then one new
    tensor for each argument that ``op`` writes.

    Run on torch 2.13 (CPU).
    """
    op = getattr(torch.ops.higher_order, "auto_functionalized", None)
    if op is None:
        raise gone("torch.ops.higher_order.auto_functionalized")
    return op


def auto_functionalized_v2() -> Any:
    """The second version of :func:`auto_functionalized`, which speaks of bases and views of them; None where
    there is none. Run on torch 2.13 (CPU)."""
    return getattr(torch.ops.higher_order, "auto_functionalized_v2", None)


def lowered_mutations(graph: fx.Graph, before: Callable[[fx.Graph], Any] | None = None) -> fx.Graph:
    """A copy of a post-grad graph after Inductor has made its in-place writes of it: what could be re-inplaced
    is, and the rest are ``clone``s before the operator. ``before``: a pass to run on the copy first.

    To be called where Inductor calls a post-grad pass (its state is asked for). Run on torch 2.13 (CPU).
    """
    try:
        from torch._inductor.fx_passes.post_grad import decompose_auto_functionalized
        from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops
        from torch._inductor.fx_utils import FakeTensorUpdater
    except ImportError:
        raise gone("torch._inductor.fx_passes.reinplace.reinplace_inplaceable_ops") from None
    own = fx.GraphModule(graph.owning_module or {}, copy.deepcopy(graph))
    for old, new in zip(graph.nodes, own.graph.nodes):
        new.meta = copy.copy(old.meta)
    if before is not None:
        before(own.graph)
    try:
        updater = FakeTensorUpdater(own)
    except (TypeError, AttributeError):  # it takes the graph on older versions
        updater = FakeTensorUpdater(own.graph)  # type: ignore[arg-type]
    reinplace_inplaceable_ops(updater, own.graph)
    decompose_auto_functionalized(own.graph)
    return own.graph


def scaled_mm(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """``(a * scale_a) @ (b * scale_b)`` of FP8 matrices (``torch._scaled_mm``), in ``out_dtype``.

    ``a`` (rows, inner) row-major, ``b`` (inner, columns) column-major; the scales are one float32 number each, or
    (rows, 1) and (1, columns). On CUDA: compute capability 8.9 or newer, sizes that are multiples of 16.
    Run on torch 2.13 (CPU).
    """
    return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype)
