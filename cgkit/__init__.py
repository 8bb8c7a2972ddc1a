"""cgkit: watch a decode step get compiled.

Five stages, each an object to hold, print, plot, time and break::

    traced   = cgkit.trace(model, *example)          # one Dynamo trace -> one FX graph
    split    = cgkit.split_graph(traced, ops)        # cut at the splitting operators
    compiled = cgkit.compile_pieces(split, config)   # each piece -> a callable
    captured = cgkit.capture(compiled, sizes)        # recorded graphs, replayed by size

or all at once with ``@cgkit.support_torch_compile`` on a model class. Names are loaded when they
are first used, so that ``import cgkit`` costs little more than ``import torch``.
"""

# ruff: noqa: F401 - what is imported for type checkers is for them alone
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import cgkit.counters  # the first reader of the events must be there before the first event

__version__ = "0.1.0"

_WHERE = {
    "config": "CompilationConfig CompilationLevel CUDAGraphMode AttentionCGSupport",
    "forward_context": "BatchDescriptor ForwardContext set_forward_context get_forward_context CaptureLock",
    "counters": "compilation_counter CompilationCounter",
    "errors": "CgkitError",
    "measuring": "Timeline crossover measure_launch_overhead profile_step",
    "tracing": "trace TracedGraph",
    "splitting": "split_graph SplitGraph register_op",
    "compiling": "compile_model compile_pieces CompiledGraph PiecewiseBackend set_inductor_config",
    "compiling.cache": "CacheKey explain_cache why_miss",
    "capturing": (
        "capture CapturedGraphs CaptureSizes CudagraphDispatcher CUDAGraphWrapper CUDAGraphOptions Ledgers get_platform"
    ),
    "measuring.plan_sizes": "plan_capture_sizes",
    "measuring.predict_pool": "predict_pool",
    "serving": "Engine Runner SamplingParams load_model",
    "serving.adopt": "adopt",
    "measuring.compile_log": "CompilationLog record_compilation",
    "measuring.expected_counters": "counters_table",
    "measuring.explain": "explain",
    "measuring.bench_host": "HostTime host_time",
    "measuring.mode_table": "ModeTable capture_modes",
    "measuring.doctor": "doctor",
    "measuring.bisecting": "bisect Bisection",
    "claims": "claim",
    "pipeline": "support_torch_compile compiled_model capture_model ledgers reset",
}
_MODULES = ("exercises", "hazards", "recordings")
_HOME = {name: module for module, names in _WHERE.items() for name in names.split()}
__all__ = sorted([*_HOME, *_MODULES])

if TYPE_CHECKING:  # the same names once more, for editors and type checkers: they run no __getattr__
    from cgkit import exercises, hazards, recordings
    from cgkit.capturing import (  # type: ignore[no-redef]
        CapturedGraphs,
        CaptureSizes,
        CudagraphDispatcher,
        CUDAGraphOptions,
        CUDAGraphWrapper,
        Ledgers,
        capture,
        get_platform,
    )
    from cgkit.claims import claim
    from cgkit.compiling import (
        CompiledGraph,
        PiecewiseBackend,
        compile_model,
        compile_pieces,
        set_inductor_config,
    )
    from cgkit.compiling.cache import CacheKey, explain_cache, why_miss
    from cgkit.config import AttentionCGSupport, CompilationConfig, CompilationLevel, CUDAGraphMode
    from cgkit.counters import CompilationCounter, compilation_counter
    from cgkit.errors import CgkitError
    from cgkit.forward_context import (
        BatchDescriptor,
        CaptureLock,
        ForwardContext,
        get_forward_context,
        set_forward_context,
    )
    from cgkit.measuring import (  # type: ignore[no-redef]
        Timeline,
        crossover,
        measure_launch_overhead,
        profile_step,
    )
    from cgkit.measuring.bench_host import HostTime, host_time
    from cgkit.measuring.bisecting import Bisection, bisect
    from cgkit.measuring.compile_log import CompilationLog, record_compilation
    from cgkit.measuring.doctor import doctor
    from cgkit.measuring.expected_counters import counters_table
    from cgkit.measuring.explain import explain  # type: ignore[no-redef]
    from cgkit.measuring.mode_table import ModeTable, capture_modes
    from cgkit.measuring.plan_sizes import plan_capture_sizes
    from cgkit.measuring.predict_pool import predict_pool  # type: ignore[no-redef]
    from cgkit.pipeline import capture_model, compiled_model, ledgers, reset, support_torch_compile
    from cgkit.serving import Engine, Runner, SamplingParams, load_model
    from cgkit.serving.adopt import adopt  # type: ignore[no-redef]
    from cgkit.splitting import SplitGraph, register_op, split_graph  # type: ignore[no-redef]
    from cgkit.tracing import TracedGraph, trace  # type: ignore[no-redef]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(f"cgkit.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return import_module(f"cgkit.{name}")
    raise AttributeError(f"module 'cgkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_HOME, *_MODULES]
