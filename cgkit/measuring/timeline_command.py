"""What ``cgkit timeline`` does: reads traces, bills them, and writes one page with the bill and the timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from cgkit.errors import CgkitError, TimelineError
from cgkit.files import check_writable, whole_file
from cgkit.measuring.bill import Bill, bill, plot, whole
from cgkit.measuring.bill_table import reading_table
from cgkit.measuring.timeline import WHOLE, Timeline


@dataclass
class TimelineResult:
    """What was found: the timeline, a bill for each process (the busiest first) and the page."""

    timeline: Timeline
    bills: list[Bill]
    steps: list[Bill]
    page: Path

    def facts(self) -> dict[str, Any]:
        """For ``--json``. The counts are the whole trace's; times and parts those of the first bill.

        ``processes`` has the same for each process, ``steps`` the median step of each.
        """
        t, first = self.timeline, self.bills[0]
        c = t.completeness
        return {
            "events": c["events_read"],
            "events_on_timeline": len(t.events),
            "kernels": c["kernels"],
            "kernels_tied": c["kernels_tied"],
            "kernels_in_graphs": c["kernels_in_graphs"],
            "launches": c["launches"],
            "graph_launches": c["graph_launches"],
            **_bill_facts(first),
            "complete": not c["truncated"] and not c["warnings"],
            "truncated": c["truncated"],
            "completeness": t.complete(),
            "processes": [_bill_facts(one) for one in self.bills],
            "steps": [_bill_facts(one) for one in self.steps],
            "number_of_steps": int((t.steps["name"] != WHOLE).sum()),
            "skipped": c["skipped"],
            "page": str(self.page),
        }

    def text(self) -> str:
        """For a terminal."""
        from cgkit.plotting.tables import text_table

        t = self.timeline
        shown = [*self.bills, *self.steps]
        device = f" · {t.about['device']}" if t.about.get("device") else ""
        lines = [f"{t.about['source']}{device}", "", text_table(reading_table(shown)), ""]
        lines += dict.fromkeys(note for one in shown for note in one.notes)
        return "\n".join([*lines, *t.complete(), f"page: {self.page}"])


def run(
    paths: Sequence[str | Path],
    *,
    out: str | Path = "out/timeline.html",
    step: int | None = None,
    python: bool = False,
) -> TimelineResult:
    """Reads ``paths``, bills them and writes the page ``out``.

    Args:
        paths: trace files of one run.
        out: the page; written whole or not at all.
        step: bill this step; by default the whole trace, and beside it the median step where steps are marked.
        python: show the Python functions too, if the trace has them.

    Raises:
        TimelineError: a trace cannot be read, or has no such step.
        CgkitError: the page cannot be written.
    """
    page = _writable(out, paths)
    timeline = Timeline.from_trace(list(paths), python=python)
    processes = _processes(timeline)
    if not processes:
        raise TimelineError(
            f"{timeline.about['source']}: neither CPU nor GPU events, so there is nothing to bill"
        )
    marked = set(timeline.steps.loc[timeline.steps["name"] != WHOLE, "process"])
    if step is None:
        bills = [whole(timeline, process) for process in processes]
        steps = [bill(timeline, None, process) for process in processes if process in marked]
    else:
        bills = [bill(timeline, step, process) for process in processes if _has(timeline, step, process)]
        steps = []
        if not bills:
            bill(timeline, step)  # says which there are
    result = TimelineResult(timeline, bills, steps, page)
    _write(page, _html(result))
    return result


def _has(timeline: Timeline, step: int, process: int) -> bool:
    steps = timeline.steps
    return bool(((steps["process"] == process) & (steps["step"] == step)).any())


def _processes(timeline: Timeline) -> list[int]:
    """All processes, those with the most kernels first."""
    kernels = timeline.kernels["process"].value_counts()
    there = timeline.steps["process"].unique().tolist()
    return sorted(there, key=lambda one: (-int(kernels.get(one, 0)), one))


def _bill_facts(one: Bill) -> dict[str, Any]:
    return {
        "wall_us": one.wall_us,
        "gpu_busy_us": one.gpu["busy"],
        "parts": one.parts,
        "gpu_parts": one.gpu,
        "step": one.step,
        "process": one.process,
        **{f"step_{name}" if name in _COUNTED else name: value for name, value in one.facts().items()},
    }


_COUNTED = ("kernels", "kernels_tied", "kernels_in_graphs", "launches", "graph_launches")


def _writable(out: str | Path, traces: Sequence[str | Path]) -> Path:
    """``out``, if a file can be written there that is no trace: asked before the work, not after it."""
    path = check_writable(out)
    if any(_is_file(path, one) for one in traces):
        raise CgkitError(f"out={str(path)!r} is one of the traces; name another file")
    return path


def _is_file(path: Path, other: str | Path) -> bool:
    """Whether both are there and the same."""
    try:
        return path.samefile(other)
    except OSError:
        return False


def _write(path: Path, text: str) -> None:
    """The whole page or none."""
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8")


def _html(result: TimelineResult) -> str:
    """The page: facts, the bill as picture and table, the timeline, what is missing."""
    from cgkit.plotting.picture import Picture
    from cgkit.plotting.report import Section, figure, page
    from cgkit.plotting.tables import table

    t, first = result.timeline, result.bills[0]
    shown = [*result.bills, *result.steps]
    busy = first.gpu["busy"] / first.wall_us if first.wall_us else 0.0
    facts = [
        ("wall time", f"{first.wall_us / 1000:,.3f} ms"),
        ("GPU busy", f"{100 * busy:.1f} %" if first.saw_gpu else "no GPU events"),
        (
            "kernels tied to their launch",
            f"{t.completeness['kernels_tied']:,} of {t.completeness['kernels']:,}",
        ),
        ("launches", f"{t.completeness['launches']:,}"),
        ("graph launches", f"{t.completeness['graph_launches']:,}"),
    ]
    picture = Picture(plot(shown), _alt(shown)).svg()
    bills = Section(
        "The bill",
        "Where the wall time went: the parts of each side add up to it.",
        [figure(picture), table(reading_table(shown), rows=40)],
    )
    missing = "".join(f"<li>{escape(line)}</li>" for line in t.complete())
    complete = Section("How complete this is", "", [f"<ul>{missing}</ul>"])
    warnings = " ".join(t.completeness["warnings"])
    return page(
        f"Timeline of {t.about['source']}",
        escape(
            " · ".join(
                f"batch {t.about[key]}" if str(t.about[key]).isdigit() else str(t.about[key])
                for key in ("model", "mode", "batch", "device")
                if t.about.get(key)
            )
        ),
        facts,
        [bills, Section("The timeline", "", _timeline_parts(t)), complete],
        note=escape(warnings),
        footer="Made by <code>cgkit timeline</code>. Times come from the trace.",
    )


def _alt(bills: Sequence[Bill]) -> str:
    """The bill in words, for somebody who does not see the picture."""
    said = []
    for one in bills:
        for side, parts in (("CPU", one.parts), ("GPU", one.gpu)):
            largest = sorted(((us, name) for name, us in parts.items() if us > 0), reverse=True)[:4]
            words = ", ".join(
                f"{name.replace('_', ' ')} {100 * us / one.wall_us:.0f} %" for us, name in largest
            )
            said.append(f"{one.mode or one.step}, {side}: {words}")
    return "Stacked bars of wall time. " + "; ".join(said)


def _timeline_parts(timeline: Timeline) -> list[str]:
    """The interactive timeline; without matplotlib, which it takes its static picture from, the lanes as a table."""
    from cgkit.plotting.tables import table

    try:
        return [timeline.explore().html()]
    except ImportError:
        pass
    events = timeline.events
    lanes = (
        events.groupby("lane", observed=True)["dur_us"].agg(events="count", longest_us="max").reset_index()
    )
    return [table(lanes, rows=40)]
