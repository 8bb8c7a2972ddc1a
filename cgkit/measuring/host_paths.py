"""The paths of a recorded decode step, each as a chain of steps in which one more part is replaced by nothing.

A chain begins with the whole step and ends with an empty call; what two neighbours differ by is the part that was
taken out between them. Only data is swapped (a replay in a wrapper's table, the function behind an operator, a
buffer's copy), for one turn at a time: the code around it is the code that serves. What comes out of a hollow step is
whatever the buffers held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from cgkit import marks
from cgkit.capturing import CapturedGraphs
from cgkit.config import CUDAGraphMode
from cgkit.forward_context import BatchDescriptor, set_forward_context
from cgkit.measuring.decode_bench import DecodeBench, Step, decode_batch
from cgkit.measuring.hollow import Hollow, HollowPlan, nothing

#: Part -> what it is, in the order in which parts are taken out.
PARTS: dict[str, str] = {
    "attention launches": "the operators between the pieces: metadata, kernel launch (on a CPU: the attention itself)",
    "operator dispatch": "torch's dispatcher around them",
    "graph replays": "cudaGraphLaunch, one a piece or one a step (on a CPU: everything that was recorded)",
    "address check": "reading and comparing where the inputs lie",
    "wrapper": "what is left of the pieces' wrappers: mode, key, entry",
    "weights fetch": "collecting the weights that the graph takes",
    "stitching code": "the generated function that calls the pieces in order, and the check of its arguments",
    "entry": "choosing the path: mode, arguments, plan",
    "input copies": "sending the filled buffers to the device",
    "input preparation": "filling the buffers and building the metadata",
    "input slices": "the buffers' first rows",
    "dispatcher": "padding and key",
    "forward context": "making, entering and leaving it",
    "unexplained": "an empty call and the clock itself",
}
REST = "unexplained"
#: What stands before a padded batch is ready: figures of other engines' replay paths begin after it.
AROUND = ("input copies", "input preparation", "input slices", "dispatcher")

PATHS: dict[str, str] = {
    "as traced": "the module path with nothing bound beforehand: operators through torch's dispatcher, weights fetched",
    "module": "piece by piece: stitching code and wrappers, weights and operators bound",
    "plan": "the flat tuple of bound calls",
    "full": "one graph for the step",
}

Substitution = Callable[[ExitStack], None]


@dataclass
class Link:
    """One step of a chain: what is called, and what is swapped while it is."""

    removed: str  # the part that this one lacks and the one before has; "" for the whole step
    step: Step
    swaps: tuple[Substitution, ...] = ()

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The substitutions, for the block."""
        with ExitStack() as undo:
            for swap in self.swaps:
                swap(undo)
            yield


@dataclass
class Chain:
    """One path. ``counts``: how often a part occurs in a step."""

    path: str
    links: list[Link]
    counts: dict[str, int]
    pieces: int


class HostStep:
    """A decode step as a runner takes it, up to the model's last norm and without sampling, on fixed requests."""

    def __init__(self, bench: DecodeBench, captured: CapturedGraphs, batch: int, mode: CUDAGraphMode) -> None:
        self.bench, self.captured, self.batch, self.mode = bench, captured, batch, mode
        self.metadata = bench.prepared(batch)
        self.scheduled = decode_batch(bench.runner, batch, bench.context)
        _, key, self.padded = captured.dispatcher.route(batch, True)
        assert isinstance(key, BatchDescriptor)
        self.key = key
        self.ids, self.positions = bench.front(self.padded)
        inputs: Any = bench.runner.inputs
        self.front = getattr(inputs, "front", bench.front)
        self.output = self.call_once(captured.run)

    def call_once(self, run: Callable[..., Any]) -> Any:
        """What one step returns."""
        with set_forward_context(self.metadata, cudagraph_runtime_mode=self.mode, batch_descriptor=self.key):
            return run(self.ids, self.positions)

    def whole(self, run: Callable[..., Any]) -> Step:
        """Everything: dispatcher, inputs, context, slices, the model."""
        inputs, scheduled, batch = self.bench.runner.inputs, self.scheduled, self.batch
        fill, route, front = inputs.fill, self.captured.dispatcher.route, self.front

        def step() -> Any:
            mode, key, padded = route(batch, True)
            metadata = fill(scheduled, padded, decode_only=True)
            with set_forward_context(metadata, cudagraph_runtime_mode=mode, batch_descriptor=key):
                return run(*front(padded))

        return step

    def around(self, run: Callable[..., Any]) -> list[Link]:
        """The end of every chain: ``run`` is empty already, and what stands around it goes too."""
        batch, metadata, front, mode, key = self.batch, self.metadata, self.front, self.mode, self.key
        route, first, second = self.captured.dispatcher.route, self.ids, self.positions

        def no_filling() -> Any:
            mode, key, padded = route(batch, True)
            with set_forward_context(metadata, cudagraph_runtime_mode=mode, batch_descriptor=key):
                return run(*front(padded))

        def no_slices() -> Any:
            mode, key, _ = route(batch, True)
            with set_forward_context(metadata, cudagraph_runtime_mode=mode, batch_descriptor=key):
                return run(first, second)

        def no_dispatcher() -> Any:
            with set_forward_context(metadata, cudagraph_runtime_mode=mode, batch_descriptor=key):
                return run(first, second)

        def no_context() -> Any:
            return run(first, second)

        return [
            Link("input copies", self.whole(run), (self.no_copies,)),
            Link("input preparation", no_filling),
            Link("input slices", no_slices),
            Link("dispatcher", no_dispatcher),
            Link("forward context", no_context),
        ]

    def no_copies(self, undo: ExitStack) -> None:
        """Nothing is sent to the device."""
        marks.swap_attribute(self.bench.runner.inputs.buffers, "send", nothing, undo)


