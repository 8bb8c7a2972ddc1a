"""What passes would do to a split graph, without generating code: seconds where compiling takes a minute."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from cgkit import torch_hooks
from cgkit.compiling.lifting import number_inputs
from cgkit.compiling.passes.manager import PostGradPassManager
from cgkit.compiling.passes.report import PassReports

if TYPE_CHECKING:
    from cgkit.compiling.piecewise_backend import PiecewiseBackend
    from cgkit.splitting import SplitGraph


def preview_passes(split: SplitGraph, passes: Sequence[Any]) -> dict[str, PassReports]:
    """The reports of ``passes`` on each piece, by the piece's name (equal pieces share one).

    Inductor is stopped after the passes, so that nothing is generated and nothing is cached.

    Args:
        split: from :func:`cgkit.split_graph`.
        passes: as in :class:`~cgkit.config.CompilationConfig`.

    Raises:
        CompileError: a pass failed.
    """
    manager = PostGradPassManager(passes)
    backends = traced_pieces(split)
    reports: dict[str, PassReports] = {}
    for backend in backends:
        owner = backend.general.owner
        if owner not in reports:
            in_post_grad(backend, manager, functionalization_v2=not manager.needs_v1)
            reports[owner] = manager.take_reports()
        reports[backend.name] = reports[owner]
    return reports


def traced_pieces(split: SplitGraph) -> list[PiecewiseBackend]:
    """The capturable pieces, each with the fakes that it is called with; nothing is compiled."""
    from cgkit.compiling.compiled_graph import compile_pieces
    from cgkit.config import CompilationConfig, CUDAGraphMode

    return compile_pieces(
        split, CompilationConfig(compiler="eager", cudagraph_mode=CUDAGraphMode.NONE)
    ).backends


class _EnoughError(Exception):
    """Stops Inductor once the graph was seen."""


def in_post_grad(
    backend: PiecewiseBackend, run: Callable[[fx.Graph], None], *, functionalization_v2: bool = False
) -> None:
    """Calls ``run`` on the piece's graph where Inductor calls post-grad passes, and stops Inductor there."""
    failed: list[Exception] = []

    def once(graph: fx.Graph) -> None:
        try:
            run(graph)
        except Exception as error:
            failed.append(error)
        raise _EnoughError

    options = {
        # a name that nobody had before: never served from a cache
        "post_grad_custom_post_pass": torch_hooks.custom_graph_pass(once, f"preview {uuid.uuid4()}"),
        "enable_auto_functionalized_v2": functionalization_v2,
        "triton.cudagraphs": False,
    }
    mode = torch_hooks.fake_mode_of(backend.call.args) or torch_hooks.new_fake_mode()
    args = (*backend.call.args, *number_inputs(mode, len(backend.lifted.numbers)))
    with torch_hooks.compile_lock():
        try:
            torch_hooks.standalone_compile(copy.deepcopy(backend.lifted.graph_module), args, mode, options)
        except Exception as error:
            if not _is_enough(error):
                raise
    if failed:
        raise failed[0]


def _is_enough(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, _EnoughError) or isinstance(
            getattr(error, "inner_exception", None), _EnoughError
        ):
            return True
        error = error.__cause__ or error.__context__
    return False
