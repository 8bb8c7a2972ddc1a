"""The replay plans of a captured model: one a key, and one more where decode batches call something else.

A PIECEWISE key serves any batch of its size, and between the pieces an attention may run one kernel for batches in
which every request has one new token and another for the rest. What a prepared call takes of the metadata for given
tells the two apart, so such a key gets two plans, and a step takes the one whose conditions it meets.

Which path runs: :attr:`CompilationConfig.replay_path <cgkit.CompilationConfig>`. With ``"plan"`` the module path serves
what has no plan, and each such step is counted (``module_steps``, the event ``PlanPassedOver``).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

from cgkit import events, marks
from cgkit.capturing.plan_check import check_plan
from cgkit.capturing.plan_reader import BUILT_OTHERWISE, Read, step_reader
from cgkit.capturing.replay_plan import Refusal, ReplayPlan, lay_out
from cgkit.config import CUDAGraphMode
from cgkit.display import Shown
from cgkit.forward_context import BatchDescriptor, set_forward_context
from cgkit.splitting.prepare import ComingStep
from cgkit.tensor_trees import tensor_leaves

if TYPE_CHECKING:
    from cgkit.capturing.captured import CapturedGraphs

PIECEWISE = CUDAGraphMode.PIECEWISE
#: What a step needs of one plan: the tuple to compare, the calls, the model's result.
Choice = tuple[tuple[Any, ...], tuple[Callable[[], Any], ...], Any]


class Ready(NamedTuple):
    """One key's entry in the table of a step."""

    read: Read
    choices: tuple[Choice, ...]
    places: tuple[str, ...]  # what stands where in the tuple that is read


class PlanRow(NamedTuple):
    """What became of one key and kind of batch."""

    key: BatchDescriptor
    kind: str  # "any batch" or "decode"
    plan: ReplayPlan | None
    refused: str  # the reason, or ""
    compared: int  # values that are compared once a step
    seconds: float


