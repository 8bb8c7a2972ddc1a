"""What an engine says of each step, and the keys that were tried for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cgkit.capturing.dispatcher import CudagraphDispatcher, Route
from cgkit.capturing.ledgers import tried
from cgkit.forward_context import BatchDescriptor

#: Where the host's time goes: all but ``forward`` (calling the model and its output projection) and ``wait`` (for the
#: tokens) is the engine's own.
PARTS = ("schedule", "fill", "route", "sample", "post", "forward", "wait")
SCHEDULE, FILL, ROUTE, SAMPLE, POST, FORWARD, WAIT = range(len(PARTS))
OWN = PARTS[:FORWARD]


class StepReport:
    """One step of an engine; filled in while it runs.

    Attributes:
        number: of the step, from 1.
        route: mode, key of the graph (None without one) and padded tokens.
        uniform: every request had one token, so that a decode graph may serve it.
        num_reqs, num_tokens: before padding.
        num_new: tokens that requests got. num_dropped: that came too late, for requests that had ended meanwhile.
        admitted, preempted: requests that came in, and that gave their blocks back, for this step.
        num_running, num_waiting: after the step was scheduled.
        ended_s: on the engine's clock, when its tokens were there.
        parts: seconds of host time, in the order of :data:`PARTS`.
    """

    __slots__ = (
        "admitted", "ended_s", "num_dropped", "num_new", "num_reqs", "num_tokens", "num_waiting", "number", "parts",
        "preempted", "route", "tried", "uniform",
    )  # fmt: skip

    def __init__(self, number: int, route: Route, uniform: bool, num_reqs: int, num_tokens: int) -> None:
        self.number, self.route, self.uniform = number, route, uniform
        self.num_reqs, self.num_tokens = num_reqs, num_tokens
        self.num_new = self.num_dropped = self.admitted = self.preempted = self.num_waiting = 0
        self.ended_s = 0.0
        self.parts = [0.0] * len(PARTS)
        self.tried: tuple[str, ...] = ()

    @property
    def descriptor(self) -> BatchDescriptor:
        """What the dispatcher was asked for: the padded batch."""
        return BatchDescriptor(self.route.num_tokens, self.uniform)

    @property
    def own_us(self) -> float:
        """Host time outside of the model, in microseconds."""
        return sum(self.parts[:FORWARD]) * 1e6

    def __repr__(self) -> str:
        return (
            f"StepReport({self.number}: {self.num_reqs} requests, {self.num_tokens} tokens padded to "
            f"{self.route.num_tokens}, {self.route.mode.name})"
        )


def tried_keys(dispatcher: CudagraphDispatcher | None, asked: BatchDescriptor) -> tuple[str, ...]:
    """The keys that are tried for a padded batch, in order, the last one being the outcome."""
    if dispatcher is None:
        return ("NONE: nothing is recorded",)
    return tuple(tried(dispatcher.tries(asked)))


def steps_frame(reports: Iterable[StepReport]) -> Any:
    """A row a step: what it held, what it was padded to, the mode taken, the keys tried, host time by part."""
    import pandas as pd

    rows = []
    for each in reports:
        row: dict[str, Any] = {
            "step": each.number,
            "kind": "decode" if each.uniform else "mixed",
            "mode": each.route.mode.name,
            "num_reqs": each.num_reqs,
            "num_tokens": each.num_tokens,
            "num_padded_tokens": each.route.num_tokens,
            "descriptor": str(tuple(each.descriptor)),
            "replayed_key": "" if each.route.key is None else str(tuple(each.route.key)),
            "keys_tried": "; ".join(each.tried),
            "new_tokens": each.num_new,
            "dropped_tokens": each.num_dropped,
            "admitted": each.admitted,
            "preempted": each.preempted,
            "waiting": each.num_waiting,
            "ended_s": each.ended_s,
        }
        row.update({f"{part}_us": seconds * 1e6 for part, seconds in zip(PARTS, each.parts)})
        row["host_outside_model_us"] = each.own_us
        rows.append(row)
    return pd.DataFrame(rows)
