"""Stages 3 to 5: what the compiled pieces compute, what a recording holds, and what this replay gives."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from cgkit.capturing import CapturedGraphs, capture
from cgkit.capturing.debugging.copies import copied
from cgkit.capturing.debugging.eager import run_on_copies, runs_apart, undisturbed
from cgkit.capturing.debugging.operators import culprit, first_differing_operator
from cgkit.capturing.debugging.steps import DebugSteps, called
from cgkit.capturing.dispatcher import Route
from cgkit.compiling import CompiledGraph
from cgkit.errors import CgkitError
from cgkit.forward_context import current_forward_context, set_forward_context
from cgkit.measuring.bisecting.recordings import held_otherwise
from cgkit.measuring.bisecting.report import StageResult
from cgkit.numerics import Apart, first_apart
from cgkit.splitting.walk import walk
from cgkit.tracing.traced_graph import plain_source

logger = logging.getLogger(__name__)
#: Compares what a run gives with the eager model; None: it is the same.
Compare = Callable[[Any], Apart | None]


def compiled_stage(compiled: CompiledGraph, inputs: Sequence[Any], apart: Apart) -> StageResult:
    """Which piece differs, each fed with what the eager pieces before it gave."""
    backends = {backend.name: backend for backend in compiled.backends}
    found: list[StageResult] = []

    def run_piece(piece: Any, given: Sequence[Any]) -> Sequence[Any]:
        before = copied(tuple(given))
        expected = run_on_copies(piece.graph_module, given)
        if not found and not expected.random:
            backend = backends[piece.name]
            run = backend.compiled_graph_for_general_shape
            if backend.sym_shape_indices:
                run = backend.runnable_for(given[backend.sym_shape_indices[0]])
            got = run_on_copies(run, before)
            differs = runs_apart(expected, got.outputs, got.given, piece.graph_module, before)
            if differs is not None:
                found.append(_compiled_piece(compiled, backend, before, differs))
        return piece.graph_module(*given)

    with undisturbed(inputs), torch.no_grad():
        walk(
            compiled.split,
            copied(tuple(inputs)),
            run_piece,
            lambda piece, f, args, kwargs: called(f, args, kwargs),
        )
    if found:
        return found[0]
    why = "each piece by itself is right: rounding adds up along the way, or the pieces are put together wrongly"
    return StageResult("compiled", "differs", difference=str(apart), why=why)


def _compiled_piece(compiled: CompiledGraph, backend: Any, given: Sequence[Any], apart: Apart) -> StageResult:
    part = backend.lifted.graph_module
    numbers = backend.lifted.numbers
    try:
        which = first_differing_operator(
            part, [*given, *numbers], lambda g: compiled.compile_part(backend, g)
        )
    except Exception:
        logger.debug("looking for the operator in %s", backend.name, exc_info=True)
        which = None
    why = f"what {backend.general.adaptor} made of the piece differs from its graph"
    if which is None:
        why += "; cut anywhere it is right, so the fault needs the whole piece (a fusion, a pass)"
    operator, line = (which.operator, which.line) if which else ("", "")
    return StageResult("compiled", "differs", backend.name, operator, line, str(apart), why)


def replay_stages(
    captured: CapturedGraphs, args: tuple[Any, ...], kwargs: dict[str, Any], compare: Compare
) -> list[StageResult]:
    """The results of "recorded" and "replayed".

    "recorded" is what a recording holds: it is wrong if one that is made now, on this very call, is wrong when it is
    replayed, or if one that is made now would hold something else (a number, an address, another branch). "replayed" is
    all that remains: a call that is refused, a plan, memory that was written or freed, a replay that does other work.
    """
    own_args, own_kwargs = copied((args, kwargs))
    if captured.inputs is not None and not captured.inputs.copy_inputs:
        own_args, own_kwargs = args, kwargs  # the caller's own buffers are what was recorded
    try:
        with undisturbed((args, kwargs)):
            got = captured(*own_args, **own_kwargs)
    except CgkitError as error:
        return [StageResult("recorded", "same"), _refused("replayed", error)]
    apart = compare((got, (own_args, own_kwargs)))
    if apart is None:
        return [StageResult("recorded", "same"), StageResult("replayed", "same")]
    found = (
        _moved_weight(captured, apart)
        or _not_the_graphs(captured, args, kwargs, apart, compare)
        or _by_debugging(captured, args, kwargs, apart)
    )
    if found.stage == "recorded":
        return [found]
    return [StageResult("recorded", "same"), found]


def _refused(stage: str, error: CgkitError) -> StageResult:
    return StageResult(
        stage,
        "refused",
        getattr(error, "piece", ""),
        getattr(error, "operator", ""),
        difference=type(error).__name__,
        why=" ".join(str(error).split()),
    )


def _moved_weight(captured: CapturedGraphs, apart: Apart) -> StageResult | None:
    """A weight that lies elsewhere than when it was recorded: the first piece and operator that read it."""
    moved = [row for row in captured.ledgers.moved if row["graph"] == "weights"]
    split = captured.compiled.split
    if not moved or split.traced is None:
        return None
    names = {entry.source: entry.name for entry in split.traced.inputs}
    for piece in split.pieces:
        for row in moved:
            if (name := names.get(row["input"])) in piece.input_names:
                node = next(
                    n for n in piece.graph_module.graph.nodes if n.op == "placeholder" and n.name == name
                )
                reader = culprit(min(node.users, key=list(piece.graph_module.graph.nodes).index))
                why = (
                    f"{plain_source(row['input'])} was captured at {row['captured_at']:#x} and lies at "
                    f"{row['replayed_at']:#x} now; the graph reads the old address. Load weights in place (copy_), or "
                    "capture again"
                )
                return StageResult(
                    "recorded", "differs", piece.name, reader.operator, reader.line, str(apart), why
                )
    return None


def _not_the_graphs(
    captured: CapturedGraphs, args: tuple[Any, ...], kwargs: dict[str, Any], apart: Apart, compare: Compare
) -> StageResult | None:
    """What goes wrong around the graphs: rows of padding in the result, a write that nobody declared."""
    inputs = captured.inputs
    if inputs is None or not inputs.copy_inputs:
        return None
    if apart.path.startswith("['argument']") and not inputs.written:
        why = (
            "forward changes an argument by an operator that does not say so (mutates_args), and the change stays in "
            "the buffer that the argument was copied into"
        )
        return StageResult("replayed", "differs", difference=str(apart), why=why)
    tokens, (_, key, padded) = _tokens(captured, args, kwargs), _route(captured, args, kwargs)
    if key is None or padded == tokens:
        return None
    made = _as_a_step(captured, captured.compiled.bind(), *copied((args, kwargs)))
    without_graph = compare((captured._cut(made, tokens, padded), (args, kwargs)))
    if without_graph is None or not without_graph.path.startswith("['output']"):
        return None
    why = (
        f"the rows that {tokens} tokens are padded with are in the result: on {padded} rows the pieces give the same "
        "without a graph. Mask them, or record this very size"
    )
    return StageResult("replayed", "differs", difference=str(apart), why=why)


def _by_debugging(
    captured: CapturedGraphs, args: tuple[Any, ...], kwargs: dict[str, Any], apart: Apart
) -> StageResult:
    """What the checks of ``debug=True`` say of this replay; where they see nothing, of a recording made for them."""
    for step in (_existing_pieces, _recorded_for_debugging):
        try:
            with undisturbed((args, kwargs)):
                step(captured, *copied((args, kwargs)))
        except CgkitError as error:
            found = _refused(getattr(error, "stage", "") or "replayed", error)
            return replace(found, verdict="differs", difference=str(apart))
    if _plan_differs(captured, args, kwargs):
        why = "the replay plan gives something else than the pieces one by one: use replay_path='module'"
        return StageResult("replayed", "differs", difference=str(apart), why=why)
    with _recorded_now(captured, args, kwargs) as again:
        held = held_otherwise(captured, again, _route(captured, args, kwargs)[1])
    why = "recorded anew no piece of it differs: "
    if held is not None:
        why += f"this recording holds {held.what}"
        return StageResult("recorded", "differs", held.piece, held.operator, "", str(apart), why)
    frozen = [piece for piece in captured.compiled.split.pieces if piece.is_splitting]
    if captured.full is not None and captured.full.entries and frozen and not captured.platform.emulated:
        ops = ", ".join(dict.fromkeys(op for piece in frozen for op in piece.ops))
        why += (
            "this recording holds something that has changed since. What nodes of CUDA hold is not compared here; but "
            f"the Python code of {ops} ran once, when the whole step was recorded, and the numbers and addresses that "
            "it took then stay; the first of them is named here"
        )
        return StageResult("recorded", "differs", frozen[0].name, frozen[0].ops[0], "", str(apart), why)
    why += "memory that it reads was written or freed by somebody else since, or its replay does other work"
    return StageResult("replayed", "differs", difference=str(apart), why=why)


def _existing_pieces(captured: CapturedGraphs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Goes through the recorded pieces of this size one by one (PIECEWISE)."""
    steps = DebugSteps(captured, captured.compiled.stitch())
    run = captured.compiled.bind(steps.execute)
    _as_a_step(captured, run, args, kwargs)


