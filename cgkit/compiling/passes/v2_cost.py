"""What auto-functionalisation would have cost: the copies that are left when in-place writes come back.

Implements the article's remark that auto-functionalisation V2 is turned off. The first version (V1) makes a graph in
which an operator's written arguments are named; V2 speaks of the bases of views, so that two arguments which are
views of one buffer need not be copied twice, and of which a pattern sees less. Either way a copy is left for each
written tensor that Inductor's re-inplacing cannot prove to be nobody else's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from cgkit import torch_hooks
from cgkit.compiling.passes.functionalization import FixFunctionalization
from cgkit.compiling.passes.graphs import tensor_value
from cgkit.compiling.passes.preview import in_post_grad, traced_pieces
from cgkit.display import Shown

if TYPE_CHECKING:
    from cgkit.splitting import SplitGraph

_COPIES = (torch.ops.aten.clone.default, torch.ops.aten.copy_.default, torch.ops.aten.copy.default)
#: What is compared, by name: (V2, then fix_functionalization).
VARIANTS: dict[str, tuple[bool, bool]] = {
    "V2": (True, False),
    "V1": (False, False),
    "V1 + fix_functionalization": (False, True),
}


@dataclass(frozen=True, repr=False)
class FunctionalizationCost(Shown):
    """Copies in the final graph of each piece, by variant. Bytes are for ``num_tokens`` tokens."""

    rows: tuple[dict[str, Any], ...]
    num_tokens: int

    def to_frame(self) -> Any:
        """A DataFrame with a row a piece and variant: ``wrapped`` calls, ``written`` tensors (the copies if nothing
        were re-inplaced), ``copies`` (those that are left) and the bytes of both."""
        import pandas as pd

        return pd.DataFrame(list(self.rows))

    @property
    def totals(self) -> dict[str, tuple[int, int]]:
        """Copies and bytes of the whole graph by variant."""
        return {
            name: (
                sum(row["copies"] for row in self.rows if row["variant"] == name),
                sum(row["copied_bytes"] for row in self.rows if row["variant"] == name),
            )
            for name in VARIANTS
        }

    def __repr__(self) -> str:
        lines = [f"FunctionalizationCost at {self.num_tokens} tokens"]
        lines += [f"  {name:<28} {n:>4} copies {size:>12,} bytes" for name, (n, size) in self.totals.items()]
        return "\n".join(lines)


def functionalization_cost(split: SplitGraph, num_tokens: int = 8) -> FunctionalizationCost:
    """Brings each different piece of ``split`` to Inductor's last pass three times, and counts the copies in it.

    Args:
        split: from :func:`cgkit.split_graph`; unsplit (``[]``), attention's own writes are counted too.
        num_tokens: what symbolic sizes are taken for in the bytes.

    Nothing runs and no code is generated. Inductor's own clones (of layouts) count as well, in all variants alike.
    """
    backends = traced_pieces(split)
    rows: list[dict[str, Any]] = []
    for name, (v2, fix) in VARIANTS.items():
        for backend in (b for b in backends if not b.general.shared):
            count = _Counter(fix, num_tokens)
            in_post_grad(backend, count, functionalization_v2=v2)
            times = sum(other.general.owner == backend.name for other in backends)
            numbers = {key: value * times for key, value in count.numbers.items()}
            rows.append({"piece": backend.name, "times": times, "variant": name, **numbers})
    return FunctionalizationCost(tuple(rows), num_tokens)


class _Counter:
    """Counts, where Inductor calls it, and leaves the graph as it is."""

    def __init__(self, fix: bool, num_tokens: int) -> None:
        self.fix, self.num_tokens = fix, num_tokens
        self.numbers: dict[str, int] = {}

    def __call__(self, graph: fx.Graph) -> None:
        wrapped = (torch_hooks.auto_functionalized(), torch_hooks.auto_functionalized_v2())
        calls = [node for node in graph.nodes if node.target in wrapped]
        written = [base for call in calls for base in _written(call)]
        final = torch_hooks.lowered_mutations(graph, FixFunctionalization() if self.fix else None)
        copies = [node for node in final.nodes if node.target in _COPIES]
        self.numbers = {
            "wrapped": len(calls),
            "written": len(written),
            "written_bytes": sum(_bytes(node, self.num_tokens) for node in written),
            "copies": len(copies),
            "copied_bytes": sum(_bytes(node, self.num_tokens) for node in copies),
        }


def _written(call: fx.Node) -> list[fx.Node]:
    """What a wrapped call would copy if nothing were re-inplaced: its written arguments, or (V2) their bases."""
    bases: Any = call.kwargs.get("_all_bases")
    if bases is None:
        bases = [call.kwargs.get(name) for name in torch_hooks.mutated_arguments(call.args[0])]  # type: ignore[arg-type]
    return [base for base in bases if isinstance(base, fx.Node)]


def _bytes(node: fx.Node, num_tokens: int) -> int:
    value = tensor_value(node)
    if value is None:  # a clone that Inductor has just put in has no value yet: it is like its source
        value = tensor_value(node.args[0])
    if value is None:
        return 0
    return torch.Size(_number(size, num_tokens) for size in value.shape).numel() * value.element_size()


def _number(size: Any, num_tokens: int) -> int:
    if isinstance(size, int):
        return size
    expression = torch_hooks.symbolic_expression(size)
    return int(expression.subs(dict.fromkeys(expression.free_symbols, num_tokens)))
