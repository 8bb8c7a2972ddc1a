"""``fix_functionalization``: calls of out-parameter operators become in-place calls again.

Implements the article's "FixFunctionalizationPass". Before Inductor sees a graph it is made functional: an
operator that writes its arguments is wrapped (``auto_functionalized``), and in place of writing it gives new
tensors. Somebody has to undo that, or each out-parameter costs a copy. Inductor's own re-inplacing does as
well; this pass does it in the graph, where it can be seen, and only where nobody can tell the difference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from cgkit import torch_hooks
from cgkit.compiling.passes.base import GraphPass
from cgkit.compiling.passes.graphs import VIEWS, insert, nodes_in, positions, root_of, views_of
from cgkit.compiling.passes.matching import written_index


class FixFunctionalization(GraphPass):
    """Unwraps each ``auto_functionalized`` call, in place where nobody else looks at what it writes.

    Where somebody does (it is an input of the graph, or read later), the call writes a copy, and the report says
    so. Nothing is left to Inductor's own lowering of the first version: on torch 2.13 that gives wrong numbers for an
    operator that writes a slice of a buffer which Inductor computes (seen on the CPU).
    """

    name = "fix_functionalization"

    def __call__(self, graph: fx.Graph) -> int:
        wrapped = torch_hooks.auto_functionalized()
        where = positions(graph)
        calls = [node for node in graph.nodes if node.target is wrapped]
        return sum(self._unwrap(graph, node, where) for node in calls)

    def _unwrap(self, graph: fx.Graph, call: fx.Node, where: dict[fx.Node, int]) -> bool:
        op: Any = call.args[0]
        results = _results(graph, call)
        names = torch_hooks.mutated_arguments(op)
        written = {name: call.kwargs[name] for name in names if call.kwargs.get(name) is not None}
        if results is None or not all(isinstance(base, fx.Node) for base in written.values()):
            self.notes.append(f"{op} is left to Inductor: it writes a list, or its result is used as a whole")
            return False
        with graph.inserting_before(call):
            bases = self._bases(graph, call, written, where)  # type: ignore[arg-type]
            unwrapped = graph.call_function(op, (), {**call.kwargs, **bases})
        where[unwrapped] = where[call]
        for name, base in bases.items():
            self._take(graph, results.get(written_index(op, name)), base)
        returns = torch_hooks.number_of_returns(op)
        for index in range(returns):
            if (old := results.get(index)) is not None:
                if returns == 1:
                    unwrapped.meta = dict(old.meta)
                    self._take(graph, old, unwrapped)
                else:
                    old.args = (unwrapped, index)
        for rest in [user for user in call.users if not user.users]:
            graph.erase_node(rest)
        graph.erase_node(call)
        return True

    def _bases(
        self, graph: fx.Graph, call: fx.Node, written: dict[str, fx.Node], where: dict[fx.Node, int]
    ) -> dict[str, fx.Node]:
        """What the unwrapped call writes: its own arguments, or copies of them."""
        bases: dict[str, fx.Node] = {}
        roots: set[fx.Node] = set()
        for name, base in written.items():
            why = _why_not(call, base, where)
            if not why and root_of(base) in roots:
                why = "shares memory with another one"
            roots.add(root_of(base))
            if why:
                self.notes.append(f"{call.args[0]} writes a copy: {name} {why}")
                base = insert(graph, torch.ops.aten.clone.default, (base,))
                where[base] = where[call]
            bases[name] = base
        return bases

    def _take(self, graph: fx.Graph, old: fx.Node | None, new: fx.Node) -> None:
        if old is not None:
            old.replace_all_uses_with(new)
            graph.erase_node(old)


def _results(graph: fx.Graph, call: fx.Node) -> dict[int, fx.Node] | None:
    """The ``getitem`` of each result that is used; None if the call is used in another way."""
    results: dict[int, fx.Node] = {}
    for user in list(call.users):
        if getattr(user.target, "__name__", "") != "getitem":
            return None
        index: int = user.args[1]  # type: ignore[assignment]
        if index in results:
            user.replace_all_uses_with(results[index])
            graph.erase_node(user)
        else:
            results[index] = user
    return results


def _why_not(call: fx.Node, base: fx.Node, where: dict[fx.Node, int]) -> str:
    """Why ``call`` may not write into ``base`` itself; "" if it may."""
    root = root_of(base)
    if root.op in ("placeholder", "get_attr"):
        return "is an input of the graph"
    op: Any = call.args[0]
    written = torch_hooks.mutated_arguments(op)
    read = [value for name, value in call.kwargs.items() if name not in written]
    if any(root_of(node) is root for node in nodes_in(read)):
        return "is read by the same call"  # as it was before: Inductor has taken a copy away
    for view in views_of(root):
        for user in view.users:
            if user is call or (user.target in VIEWS and user.args[0] is view):
                continue
            if where.get(user, len(where)) > where[call]:
                return "is read after it was written"
    return ""