# --- the module path -------------------------------------------------------------------------------------


def module_chain(bench: DecodeBench, captured: CapturedGraphs, batch: int) -> Chain:
    """Piece by piece, weights and operators bound."""
    host = HostStep(bench, captured, batch, CUDAGraphMode.PIECEWISE)
    run = getattr(captured, "run_module", captured.run)
    hollow = Hollow(captured, host)
    off = (hollow.no_attention, hollow.no_replays, hollow.no_check)
    links = [
        Link("", host.whole(run)),
        Link("attention launches", host.whole(run), off[:1]),
        Link("graph replays", host.whole(run), off[:2]),
        Link("address check", host.whole(run), off),
        Link("wrapper", host.whole(run), (hollow.no_attention, hollow.no_wrappers)),
        Link("stitching code", host.whole(run), (hollow.no_stitching,)),
        Link("entry", host.whole(hollow.empty)),
        *host.around(hollow.empty),
    ]
    return Chain("module", links, _counts(captured, len(captured.pieces)), len(captured.pieces))


def traced_chain(bench: DecodeBench, captured: CapturedGraphs, batch: int) -> Chain:
    """As the graph was traced: every step fetches the weights, operators go through torch's dispatcher."""
    host = HostStep(bench, captured, batch, CUDAGraphMode.PIECEWISE)
    hollow = Hollow(captured, host)
    compiled = captured.compiled
    calls = iter([wrapper.call for wrapper in captured.pieces])
    run = compiled.bind(compiled.stitch(lambda backend: next(calls)))
    empty_pieces = compiled.bind(hollow.execute)
    links = [
        Link("", host.whole(run), (hollow.dispatched,)),
        Link("attention launches", host.whole(run), (hollow.empty_dispatched,)),
        Link("operator dispatch", host.whole(run), (hollow.no_attention,)),
        Link("graph replays", host.whole(run), (hollow.no_attention, hollow.no_replays)),
        Link("address check", host.whole(run), (hollow.no_attention, hollow.no_replays, hollow.no_check)),
        Link("wrapper", host.whole(empty_pieces), (hollow.no_attention,)),
        Link("weights fetch", host.whole(hollow.fixed), (hollow.no_attention,)),
        Link("stitching code", host.whole(hollow.empty)),
        *host.around(hollow.empty),
    ]
    return Chain("as traced", links, _counts(captured, len(captured.pieces)), len(captured.pieces))


def full_chain(bench: DecodeBench, captured: CapturedGraphs, batch: int) -> Chain:
    """One graph for the step."""
    host = HostStep(bench, captured, batch, CUDAGraphMode.FULL)
    hollow = Hollow(captured, host)
    run = captured.run
    links = [
        Link("", host.whole(run)),
        Link("graph replays", host.whole(run), (hollow.no_replays,)),
        Link("address check", host.whole(run), (hollow.no_replays, hollow.no_check)),
        Link("wrapper", host.whole(hollow.empty)),
        *host.around(hollow.empty),
    ]
    return Chain("full", links, _counts(captured, 1), len(bench.executor.compiled.backends))  # type: ignore[union-attr]


def plan_chain(bench: DecodeBench, captured: CapturedGraphs, batch: int) -> Chain | str:
    """The flat tuple of bound calls; a sentence where there is none for this step."""
    plans: Any = getattr(captured, "plans", None)
    if plans is None:
        return "this version has no replay plans"
    host = HostStep(bench, captured, batch, CUDAGraphMode.PIECEWISE)
    before = sum(plans.module_steps.values())
    host.call_once(captured.run)
    if host.key not in plans.ready or sum(plans.module_steps.values()) != before:
        return f"no plan serves this step: {'; '.join(plans.module_steps) or 'none was laid out'}"
    hollow, planned = Hollow(captured, host), HollowPlan(plans, host.key)
    run = captured.run
    links = [
        Link("", host.whole(run)),
        Link("attention launches", host.whole(run), (planned.no_attention,)),
        Link("graph replays", host.whole(run), (planned.no_calls,)),
        Link("address check", host.whole(run), (planned.no_check,)),
        Link("entry", host.whole(hollow.empty)),
        *host.around(hollow.empty),
    ]
    return Chain(
        "plan", links, {**_counts(captured, 1), "graph replays": len(captured.pieces)}, len(captured.pieces)
    )


def _counts(captured: CapturedGraphs, wrappers: int) -> dict[str, int]:
    """How often each part occurs in a step."""
    cut = sum(piece.is_splitting for piece in captured.compiled.split.pieces)
    once = dict.fromkeys(PARTS, 1)
    many = {"graph replays": wrappers, "address check": wrappers, "wrapper": wrappers}
    return {**once, **many, "attention launches": cut, "operator dispatch": cut, "stitching code": 1}
