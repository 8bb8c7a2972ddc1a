"""``capture_modes(runner)``: each graph mode recorded once, as a table: what, in what order, how long, how much memory.

Implements the article's "CUDAGraphMode：一张图还是几段图" (one graph or several) and "capture_model：runner 侧的编排"
(the runner's part) as something to look at: the five modes side by side on one compiled model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from cgkit import events
from cgkit.capturing.modes import resolve_cudagraph_mode
from cgkit.config import AttentionCGSupport, CUDAGraphMode
from cgkit.display import Shown
from cgkit.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

    from cgkit.capturing import CapturedGraphs
    from cgkit.serving.runner import Runner


@dataclass(repr=False)
class ModeTable(Shown):
    """What each mode recorded.

    Attributes:
        rows: a dict a recorded key, in the order of recording, as :meth:`to_frame` gives them.
        modes: a dict a mode, as :meth:`modes_frame` gives them.
        routes: a dict a mode, kind of batch and run of token counts, as :meth:`routes_frame` gives them.
        about: model, device, ``emulated``.
    """

    rows: list[dict[str, Any]]
    modes: list[dict[str, Any]]
    routes: list[dict[str, Any]]
    about: dict[str, Any]

    def to_frame(self) -> pd.DataFrame:
        """A row a recorded key: ``asked`` and ``given`` mode, ``order`` of recording, ``runtime_mode``, ``num_tokens``,
        ``uniform_decode``, ``graphs`` (one a piece, or one for the whole step), ``seconds`` (the recordings alone),
        ``pool_growth_bytes``, ``pool_reserved_bytes`` (after it), ``emulated``."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    def modes_frame(self) -> pd.DataFrame:
        """A row a mode: ``asked``, ``given``, what ``decode`` and ``mixed`` batches take, ``keys``, ``graphs``,
        ``total_s`` (warm-ups included), ``recording_s``, ``pool_reserved_bytes``, ``peak_allocated_bytes``,
        ``emulated``, and ``said``: what was asked, what is given and why."""
        import pandas as pd

        return pd.DataFrame(self.modes)

    def routes_frame(self) -> pd.DataFrame:
        """A row a mode, kind of batch ("decode", "mixed") and run of token counts: ``from_tokens``, ``to_tokens``,
        ``padded`` (what they are padded to), ``runtime_mode`` and ``key``."""
        import pandas as pd

        return pd.DataFrame(self.routes)

    def plot(self, ax: Any = None) -> Any:
        """The pool while each mode is recorded; see :func:`cgkit.plotting.mode_charts.pool_while_recording`."""
        from cgkit.plotting import mode_charts
        from cgkit.plotting.style import About

        about = About(self.about["model"], device=self.about["device"], emulated=self.about["emulated"])
        return mode_charts.pool_while_recording(self.to_frame(), about, ax=ax)

    def __repr__(self) -> str:
        kind = "emulated" if self.about["emulated"] else self.about["device"]
        lines = [f"ModeTable of {self.about['model']} ({kind}): what each graph mode records"]
        for mode in self.modes:
            lines.append(
                f"  {mode['asked']:<18} decode {mode['decode']:<9} mixed {mode['mixed']:<9} "
                f"{mode['graphs']:4d} graphs, {mode['total_s']:6.2f} s, {mode['pool_reserved_bytes'] / 2**20:8.1f} MiB"
            )
        return "\n".join([*lines, *(f"  {m['said']}" for m in self.modes if m["asked"] != m["given"])])


