"""How long it takes to read and bill a trace of a million events, against HolisticTraceAnalysis (HTA).

Both read the same synthetic trace in a process of their own, one after the other; imports are not counted, time and
memory of the process are. HTA 0.5.0 is older than pandas 3 and fails or crawls on it: give it an environment of its
own with pandas 2 (``--hta-python``). With ``--trace`` both read traces of yours instead, and what they find is
compared: launch statistics (HTA assumes one launch, one kernel) and idle time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgkit.errors import CgkitError

if TYPE_CHECKING:
    import pandas as pd

_HERE = Path(__file__).resolve()
#: The goals: at most a fifth of HTA's time, at most 1.5 GiB.
GOAL_SHARE, GOAL_BYTES = 0.2, 1.5 * 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``cgkit bench traces``."""
    parser.add_argument("--events", type=int, default=1_000_000, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--trace", nargs="+", metavar="FILE", help="compare on these traces; none is generated"
    )
    parser.add_argument(
        "--hta-python",
        default=sys.executable,
        metavar="PATH",
        help="a Python that has HolisticTraceAnalysis (default: this one; without it cgkit is measured alone)",
    )
    parser.add_argument(
        "--repeat", type=int, default=3, metavar="N", help="runs of each (default: %(default)s)"
    )
    parser.add_argument("--csv", metavar="FILE", help="write the rows as CSV too")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures or compares; ``frame`` is the table."""
    import pandas as pd

    if args.trace:
        frame = pd.concat([compare(path, args.hta_python) for path in args.trace], ignore_index=True)
    else:
        frame = measure(args.events, args.hta_python, args.repeat)
    if args.csv:
        frame.to_csv(args.csv, index=False, float_format="%.6g")
    rows = frame.to_dict("records")
    if args.trace:
        numbers = frame.columns[2:]
        frame[numbers] = frame[numbers].map(lambda value: "-" if value is None else f"{value:,.0f}")
        return {"frame": frame, "rows": rows}
    return {"frame": frame, "rows": rows, **_verdict(frame)}


def measure(events: int = 1_000_000, hta_python: str = sys.executable, repeat: int = 3) -> pd.DataFrame:
    """Time and memory, a row a run; the tools take turns.

    Columns ``tool``, ``version``, ``pandas`` (its version), ``run``, ``events``, ``file_bytes``, ``load_s``,
    ``bill_s``, ``total_s`` (wall time), ``cpu_s`` (processor time of the same work: it depends less on what else runs),
    ``peak_bytes``, ``kernels``.

    Raises:
        CgkitError: cgkit's own process failed, or HTA's failed although it is installed.
    """
    import pandas as pd

    from cgkit.measuring import synthetic_trace

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "synthetic.json"
        synthetic_trace.write(path, events)
        size = path.stat().st_size
        with_hta = _has_hta(hta_python)
        for i in range(repeat):
            for tool, command in _tools(hta_python, with_hta):
                found = _child([*command, str(path)])
                rows.append(
                    {
                        "tool": tool,
                        "version": found["version"],
                        "pandas": found["pandas"],
                        "run": i,
                        "events": rows[0]["events"] if rows else found["events"],
                        "file_bytes": size,
                        "load_s": found["load_s"],
                        "bill_s": found["bill_s"],
                        "total_s": found["load_s"] + found["bill_s"],
                        "cpu_s": found["cpu_s"],
                        "peak_bytes": found["peak_bytes"],
                        "kernels": found.get("launches", {}).get("kernels"),
                    }
                )
    return pd.DataFrame(rows)


def compare(path: str, hta_python: str = sys.executable) -> pd.DataFrame:
    """What each finds in one trace, a row a quantity (``trace``, ``quantity``).

    ``cgkit``: all that there is; ``cgkit_like_hta``: with HTA's restrictions applied; ``hta``; ``hta_unrounded``:
    with its rounding to whole microseconds switched off. Why they differ: :mod:`cgkit.measuring.launches`.
    """
    import pandas as pd

    from cgkit.measuring.bill import whole
    from cgkit.measuring.launches import idle_by_stream, launch_statistics
    from cgkit.measuring.timeline import Timeline

    if not _has_hta(hta_python):
        raise CgkitError(f"{hta_python} has no HolisticTraceAnalysis; name one that has with --hta-python")
    timeline = Timeline.from_trace(path)
    idle, all_of, like = (
        idle_by_stream(timeline),
        launch_statistics(timeline),
        launch_statistics(timeline, like_hta=True),
    )
    worker = [hta_python, str(_HERE.with_name("hta_worker.py")), str(Path(path).resolve())]
    rounded, exact = _child(worker), _child(worker, HTA_DISABLE_NS_ROUNDING="1")
    rows = []

    def row(what: str, ours: float, alike: float, theirs: Any) -> None:
        values = {"hta_unrounded": theirs(exact), "hta": theirs(rounded)}
        rows.append(
            {"trace": Path(path).name, "quantity": what, "cgkit": ours, "cgkit_like_hta": alike, **values}
        )

    for name in ("kernels", "launch_us", "run_us"):
        count = name == "kernels"
        row(
            {
                "kernels": "GPU works with a launch",
                "launch_us": "us in these launches",
                "run_us": "us they run",
            }[name],
            len(all_of)
            if count
            else _launch_time(all_of)
            if name == "launch_us"
            else float(all_of[name].sum()),
            len(like) if count else float(like[name].sum()),
            lambda found, name=name: found.get("launches", {}).get(name),
        )
    for name in ("host_wait", "kernel_wait", "other"):
        ours = float(idle[f"{name}_us"].sum())
        row(f"us idle per stream, {name}", ours, ours, lambda found, name=name: _idle(found, name))
    one = whole(timeline)
    per_stream = float(idle[["host_wait_us", "kernel_wait_us", "other_us"]].sum().sum())
    row("us idle, all together", one.wall_us - one.gpu["busy"], per_stream, lambda found: _idle(found, ""))
    return pd.DataFrame(rows)


def _launch_time(table: pd.DataFrame) -> float:
    """Of calls, each counted once however many kernels it launched; the bill's numbers, not HTA's."""
    return float(table.drop_duplicates("launched_by")["launch_us"].sum())


def _idle(found: dict[str, Any], category: str) -> float | None:
    rows = found.get("idle")
    if rows is None:
        return None
    return sum(one["idle_time"] for one in rows if category in ("", one["idle_category"]))


def _verdict(frame: pd.DataFrame) -> dict[str, Any]:
    best = frame.groupby("tool")["total_s"].median()
    processor = frame.groupby("tool")["cpu_s"].median()
    peak = float(frame.loc[frame["tool"] == "cgkit", "peak_bytes"].max())
    share = float(best["cgkit"] / best["HTA"]) if "HTA" in best else None
    return {
        "share_of_hta_time": share,
        "share_of_hta_cpu_time": float(processor["cgkit"] / processor["HTA"]) if "HTA" in best else None,
        "peak_bytes": peak,
        "within_goal": (share is None or share <= GOAL_SHARE) and peak <= GOAL_BYTES,
    }


def _tools(hta_python: str, with_hta: bool) -> list[tuple[str, list[str]]]:
    tools = [
        (
            "cgkit",
            [sys.executable, "-m", __name__ if __name__ != "__main__" else "cgkit.measuring.bench_traces"],
        )
    ]
    return tools + ([("HTA", [hta_python, str(_HERE.with_name("hta_worker.py"))])] if with_hta else [])


def _has_hta(python: str) -> bool:
    try:
        code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('hta') is None)"
        return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0
    except OSError as error:
        raise CgkitError(f"--hta-python {python!r} cannot be run: {error.strerror}") from None


def _child(command: list[str], **environment: str) -> dict[str, Any]:
    """Runs a worker; the last line that it prints is its result."""
    here = str(_HERE.parents[2])
    paths = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": paths} | environment,
    )
    if done.returncode:
        raise CgkitError(f"{command[0]} failed on {command[-1]}: {done.stderr.strip()[-800:]}")
    return json.loads(done.stdout.splitlines()[-1])


def worker(path: str) -> dict[str, Any]:
    """cgkit's side in this process: load, bill of the whole trace and of the median step."""
    import resource
    import time

    import pandas  # imports are not counted

    from cgkit import __version__
    from cgkit.measuring import bill, chrome_trace, timeline_frame  # noqa: F401
    from cgkit.measuring.timeline import Timeline

    before, begin = time.process_time(), time.perf_counter()
    timeline = Timeline.from_trace(path)
    loaded = time.perf_counter()
    one, step = bill.whole(timeline), timeline.bill()
    done = time.perf_counter()
    return {
        "load_s": loaded - begin,
        "bill_s": done - loaded,
        "cpu_s": time.process_time() - before,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "version": __version__,
        "pandas": pandas.__version__,
        "events": timeline.completeness["events_read"],
        "launches": {"kernels": one.kernels_tied},
        "median_step": step.step,
    }


if __name__ == "__main__":
    print(json.dumps(worker(sys.argv[1])))
