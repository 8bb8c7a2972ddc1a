"""A timeline as a file for Perfetto (ui.perfetto.dev, which works without uploading) or chrome://tracing.

Chrome's JSON, gzip if the name ends in ``.gz``. Beside the lanes of the trace there are lanes for stages and pieces,
and an arrow from each launch to each kernel that it ran: a graph launch has as many as it has kernels. Categories
and arguments are Kineto's, so that other tools (and ``Timeline.from_trace``) read the file too.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cgkit.files import whole_file

if TYPE_CHECKING:
    import pandas as pd

    from cgkit.measuring.timeline import Timeline

#: Kineto's category of each of our kinds. ``guard`` is recognised by its name, as in the original.
CATEGORIES = {
    "python": "python_function",
    "annotation": "user_annotation",
    "op": "cpu_op",
    "guard": "cpu_op",
    "launch": "cuda_runtime",
    "graph_launch": "cuda_runtime",
    "copy_call": "cuda_runtime",
    "sync": "cuda_runtime",
    "runtime": "cuda_runtime",
    "kernel": "kernel",
    "memcpy": "gpu_memcpy",
    "memset": "gpu_memset",
    "gpu_annotation": "gpu_user_annotation",
}
_GPU = ("kernel", "memcpy", "memset", "gpu_annotation")
_MARKS = 1_000_000_000  # above all thread ids of a trace: lanes of our own
Event = dict[str, Any]


def to_perfetto(timeline: Timeline, path: str | Path) -> Path:
    """Writes ``timeline``; stages and pieces are slices on lanes of their own.

    Args:
        timeline: of any trace; without marks of ours there are no lanes of stages and pieces.
        path: of the file; ``.gz`` at its end compresses it.

    Returns:
        The path.

    Raises:
        UnwritableFileError: the file cannot be written.
    """
    import msgspec

    path = Path(path)
    about = {key: value for key, value in timeline.about.items() if key not in ("source", "processes")}
    head = msgspec.json.encode({"displayTimeUnit": "ns", "cgkit": about}, enc_hook=str)
    encode = msgspec.json.Encoder(enc_hook=str).encode
    with whole_file(path) as part:
        with gzip.open(part, "wb", compresslevel=5) if path.suffix == ".gz" else part.open("wb") as out:
            out.write(head[:-1] + b',"traceEvents":[\n')
            comma = b""
            for event in events_of(timeline):
                out.write(comma + encode(event))
                comma = b",\n"
            out.write(b"\n]}\n")
    return path


def events_of(timeline: Timeline) -> Iterator[Event]:
    """All events of the file, as chrome has them."""
    frame = timeline.events[timeline.events["kind"] != "other"]
    tracks = _Tracks(frame)
    yield from tracks.names()
    yield from _slices(frame, tracks)
    yield from _arrows(timeline.events, frame, tracks)
    yield from _marks(frame, tracks)


class _Tracks:
    """Where each event stands in the file: ``pid`` and ``tid``."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self.frame = frame
        self.on_gpu = frame["kind"].isin(_GPU).to_numpy()
        process = frame["process"].to_numpy(np.int64)
        device = frame["device"].to_numpy(np.int64)
        self.several = len(np.unique(process)) > 1
        self.pid = np.where(self.on_gpu, 1000 * (process + 1) + 1 + device, 1000 * (process + 1))
        thread = frame["thread"].to_numpy(np.int64)
        thread = np.where(thread < 0, 2**30 - thread, thread)
        self.tid = np.where(self.on_gpu, 1000 * frame["stream"].to_numpy(np.int64), thread)
        self.tid += np.where(self.on_gpu, self._beside(), 0)

    def _beside(self) -> NDArray[np.int64]:
        """Work of one stream that overlaps goes to lanes beside each other: slices of a lane must nest."""
        beside = np.zeros(len(self.frame), np.int64)
        start = self.frame["start_us"].to_numpy()
        end = start + self.frame["dur_us"].to_numpy()
        marks = (self.frame["kind"] == "gpu_annotation").to_numpy()
        for lane in np.unique(self.pid[self.on_gpu] * 2**20 + self.tid[self.on_gpu]):
            inside = np.flatnonzero(self.on_gpu & ~marks & (self.pid * 2**20 + self.tid == lane))
            reach: list[float] = []
            for row, left, right in zip(inside.tolist(), start[inside].tolist(), end[inside].tolist()):
                free = next((k for k, until in enumerate(reach) if until <= left + 5e-4), len(reach))
                reach[free : free + 1] = [right]
                beside[row] = min(free, 900)
        return np.where(marks, 999, beside)

    def names(self) -> Iterator[Event]:
        """Names and order of all processes and threads, those of stages and pieces too."""
        lanes = self.frame["lane"].astype(str).to_numpy()
        _, first = np.unique(np.stack([self.pid, self.tid]), axis=1, return_index=True)
        seen = set()
        for row in sorted(first.tolist()):
            pid, tid, lane = int(self.pid[row]), int(self.tid[row]), lanes[row]
            owner, _, thread = lane.rpartition(" · ")
            if pid not in seen:
                seen.add(pid)
                name = thread.split(" stream ")[0] if self.on_gpu[row] else "CPU"
                yield _meta("process_name", pid, 0, f"{owner} {name}".strip())
                yield {
                    "ph": "M",
                    "name": "process_sort_index",
                    "pid": pid,
                    "tid": 0,
                    "args": {"sort_index": pid},
                }
            extra = tid % 1000 if self.on_gpu[row] else 0
            suffix = "" if not extra else " marks" if extra == 999 else f" (beside, {extra})"
            yield _meta("thread_name", pid, tid, f"{thread}{suffix}")


