"""``compilation_counter``: the first reader of the events.

Implements the article's "调试与观测：两个官方入口" (debugging and observing: two official ways in),
with the names of the article and of vLLM's counter. Counters locate "which graph was not compiled"
where a benchmark only says "slow".
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from cgkit import events
from cgkit.display import Shown


@dataclass(repr=False)
class CompilationCounter(Shown):
    """Counts what the stages report. All fields are plain totals since the last :meth:`reset`."""

    num_models_seen: int = 0  # decorated models called at level 1 or higher
    num_graphs_seen: int = 0  # graphs handed over by Dynamo: 1 a model, 0 where its trace was loaded
    num_piecewise_graphs_seen: int = 0  # pieces after the split, splitting ones included: 2L + 1
    num_piecewise_capturable_graphs_seen: int = 0  # pieces without a splitting operator: L + 1
    num_backend_compilations: int = 0  # requests: one a piece and shape
    num_inductor_compiles: int = 0  # really compiled by Inductor, after sharing and caches
    num_eager_compiles: int = 0  # really "compiled" by the eager adaptor
    num_gpu_runner_capture_triggers: int = 0  # sizes that a runner asked to record
    num_cudagraph_captured: int = 0  # recorded graphs: sizes x capturable pieces
    num_replay_plans_built: int = 0  # flat plans of PIECEWISE steps, laid out and checked at capture
    num_replay_plans_refused: int = 0  # keys that have none, for a reason that ReplayPlans shows
    num_module_path_steps: int = 0  # PIECEWISE steps without a plan although plans were asked for
    num_cache_entries_updated: int = 0  # new entries in the compile cache on disk
    num_compiled_artifacts_saved: int = 0  # compiled pieces written to disk
    num_compiled_artifacts_loaded: int = 0  # compiled pieces read from disk
    num_traces_saved: int = 0  # traces written to disk
    num_traces_loaded: int = 0  # traces read from disk: their models were not traced
    dynamo_as_is_count: int = 0  # models at level 1

    def reset(self) -> None:
        """Sets every counter to zero."""
        for field in fields(self):
            setattr(self, field.name, 0)

    def clone(self) -> CompilationCounter:
        """A copy that does not go on counting."""
        return copy.copy(self)

    def as_dict(self) -> dict[str, int]:
        """The counters by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def to_frame(self) -> Any:
        """A DataFrame with the columns ``counter`` and ``count``."""
        import pandas as pd

        return pd.DataFrame({"counter": list(self.as_dict()), "count": list(self.as_dict().values())})

    @contextmanager
    def expect(self, **deltas: int) -> Iterator[None]:
        """For tests: asserts by how much each named counter moves in the block.

        Raises:
            AssertionError: a counter moved otherwise; the message lists all that differ.
            TypeError: a name is not a counter.
        """
        unknown = set(deltas) - set(self.as_dict())
        if unknown:
            raise TypeError(f"no such counter: {sorted(unknown)}; there are {list(self.as_dict())}")
        before = self.as_dict()
        yield
        after = self.as_dict()
        wrong = [
            f"{name}: expected +{delta}, got +{after[name] - before[name]}"
            for name, delta in deltas.items()
            if after[name] - before[name] != delta
        ]
        if wrong:
            raise AssertionError("compilation counters differ: " + "; ".join(wrong))

    def __repr__(self) -> str:
        width = max(len(name) for name in self.as_dict())
        lines = [f"  {name:<{width}}  {count:>6}" for name, count in self.as_dict().items()]
        return "\n".join(["compilation_counter", *lines])


compilation_counter = CompilationCounter()


_lock = threading.Lock()  # two threads may compile at the same time


def _add(name: str, count: int = 1) -> None:
    with _lock:
        setattr(compilation_counter, name, getattr(compilation_counter, name) + count)


def _count(name: str, event: events.Event) -> None:
    _add(name)


def _on_split(event: events.GraphSplit) -> None:
    _add("num_piecewise_graphs_seen", event.pieces)
    _add("num_piecewise_capturable_graphs_seen", event.capturable)


def _on_trace_loaded(event: events.TraceLoaded) -> None:
    _add("num_traces_loaded")
    _add("num_piecewise_graphs_seen", event.pieces)
    _add("num_piecewise_capturable_graphs_seen", event.capturable)


def _on_compiled(event: events.PieceCompiled) -> None:
    _add("num_eager_compiles" if event.adaptor == "eager" else "num_inductor_compiles")


events.subscribe(events.GraphSplit, _on_split)
events.subscribe(events.TraceLoaded, _on_trace_loaded)
events.subscribe(events.PieceCompiled, _on_compiled)
for _kind, _name in [
    (events.ModelSeen, "num_models_seen"),
    (events.GraphTraced, "num_graphs_seen"),
    (events.CompileRequested, "num_backend_compilations"),
    (events.CaptureTriggered, "num_gpu_runner_capture_triggers"),
    (events.GraphCaptured, "num_cudagraph_captured"),
    (events.PlanBuilt, "num_replay_plans_built"),
    (events.PlanRefused, "num_replay_plans_refused"),
    (events.PlanPassedOver, "num_module_path_steps"),
    (events.CacheEntryUpdated, "num_cache_entries_updated"),
    (events.ArtifactSaved, "num_compiled_artifacts_saved"),
    (events.ArtifactLoaded, "num_compiled_artifacts_loaded"),
    (events.TraceSaved, "num_traces_saved"),
    (events.DynamoAsIs, "dynamo_as_is_count"),
]:
    events.subscribe(_kind, functools.partial(_count, _name))
