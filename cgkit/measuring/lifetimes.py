"""How long an output holds what a replay wrote: which later replay overwrites it.

All graphs of a pool share memory, so an output is valid from its own replay to the next one that writes into
the same bytes (the article's "weak ref 技巧", the weak-ref trick; pytorch issue 148439 is what it looks like when
one forgets). The addresses are those of the recorded graphs' outputs. What a graph writes besides
its outputs (its intermediate buffers) is not listed by CUDA, so an output may be gone *earlier* than shown, never
later: ``overwritten_by`` names the first replay whose outputs lie over it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cgkit.capturing.captured import CapturedGraphs
from cgkit.capturing.wrapper import CUDAGraphWrapper, GraphEntry
from cgkit.display import Shown
from cgkit.errors import ReplayError
from cgkit.measuring.segments import segment_ranges
from cgkit.tensor_trees import tensor_leaves


@dataclass(frozen=True)
class _Output:
    name: str
    label: str
    segment: int
    start: int  # bytes from the segment's beginning
    stop: int


class Lifetimes(Shown):
    """The outputs of a series of replays, and how long each lasts; made by :func:`output_lifetimes`."""

    def __init__(self, rows: list[dict[str, Any]], replays: list[str], about: dict[str, Any]) -> None:
        self._rows, self.replays, self._about_facts = rows, replays, about

    def to_frame(self) -> Any:
        """A row an output of a replay: ``step``, ``mode``, ``num_tokens``, ``name`` (of the graph), ``output``,
        ``segment``, ``start_bytes``, ``stop_bytes`` in it, ``written_at`` (number of the replay),
        ``last_read_at`` (by a later piece of the step; None: by whoever called), ``overwritten_at`` (None: not in
        this series), ``overwritten_by``."""
        import pandas as pd

        frame = pd.DataFrame(self._rows, columns=_COLUMNS)
        for column in ("last_read_at", "overwritten_at"):
            frame[column] = frame[column].astype("Int64")
        return frame

    def plot(self, about: Any = None, *, ax: Any = None) -> Any:
        """A bar an output, from its replay to the one that overwrites it."""
        from cgkit.plotting.memory_charts import lifetimes
        from cgkit.plotting.style import About

        return lifetimes(self.to_frame(), self.replays, about or About(**self._about_facts), ax=ax)

    def __repr__(self) -> str:
        lost = [row for row in self._rows if row["overwritten_at"] is not None]
        broken = [
            row
            for row in lost
            if row["last_read_at"] is not None and row["overwritten_at"] < row["last_read_at"]
        ]
        text = (
            f"Lifetimes: {len(self._rows)} outputs of {len(self.replays)} replays, {len(lost)} of them overwritten "
            "within the series"
        )
        return text + (f"\n  {len(broken)} were overwritten before their last reader ran" if broken else "")


_COLUMNS = [
    "step", "mode", "num_tokens", "name", "output", "segment", "start_bytes", "stop_bytes", "written_at",
    "last_read_at", "overwritten_at", "overwritten_by",
]  # fmt: skip


def output_lifetimes(
    captured: CapturedGraphs,
    steps: Sequence[int] | None = None,
    mode: str | None = None,
    uniform: bool = False,
) -> Lifetimes:
    """Which replay overwrites which output, if ``captured`` ran steps of these token counts one after the other.

    Nothing is replayed. ``steps``: padded token counts, default the largest size, the next smaller, and the
    largest again. ``mode``: "PIECEWISE" or "FULL", default whichever was recorded, PIECEWISE first.

    Raises:
        ReplayError: a step's size was not recorded in that mode.
    """
    wrappers, mode = _wrappers(captured, mode)
    sizes = captured.sizes.sizes
    steps = (
        [sizes[-1], sizes[-2] if len(sizes) > 1 else sizes[-1], sizes[-1]] if steps is None else list(steps)
    )
    ranges = segment_ranges(captured.platform, captured.pool)
    consumers = _consumers(captured) if mode == "PIECEWISE" else {}
    replays: list[tuple[int, int, str, list[_Output]]] = []
    for step, size in enumerate(steps):
        for wrapper in wrappers:
            outputs = _outputs(wrapper, _entry(wrapper, size, uniform), ranges, captured)
            replays.append((step, size, wrapper.name, outputs))
    rows = []
    for at, (step, size, name, outputs) in enumerate(replays):
        first = at - at % len(wrappers)
        for output in outputs:
            reader = consumers.get((name, output.label))
            lost = next((n for n in range(at + 1, len(replays)) if _over(output, replays[n][3])), None)
            rows.append(
                {
                    "step": step,
                    "mode": mode,
                    "num_tokens": size,
                    "name": name,
                    "output": output.label,
                    "segment": output.segment,
                    "start_bytes": output.start,
                    "stop_bytes": output.stop,
                    "written_at": at,
                    "last_read_at": None if reader is None else first + reader,
                    "overwritten_at": lost,
                    "overwritten_by": ""
                    if lost is None
                    else f"{replays[lost][2]} at {replays[lost][1]} tokens",
                }
            )
    about = {
        "model": captured.compiled.model_name,
        "mode": mode,
        "batch": "steps of " + ", ".join(map(str, steps)) + " tokens",
        "device": "cpu" if captured.platform.emulated else captured.platform.name,
        "emulated": captured.platform.emulated,
    }
    return Lifetimes(rows, [f"{name} @ {size}" for _, size, name, _ in replays], about)


def _wrappers(captured: CapturedGraphs, mode: str | None) -> tuple[list[CUDAGraphWrapper], str]:
    chosen = mode or ("PIECEWISE" if captured.pieces else "FULL")
    found = captured.pieces if chosen == "PIECEWISE" else [captured.full] if captured.full else []
    if not found:
        raise ReplayError(
            f"mode={mode!r}: nothing was recorded in it; the graphs are of mode {captured.mode.name}"
        )
    return list(found), chosen


def _entry(wrapper: CUDAGraphWrapper, size: int, uniform: bool) -> GraphEntry:
    held = {(key.num_tokens, key.uniform_decode): entry for key, entry in wrapper.entries.items()}
    entry = held.get((size, uniform)) or held.get((size, False)) or held.get((size, True))
    if entry is None:
        known = sorted({tokens for tokens, _ in held})
        raise ReplayError(f"{wrapper.name} has no graph of {size} tokens; recorded are {known or 'none'}")
    return entry


def _outputs(
    wrapper: CUDAGraphWrapper, entry: GraphEntry, ranges: list[tuple[int, int]], captured: CapturedGraphs
) -> list[_Output]:
    """The outputs that lie in the pool, as byte ranges; their names are the piece's where there is one."""
    names = next((b.piece.output_names for b in captured.compiled.backends if b.name == wrapper.name), ())
    starts = [address for address, _ in ranges]
    found = []
    for index, (path, tensor) in enumerate(tensor_leaves(entry.output, "output")):
        address = tensor.data_ptr()
        at = bisect_right(starts, address) - 1
        if at < 0 or address >= ranges[at][0] + ranges[at][1]:
            continue  # a view of an input, a weight: no replay of another graph writes there
        start = address - ranges[at][0]
        label = names[index] if index < len(names) else path
        found.append(_Output(wrapper.name, label, at, start, start + _span(tensor)))
    return found


def _span(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return extent * tensor.element_size()


def _over(output: _Output, later: Sequence[_Output]) -> bool:
    return any(o.segment == output.segment and o.start < output.stop and output.start < o.stop for o in later)


def _consumers(captured: CapturedGraphs) -> dict[tuple[str, str], int]:
    """For each output of a capturable piece: the number, among the capturable ones, of the last that reads it.

    A splitting operator reads before the capturable piece that follows it runs; it is counted as the piece before
    that one (nothing is replayed between).
    """
    last: dict[str, int] = {}
    replayed = -1
    for piece in captured.compiled.split.pieces:
        replayed += not piece.is_splitting
        for name in piece.input_names:
            last[name] = replayed
    pieces = captured.compiled.split.capturable
    return {(piece.name, name): last[name] for piece in pieces for name in piece.output_names if name in last}