def _meta(what: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _slices(frame: pd.DataFrame, tracks: _Tracks) -> Iterator[Event]:
    """The events themselves. With several processes correlation ids are made unique: each counts its own."""
    columns = {name: frame[name].tolist() for name in ("name", "start_us", "dur_us", "kind", "correlation")}
    columns |= {name: frame[name].tolist() for name in ("stream", "device", "piece", "stage", "process")}
    rows = zip(*columns.values(), tracks.pid.tolist(), tracks.tid.tolist(), tracks.on_gpu.tolist())
    for name, start, dur, kind, correlation, stream, device, piece, stage, process, pid, tid, on_gpu in rows:
        args: Event = {}
        if correlation >= 0:
            args["correlation"] = correlation + process * 2**40 if tracks.several else correlation
        if on_gpu:
            args |= {"device": device, "stream": stream}
        if piece:
            args["piece"] = piece
        if stage:
            args["stage"] = stage
        yield {
            "ph": "X",
            "cat": CATEGORIES[kind],
            "name": name,
            "pid": pid,
            "tid": tid,
            "ts": round(start, 3),
            "dur": round(dur, 3),
            "args": args,
        }


def _arrows(events: pd.DataFrame, frame: pd.DataFrame, tracks: _Tracks) -> Iterator[Event]:
    """A flow from each launch to each piece of GPU work that it started."""
    by = frame.index.get_indexer(frame["launched_by"])
    start = frame["start_us"].to_numpy()
    for number, row in enumerate(np.flatnonzero(tracks.on_gpu & (by >= 0)).tolist()):
        for phase, end in (("s", int(by[row])), ("f", row)):
            flow: Event = {"ph": phase, "id": number + 1, "cat": "ac2g", "name": "launch"}
            flow |= {
                "pid": int(tracks.pid[end]),
                "tid": int(tracks.tid[end]),
                "ts": round(float(start[end]), 3),
            }
            yield flow | ({"bp": "e"} if phase == "f" else {})


def _marks(frame: pd.DataFrame, tracks: _Tracks) -> Iterator[Event]:
    """Stages and pieces: on the CPU as marked, on the GPU from the first to the last kernel of a run of equals."""
    start = frame["start_us"].to_numpy()
    end = start + frame["dur_us"].to_numpy()
    work = frame["kind"].isin(("kernel", "memcpy", "memset")).to_numpy()
    ours = frame["name"].astype(str).str.startswith("cgkit:").to_numpy()
    marked = ours & frame["kind"].isin(("annotation", "guard")).to_numpy()
    for offset, column in enumerate(("stage", "piece")):
        label = frame[column].astype(str).to_numpy()
        for pid in np.unique(tracks.pid):
            tid = _MARKS + offset
            rows = np.flatnonzero((tracks.pid == pid) & (work | marked) & (label != ""))
            if not len(rows):
                continue
            yield _meta("thread_name", int(pid), tid, f"{column}s")
            if tracks.on_gpu[rows[0]]:
                spans = _runs(label[rows], start[rows], end[rows])
            else:
                spans = list(zip(label[rows].tolist(), start[rows].tolist(), end[rows].tolist()))
            for name, left, right in spans:
                slot = {"pid": int(pid), "tid": tid, "ts": round(left, 3), "dur": round(right - left, 3)}
                yield {"ph": "X", "cat": f"cgkit_{column}", "name": name, **slot}


def _runs(
    label: NDArray[Any], start: NDArray[np.float64], end: NDArray[np.float64]
) -> list[tuple[str, float, float]]:
    """Neighbours (by start) with one label, as one span each; a span ends at the next one's begin at the latest."""
    first = np.flatnonzero(np.r_[True, label[1:] != label[:-1]])
    last = np.maximum.reduceat(end, first)
    last[:-1] = np.minimum(last[:-1], start[first[1:]])
    return [(str(label[a]), float(start[a]), float(b)) for a, b in zip(first, last)]
