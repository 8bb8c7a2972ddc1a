"""The memory ledger: what each recorded graph did to the shared pool, in the order of recording.

Implements the article's "显存账：CUDA Graph 的池化与每档成本" (the memory bill: pooling and what each size
costs). A :class:`Ledger` listens while something is captured::

    from cgkit.measuring import memory

    with memory.Ledger() as ledger:
        captured = cgkit.capture(compiled, sizes)
    ledger.plot()

Reading the pool exactly at each recording costs time (a walk over its segments); without a ledger nobody pays it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from cgkit import events
from cgkit.capturing.captured import CapturedGraphs
from cgkit.capturing.wrapper import CUDAGraphWrapper, GraphEntry
from cgkit.display import Shown

COLUMNS = [
    "order", "name", "mode", "num_tokens", "uniform_decode", "nodes", "reserved_before_bytes",
    "reserved_after_bytes", "growth_bytes", "allocated_before_bytes", "allocated_after_bytes",
    "peak_allocated_bytes", "seconds", "emulated",
]  # fmt: skip


class Ledger(Shown):
    """A row for each graph recorded inside the ``with`` block.

    Attributes:
        model: the model whose capture finished last in the block, or "".
        fullest: the pool's blocks (:func:`cgkit.measuring.segments.pool_segments`) right after the recording
            that left the most allocated; None without ``keep_blocks``.
    """

    def __init__(self, keep_blocks: bool = True) -> None:
        """``keep_blocks``: keep the layout of the pool at its fullest; costs one more walk where a recording
        leaves more allocated than any before it."""
        self.model = ""
        self.fullest: Any = None
        self._keep_blocks = keep_blocks
        self._most = -1
        self._rows: list[dict[str, Any]] = []
        self._undo: list[Callable[[], None]] = []

    @classmethod
    def of(cls, captured: CapturedGraphs) -> Ledger:
        """The ledger of graphs that are recorded already: allocated bytes were not noted then and are missing."""
        ledger = cls()
        ledger.model = captured.compiled.model_name
        for wrapper, entry in _in_order(captured):
            before, after = entry.pool_reserved_before_bytes, entry.pool_reserved_after_bytes
            ledger._rows.append(
                {
                    "name": wrapper.name,
                    "mode": wrapper.runtime_mode.name,
                    "num_tokens": entry.key.num_tokens,
                    "uniform_decode": entry.key.uniform_decode,
                    "nodes": entry.graph.num_nodes(),
                    "reserved_before_bytes": before,
                    "reserved_after_bytes": after,
                    "seconds": entry.seconds,
                    "emulated": captured.platform.emulated,
                }
            )
        return ledger

    def __enter__(self) -> Ledger:
        self._undo = [
            events.subscribe(events.GraphMemory, self._note),
            events.subscribe(events.CaptureFinished, self._finish),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for undo in self._undo:
            undo()

    def _note(self, event: events.GraphMemory) -> None:
        row = {name: getattr(event, name) for name in COLUMNS if hasattr(event, name)}
        self._rows.append(row)
        if self._keep_blocks and event.allocated_after_bytes > self._most:
            from cgkit.measuring.segments import blocks_of

            self._most = event.allocated_after_bytes
            self.fullest = blocks_of(event.platform, event.pool)

    def _finish(self, event: events.CaptureFinished) -> None:
        self.model = event.model

    @property
    def emulated(self) -> bool:
        """Whether the graphs are emulated: then no figure is a GPU's."""
        return any(row["emulated"] for row in self._rows)

    def to_frame(self) -> Any:
        """A row a recording, in order: ``name, mode, num_tokens, uniform_decode``, ``nodes`` (None: could not be
        counted), reserved and allocated bytes of the pool before and after, ``growth_bytes`` of the reserved,
        the peak allocated inside the recording, ``seconds``, ``emulated``."""
        import pandas as pd

        frame = pd.DataFrame(self._rows, columns=COLUMNS)
        frame["order"] = range(len(frame))
        frame["growth_bytes"] = frame["reserved_after_bytes"] - frame["reserved_before_bytes"]
        return frame

    def vllm_estimate_bytes(self) -> int | None:
        """What vLLM 0.33 would have reserved for this pool, by the rule of its ``profile_cudagraph_memory``: all
        PIECEWISE graphs, and of the FULL ones the first and, for each other, as much as the second (1 MiB at
        least). Compare with the growth that was measured; None without two FULL graphs to extrapolate from."""
        frame = self.to_frame()
        full = frame.loc[frame["mode"] == "FULL", "growth_bytes"].tolist()
        if len(full) < 2:
            return None
        piecewise = int(frame.loc[frame["mode"] == "PIECEWISE", "growth_bytes"].sum())
        return piecewise + int(full[0]) + (len(full) - 1) * max(int(full[1]), 2**20)

    def plot(self, about: Any = None, *, ax: Any = None) -> Any:
        """Reserved and allocated bytes over the recordings; see :func:`cgkit.plotting.memory_charts.ledger`."""
        from cgkit.plotting.memory_charts import ledger

        return ledger(self.to_frame(), about or self._about(), ax=ax)

    def plot_segments(self, about: Any = None, *, ax: Any = None) -> Any:
        """The pool's segments when it was fullest.

        Raises:
            CgkitError: no layout was kept.
        """
        from cgkit.errors import CgkitError
        from cgkit.plotting.memory_charts import segments

        if self.fullest is None:
            raise CgkitError(
                "this ledger holds no layout of the pool: record inside `with Ledger() as ledger`"
            )
        return segments(self.fullest, about or self._about(), ax=ax)

    def _about(self) -> Any:
        from cgkit.plotting.style import About

        frame = self.to_frame()
        modes = " and ".join(dict.fromkeys(frame["mode"]))
        sizes = (
            f"{frame['num_tokens'].nunique()} sizes to {frame['num_tokens'].max()} tokens"
            if len(frame)
            else ""
        )
        return About(self.model, modes, sizes, "cpu" if self.emulated else "cuda", self.emulated)

    def __repr__(self) -> str:
        frame = self.to_frame()
        if frame.empty:
            return "Ledger(no graph was recorded in its block)"
        kind = "emulated graphs" if self.emulated else "graphs"
        last = frame.iloc[-1]
        peak = frame["peak_allocated_bytes"].max()
        allocated = f", {int(peak):,} allocated at most" if peak == peak and peak is not None else ""
        counted = frame["nodes"].notna().all()
        return (
            f"Ledger of {self.model or 'a capture'}: {len(frame)} {kind}, the pool grew by "
            f"{int(frame['growth_bytes'].sum()):,} bytes to {int(last['reserved_after_bytes']):,}{allocated}\n  nodes: "
            + (
                f"{int(frame['nodes'].sum()):,} in all"
                if counted
                else "not counted (CudaPlatform(keep_graphs=True) can)"
            )
        )


def _in_order(captured: CapturedGraphs) -> Iterator[tuple[CUDAGraphWrapper, GraphEntry]]:
    """The graphs in the order of recording: size by size, in each the pieces in order; then the full ones."""
    for group in (captured.pieces, [captured.full] if captured.full else []):
        for entries in zip(*(wrapper.entries.values() for wrapper in group)):
            yield from zip(group, entries)


def compare_orders(record: Callable[[bool], Any], between: Callable[[], Any] | None = None) -> Any:
    """Records twice, large to small and small to large: one frame of both ledgers with a column ``order_of_sizes``.

    Args:
        record: ``record(largest_first)`` captures; it is called with True and then False. What it returns is
            freed (``.free()``) before the next.
        between: called after each, for instance to free a runner's graphs.
    """
    import pandas as pd

    frames = []
    for largest_first, label in ((True, "large to small"), (False, "small to large")):
        with Ledger(keep_blocks=False) as ledger:
            made = record(largest_first)
        frames.append(ledger.to_frame().assign(order_of_sizes=label))
        if hasattr(made, "free"):
            made.free()
        if between is not None:
            between()
    return pd.concat(frames, ignore_index=True)