def capture_modes(
    runner: Runner,
    modes: Sequence[CUDAGraphMode | str] = tuple(CUDAGraphMode),
    *,
    support: AttentionCGSupport | str | None = None,
) -> ModeTable:
    """Records every size in each of ``modes``, one mode after the other, and tells what came of it.

    One compiled model serves all of them. What the runner had recorded stays as it is; what is recorded here is freed.

    Args:
        runner: at level 2 or 3; it is compiled if it was not yet.
        modes: in this order; default all five.
        support: what the attention is taken to support; None: what the runner was told.

    Raises:
        ConfigError: a mode is given twice, or the level compiles nothing that could be recorded.
        CaptureError: a recording failed.
    """
    executor = runner.executor
    asked = [CUDAGraphMode.parse(mode, "modes") for mode in modes]
    if len(set(asked)) < len(asked):
        raise ConfigError(f"modes={[mode.name for mode in asked]} names one twice")
    held = executor.support if support is None else AttentionCGSupport.parse(support, "support")
    executor.compile(runner.inputs)
    if executor.compiled is None:
        raise ConfigError(f"level={executor.config.level.value} records nothing: use level 2 or 3")
    was_locked = executor.compiled.lock.locked
    rows: list[dict[str, Any]] = []
    summary: list[dict[str, Any]] = []
    routes: list[dict[str, Any]] = []
    try:
        for mode in asked:
            try:
                found = resolve_cudagraph_mode(mode, held, executor.attention_cut)
            except ConfigError as error:
                summary.append(_nothing(mode, "refused", str(error)))
                continue
            if not found.mode:
                summary.append(_nothing(mode, found.mode.name, found.said))
                continue
            with events.record(events.GraphCaptured) as log:
                captured = executor.record(runner.inputs, mode=found.mode)
            try:
                mine = list(_keys(log, mode, found.mode))
                rows += mine
                summary.append(_summary(captured, mode, found.said, mine))
                routes += _routes(captured, mode)
            finally:
                captured.free()
    finally:
        executor.compiled.lock.locked = was_locked
    emulated = any(row["emulated"] for row in rows) or runner.device.type == "cpu"
    device = torch.cuda.get_device_name() if runner.device.type == "cuda" else runner.device.type
    for each in summary:
        each["emulated"] = emulated
    about = {"model": runner.model.config.name, "device": device, "emulated": emulated}
    return ModeTable(rows, summary, routes, about)


def _keys(log: Sequence[Any], asked: CUDAGraphMode, given: CUDAGraphMode) -> Iterator[dict[str, Any]]:
    """One row for all graphs of a key: they are recorded one right after the other."""
    row: dict[str, Any] = {}
    for event in log:
        key = (event.mode, event.num_tokens, event.uniform_decode)
        if row and (row["runtime_mode"], row["num_tokens"], row["uniform_decode"]) != key:
            yield row
            row = {"order": row["order"] + 1}
        if len(row) < 2:
            row = {
                "asked": asked.name,
                "given": given.name,
                "order": row.get("order", 1),
                "runtime_mode": event.mode,
                "num_tokens": event.num_tokens,
                "uniform_decode": event.uniform_decode,
                "graphs": 0,
                "seconds": 0.0,
                "pool_growth_bytes": 0,
                "pool_reserved_bytes": 0,
                "emulated": event.emulated,
            }
        row["graphs"] += 1
        row["seconds"] += event.seconds
        row["pool_growth_bytes"] += event.pool_reserved_after_bytes - event.pool_reserved_before_bytes
        row["pool_reserved_bytes"] = event.pool_reserved_after_bytes
    if row:
        yield row


def _summary(
    captured: CapturedGraphs, asked: CUDAGraphMode, said: str, rows: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    mode = captured.mode
    return {
        "asked": asked.name,
        "given": mode.name,
        "decode": mode.decode_mode().name,
        "mixed": mode.mixed_mode().name,
        "keys": len(rows),
        "graphs": captured.num_graphs,
        "total_s": captured.seconds,
        "recording_s": sum(row["seconds"] for row in rows),
        "pool_reserved_bytes": captured.pool_bytes.reserved,
        "peak_allocated_bytes": captured.peak_allocated_bytes,
        "said": said,
    }


def _nothing(asked: CUDAGraphMode, given: str, said: str) -> dict[str, Any]:
    none = CUDAGraphMode.NONE.name
    zero = {"keys": 0, "graphs": 0, "total_s": 0.0, "recording_s": 0.0}
    zero |= {"pool_reserved_bytes": 0, "peak_allocated_bytes": 0}
    taken = "-" if given == "refused" else none
    return {"asked": asked.name, "given": given, "decode": taken, "mixed": taken, **zero, "said": said}


def _routes(captured: CapturedGraphs, asked: CUDAGraphMode) -> list[dict[str, Any]]:
    """Where batches go: runs of token counts with one answer, one size above the largest included."""
    rows: list[dict[str, Any]] = []
    for kind, uniform in (("decode", True), ("mixed", False)):
        for num_tokens in range(1, captured.sizes.largest + 2):
            mode, key, padded = captured.dispatcher.route_of(num_tokens, uniform)
            answer = {
                "asked": asked.name,
                "batch": kind,
                "padded": padded if mode else None,
                "runtime_mode": mode.name,
                "key": "" if key is None else str(tuple(key)),
            }
            last = rows[-1] if rows else {}
            if all(last.get(name) == value for name, value in answer.items()):
                last["to_tokens"] = num_tokens
            else:
                rows.append({**answer, "from_tokens": num_tokens, "to_tokens": num_tokens})
    return rows
