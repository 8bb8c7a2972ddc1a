"""Synthetic traces: made here, by construction, recorded nowhere. Their bills are known beforehand.

Times are whole microseconds, so that sums are exact. A :class:`Trace` collects chrome events as Kineto writes
them; the functions below it write whole steps and return what their bill must say.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cgkit.measuring.timeline import Timeline

#: What an NVIDIA and an AMD trace call the same things.
NVIDIA = {
    "launch": "cudaLaunchKernel",
    "graph": "cudaGraphLaunch",
    "copy": "cudaMemcpyAsync",
    "sync": "cudaDeviceSynchronize",
    "other": "cudaFuncGetAttributes",
}
AMD = {
    "launch": "hipExtModuleLaunchKernel",
    "graph": "hipGraphLaunch",
    "copy": "hipMemcpyAsync",
    "sync": "hipDeviceSynchronize",
    "other": "hipGetDevice",
}


@dataclass
class Trace:
    """Events of one process on one device."""

    pid: int = 100
    device: int = 0
    stream: int = 7
    names: dict[str, str] = field(default_factory=lambda: NVIDIA)
    events: list[dict[str, Any]] = field(default_factory=list)
    header: dict[str, Any] = field(default_factory=dict)
    correlation: int = 1000

    def add(self, category: str, name: str, start: float, dur: float, **args: Any) -> dict[str, Any]:
        """A CPU event; ``tid`` among ``args`` names its thread (default: the main one)."""
        tid = args.pop("tid", self.pid)
        event = {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": self.pid,
            "tid": tid,
            "ts": start,
            "dur": dur,
        }
        self.events.append(event | ({"args": args} if args else {}))
        return self.events[-1]

    def step(self, number: int, start: float, dur: float, **args: Any) -> None:
        self.add("user_annotation", f"ProfilerStep#{number}", start, dur, **args)

    def mark(self, name: str, start: float, dur: float, **args: Any) -> None:
        self.add("user_annotation", name, start, dur, **args)

    def op(self, name: str, start: float, dur: float, **args: Any) -> None:
        self.add("cpu_op", name, start, dur, **args)

    def call(self, what: str, start: float, dur: float, **args: Any) -> int:
        """A call into the runtime (``what``: a key of ``names`` or a name); returns its correlation id."""
        self.correlation += 1
        name = self.names.get(what, what)
        self.add("cuda_runtime", name, start, dur, correlation=self.correlation, **args)
        return self.correlation

    def gpu(
        self,
        start: float,
        dur: float,
        correlation: int = 0,
        *,
        category: str = "kernel",
        name: str = "kernel",
        stream: int | None = None,
        device: int | None = None,
    ) -> None:
        """Work on the GPU."""
        stream = self.stream if stream is None else stream
        device = self.device if device is None else device
        args = {"device": device, "stream": stream, "correlation": correlation}
        event = {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": device,
            "tid": stream,
            "ts": start,
            "dur": dur,
        }
        self.events.append(event | {"args": args})

    def timeline(self, **options: Any) -> Timeline:
        return Timeline.from_events(self.events, **options, **self.header)

    def text(self) -> bytes:
        return json.dumps(self.header | {"schemaVersion": 1, "traceEvents": self.events}).encode()

    def save(self, path: Path) -> Path:
        """Writes the trace, packed if ``path`` ends in ``.gz``."""
        path.write_bytes(gzip.compress(self.text()) if path.suffix == ".gz" else self.text())
        return path


def eager_step(
    trace: Trace, start: float, kernels: int = 10, run: float = 3, number: int | None = 1
) -> dict[str, Any]:
    """A launch-bound step without graphs; returns its bill.

    Each kernel costs the CPU 20 us: 6 of Python, 14 in an operator, of which the launch takes 4. It starts 2 us
    after its launch returns and runs ``run`` (at most 15) us, then the GPU idles. At the end the CPU waits, for
    the last kernel and 5 us more.
    """
    assert run <= 15
    for i in range(kernels):
        at = start + 20 * i
        trace.op("aten::add", at + 6, 14)
        correlation = trace.call("launch", at + 12, 4)
        trace.gpu(at + 18, run, correlation)
    end = start + 20 * kernels
    gpu_end = start + 20 * (kernels - 1) + 18 + run
    sync = max(gpu_end - end, 0) + 5
    trace.call("sync", end, sync)
    if number is not None:
        trace.step(number, start, end + sync - start)
    wall = end + sync - start
    parts = {
        "python": 6 * kernels,
        "dispatch": 10 * kernels,
        "kernel_launches": 4 * kernels,
        "waiting": sync,
    }
    return {"wall": wall, "parts": parts, "busy": run * kernels, "kernels": kernels, "end": end + sync}


def graph_step(
    trace: Trace, start: float, graphs: int = 1, nodes: int = 8, run: float = 10, number: int | None = 1
) -> dict[str, Any]:
    """A step of replays; returns its bill.

    Each replay costs the CPU 3 us of Python and a graph launch of 7 us; each has ``nodes`` kernels of ``run`` us
    with 1 us between them. The first replay starts as its launch returns, each further one 2 us after the one
    before. Then the CPU waits.
    """
    at, gpu = start, 0.0
    for i in range(graphs):
        correlation = trace.call("graph", at + 3, 7)
        at += 10
        gpu = max(at, gpu + 2) if i else at
        for _ in range(nodes):
            trace.gpu(gpu, run, correlation)
            gpu += run + 1
        gpu -= 1
    sync = max(gpu - at, 0)
    trace.call("sync", at, sync)
    if number is not None:
        trace.step(number, start, at + sync - start)
    parts = {"python": 3 * graphs, "graph_launches": 7 * graphs, "waiting": sync}
    gpu_parts = {"busy": graphs * nodes * run, "idle_inside_graph": graphs * (nodes - 1)}
    return {
        "wall": at + sync - start,
        "parts": parts,
        "gpu": gpu_parts,
        "kernels": graphs * nodes,
        "end": at + sync,
    }