class ReplayPlans(Shown):
    """The plans of one :class:`~cgkit.CapturedGraphs`; empty until it is captured, and after it is freed.

    Attributes:
        ready: key -> what a step looks at; only the replay path reads it.
        rows: every key and kind, with its plan or the reason why there is none.
        module_steps: PIECEWISE steps that the module path served although plans were asked for, by reason.
        seconds: what laying out and checking took.
    """

    def __init__(self, captured: CapturedGraphs) -> None:
        self._captured = captured
        self.ready: dict[BatchDescriptor | None, Ready] = {}
        self.rows: list[PlanRow] = []
        self.module_steps: Counter[str] = Counter()
        self.seconds = 0.0
        self.active = False
        marks.register(self)

    # --- laying out ------------------------------------------------------------------------------

    def lay_out(
        self,
        keys: Iterable[BatchDescriptor],
        metadata_for: Callable[[BatchDescriptor], Any],
        decode_sizes: Collection[int] | None,
    ) -> None:
        """Lays out and checks the plans of PIECEWISE ``keys``. Runs each step a few times on the recording's inputs.

        Args:
            metadata_for: the metadata of a recording, and of a decode batch (``uniform_decode``).
            decode_sizes: the sizes that a decode batch can have; None: all.
        """
        started = time.perf_counter()
        for key in keys:
            self._lay_out_key(key, metadata_for, decode_sizes)
        self.active = True
        self.seconds = time.perf_counter() - started

    def _lay_out_key(
        self,
        key: BatchDescriptor,
        metadata_for: Callable[[BatchDescriptor], Any],
        decode_sizes: Collection[int] | None,
    ) -> None:
        first = self._add(key, "any batch", metadata_for(key))
        if first is None or not first.fixed:
            return  # refused, or it serves every batch
        if decode_sizes is None or key.num_tokens in decode_sizes:
            self._add(key, "decode", metadata_for(BatchDescriptor(key.num_tokens, True)))

    def _add(self, key: BatchDescriptor, kind: str, metadata: Any) -> ReplayPlan | None:
        model, started = self._captured.compiled.model_name, time.perf_counter()
        plan, compared, reason = None, 0, ""
        try:
            plan, compared = self._made(key, metadata)
        except Refusal as refusal:
            reason = str(refusal)
        seconds = time.perf_counter() - started
        if plan is None and not reason:  # the same conditions as the plan before: it serves this kind too
            return None
        self.rows.append(PlanRow(key, kind, plan, reason, compared, seconds))
        if plan is None:
            events.emit(events.PlanRefused(model, key.num_tokens, kind, reason))
        else:
            for operator in plan.operators:
                operator.tell(self)
            events.emit(events.PlanBuilt(model, key.num_tokens, kind, len(plan.calls), seconds))
        return plan

    def _made(self, key: BatchDescriptor, metadata: Any) -> tuple[ReplayPlan | None, int]:
        captured = self._captured
        assert captured.inputs is not None
        args, kwargs = captured.inputs.at(key.num_tokens)
        stream = getattr(captured.platform, "launch_stream", None)
        coming = ComingStep(metadata, stream() if stream is not None else None)
        with set_forward_context(metadata, cudagraph_runtime_mode=PIECEWISE, batch_descriptor=key):
            plan = lay_out(captured.compiled, captured.pieces, key, args, kwargs, coming)
            names = None if plan.fixed is None else list(plan.fixed)
            paths = captured.inputs.paths
            traced = captured.compiled.split.traced
            read, places = step_reader(
                args, kwargs, metadata, paths, names, captured.check_arguments, traced and traced.other_mode
            )
            now = read(args, kwargs, metadata)
            others = self.ready.get(key)
            if others is not None:
                if others.places != places:
                    raise Refusal("the metadata is built otherwise than that of the plan for any batch")
                if now == others.choices[0][0]:
                    return None, 0
            tensors = [tensor for _, tensor in tensor_leaves((args, kwargs), "call")]
            check_plan(
                plan, lambda: captured.run_module(*args, **kwargs), tensors, captured.platform, captured.pool
            )
        choices = others.choices if others is not None else ()
        self.ready[key] = Ready(read, (*choices, (now, plan.calls, plan.result)), places)
        return plan, len(places)

    # --- a step, seen from beside it -------------------------------------------------------------

    def plan_for(self, key: Any, args: tuple, kwargs: dict, metadata: Any) -> ReplayPlan | None:
        """The plan by which this step would run; None if the module path would serve it. Not for the replay path."""
        found = self.ready.get(key)
        if found is None:
            return None
        try:
            now = found.read(args, kwargs, metadata)
        except BUILT_OTHERWISE:
            return None
        plans = [row.plan for row in self.rows if row.key == key and row.plan is not None]
        return next((plan for plan, choice in zip(plans, found.choices) if choice[0] == now), None)

    # --- a step without a plan -------------------------------------------------------------------

    def pass_over(self, key: Any, args: tuple, kwargs: dict, metadata: Any) -> None:
        """Counts a step that the module path is about to serve, with the reason."""
        reason = self._reason(key, args, kwargs, metadata)
        self.module_steps[reason] += 1
        tokens = key.num_tokens if isinstance(key, BatchDescriptor) else 0
        events.emit(events.PlanPassedOver(self._captured.compiled.model_name, tokens, reason))

    def _reason(self, key: Any, args: tuple, kwargs: dict, metadata: Any) -> str:
        found = self.ready.get(key)
        if found is None:
            refused = [row.refused for row in self.rows if row.key == key and row.refused]
            return refused[0] if refused else "the key was not captured"
        try:
            now = found.read(args, kwargs, metadata)
        except BUILT_OTHERWISE:
            return "the step's arguments or metadata are built otherwise than at capture"
        closest = max((choice[0] for choice in found.choices), key=lambda known: _agreeing(known, now))
        return f"not the step that a plan was laid out for: {found.places[_agreeing(closest, now)]}"

    def operator_changed(self) -> None:
        """An operator that a plan has bound was registered again: no plan is taken any more."""
        self.ready.clear()
        reason = "an operator between the pieces was registered again after capture; capture again"
        self.rows = [
            row._replace(plan=None, refused=reason) if row.plan is not None else row for row in self.rows
        ]

    def clear(self) -> None:
        """Forgets every plan."""
        self.ready.clear()
        self.rows, self.active = [], False

    # --- marking ---------------------------------------------------------------------------------

    def put_marks(self, marker: marks.Marker, undo: ExitStack) -> None:
        """Swaps in calls with a range around each piece and operator while a profiler runs; see :mod:`cgkit.marks`."""
        captured = self._captured
        facts = {
            "model": captured.compiled.model_name, "mode": PIECEWISE.name, "emulated": captured.platform.emulated
        }  # fmt: skip
        for key, ready in list(self.ready.items()):
            plans = [row.plan for row in self.rows if row.key == key and row.plan is not None]
            choices = tuple(
                (known, _marked(plan, calls, marker, facts), result)
                for plan, (known, calls, result) in zip(plans, ready.choices)
            )
            marks.swap_item(self.ready, key, ready._replace(choices=choices), undo)

    # --- showing ---------------------------------------------------------------------------------

    @property
    def refused(self) -> dict[str, int]:
        """The reasons why there is no plan, and for how many keys."""
        return dict(Counter(row.refused for row in self.rows if row.refused))

    def to_frame(self) -> Any:
        """A row a key and kind of batch: ``num_tokens``, ``kind``, ``laid_out``, ``calls``, ``replays``, ``between``
        (how the operators between pieces are called), ``compared`` (values a step), ``seconds``, ``refused``."""
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "num_tokens": row.key.num_tokens,
                    "kind": row.kind,
                    "laid_out": row.plan is not None,
                    "calls": len(row.plan.calls) if row.plan else 0,
                    "replays": row.plan.num_replays if row.plan else 0,
                    "between": _between(row.plan) if row.plan else "",
                    "compared": row.compared,
                    "seconds": row.seconds,
                    "refused": row.refused,
                }
                for row in self.rows
            ]
        )

    def calls_frame(self, num_tokens: int, kind: str = "any batch") -> Any:
        """The calls of one plan, a row each: ``stage``, ``piece``, ``what``, ``how``, ``calls``."""
        import pandas as pd

        found = [r.plan for r in self.rows if (r.key.num_tokens, r.kind) == (num_tokens, kind) and r.plan]
        return pd.DataFrame(
            [
                {"stage": p.stage, "piece": p.piece, "what": p.what, "how": p.how, "calls": len(p.calls)}
                for p in (found[0].planned if found else ())
            ],
            columns=["stage", "piece", "what", "how", "calls"],
        )

    def __repr__(self) -> str:
        if not self.rows:
            return "ReplayPlans(none laid out)"
        made = sum(row.plan is not None for row in self.rows)
        lines = [f"ReplayPlans: {made} of {len(self.rows)} laid out in {self.seconds:.2f} s"]
        lines += [f"  refused {count} times: {reason}" for reason, count in self.refused.items()]
        lines += [
            f"  {count} steps took the module path: {reason}" for reason, count in self.module_steps.items()
        ]
        return "\n".join(lines)