def _recorded_for_debugging(captured: CapturedGraphs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Records this size under ``debug=True``, and runs the call."""
    with _recorded_now(captured, args, kwargs, debug=True) as again:
        CapturedGraphs.__call__(again, *args, **kwargs)  # stage by stage, not as a whole


@contextmanager
def _recorded_now(
    captured: CapturedGraphs, args: tuple[Any, ...], kwargs: dict[str, Any], debug: bool = False
) -> Iterator[CapturedGraphs]:
    """The same pieces recorded anew, at the size of this call."""
    compiled = captured.compiled
    config, locked = compiled.config, compiled.lock.locked
    context = current_forward_context()
    compiled.config = replace(config, debug=debug, cudagraph_copy_inputs=True, replay_path="module")
    try:
        again = capture(
            compiled,
            [captured.dispatcher.sizes.pad(_tokens(captured, args, kwargs))]
            if captured.dispatcher.sizes
            else None,
            mode=captured.mode,
            platform=captured.platform,
            context=None if context is None else context.attn_metadata,
        )
        try:
            yield again
        finally:
            again.free()
    finally:
        compiled.config = config
        compiled.lock.locked = locked


def _plan_differs(captured: CapturedGraphs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if not captured.plans.ready:
        return False
    results = [
        _as_a_step(captured, run, *copied((args, kwargs))) for run in (captured.run, captured.run_module)
    ]
    return first_apart(*results) is not None


def _as_a_step(
    captured: CapturedGraphs, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls ``run`` as :class:`CapturedGraphs` would call its own: padded, in the static buffers, with a key."""
    inputs = captured.inputs
    assert inputs is not None
    mode, key, padded = _route(captured, args, kwargs)
    args, kwargs = captured.model_inputs.canonical(args, kwargs)
    outer = current_forward_context()
    metadata = outer.attn_metadata if outer else None
    if key is None:
        return None
    if inputs.copy_inputs:
        args, kwargs = inputs.fill(padded, inputs.tensors(args, kwargs))
    else:
        args, kwargs = inputs.at(padded)
    with set_forward_context(metadata, cudagraph_runtime_mode=mode, batch_descriptor=key), torch.no_grad():
        return copied(run(*args, **kwargs))


def _route(captured: CapturedGraphs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Route:
    """Where this call goes."""
    outer = current_forward_context()
    described = outer.batch_descriptor if outer else None
    uniform = described is not None and described.uniform_decode
    return captured.dispatcher.route_of(_tokens(captured, args, kwargs), uniform)


def _tokens(captured: CapturedGraphs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    assert captured.inputs is not None
    return captured.inputs.num_tokens(*captured.model_inputs.canonical(args, kwargs))
