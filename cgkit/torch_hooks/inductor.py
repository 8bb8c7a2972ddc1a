"""Inductor: compiling one graph, its options, its count of kernels and its C++ compiler."""

from __future__ import annotations

import contextlib
import inspect
import logging
import subprocess
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cgkit.torch_hooks.versions import gone


def standalone_compile(
    graph_module: torch.fx.GraphModule, fake_args: Sequence[Any], fake_mode: Any, options: dict[str, Any]
) -> Callable[..., Sequence[Any]]:
    """Inductor's ``standalone_compile`` on fakes of ``fake_mode``; the artefact.

    A fresh tracing context carries the fake mode in (``dynamic_shapes="from_tracing_context"``), so
    that symbols keep their meaning and a mode without symbols gives a static compilation, without
    a real example tensor. The graph module is given away: hand in a copy. Where ``options`` turn Inductor's caches off,
    its warning that nothing could be saved is left out.
    Run on torch 2.11 (CUDA) and 2.13 (CPU).
    """
    from torch._guards import TracingContext, tracing

    try:
        from torch._inductor import standalone_compile as compile_it
    except ImportError:
        raise gone("torch._inductor.standalone_compile") from None
    more: dict[str, Any] = {}
    if "donate_graph_module" in inspect.signature(compile_it).parameters:  # 2.13
        more["donate_graph_module"] = True
    quietly = _unsaved_is_unsaid(bool(options.get("force_disable_caches")))
    with quietly, torch.inference_mode(False), torch.no_grad(), tracing(TracingContext(fake_mode)):
        return compile_it(
            graph_module,
            list(fake_args),
            dynamic_shapes="from_tracing_context",
            options={"config_patches": options},
            **more,
        )


@contextlib.contextmanager
def _unsaved_is_unsaid(quiet: bool) -> Iterator[None]:
    """If ``quiet``: in the block torch does not warn that what it compiled cannot be saved."""
    logger = logging.getLogger("torch._inductor.standalone_compile")

    def drop(record: logging.LogRecord) -> bool:
        return "cannot save" not in str(record.msg)

    if quiet:
        logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)


def import_compiler(inductor: bool) -> None:
    """Imports Dynamo, and with ``inductor`` what compiles and loads code: torch puts that off until it is
    needed, and it takes seconds. Run on torch 2.13 (CPU).
    """
    import torch._dynamo.convert_frame

    if inductor:
        import torch._inductor.codecache
        import torch._inductor.compile_fx  # noqa: F401


def inductor_options() -> set[str]:
    """The names of Inductor's options, as ``config_patches`` takes them.

    Run on torch 2.11 (CUDA) and 2.13 (CPU).
    """
    from torch._inductor import list_options

    return set(list_options())


def generated_kernels() -> int:
    """How many kernels Inductor has generated in this process, cache hits included.

    Run on torch 2.11 (CUDA) and 2.13 (CPU).
    """
    from torch._inductor import metrics

    return getattr(metrics, "generated_kernel_count", 0)


def find_cpp_compiler() -> str | None:
    """The C++ compiler that Inductor would use for CPU code, or None.

    Run on torch 2.11 (CUDA) and 2.13 (CPU).
    """
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler
    except ImportError:
        raise gone("torch._inductor.cpp_builder.get_cpp_compiler") from None
    try:
        return get_cpp_compiler()
    except (RuntimeError, OSError, subprocess.SubprocessError):
        return None


@contextlib.contextmanager
def bytes_accessed() -> Iterator[Callable[[], int]]:
    """Gives a function that says how many bytes the kernels that Inductor has generated in the block read and write,
    at the sizes of the example, by its own count. Cache hits count nothing.

    Inductor counts only while its metrics' logger is on. Run on torch 2.13 (CPU).
    """
    from torch._inductor import metrics

    try:
        from torch._inductor.compile_fx import inductor_metrics_log as logger
    except ImportError:
        raise gone("torch._inductor.compile_fx.inductor_metrics_log") from None
    before, level, propagate = metrics.num_bytes_accessed, logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield lambda: metrics.num_bytes_accessed - before
    finally:
        logger.setLevel(level)
        logger.propagate = propagate


def generated_code(runnable: Any) -> dict[str, str]:
    """What Inductor kept beside a compiled callable: ``code`` (its Python, kernels included), ``post_grad``
    (the graph after its passes, as text) and ``path`` (where the code lies, "" if it is gone). Empty
    where nothing of the kind is found, as for a callable that Inductor did not make.

    An artefact holds a ``CompiledFxGraph`` behind a few functions; it is searched for, not computed.
    Run on torch 2.11 (CUDA) and 2.13 (CPU).
    """
    for found in _reachable(runnable):
        code = getattr(found, "source_code", None)
        if isinstance(code, str) and code and hasattr(found, "current_callable"):
            graph = getattr(found, "inductor_post_grad_graph_str", "") or ""
            return {"code": code, "post_grad": str(graph), "path": _code_path(found, code)}
    return {}


def _code_path(graph: Any, code: str) -> str:
    """Where Inductor's cache keeps ``code``; "" if it is not there (any more)."""
    from torch._inductor.codecache import get_path

    try:
        path = Path(get_path(graph.cache_key, "py")[2])
        return str(path) if path.read_text() == code else ""
    except (OSError, AttributeError, TypeError, UnicodeError):
        return ""


def _reachable(start: Any, most: int = 400) -> Iterator[Any]:
    """What hangs on a compiled callable, nearest first: attributes of torch's objects, closures of functions."""
    todo, seen = [start], {id(start)}
    for thing in todo:
        if len(seen) > most:
            return
        yield thing
        near: list[Any] = []
        if isinstance(thing, types.MethodType):
            near += [thing.__self__, thing.__func__]
        elif isinstance(thing, types.FunctionType):
            near += [cell.cell_contents for cell in thing.__closure__ or () if _filled(cell)]
        if type(thing).__module__.split(".")[0] in ("torch", "functools", "builtins"):
            held = getattr(thing, "__dict__", None)
            near += list(held.values()) if isinstance(held, Mapping) else []
        for other in near:
            plain = isinstance(other, str | bytes | int | float | list | dict | types.ModuleType | type)
            if other is not None and not plain and id(other) not in seen:
                seen.add(id(other))
                todo.append(other)


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # an empty cell
        return False


def compile_cache_counts() -> dict[str, int]:
    """How often Inductor's own caches on disk answered in this process so far: ``hits`` and ``misses``
    (``torch._dynamo.utils.counters``). Run on torch 2.11 (CUDA) and 2.13 (CPU).
    """
    from torch._dynamo.utils import counters

    graph, whole = counters["inductor"], counters["aot_autograd"]
    return {
        "hits": graph["fxgraph_cache_hit"] + whole["autograd_cache_hit"],
        "misses": graph["fxgraph_cache_miss"],
    }
