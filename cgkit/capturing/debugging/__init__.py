"""What ``CompilationConfig(debug=True)`` puts around a captured model; ``README.md`` beside this file is the tour.

Everything is wired when the model is captured: with ``debug=False`` nothing of it is on the replay path, not even a
question whether it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from cgkit import forward_context
from cgkit.capturing.debugging.canaries import Canary, Neighbours, check, guarded
from cgkit.capturing.debugging.guards import DroppedGuards
from cgkit.capturing.debugging.outputs import LentOutputs
from cgkit.capturing.debugging.outputs import StepOutput as StepOutput
from cgkit.capturing.debugging.steps import DebugSteps
from cgkit.config import CUDAGraphMode
from cgkit.display import Shown
from cgkit.tracing.buffer_writes import written_arguments

if TYPE_CHECKING:
    from cgkit.capturing.captured import CapturedGraphs


class Debugging(Shown):
    """The checks of one :class:`~cgkit.CapturedGraphs` under ``debug=True``.

    Attributes:
        guards: the dropped guards, replayed on each new shape.
        steps: each replay beside its eager run.
        outputs: what was handed out, and is taken back at the next replay.
        canaries: around the static buffers.
    """

    def __init__(self, captured: CapturedGraphs, execute: Callable[..., Any]) -> None:
        self.captured = captured
        self.guards = DroppedGuards(captured.compiled.split.traced)
        self.steps = DebugSteps(captured, execute)
        self.canaries: list[Canary] = []
        platform, pool = captured.platform, captured.pool
        holds = getattr(platform, "holds", None)
        owned = (lambda tensor: holds(tensor, pool)) if holds is not None else (lambda tensor: True)
        self.outputs = LentOutputs(captured.compiled.model_name, owned)

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run`` (a step, PIECEWISE ones piece by piece) with every check around it; where a replay plan would serve
        the step, the plan runs too, on the same inputs.

        Raises (when called):
            DroppedGuardError: an assumption of the trace does not hold for this call, and it makes a difference.
            MovedInputError: a weight is no longer where it was recorded.
            WrongReplayError: a replay differs from the eager run.
            DamagedBufferError: memory was written that no step may write.
        """
        captured, full = self.captured, CUDAGraphMode.FULL

        def step(*args: Any, **kwargs: Any) -> Any:
            self.guards.check(args, kwargs)
            context = forward_context.current_forward_context()
            if context is None or not context.cudagraph_runtime_mode or not captured.lock.locked:
                return run(*args, **kwargs)
            captured.check_weights()
            self.outputs.begin()
            where = f"after the step of {tuple(context.batch_descriptor or ())}"
            neighbours = self._neighbours(args, kwargs)
            if context.cudagraph_runtime_mode is full and context.batch_descriptor is not None:
                key, metadata = context.batch_descriptor, context.attn_metadata
                output = self.steps.full_step(run, key, args, kwargs, metadata)
            elif captured.plans.active:
                output = self.steps.planned_step(run, args, kwargs, context)
            else:
                output = run(*args, **kwargs)
            check(self.canaries, where)
            neighbours.check(where)
            return self.outputs.lend(output)

        return step

    def checking(self, check: Callable[..., None]) -> Callable[..., None]:
        """``check`` (of a call's arguments, before they are padded), and the guards on them: a model that branches on
        its size would take another branch for the call than for the padded one."""

        def both(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            check(args, kwargs)
            self.guards.check(args, kwargs)

        return both

    def clear(self) -> None:
        """Lets go of what belongs to the graphs."""
        self.steps.probes.clear()
        self.canaries.clear()

    def guarded_buffer(self, path: str, elements: int, like: torch.Tensor) -> torch.Tensor:
        """Memory for one static buffer, with a canary on each side."""
        buffer, canary = guarded(path, elements, like)
        self.canaries.append(canary)
        return buffer

    def _neighbours(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Neighbours:
        """What lies beside buffers that are the caller's; own ones have canaries."""
        inputs, traced = self.captured.inputs, self.captured.compiled.split.traced
        if inputs is None or inputs.copy_inputs or (traced is not None and written_arguments(traced)):
            return Neighbours(())
        return Neighbours(list(zip(inputs.paths, inputs.tensors(args, kwargs))))

    def to_frame(self) -> Any:
        """A row a piece or operator: ``what``, ``compared`` (steps), ``not_compared`` (the reason, or "")."""
        import pandas as pd

        rows = [
            {"what": name, "compared": count, "not_compared": ""}
            for name, count in self.steps.compared.items()
        ]
        rows += [
            {"what": n, "compared": 0, "not_compared": why} for n, why in self.steps.not_compared.items()
        ]
        return pd.DataFrame(rows, columns=["what", "compared", "not_compared"])

    def __repr__(self) -> str:
        steps = self.steps
        lines = [
            f"Debugging of {self.captured.compiled.model_name}: {self.outputs.step} replayed steps, "
            f"{sum(steps.compared.values())} comparisons with an eager run",
            f"  guards replayed on {self.guards.shapes} shapes; {len(self.canaries)} buffers with canaries",
        ]
        lines += [f"  held not, and made no difference: {what}" for what in self.guards.replayed]
        lines += [f"  not compared: {name} ({why})" for name, why in steps.not_compared.items()]
        return "\n".join(lines)
