"""Graph passes in Inductor's post-grad hook: what vLLM does to a graph that Inductor alone does not."""

from cgkit.compiling.passes.base import FunctionPass, GraphPass
from cgkit.compiling.passes.functionalization import FixFunctionalization
from cgkit.compiling.passes.fuse_act_quant import ActivationQuantFusion
from cgkit.compiling.passes.fuse_attn_quant import AttentionQuantFusion
from cgkit.compiling.passes.fuse_norm_quant import RMSNormQuantFusion
from cgkit.compiling.passes.manager import PostGradPassManager, run_pass
from cgkit.compiling.passes.noop import NoOpElimination
from cgkit.compiling.passes.preview import preview_passes
from cgkit.compiling.passes.report import PassReport, PassReports, graph_text
from cgkit.compiling.passes.v2_cost import FunctionalizationCost, functionalization_cost

__all__ = [
    "ActivationQuantFusion",
    "AttentionQuantFusion",
    "FixFunctionalization",
    "FunctionPass",
    "FunctionalizationCost",
    "GraphPass",
    "NoOpElimination",
    "PassReport",
    "PassReports",
    "PostGradPassManager",
    "RMSNormQuantFusion",
    "functionalization_cost",
    "graph_text",
    "preview_passes",
    "run_pass",
]
