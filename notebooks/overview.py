"""Draws the map (``pipeline.svg``) and writes the table of notebooks: ``python notebooks/overview.py``.

Both come of ``course.csv`` and of which notebooks are there. ``make notebooks`` does it at its end.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import hosted  # noqa: E402 - of this folder

BEGIN, END = "<!-- the table of notebooks: made by overview.py -->\n", "<!-- end -->\n"


def course() -> pd.DataFrame:
    """``course.csv`` with ``file`` (empty: not there yet) and ``there``."""
    frame = pd.read_csv(HERE / "course.csv", dtype=str, keep_default_na=False)
    frame["file"] = [next((path.name for path in HERE.glob(f"{number}_*.ipynb")), "") for number in frame["number"]]
    return frame.assign(there=frame["file"] != "")


def table(frame: pd.DataFrame) -> str:
    """The notebooks as a Markdown table."""
    lines = ["| | notebook | its question | after | without installing |", "|---|---|---|---|---|"]
    for row in frame.itertuples():
        title = f"[{row.title}]({row.file})" if row.there else f"{row.title} *(not there yet)*"
        after, opened = row.after.replace(",", ", "), hosted.badges(row.file) if row.there else ""
        lines.append(f"| {row.number} | {title} | {row.question} | {after} | {opened} |")
    return "\n".join(lines) + "\n"


def readme(text: str, frame: pd.DataFrame) -> str:
    """``text`` with the table of today between its two marks."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table(frame) + END + rest.partition(END)[2]


def main() -> None:
    from cgkit.plotting import Picture
    from cgkit.plotting.road import road

    frame = course()
    Picture(road(frame)).save(HERE / "pipeline.svg")
    path = HERE / "README.md"
    path.write_text(readme(path.read_text(encoding="utf-8"), frame), encoding="utf-8")
    print(f"README.md: {frame['there'].sum()} of {len(frame)} notebooks are there")


if __name__ == "__main__":
    main()
