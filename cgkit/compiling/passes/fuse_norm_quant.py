"""RMSNorm + FP8 quantisation, with the residual sum before it where there is one, becomes one operator.

Implements the article's "RMSNormQuantFusionPass" (its ``FusionPass``). A decode step's norm and quantisation are
bound by memory: unfused, the normed row is written in 16 bits and read again to become 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cgkit.compiling.passes import quant_patterns as patterns
from cgkit.compiling.passes.base import GraphPass
from cgkit.compiling.passes.graphs import same_sizes, tensor_value
from cgkit.compiling.passes.matching import (
    CASTS,
    CONVERT,
    Found,
    erase_unused,
    match,
    through_casts,
    used_elsewhere,
    written_index,
)
from cgkit.compiling.passes.replace import (
    call_functional,
    empty_column,
    empty_like,
    fits,
    is_scalar,
    place_for,
)

ops = torch.ops.cgkit


@dataclass(frozen=True)
class Quantised:
    """A quantisation that was found: of ``value``, by a static ``scale`` or into ``scales`` (a result)."""

    value: fx.Node
    scale: fx.Node | None
    scales: fx.Node | None
    nodes: tuple[fx.Node, ...]


def find_quantisation(node: fx.Node, dynamic: bool = True) -> Quantised | None:
    """The quantisation that ends in ``node``."""
    if not patterns.is_fp8(node):
        return None
    if dynamic and (m := match(patterns.DYNAMIC_QUANT, node)):
        m = match(patterns.DYNAMIC_SCALES, m["scales"], m)
        if m is not None:
            return Quantised(_before_cast(m["wide"]), None, m["scales"], (*m.nodes, *_cast_of(m["wide"])))
    if dynamic and (m := match(patterns.DYNAMIC_QUANT_OP, node)):
        call = node.args[0]
        index = written_index(ops.dynamic_per_token_fp8_quant.default, "scales")
        for other in call.users:  # type: ignore[union-attr]
            if other.args[1] == index:
                return Quantised(m["value"], None, other, (*m.nodes, other))
    if (m := match(patterns.STATIC_QUANT, node)) and is_scalar(m["scale"]):
        return Quantised(m["value"], m["scale"], None, m.nodes)
    return None


def _before_cast(node: fx.Node) -> fx.Node:
    return node.args[0] if node.target in CASTS else node  # type: ignore[return-value]


def _cast_of(node: fx.Node) -> tuple[fx.Node, ...]:
    return (node,) if node.target in CASTS else ()


@dataclass(frozen=True)
class Normed:
    """What a quantisation is of: the norm of ``x``, or of ``residual + x`` (then ``sums`` are the nodes of the
    sum, the rounded one first)."""

    x: fx.Node
    weight: fx.Node
    eps: float
    residual: fx.Node | None = None
    sums: tuple[fx.Node, ...] = ()

    @property
    def inputs(self) -> list[fx.Node]:
        """The nodes that it is computed from."""
        return [self.x, self.weight] + ([self.residual] if self.residual is not None else [])


class RMSNormQuantFusion(GraphPass):
    """``rms_norm`` (+ the residual's sum) + FP8 quantisation -> one operator; static scales and per-token ones."""

    name = "fuse_norm_quant"

    def __call__(self, graph: fx.Graph) -> int:
        return sum(
            self._fuse(graph, node) for node in list(graph.nodes) if patterns.is_fp8(node) and node.users
        )

    def _fuse(self, graph: fx.Graph, node: fx.Node) -> bool:
        quantised = find_quantisation(node)
        norm = match(patterns.RMS_NORM, quantised.value) if quantised else None
        if quantised is None or norm is None:
            return False
        results = [node] + ([quantised.scales] if quantised.scales is not None else [])
        inside = (*quantised.nodes, *norm.nodes)
        if used_elsewhere(inside, results):
            self.notes.append(f"{node.name}: its norm is used unquantised as well")
            return False
        source = self._source(norm)
        if source is None or not fits(source.x, node):
            self.notes.append(f"{node.name}: types or layout are not what the fused operator writes")
            return False
        inputs = source.inputs + ([quantised.scale] if quantised.scale is not None else [])
        users = [user for out in (*results, *source.sums) for user in out.users if user not in inside]
        place = place_for(graph, inputs, [u for u in users if u not in source.sums])
        if place is None:
            self.notes.append(f"{node.name}: a result is needed before all inputs are there")
            return False
        with graph.inserting_before(place):
            new = self._insert(graph, node, quantised, source)
        self._rewire(graph, node, quantised, source, new, inside)
        return True

    def _source(self, norm: Found) -> Normed | None:
        """What the norm is of, in the model's own type."""
        normed, weight, eps = norm["normed"], norm["weight"], norm["eps"]
        value, scale = tensor_value(normed), tensor_value(weight)
        if (
            value is None
            or scale is None
            or scale.dim() != 1
            or not same_sizes(value.shape[-1:], scale.shape)
            or not same_sizes(value.shape[-1:], (norm.values.get("width", value.shape[-1]),))
        ):
            return None
        dtype = scale.dtype
        if added := self._sum(normed, weight, eps, dtype):
            return added
        if value.dtype == dtype:
            return Normed(normed, weight, eps)
        inner = _before_cast(normed)
        return Normed(inner, weight, eps) if inner.meta["val"].dtype == dtype else None

    def _sum(self, normed: fx.Node, weight: fx.Node, eps: float, dtype: torch.dtype) -> Normed | None:
        total = through_casts(normed)
        m = match(patterns.SUM, total)
        if m is None:
            return None
        terms = [tensor_value(m["first"]), tensor_value(m["second"])]
        if any(
            t is None or t.dtype != dtype or not same_sizes(t.shape, total.meta["val"].shape) for t in terms
        ):
            return None
        if total.meta["val"].dtype != dtype and any(user.op == "output" for user in total.users):
            return None  # the model itself hands the unrounded sum on
        rounded = [n for n in total.users if n.target in CASTS and n.meta["val"].dtype == dtype]
        sums = (total,) if total.meta["val"].dtype == dtype else (*rounded, total)
        return Normed(m["second"], weight, eps, m["first"], sums)

    def _insert(
        self, graph: fx.Graph, node: fx.Node, quantised: Quantised, source: Normed
    ) -> dict[str, fx.Node]:
        arguments: dict[str, Any] = {"out": empty_like(graph, source.x, node.meta["val"].dtype)}
        if source.residual is not None:
            arguments["residual_out"] = empty_like(graph, source.x, source.x.meta["val"].dtype)
        if quantised.scales is not None:
            arguments["scales"] = empty_column(graph, source.x, torch.float32)
        arguments["x"] = source.x
        if source.residual is not None:
            arguments["residual"] = source.residual
        arguments["weight"] = source.weight
        if quantised.scale is not None:
            arguments["scale"] = quantised.scale
        arguments["eps"] = source.eps
        name = ("" if source.residual is None else "fused_add_") + "rms_norm_"
        name += "static_fp8_quant" if quantised.scales is None else "dynamic_per_token_fp8_quant"
        return call_functional(graph, getattr(ops, name).default, arguments)

    def _rewire(
        self,
        graph: fx.Graph,
        node: fx.Node,
        quantised: Quantised,
        source: Normed,
        new: dict[str, fx.Node],
        inside: tuple[fx.Node, ...],
    ) -> None:
        node.replace_all_uses_with(new["out"])
        if quantised.scales is not None:
            quantised.scales.replace_all_uses_with(new["scales"])
        erase_unused([*inside, *_cast_chain(inside)])
        for total in source.sums:
            by = new["residual_out"]
            if not total.users:
                continue
            if total.meta["val"].dtype != by.meta["val"].dtype:
                rest = [user for user in total.users if user not in source.sums]
                if not rest:
                    continue
                with graph.inserting_after(by):
                    by = graph.call_function(CONVERT, (by, total.meta["val"].dtype))
                by.meta["val"] = total.meta["val"]
            total.replace_all_uses_with(by)
        terms = [t for total in source.sums for t in total.all_input_nodes]
        erase_unused([*source.sums, *(t for t in terms if t.target in CASTS)])


def _cast_chain(inside: tuple[fx.Node, ...]) -> list[fx.Node]:
    """Conversions that only fed the nodes ``inside``."""
    return [source for node in inside for source in node.all_input_nodes if source.target in CASTS]
