"""Attention + static FP8 quantisation of its output: the attention operator quantises what it writes.

Implements the article's "AttnFusionPass". Off by default: it can only match where attention stands in a compiled
graph, which is where the graph is not split at it (``splitting_ops=[]``), and then the whole step must be
recordable.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from cgkit.compiling.lifting import by_number
from cgkit.compiling.passes import quant_patterns as patterns
from cgkit.compiling.passes.base import GraphPass
from cgkit.compiling.passes.fuse_norm_quant import find_quantisation
from cgkit.compiling.passes.graphs import insert
from cgkit.compiling.passes.matching import Found, Var, Written, erase_unused, match, used_elsewhere
from cgkit.compiling.passes.noop import RESHAPES
from cgkit.compiling.passes.replace import call_functional, empty_like, place_for

_ARGUMENTS = ("query", "key", "value")


def _operators() -> list[tuple[Any, Any]]:
    """Attention and attention with an output scale: told the layer's name, and (as compiled) its number."""
    attention = getattr(torch.ops.cgkit, "unified_attention_with_output", None)
    fused = getattr(torch.ops.cgkit, "unified_attention_with_fp8_output", None)
    if attention is None or fused is None:
        return []
    pairs = [(attention.default, fused.default)]
    numbered = by_number(attention.default), by_number(fused.default)
    return pairs if None in numbered else [*pairs, numbered]


class AttentionQuantFusion(GraphPass):
    """``unified_attention_with_output`` + quantisation -> ``unified_attention_with_fp8_output``."""

    name = "fuse_attn_quant"

    def __init__(self) -> None:
        # Made now, not when the pass first runs: a piece out of a cache holds them, and no pass runs for it.
        _operators()

    def __call__(self, graph: fx.Graph) -> int:
        pairs = _operators()
        if not pairs:
            self.notes.append("no attention operator is registered (import cgkit.serving)")
        nodes = [node for node in graph.nodes if patterns.is_fp8(node) and node.users]
        return sum(any(self._fuse(graph, node, *pair) for pair in pairs) for node in nodes)

    def _fuse(self, graph: fx.Graph, node: fx.Node, attention: Any, fused: Any) -> bool:
        quantised = find_quantisation(node, dynamic=False)
        if quantised is None:
            return False
        views, value = [], quantised.value
        while value.target in RESHAPES:
            views.append(value)
            value = value.args[0]  # type: ignore[assignment]
        found: Found | None = match(
            Written(attention, "output", tuple((a, Var(a)) for a in _ARGUMENTS)), value
        )
        if found is None:
            return False
        inside = (*quantised.nodes, *views, *found.nodes)
        if used_elsewhere(inside, [node]):
            self.notes.append(f"{node.name}: the attention's output is used unquantised as well")
            return False
        call, scale = found.nodes[-1], quantised.scale
        assert scale is not None
        sizes = views[0].args[1] if views else None
        needed = (
            [n for n in (sizes or ()) if isinstance(n, fx.Node)] if isinstance(sizes, list | tuple) else []
        )
        inputs = [*(found[a] for a in _ARGUMENTS), scale, *needed]
        place = place_for(graph, inputs, list(node.users))
        if place is None:
            self.notes.append(f"{node.name}: a result is needed before all inputs are there")
            return False
        with graph.inserting_before(place):
            out = empty_like(graph, found["query"], node.meta["val"].dtype)
            arguments = {**call.kwargs, "output": out, "output_scale": scale}
            new = call_functional(graph, fused, arguments)["output"]
            if views:
                new = insert(graph, views[0].target, (new, sizes))
        node.replace_all_uses_with(new)
        erase_unused([*inside, call.kwargs["output"]])  # type: ignore[list-item]
        return True
