"""A timeline: what a run did on the CPU and on the GPU, each kernel tied to what launched it.

It is read from what ``torch.profiler`` writes (Kineto's chrome JSON), of our own runs
(:func:`cgkit.measuring.profile_step`) or of anybody's, NVIDIA or AMD. The article ("CUDA Graph 的原理", how
a CUDA graph works) argues with such timelines. Trace tools commonly assume one launch, one kernel; here one launch has
as many kernels as it has, because all kernels of a replay carry the correlation id of one graph launch.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cgkit.display import Shown
from cgkit.errors import CgkitError, TimelineError

if TYPE_CHECKING:
    import pandas as pd

    from cgkit.measuring.bill import Bill

_STEP = re.compile(r"^ProfilerStep#(\d{1,18})$")
#: The annotation that our own runs put around a whole step.
OUR_STEP = "cgkit step"
WHOLE = "whole trace"


class Timeline(Shown):
    """What happened, as one table; make it with :meth:`from_trace` or :meth:`from_events`.

    ``events``: a DataFrame sorted by ``start_us``, index 0..n-1, with the columns

    - ``lane``: what is one row of the picture: "rank 0 · thread 123 (main)", "rank 0 · GPU 0 stream 7";
    - ``kind``: on the CPU ``python``, ``annotation``, ``op``, ``guard`` (Dynamo's look-up of its cache), ``launch``,
      ``graph_launch``, ``copy_call``, ``sync``, ``runtime`` (any other call); on the GPU ``kernel``, ``memcpy``,
      ``memset``, ``gpu_annotation``; ``other``;
    - ``name``, ``start_us`` (since the trace's first event), ``dur_us``;
    - ``correlation`` (-1: none), ``stream`` and ``device`` (-1 on the CPU), ``process`` (a pid of a file, counted
      from 0), ``thread`` (-1 on the GPU);
    - ``launched_by``: for GPU work the row of the call that launched it (-1: not in the trace);
    - ``graph_launch``: for GPU work that a replay ran the row of the graph launch, else -1;
    - ``piece``, ``stage``: of our own runs ("" elsewhere).

    ``steps``: DataFrame of ``step``, ``process``, ``start_us``, ``dur_us``, ``name``, ``thread``.
    ``about``: what is known of the run. ``completeness``: how much of it is there, see :meth:`complete`.
    """

    def __init__(
        self,
        events: pd.DataFrame,
        about: dict[str, Any] | None = None,
        completeness: dict[str, Any] | None = None,
    ) -> None:
        self.events = events
        self.about: dict[str, Any] = dict(about or {})
        self.steps = _steps(events)
        self.completeness = _counts(events) | {"truncated": False, "warnings": []} | dict(completeness or {})

    @classmethod
    def from_trace(
        cls, paths: str | Path | Sequence[str | Path], *, python: bool = False, name: str | None = None
    ) -> Timeline:
        """Reads one trace file, or several of one run (a file a rank), plain or gzip.

        Args:
            paths: what ``export_chrome_trace`` wrote.
            python: keep the events of Python functions too: most of a trace that was made ``with_stack``.
            name: what pictures and tables call it (default: the file's name).

        Raises:
            TimelineError: a file is missing, empty, no trace, or has no event that could be read. A damaged file
                gives what is whole in it; ``completeness`` says so.
        """
        chrome_trace = _reader()
        several = [paths] if isinstance(paths, str | Path) else list(paths)
        if not several:
            raise TimelineError("no trace file was named")
        return cls._from_raw([chrome_trace.read(path, python=python) for path in several], name)

    @classmethod
    def from_events(
        cls, events: Iterable[dict[str, Any]], *, python: bool = False, name: str | None = None, **header: Any
    ) -> Timeline:
        """The same from events in memory, as they stand in ``traceEvents``; ``header`` is the rest of the file."""
        chrome_trace = _reader()
        import msgspec

        text = msgspec.json.encode({**header, "traceEvents": list(events)}, enc_hook=str)
        return cls._from_raw([chrome_trace.parse(text, source=name or "", python=python)], name)

    @classmethod
    def _from_raw(cls, raws: list[Any], name: str | None) -> Timeline:
        from cgkit.measuring import timeline_frame

        events, pids, warnings = timeline_frame.frame(raws)
        skipped: dict[str, int] = {}
        for raw in raws:
            for label, count in raw.skipped.items():
                skipped[label] = skipped.get(label, 0) + count
        told = [f"{raw.source}: {text}" if len(raws) > 1 else text for raw in raws for text in raw.warnings]
        completeness = {
            "events_read": sum(raw.events_read for raw in raws),
            "skipped": {label: count for label, count in skipped.items() if count},
            "truncated": any(raw.truncated for raw in raws),
            "warnings": told + warnings + _oddities(events),
        }
        about = {"source": name or ", ".join(raw.source for raw in raws), "processes": pids}
        about |= _about(raws[0].header)
        return cls(events, about, completeness)

    @property
    def kernels(self) -> pd.DataFrame:
        """The kernels (no copies), a row each; the index is that of ``events``."""
        return self.events[self.events["kind"] == "kernel"]

    @property
    def launches(self) -> pd.DataFrame:
        """The calls that launch kernels: one by one, and graphs."""
        return self.events[self.events["kind"].isin(["launch", "graph_launch"])]

    def to_frame(self) -> pd.DataFrame:
        """``events``."""
        return self.events

    def complete(self) -> list[str]:
        """Sentences: how complete each number is, and what is missing."""
        c = self.completeness
        lines = [
            f"{c['kernels_tied']:,} of {c['kernels']:,} kernels tied to what launched them",
            _graphs(c["kernels_in_graphs"], c["kernels"], c["graph_launches"]),
        ]
        if skipped := c.get("skipped"):
            left = ", ".join(f"{count:,} {label}" for label, count in skipped.items())
            lines.append(
                f"{len(self.events):,} of {c['events_read']:,} events are on the timeline (not: {left})"
            )
        return lines + list(c["warnings"])

    def bill(self, step: int | None = None, process: int | None = None) -> Bill:
        """Where the wall time of one step went; see :class:`cgkit.measuring.bill.Bill`.

        Args:
            step: as in ``steps``; by default the one with the median wall time of those that are whole.
            process: by default the one with the most kernels.
        """
        from cgkit.measuring import bill

        return bill.bill(self, step, process)

    def gaps(self) -> pd.DataFrame:
        """When each GPU had nothing to do, and why; see :func:`cgkit.measuring.gaps.gaps`."""
        from cgkit.measuring import gaps

        return gaps.gaps(self)

    def plot(self, ax: Any = None, *, step: int | None = None, **options: Any) -> Any:
        """CPU above GPU on one time axis; see :func:`cgkit.plotting.timeline_chart.timeline`.

        Args:
            ax: axes to draw on.
            step: only this one (as in ``steps``; of the first process that has it), until its GPU work has ended.

        Raises:
            TimelineError: there is no such step.
        """
        from importlib import import_module

        chart = import_module("cgkit.plotting.timeline_chart")
        options.setdefault("gaps", self.gaps())
        if step is not None:
            options["window"] = self.window(step)
        return chart.timeline(self.events, self._plot_about(), ax=ax, **options)

    @staticmethod
    def plot_against(
        timelines: Sequence[Timeline], names: Sequence[str] = (), *, ax: Any = None, **options: Any
    ) -> Any:
        """One step of each above each other on one time axis, as in the article's figure.

        The step is the one that the bill takes: the median by wall time.

        Args:
            timelines: for instance an eager run and a replayed one.
            names: of the modes; by default what the traces say.
            ax: axes to draw on; ``options`` as :func:`cgkit.plotting.timeline_chart.compare_timelines` has them.
        """
        from importlib import import_module

        from cgkit.measuring import bill
        from cgkit.measuring.step_window import StepWindow

        windows = []
        for one in timelines:
            process = bill.chosen_process(one, None)
            steps = one.steps[one.steps["process"] == process]
            window = StepWindow.of_step(one, bill.median_step(one, steps)[0])
            windows.append((window.start_us, window.end_us))
        told = [
            str(t.about.get("mode") or t.about.get("source") or f"run {i}") for i, t in enumerate(timelines)
        ]
        first = timelines[0]._plot_about() if len(timelines) else None
        about = dataclasses.replace(first, mode="") if first else None
        compare = import_module("cgkit.plotting.timeline_chart").compare_timelines
        gaps = [one.gaps() for one in timelines]
        known: dict[str, Any] = {"windows": windows, "gaps": gaps}
        return compare([t.events for t in timelines], names or told, about, ax=ax, **(known | options))

    def window(self, step: int, process: int | None = None) -> tuple[float, float]:
        """From the begin of a step to its end, on the CPU and on the GPU, in microseconds of the trace.

        Raises:
            TimelineError: there is no such step.
        """
        from cgkit.measuring.step_window import StepWindow

        found = self.steps[self.steps["step"] == step]
        if process is not None:
            found = found[found["process"] == process]
        if not len(found):
            there = ", ".join(str(one) for one in self.steps["step"].unique()[:12])
            raise TimelineError(f"step {step} is not in the trace; there are: {there}")
        window = StepWindow.of_step(self, found.iloc[0])
        return window.start_us, window.end_us

    def explore(self, *, step: int | None = None, height: int = 440, **options: Any) -> Any:
        """The interactive timeline: zoom, pan, search, click a kernel to see its launch.

        See :func:`cgkit.plotting.explore.explore`.
        """
        from importlib import import_module

        known = {"steps": self.steps, "gaps": self.gaps(), "notes": self.complete()}
        return import_module("cgkit.plotting.explore").explore(
            self.events, self._plot_about(), step=step, height=height, **(known | options)
        )

    def to_perfetto(self, path: str | Path) -> Path:
        """Writes a file that Perfetto reads, with stages and pieces as slices."""
        from importlib import import_module

        return import_module("cgkit.measuring.perfetto").to_perfetto(self, path)

    def _plot_about(self) -> Any:
        from cgkit.plotting.style import About

        known = {
            key: str(self.about.get(key) or "") for key in ("model", "mode", "batch", "device", "recorded")
        }
        if not known["model"]:
            known["model"] = str(self.about.get("source") or "")
        return About(**known, emulated=self.about.get("emulated"))

    def __repr__(self) -> str:
        span = self.events["start_us"] + self.events["dur_us"]
        wall = float(span.max()) / 1000 if len(span) else 0.0
        name = self.about.get("source") or "a run"
        first = f"Timeline of {name}: {len(self.events):,} events, {wall:,.3f} ms, {_many(len(self.steps), 'step')}"
        return "\n  ".join([first, *self.complete()])


def _graphs(inside: int, kernels: int, launches: int) -> str:
    if not launches:
        return "no graph was launched"
    where = "one graph launch" if launches == 1 else f"{launches:,} graph launches"
    return f"{inside:,} of {kernels:,} kernels in {where}"


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def _reader() -> Any:
    try:
        from cgkit.measuring import chrome_trace
    except ModuleNotFoundError as error:
        raise CgkitError(f"reading traces needs {error.name}: pip install 'cgkit[plot]'") from None
    return chrome_trace


def _counts(events: pd.DataFrame) -> dict[str, Any]:
    kernels = events[events["kind"] == "kernel"]
    return {
        "events": len(events),
        "events_read": len(events),
        "kernels": len(kernels),
        "kernels_tied": int((kernels["launched_by"] >= 0).sum()),
        "kernels_in_graphs": int((kernels["graph_launch"] >= 0).sum()),
        "launches": int((events["kind"] == "launch").sum()),
        "graph_launches": int((events["kind"] == "graph_launch").sum()),
    }


def _steps(events: pd.DataFrame) -> pd.DataFrame:
    """The steps that annotations mark; without any, the whole trace of each process is one."""
    import pandas as pd

    names = events["name"].cat.categories
    number = np.array(
        [-1 if name == OUR_STEP else int(m[1]) if (m := _STEP.match(str(name))) else -2 for name in names],
        np.int64,
    )
    code = events["name"].cat.codes.to_numpy()
    mark = number[code] if len(number) else np.empty(0, np.int64)
    chosen = (events["kind"] == "annotation").to_numpy() & (mark > -2)
    if (chosen & (mark == -1)).any():  # our own marks know best
        chosen &= mark == -1
    found = events.loc[chosen, ["process", "start_us", "dur_us", "name", "thread"]].copy()
    found.insert(0, "step", mark[chosen])
    ours = found["step"] == -1
    found.loc[ours, "step"] = found[ours].groupby("process").cumcount()
    rows = [found]
    for process in sorted(set(events["process"].unique()) - set(found["process"].unique())):
        mine = events[(events["process"] == process) & (events["kind"] != "other")]
        if len(mine):
            start, end = mine["start_us"].min(), (mine["start_us"] + mine["dur_us"]).max()
            row = {
                "step": 0,
                "process": process,
                "start_us": start,
                "dur_us": end - start,
                "name": WHOLE,
                "thread": -1,
            }
            rows.append(pd.DataFrame([row]))
    table = pd.concat([row for row in rows if len(row)] or rows[:1], ignore_index=True)
    table["name"] = table["name"].astype(str)
    return table.sort_values(["process", "start_us"], ignore_index=True)


def _about(header: dict[str, Any]) -> dict[str, Any]:
    """What a file says of its run: our own block, and the GPU's name. Nothing else is taken over."""
    ours = header.get("cgkit")
    about = dict(ours) if isinstance(ours, dict) else {}
    devices = header.get("deviceProperties")
    if "device" not in about and isinstance(devices, list):
        names = [str(one.get("name") or "") for one in devices if isinstance(one, dict)]
        about["device"] = ", ".join(sorted({name for name in names if name}))
    return about


def _oddities(events: pd.DataFrame) -> list[str]:
    """What is missing or strange, in sentences."""
    told = []
    gpu = events["kind"].isin(["kernel", "memcpy", "memset"])
    cpu = ~gpu & ~events["kind"].isin(["other", "gpu_annotation"])
    if not gpu.any():
        told.append(
            "there are no GPU events: the CPU side alone can be billed (was ProfilerActivity.CUDA on?)"
        )
    if not cpu.any():
        told.append(
            "there are no CPU events: no kernel can be tied to a launch (was ProfilerActivity.CPU on?)"
        )
    kernels = events[events["kind"] == "kernel"]
    if (missing := int((kernels["launched_by"] < 0).sum())) and cpu.any():
        told.append(f"the launches of {missing:,} kernels are not in the trace (they came before it began)")
    shown = events[events["kind"] != "other"]
    start = shown["start_us"].to_numpy()
    if len(start) > 1:
        end = np.maximum.accumulate(start + shown["dur_us"].to_numpy())
        gap = start[1:] - end[:-1]
        largest = int(gap.argmax())
        if gap[largest] > 10e6:
            told.append(
                f"nothing happens for {gap[largest] / 1e6:,.1f} s after {end[largest] / 1e6:,.3f} s: the clock jumps, "
                "or the trace holds two runs"
            )
    return told
