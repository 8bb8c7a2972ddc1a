"""When each stage did what, and what the caches saved: a log of one compilation, read off the events.

An event is sent when its work is done and says how long that took; the reader notes when it came and
counts back. So a start is exact to what a stage does between stopping its clock and sending the event.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cgkit import events, torch_hooks
from cgkit.counters import CompilationCounter, compilation_counter
from cgkit.display import Shown

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

COLUMNS = [
    *("stage", "what", "start_s", "seconds", "cache", "shared_with", "piece", "shape", "key", "adaptor"),
    *("mode", "num_tokens", "uniform_decode", "graphs", "recording_s", "emulated"),
]

_TEXTS = ["what", "cache", "shared_with", "piece", "shape", "key", "adaptor", "mode"]


@contextmanager
def record_compilation() -> Iterator[CompilationLog]:
    """Logs what is traced, split, compiled and captured in the block.

    ::

        with cgkit.record_compilation() as log:
            captured = cgkit.capture(cgkit.compile_pieces(split, config))
        log.plot()
    """
    log = CompilationLog()
    undo = [events.subscribe(kind, reader) for kind, reader in log.readers().items()]
    try:
        yield log
    finally:
        for unsubscribe in undo:
            unsubscribe()
        log.finish()


class CompilationLog(Shown):
    """What happened while it listened.

    Attributes:
        counters: by how much each counter of :data:`cgkit.compilation_counter` moved.
        seconds: how long it listened.
    """

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._before = compilation_counter.clone()
        self._rows: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the size that is being captured
        self._caches = {"hits": 0, "misses": 0}
        self._counters: CompilationCounter | None = None
        self._seconds: float | None = None
        self.model_name = ""

    def readers(self) -> dict[type[events.Event], Callable[[Any], None]]:
        """Which event is read by what."""
        return {
            events.GraphTraced: self._traced,
            events.GraphSplit: self._split,
            events.CompileRequested: self._requested,
            events.PieceCompiled: self._compiled,
            events.ArtifactLoaded: self._loaded,
            events.PieceShared: self._shared,
            events.CaptureTriggered: self._triggered,
            events.GraphCaptured: self._captured,
            events.CaptureFinished: self._capture_finished,
        }

    def finish(self) -> None:
        """Stops listening: the counters' difference is taken now."""
        self._close_size(None)
        self._seconds = self._now()
        self._counters = self._difference()

    @property
    def counters(self) -> CompilationCounter:
        """By how much the counters moved since the log began (until it ended)."""
        return self._counters or self._difference()

    @property
    def seconds(self) -> float:
        """How long the log listened, so far."""
        return self._now() if self._seconds is None else self._seconds

    def to_frame(self) -> pd.DataFrame:
        """One row a thing that was done, in order of its start.

        ``stage`` ("trace", "split", "compile", "capture"), ``what``, ``start_s`` since the log began,
        ``seconds``; of a compilation ``piece``, ``shape``, ``key``, ``adaptor``, and ``cache``: "miss" and
        "hit" (of Inductor's cache on disk), "loaded" (whole, from cgkit's), "shared" (with an equal piece that
        was compiled before: ``shared_with``), or "none" (nothing to cache); of a capture ``mode``,
        ``num_tokens``, ``graphs`` and ``recording_s``, the part of ``seconds`` that was no warm-up.
        """
        import pandas as pd

        rows = sorted(self._rows, key=lambda row: row["start_s"])
        frame = pd.DataFrame(rows, columns=COLUMNS)
        return frame.astype(dict.fromkeys(_TEXTS, object)).fillna(dict.fromkeys(_TEXTS, ""))

    def plot(self, ax: Axes | None = None) -> Axes:
        """The Gantt chart: a bar a thing, by stage, cache hits and shared pieces marked."""
        from cgkit.plotting.compile_gantt import compile_gantt
        from cgkit.plotting.style import About

        about = About(model=self.model_name, emulated=any(row.get("emulated") for row in self._rows) or None)
        return compile_gantt(self.to_frame(), about, ax=ax)

    def __repr__(self) -> str:
        by_stage: dict[str, list[dict[str, Any]]] = {}
        for row in self._rows:
            by_stage.setdefault(row["stage"], []).append(row)
        lines = [
            f"CompilationLog of {self.model_name or ('pieces' if self._rows else 'nothing')}: {len(self._rows)} entries"
        ]
        for stage, rows in by_stage.items():
            caches = [row.get("cache", "") for row in rows]
            said = ", ".join(f"{caches.count(c)} {_CACHE_WORDS[c]}" for c in _CACHE_WORDS if c in caches)
            seconds = sum(row["seconds"] for row in rows)
            lines.append(
                f"  {stage:<8} {seconds:8.2f} s  {len(rows)} × {'  (' + said + ')' if said else ''}".rstrip()
            )
        return "\n".join(lines)

    # --- the readers -----------------------------------------------------------------------------

    def _now(self) -> float:
        return time.perf_counter() - self._start

    def _add(self, stage: str, what: str, seconds: float, **more: Any) -> dict[str, Any]:
        row = {"stage": stage, "what": what, "start_s": self._now() - seconds, "seconds": seconds, **more}
        self._rows.append(row)
        return row

    def _traced(self, event: events.GraphTraced) -> None:
        self.model_name = event.model
        self._add("trace", event.model, event.seconds)

    def _split(self, event: events.GraphSplit) -> None:
        self.model_name = event.model
        self._add("split", f"{event.model}: {event.pieces} pieces", event.seconds)

    def _requested(self, event: events.CompileRequested) -> None:
        self._caches = torch_hooks.compile_cache_counts()

    def _compiled(self, event: events.PieceCompiled) -> None:
        now = torch_hooks.compile_cache_counts()
        missed, hit = (now[name] > self._caches[name] for name in ("misses", "hits"))
        cache = "miss" if missed else "hit" if hit else "none"
        self._piece(event, event.seconds, cache=cache, adaptor=event.adaptor)

    def _loaded(self, event: events.ArtifactLoaded) -> None:
        self._piece(event, event.seconds, cache="loaded")

    def _shared(self, event: events.PieceShared) -> None:
        self._piece(event, 0.0, cache="shared", shared_with=event.owner)

    def _piece(self, event: Any, seconds: float, **more: Any) -> None:
        shape = "general" if event.shape is None else str(event.shape)
        what = event.piece if event.shape is None else f"{event.piece} @ {event.shape}"
        self._add("compile", what, seconds, piece=event.piece, shape=shape, key=event.key, **more)

    def _triggered(self, event: events.CaptureTriggered) -> None:
        self._close_size(self._now())
        what = f"{event.mode}{' decode' if event.uniform_decode else ''} {event.num_tokens}"
        self._open = self._add(
            *("capture", what, 0.0),
            mode=event.mode,
            num_tokens=event.num_tokens,
            uniform_decode=event.uniform_decode,
            graphs=0,
            recording_s=0.0,
        )

    def _captured(self, event: events.GraphCaptured) -> None:
        if self._open is not None:
            self._open["graphs"] += 1
            self._open["recording_s"] += event.seconds
            self._open["emulated"] = event.emulated
            self._open["seconds"] = self._now() - self._open["start_s"]

    def _capture_finished(self, event: events.CaptureFinished) -> None:
        self.model_name = event.model
        self._close_size(None)

    def _close_size(self, now: float | None) -> None:
        """The size that was being captured ends: at ``now``, where the next began, or with its last graph."""
        if self._open is not None and now is not None:
            self._open["seconds"] = now - self._open["start_s"]
        self._open = None

    def _difference(self) -> CompilationCounter:
        before, after = self._before.as_dict(), compilation_counter.as_dict()
        return CompilationCounter(**{name: max(after[name] - before[name], 0) for name in after})


_CACHE_WORDS = {
    "miss": "compiled",
    "hit": "from Inductor's cache",
    "loaded": "loaded",
    "shared": "shared",
    "none": "without a cache",
}
