"""Stage 1: a model class -> one FX graph.

One Dynamo trace with dynamic dimensions, and its bytecode without the guards. See README.md here.
"""

from cgkit.tracing.annotations import infer_dynamic_arg_dims, normalise_dims
from cgkit.tracing.arguments import Arguments
from cgkit.tracing.buffer_writes import (
    BufferWrite,
    article_check,
    find_buffer_writes,
    raise_on_buffer_writes,
)
from cgkit.tracing.decompile import decompile
from cgkit.tracing.trace import trace
from cgkit.tracing.traced_graph import GraphInput, TracedGraph
from cgkit.tracing.wrapper import TorchCompileWrapperWithCustomDispatcher

__all__ = [
    "Arguments",
    "BufferWrite",
    "GraphInput",
    "TorchCompileWrapperWithCustomDispatcher",
    "TracedGraph",
    "article_check",
    "decompile",
    "find_buffer_writes",
    "infer_dynamic_arg_dims",
    "normalise_dims",
    "raise_on_buffer_writes",
    "trace",
]
