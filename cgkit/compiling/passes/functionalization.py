"""``fix_functionalization``: calls of out-parameter operators become in-place calls again.

Implements the article's "FixFunctionalizationPass". Before Inductor sees a graph it is made functional: an
operator that writes its arguments is wrapped (``auto_functionalized``), and in place of writing it gives new
tensors. Somebody has to undo that, or each out-parameter costs a copy. Inductor's own re-inplacing does as
well; this pass does it in the graph, where it can be seen, and only where nobody can tell the difference.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from cgkit import torch_hooks
from cgkit.compiling.passes.base import GraphPass
from cgkit.compiling.passes.graphs import VIEWS, positions, root_of, views_of
from cgkit.compiling.passes.matching import written_index


class FixFunctionalization(GraphPass):
    """Unwraps each ``auto_functionalized`` call whose written arguments nobody else looks at.

    A call is left to Inductor, with a note in the report, if it writes a graph's input or something that is
    read later: there a copy is needed, or a proof that this pass does not attempt.
    """

    name = "fix_functionalization"

    def __call__(self, graph: fx.Graph) -> int:
        wrapped = torch_hooks.auto_functionalized()
        where = positions(graph)
        calls = [node for node in graph.nodes if node.target is wrapped]
        return sum(self._unwrap(graph, node, where) for node in calls)

    def _unwrap(self, graph: fx.Graph, call: fx.Node, where: dict[fx.Node, int]) -> bool:
        op: Any = call.args[0]
        results: dict[int, fx.Node] = {}
        for user in list(call.users):
            if user.op != "call_function" or getattr(user.target, "__name__", "") != "getitem":
                return self._left(call, "its result is used as a whole")
            index = user.args[1]
            if index in results:
                user.replace_all_uses_with(results[index])
                graph.erase_node(user)
            else:
                results[index] = user
        written = torch_hooks.mutated_arguments(op)
        bases = {name: call.kwargs.get(name) for name in written}
        if any(index < torch_hooks.number_of_returns(op) for index in results):
            return self._left(call, "it returns a value as well")
        for name, base in bases.items():
            if isinstance(base, fx.Node) and (why := _why_not(call, base, where)):
                return self._left(call, f"{name} {why}")
            if base is not None and not isinstance(base, fx.Node):
                return self._left(call, f"{name} is no single tensor")
        roots = [root_of(base) for base in bases.values() if isinstance(base, fx.Node)]
        if len(set(roots)) < len(roots):
            return self._left(call, "two of its out-parameters share memory")
        with graph.inserting_before(call):
            where[graph.call_function(op, (), dict(call.kwargs))] = where[call]
        for name, base in bases.items():
            if (new := results.get(written_index(op, name))) is not None and isinstance(base, fx.Node):
                new.replace_all_uses_with(base)
                graph.erase_node(new)
        graph.erase_node(call)
        return True

    def _left(self, call: fx.Node, why: str) -> bool:
        self.notes.append(f"{call.args[0]} is left to Inductor: {why}")
        return False


def _why_not(call: fx.Node, base: fx.Node, where: dict[fx.Node, int]) -> str:
    """Why ``call`` may not write into ``base`` itself; "" if it may."""
    root = root_of(base)
    if root.op in ("placeholder", "get_attr"):
        return "is an input of the graph"
    for view in views_of(root):
        for user in view.users:
            if user is call or (user.target in VIEWS and user.args[0] is view):
                continue
            if where.get(user, len(where)) > where[call]:
                return "is read after it was written"
    return ""


