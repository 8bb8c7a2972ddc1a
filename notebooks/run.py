"""Makes the notebooks out of their sources: ``python notebooks/run.py 04 05`` (without numbers: all of them).

``src/NN_name.py`` (percent format) is what is written by hand; ``NN_name.ipynb`` is that, run from top to bottom on
this machine, with its outputs; ``scrub.py`` takes the machine's folders out of them. Whoever edits a notebook in
Jupyter instead: ``jupytext --sync`` carries it back.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.output_widget import OutputWidget

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import scrub  # noqa: E402 - of this folder


class SilentOutput(OutputWidget):
    """The output of an ``interact``, kept here and not sent back to the kernel.

    What nbclient (0.11) sends back goes out on the socket on which it waits for the cell's end, past asyncio: the wait
    may then miss the end and last until the cell's timeout.
    """

    def sync_state(self) -> None:
        """Nothing of ours reads it in the kernel."""


def client(notebook: nbformat.NotebookNode, timeout: int) -> NotebookClient:
    """Runs ``notebook`` in the folder of the notebooks; ``timeout`` of a cell, in seconds."""
    where = {"metadata": {"path": str(HERE)}}
    made = NotebookClient(notebook, timeout=timeout, kernel_name="python3", resources=where)
    made.widget_registry["@jupyter-widgets/output"]["OutputModel"] = SilentOutput
    made.on_cell_executed = join_streams
    return made


def join_streams(cell: nbformat.NotebookNode, **_: object) -> None:
    """Makes one output of neighbours on the same stream: a slow machine's kernel sends a ``print`` in several parts."""
    joined: list[nbformat.NotebookNode] = []
    for out in cell.get("outputs", ()):
        if joined and out.output_type == "stream" == joined[-1].output_type and out.name == joined[-1].name:
            joined[-1].text += out.text
        else:
            joined.append(out)
    if cell.cell_type == "code":
        cell.outputs = joined


def dress(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Sets what a reader sees of each cell: which begin a slide (unless the source says), and that cards of claims fold
    their code away."""
    for cell in notebook.cells:
        levels = [len(line) - len(line.lstrip("#")) for line in cell.source.splitlines() if line.startswith("#")]
        if cell.cell_type == "markdown" and levels:
            kind = "slide" if min(levels) <= 2 else "subslide"
            cell.metadata.setdefault("slideshow", {"slide_type": kind})
        if {"stamp", "setup"} & set(cell.metadata.get("tags", ())):
            cell.metadata.setdefault("slideshow", {"slide_type": "skip"})
        if cell.cell_type == "code" and "cgkit.claim(" in cell.source:
            cell.metadata.setdefault("jupyter", {"source_hidden": True})
    return notebook


def make(source: Path) -> Path:
    """Runs one source; writes and returns the notebook."""
    notebook = jupytext.read(source)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # the same each time, for readable diffs
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE.parent), os.environ.get("PYTHONPATH"))))
    client(notebook, timeout=900).execute()
    notebook.metadata.pop("jupytext", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day
    target = HERE / f"{source.stem}.ipynb"
    nbformat.write(scrub.scrub(dress(notebook)), target)
    return target


def told(source: Path) -> tuple[bool, str]:
    """Makes one, and whether that went well with a line about it: the others are made all the same."""
    started = time.perf_counter()
    try:
        made = make(source)
    except Exception as error:
        return False, f"{source.stem}: not made, after {time.perf_counter() - started:.0f} s: {error}"
    return True, f"{made.name}: {time.perf_counter() - started:.0f} s, {made.stat().st_size:,} bytes"


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the notebooks' sources and writes the notebooks.")
    parser.add_argument("numbers", nargs="*", help="of those to run, as 04 (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="notebooks at a time (default 1; times in them suffer)")
    options = parser.parse_args()
    chosen = tuple(options.numbers) or ("",)
    sources = [path for path in sorted((HERE / "src").glob("*.py")) if path.stem.startswith(chosen)]
    if not sources:
        parser.error(f"no source in {HERE / 'src'} begins with {' or '.join(chosen)}")
    failed = 0
    with ProcessPoolExecutor(max(1, options.jobs)) as pool:
        for good, line in pool.map(told, sources):
            print(line, flush=True)
            failed += not good
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
