"""``PostGradPassManager``: the passes of one compiler, in Inductor's post-grad hook.

Implements the article's "PostGradPassManager". Inductor calls it once a graph that it really compiles; what it
serves from its cache went through the passes when it was compiled, which is why the passes' identities enter
the key.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Sequence
from typing import Any

from torch import fx

from cgkit import torch_hooks
from cgkit.compiling.passes.base import FunctionPass, GraphPass
from cgkit.compiling.passes.functionalization import FixFunctionalization
from cgkit.compiling.passes.fuse_act_quant import ActivationQuantFusion
from cgkit.compiling.passes.fuse_attn_quant import AttentionQuantFusion
from cgkit.compiling.passes.fuse_norm_quant import RMSNormQuantFusion
from cgkit.compiling.passes.noop import NoOpElimination
from cgkit.compiling.passes.report import PassReport, PassReports, graph_text
from cgkit.config import PASSES
from cgkit.errors import CompileError, ConfigError

_BUILT_IN: dict[str, type[GraphPass]] = {
    "noop": NoOpElimination,
    "fuse_norm_quant": RMSNormQuantFusion,
    "fuse_act_quant": ActivationQuantFusion,
    "fuse_attn_quant": AttentionQuantFusion,
    "fix_functionalization": FixFunctionalization,
}
assert tuple(_BUILT_IN) == PASSES
FUSIONS = tuple(name for name in PASSES if name.startswith("fuse_"))


class PostGradPassManager:
    """Runs passes one after the other over each graph that Inductor compiles, and keeps a report of each.

    ``fix_functionalization`` is put last if a fusion is asked for and it is not in the list: what the fusions
    insert is functional.

    Args:
        passes: names (:data:`cgkit.config.PASSES`), :class:`GraphPass` objects, functions ``(graph) -> int``.

    Attributes:
        passes: the passes, in order.
    """

    def __init__(self, passes: Sequence[Any]) -> None:
        self.passes = [_as_pass(each) for each in passes]
        names = [each.name for each in self.passes]
        fusions = [name for name in names if name in FUSIONS]
        if fusions and "noop" not in names[: names.index(fusions[0])]:
            warnings.warn(
                f"passes={names}: {', '.join(fusions)} without 'noop' before: a reshape that does nothing, between "
                "what would be fused, hides it, and the fusion then silently matches less often. Put 'noop' first",
                stacklevel=3,
            )
        if fusions and "fix_functionalization" not in names:
            self.passes.append(FixFunctionalization())
        elif fusions and names.index("fix_functionalization") < names.index(fusions[-1]):
            raise ConfigError(
                f"passes={names}: 'fix_functionalization' stands before {fusions[-1]!r}, whose operators would stay "
                "functional; put it after the fusions, or leave it out (it is then put last)"
            )
        #: Whether auto-functionalisation V2 is off: the passes know the first version.
        self.needs_v1 = any(isinstance(each, FixFunctionalization) for each in self.passes)
        self._reports: list[PassReport] = []
        # Taken now: a pass that counts what it sees would else be another one for each piece.
        text = "\n".join(f"{each.name} {each.uuid()}" for each in self.passes)
        self._uuid = hashlib.sha256(text.encode()).hexdigest()[:16]

    def uuid(self) -> str:
        """16 hexadecimal digits of all passes in order: part of Inductor's cache key and of ours."""
        return self._uuid

    def inductor_options(self) -> dict[str, Any]:
        """The options that put the passes into Inductor."""
        options: dict[str, Any] = {
            "post_grad_custom_post_pass": torch_hooks.custom_graph_pass(self, self.uuid())
        }
        if self.needs_v1:
            options["enable_auto_functionalized_v2"] = False
        return options

    def __call__(self, graph: fx.Graph) -> None:
        """Runs all passes over ``graph``.

        Raises:
            CompileError: a pass failed or left a broken graph; names the pass.
        """
        for each in self.passes:
            self._reports.append(run_pass(each, graph))

    def take_reports(self) -> PassReports:
        """The reports since the last call of this."""
        reports, self._reports = PassReports(self._reports), []
        return reports

    def __repr__(self) -> str:
        return f"PostGradPassManager({[each.name for each in self.passes]}, {self.uuid()})"


def run_pass(graph_pass: GraphPass, graph: fx.Graph) -> PassReport:
    """Runs one pass over ``graph``, in place; what it did.

    Raises:
        CompileError: it failed, or the graph is broken after it.
    """
    before, count = graph_text(graph), len(graph.nodes)
    graph_pass.notes.clear()
    started = time.perf_counter()
    try:
        matched = graph_pass(graph)
        graph.lint()
    except Exception as error:
        raise CompileError(
            f"the graph pass {graph_pass.name!r} failed on a graph of {count} nodes: {type(error).__name__}: {error}. "
            "Leave it out of CompilationConfig(passes=...) to compile without it"
        ) from error
    seconds = time.perf_counter() - started
    return PassReport(
        graph_pass.name,
        graph_pass.uuid(),
        int(matched or 0),
        count,
        len(graph.nodes),
        before,
        graph_text(graph),
        seconds,
        tuple(graph_pass.notes),
    )


def _as_pass(given: Any) -> GraphPass:
    if isinstance(given, str):
        return _BUILT_IN[given]()
    return given if isinstance(given, GraphPass) else FunctionPass(given)
