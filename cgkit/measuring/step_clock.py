"""``StepClock``: an engine serves here, and time passes as it would elsewhere.

Whom a step serves depends on who has arrived, so on how long the steps before took. With this clock a step takes
what was recorded on a GPU for its mode and size: batches, queues and latencies are then those of that GPU, as far as
a step's time depends on nothing else, while the steps are run on any machine. Deterministic without
``async_scheduling``.
"""

from __future__ import annotations

from collections.abc import Callable

from cgkit.measuring.step_cost import recorded_step_cost
from cgkit.serving.engine import Engine
from cgkit.serving.step_report import StepReport


class StepClock:
    """The ``clock`` of :func:`cgkit.measuring.serve_traffic.serve_traffic`, and its ``sleep``::

        clock = StepClock(engine, recorded_step_ms("llama-3.1-8b"))
        serve_traffic(engine, trace, clock=clock, sleep=clock.sleep)

    Seconds since it was made. It stands in the way of ``engine.step``; one clock an engine.
    """

    def __init__(self, engine: Engine, milliseconds: Callable[[StepReport], float]) -> None:
        """``milliseconds``: what a step takes, given the engine's report of it."""
        self.now = 0.0
        step = engine.step

        def timed() -> list:
            before = engine.num_steps
            outputs = step()
            if engine.num_steps > before:
                self.now += milliseconds(engine.reports[-1]) / 1e3
            return outputs

        engine.step = timed  # type: ignore[method-assign]

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Nothing happens for so long."""
        self.now += seconds


def recorded_step_ms(shape: str = "llama-3.1-8b") -> Callable[[StepReport], float]:
    """What an H200 took for a step of the same mode and size (``cgkit bench crossover``), in milliseconds.

    Raises:
        RecordingError: there is no recording of ``shape``.
    """
    costs = {mode: recorded_step_cost(shape, mode) for mode in ("PIECEWISE", "FULL")}

    def milliseconds(report: StepReport) -> float:
        route = report.route
        if not route.mode:
            return costs["FULL"].uncaptured(route.num_tokens)
        return costs[route.mode.name].replayed(route.num_tokens)

    return milliseconds