def _agreeing(one: tuple[Any, ...], other: tuple[Any, ...]) -> int:
    """How many values at the beginning agree, the last place at most."""
    differing = (place for place, (a, b) in enumerate(zip(one, other)) if a != b)
    return next(differing, len(one) - 1)


def _between(plan: ReplayPlan) -> str:
    counts = Counter(one.how for one in plan.planned if one.stage != "replay")
    return ", ".join(f"{count} x {how}" for how, count in counts.items())


def _marked(
    plan: ReplayPlan, calls: tuple[Callable[[], Any], ...], marker: marks.Marker, facts: dict[str, Any]
) -> tuple[Callable[[], Any], ...]:
    """The plan's calls with a range around each piece and each operator.

    Graphs are replayed by torch here: Kineto writes down ``cudaGraphLaunch``, and not the driver's ``cuGraphLaunch``
    that a plan calls, and without it no kernel of a graph could be tied to its launch (seen on torch 2.11).
    """
    inside = [call for one in plan.planned for call in one.calls]
    marked = list(calls[: len(calls) - len(inside)])  # what stands before them all
    for one in plan.planned:
        calls_of_one = (one.plain,) if one.stage == "replay" else one.calls
        call = calls_of_one[0] if len(calls_of_one) == 1 else _in_order(calls_of_one)
        replay = facts | {"batch": plan.key.num_tokens} if one.stage == "replay" else {}
        marked.append(marker.function(call, one.stage, one.piece, **replay))
    return tuple(marked)


def _in_order(calls: tuple[Callable[[], Any], ...]) -> Callable[[], None]:
    def run() -> None:
        for call in calls:
            call()

    return run
