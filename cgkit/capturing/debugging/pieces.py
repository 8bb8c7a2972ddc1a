"""Each replayed piece against its eager run, and who is to blame where they differ."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from cgkit.capturing.debugging.copies import Kept, copied
from cgkit.capturing.debugging.eager import EagerRun, run_on_copies, runs_apart
from cgkit.capturing.debugging.operators import Culprit, culprit, first_differing_operator
from cgkit.capturing.platform import GraphPlatform
from cgkit.errors import WrongReplayError
from cgkit.numerics import Apart
from cgkit.tensor_trees import tensor_leaves

if TYPE_CHECKING:
    from cgkit.compiling import CompiledGraph, PiecewiseBackend

logger = logging.getLogger(__name__)


class Verdict:
    """One piece that gave something else than its eager run.

    Attributes:
        stage: "compiled", "recorded" or "replayed": the first that is wrong.
        piece: its name.
        culprit: the operator, or None where that cannot be told.
        apart: how it differs.
    """

    def __init__(self, stage: str, piece: str, found: Culprit | None, apart: Apart, why: str) -> None:
        self.stage, self.piece, self.culprit, self.apart, self.why = stage, piece, found, apart, why

    def error(self, where: str) -> WrongReplayError:
        """What is raised."""
        at = f"; the first operator that differs is {self.culprit}" if self.culprit else ""
        return WrongReplayError(
            f"{where}: {self.piece} gives something else than its eager run ({self.apart}){at}. {self.why}",
            self.stage,
            self.piece,
            self.culprit.operator if self.culprit else "",
        )


def judge(
    compiled: CompiledGraph,
    backend: PiecewiseBackend,
    given: Sequence[Any],
    expected: EagerRun,
    apart: Apart,
    platform: GraphPlatform,
) -> Verdict:
    """Who is to blame for ``apart``: the callable, the recording of it, or only this replay.

    ``given``: the piece's inputs as they were before the replay.
    """
    name, graph_module = backend.name, backend.piece.graph_module
    part = _part_of(backend)

    def differs(run: Callable[..., Any]) -> Apart | None:
        got = run_on_copies(run, given)
        return runs_apart(expected, got.outputs, got.given, graph_module, given)

    found = differs(_callable_of(backend, given))
    if found is not None:
        build = lambda graph: compiled.compile_part(backend, graph)  # noqa: E731
        return Verdict(
            "compiled",
            name,
            _operator(part, [*given, *backend.lifted.numbers], build, backend),
            found,
            f"What {backend.general.adaptor} compiled does so without any graph: try compiler='eager', without passes",
        )
    record = lambda run: recorded_anew(run, platform)  # noqa: E731
    try:
        found = differs(record(_callable_of(backend, given)))
    except Exception as error:  # the judge must not fall over what is being judged
        logger.debug("recording %s anew", name, exc_info=True)
        return Verdict("recorded", name, None, apart, f"It cannot be recorded again ({error})")
    if found is not None:
        return Verdict(
            "recorded",
            name,
            _operator(part, [*given, *backend.lifted.numbers], lambda graph: record(graph), backend),
            found,
            "Run without a graph it is right, recorded anew and replayed it is wrong: something in it is not "
            "repeated by a replay (host code, a number read on the host, work on another stream)",
        )
    return Verdict(
        "replayed",
        name,
        _maker_of(graph_module, apart),
        apart,
        "Run without a graph it is right, and recorded anew on these inputs too: the recording holds something that "
        "has changed since (a Python number, a global, memory that somebody else wrote or freed)",
    )


def recorded_anew(run: Callable[..., Any], platform: GraphPlatform) -> Callable[..., Any]:
    """``run`` recorded in a pool of its own, on the arguments that it is called with, and replayed once."""

    def call(*args: Any) -> Any:
        kept = Kept(tensor for _, tensor in tensor_leaves(args))
        if not platform.emulated:  # libraries make their workspaces when they first run
            run(*args)
            kept.restore()
        pool = platform.new_pool()
        try:
            graph, output = platform.record(lambda: run(*args), pool)
            kept.restore()
            graph.replay()
            platform.synchronize()
            return copied(tuple(output))
        finally:
            platform.free(pool)

    return call


def _callable_of(backend: PiecewiseBackend, given: Sequence[Any]) -> Callable[..., Any]:
    """What the piece runs for this many tokens, also under an emulated recording."""
    run = backend.compiled_graph_for_general_shape
    if backend.sym_shape_indices:
        run = backend.runnable_for(given[backend.sym_shape_indices[0]])

    def call(*args: Any) -> Any:
        from cgkit.recording import active

        if active.recorder is None:
            return run(*args)
        return active.recorder.opaque_call(run, backend.piece.on_fakes, args)

    return call


def _part_of(backend: PiecewiseBackend) -> fx.GraphModule | None:
    return getattr(backend.lifted, "graph_module", None) or (
        None if backend.lifted.numbers else backend.graph
    )


def _operator(
    part: fx.GraphModule | None, given: Sequence[Any], build: Callable[..., Any], backend: PiecewiseBackend
) -> Culprit | None:
    if part is None:
        return None
    try:
        return first_differing_operator(part, given, build)
    except Exception:
        logger.debug("looking for the operator in %s", backend.name, exc_info=True)
        return None


def _maker_of(graph_module: fx.GraphModule, apart: Apart) -> Culprit | None:
    """The operator that makes the output which differs."""
    returned = graph_module.graph.output_node().args[0]
    place = apart.path.removeprefix("['output'][")
    index = place.partition("]")[0]
    if place == apart.path or not index.isdecimal() or not isinstance(returned, (tuple, list)):
        return None
    node = returned[int(index)]
    return culprit(node) if isinstance(node, fx.Node) and node.op != "placeholder" else None
