"""How smoothly the interactive timeline pans: frame times in a real browser.

A page with a synthetic timeline is opened in headless Chromium, and the view is moved a little in each animation
frame. Two times are taken of each frame: how long the explorer took to draw it, and how long it was from one
frame to the next (16.7 ms is the screen's own rhythm). Without a GPU Chromium draws in software, so a desktop is
faster. What is drawn is made by arithmetic; only the frame times are measurements.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cgkit.errors import CgkitError

if TYPE_CHECKING:
    import pandas as pd

#: Share of the whole trace that is in view.
VIEWS = {"everything": 1.0, "a tenth": 0.1, "a hundredth": 0.01, "a thousandth": 0.001}
GOAL_MS = 33.0
WIDTH, HEIGHT = 1600, 900

_PAN = """async ([span, frames]) => {
  const explorer = document.querySelector("[id^=cgx]").explorer;
  const end = explorer.data.end, width = span * end;
  const left = span >= 1 ? 0 : 0.3 * end;
  explorer.show(left, left + width);
  const draws = [], intervals = [];
  let last = 0;
  for (let k = -3; k < frames; k++) {
    const now = await new Promise(requestAnimationFrame);
    if (k >= 0) { draws.push(explorer.drawMs); intervals.push(now - last); }
    explorer.show(left + 0.004 * k * width, left + (1 + 0.004 * k) * width);
    last = now;
  }
  const seen = explorer.data.start.reduce((n, s) => n + (s < left + width && s >= left), 0);
  return { draws, intervals, seen };
}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``cgkit bench explore``."""
    parser.add_argument("--events", type=int, nargs="+", default=[100_000], metavar="N")
    parser.add_argument(
        "--frames", type=int, default=120, metavar="N", help="of each view (default: %(default)s)"
    )
    parser.add_argument(
        "--chromium", default="", metavar="FILE", help="the browser (default: found on the path)"
    )
    parser.add_argument("--out", default="", metavar="FILE", help="write the rows as CSV too")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """For the command line: the frame, and what it was measured with."""
    frame = measure(args.events, frames=args.frames, chromium=args.chromium)
    if args.out:
        frame.to_csv(args.out, index=False, float_format="%.2f")
    return {"frame": frame, "rows": frame.to_dict("records"), "goal_ms": GOAL_MS}


def measure(events: list[int], *, frames: int = 120, chromium: str = "") -> pd.DataFrame:
    """Pans over timelines of about so many events, in views of different width.

    Returns:
        A row a size and view: ``events``, ``view``, ``events_in_view``, ``frames``, median and 95th percentile of
        ``draw_..._ms`` (the explorer's own work) and ``frame_..._ms`` (from frame to frame), and what it was run on
        (``load``: how many processes wanted a core meanwhile).

    Raises:
        CgkitError: playwright or Chromium is not there.
    """
    import pandas as pd

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for count in events:
            page = _page(count, Path(folder) / f"{count}.html")
            rows += _in_browser(page, frames, chromium or find_chromium())
    return pd.DataFrame(rows)


def find_chromium() -> str:
    """Path of a Chromium or Chrome.

    Raises:
        CgkitError: there is none on the path.
    """
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome"):
        if found := shutil.which(name):
            return found
    raise CgkitError("no chromium, chromium-browser or google-chrome on the path; name one with --chromium")


def synthetic(events: int) -> pd.DataFrame:
    """About ``events`` events of an eager run by arithmetic: two operators, a launch and a kernel, again and again."""
    import pandas as pd

    steps = max(events // 4, 1)
    rng = np.random.default_rng(0)
    begin = np.cumsum(rng.uniform(6, 16, steps))
    run_us = rng.uniform(1.5, 9, steps)
    after = (
        np.maximum.accumulate(begin + 5 - np.r_[0, np.cumsum(run_us)[:-1]]) + np.r_[0, np.cumsum(run_us)[:-1]]
    )
    kinds = ("op", "op", "launch", "kernel")
    start = np.stack([begin, begin + 1, begin + 2.5, after], axis=1).ravel()
    dur = np.stack([np.full(steps, 5.5), np.full(steps, 4.0), np.full(steps, 2.0), run_us], axis=1).ravel()
    place = np.arange(4 * steps)
    kernel = place % 4 == 3
    names = ["aten::linear", "aten::mm", "cudaLaunchKernel"]
    gpu = ["synthetic_gemm", "synthetic_attention", "synthetic_elementwise", "synthetic_norm"]
    name = np.array([gpu[i // 4 % 4] if k else names[i % 4] for i, k in zip(place, kernel)], dtype=object)
    frame = pd.DataFrame(
        {
            "lane": np.where(kernel, "GPU 0 stream 7", "thread 1 (main)"),
            "kind": np.tile(kinds, steps),
            "name": name,
            "start_us": start,
            "dur_us": dur,
            "correlation": np.where(place % 4 >= 2, place // 4, -1),
            "stream": np.where(kernel, 7, -1),
            "device": np.where(kernel, 0, -1),
            "process": 0,
            "thread": np.where(kernel, -1, 1),
            "launched_by": np.where(kernel, place - 1, -1),
            "graph_launch": -1,
            "piece": "",
            "stage": "",
        }
    )
    order = np.argsort(start, kind="stable")
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    frame["launched_by"] = np.where(kernel, rank[frame["launched_by"]], -1)
    return frame.iloc[order].reset_index(drop=True)


def _page(events: int, path: Path) -> Path:
    from cgkit.plotting.explore import explore
    from cgkit.plotting.style import About

    about = About(model="synthetic", mode=f"{events:,} events made by arithmetic")
    return explore(synthetic(events), about, title="Frame times").save(path)


def _in_browser(page: Path, frames: int, chromium: str) -> list[dict[str, Any]]:
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        raise CgkitError("the benchmark drives the browser with playwright: pip install playwright") from None
    rows = []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        tab.goto(page.as_uri())
        tab.wait_for_selector(".cgx[data-ready=yes]")
        count = tab.evaluate("document.querySelector('[id^=cgx]').explorer.data.count")
        for view, span in VIEWS.items():
            seen = tab.evaluate(_PAN, [span, frames])
            rows.append(
                {
                    "events": count,
                    "view": view,
                    "events_in_view": seen["seen"],
                    "frames": frames,
                    "draw_median_ms": float(np.median(seen["draws"])),
                    "draw_p95_ms": float(np.percentile(seen["draws"], 95)),
                    "frame_median_ms": float(np.median(seen["intervals"])),
                    "frame_p95_ms": float(np.percentile(seen["intervals"], 95)),
                    "canvas": f"{WIDTH}x{HEIGHT}",
                    "browser": f"Chromium {browser.version}, headless",
                    "machine": f"{os.cpu_count()} cores, {platform.machine()}, no GPU used",
                    "load": round(os.getloadavg()[0], 1),
                }
            )
        browser.close()
    return rows
