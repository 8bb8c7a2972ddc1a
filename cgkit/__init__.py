"""cgkit: watch a decode step get compiled.

Five stages, each an object to hold, print, plot, time and break::

    traced   = cgkit.trace(model, *example)          # one Dynamo trace -> one FX graph
    split    = cgkit.split_graph(traced, ops)        # cut at the splitting operators
    compiled = cgkit.compile_pieces(split, config)   # each piece -> a callable
    captured = cgkit.capture(compiled, sizes)        # recorded graphs, replayed by size

or all at once with ``@cgkit.support_torch_compile`` on a model class. Names are loaded when they
are first used, so that ``import cgkit`` costs little more than ``import torch``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import cgkit.counters  # noqa: F401 - the first reader of the events must be there before the first event

__version__ = "0.1.0"

_WHERE = {
    "config": "CompilationConfig CompilationLevel CUDAGraphMode AttentionCGSupport",
    "forward_context": "BatchDescriptor ForwardContext set_forward_context get_forward_context CaptureLock",
    "counters": "compilation_counter CompilationCounter",
    "errors": "CgkitError",
    "tracing": "trace TracedGraph",
    "splitting": "split_graph SplitGraph register_op",
    "compiling": "compile_pieces CompiledGraph PiecewiseBackend set_inductor_config",
    "capturing": "capture CapturedGraphs CUDAGraphWrapper CudagraphDispatcher CaptureSizes",
    "serving": "Runner",
    "pipeline": "support_torch_compile compiled_model capture_model reset",
}
_HOME = {name: module for module, names in _WHERE.items() for name in names.split()}
__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from cgkit.capturing import CapturedGraphs as CapturedGraphs
    from cgkit.capturing import CaptureSizes as CaptureSizes
    from cgkit.capturing import capture as capture  # type: ignore[no-redef]
    from cgkit.compiling import CompiledGraph as CompiledGraph
    from cgkit.compiling import compile_pieces as compile_pieces
    from cgkit.config import CompilationConfig as CompilationConfig
    from cgkit.config import CUDAGraphMode as CUDAGraphMode
    from cgkit.splitting import SplitGraph as SplitGraph
    from cgkit.splitting import split_graph as split_graph  # type: ignore[no-redef]
    from cgkit.tracing import TracedGraph as TracedGraph
    from cgkit.tracing import trace as trace  # type: ignore[no-redef]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(f"cgkit.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'cgkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
