"""notebooks/scrub.py: no output says where it was made, and nothing else of it changes."""

import runpy
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="notebooks are read by nbformat")
FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("[0-9]*.ipynb"))


@pytest.fixture(scope="module")
def scrub():
    return runpy.run_path(str(FOLDER / "scrub.py"))


@pytest.mark.parametrize(
    ("said", "scrubbed"),
    [
        ("/srv/env/.venv/lib/python3.12/site-packages/torch/x.py:3: W", "site-packages/torch/x.py:3: W"),
        ('File "/usr/lib/python3/dist-packages/numpy/a.py"', 'File "site-packages/numpy/a.py"'),
        ("/usr/lib/python3.12/threading.py:9", "lib/python3.12/threading.py:9"),
        ("at /srv/check out/notebooks/a.csv", "at ./notebooks/a.csv"),
        ("/srv/elsewhere/cgkit/tracing/trace.py:7", "./cgkit/tracing/trace.py:7"),
        ('File "/tmp/ipykernel_555/1403116513.py", line 31', 'File "this notebook", line 31'),
        ("(...mp/ipykernel_555/4097275592.py:3: if x)", "(this notebook, line 3: if x)"),
        ("(...nel_12345/4097275592.py:3: if x)", "(this notebook, line 3: if x)"),
        ("/tmp/tmpcukatvq5/moved_model.py was traced", ".../moved_model.py was traced"),
        ("<td>/tmp/tmpcukatvq5/a_b.csv</td>", "<td>.../a_b.csv</td>"),
        ("cache: /home/somebody/.cache/cgkit, /root/.cache", "cache: ~/.cache/cgkit, ~/.cache"),
        (
            "W1130 12:05:14.420000 555 torch/_dynamo/x.py:13] a\nW1130 12:05:14.420000 555 torch/x.py:1] b",
            "W torch/_dynamo/x.py:13] a\nW torch/x.py:1] b",
        ),
    ],
)
def test_folders_go(scrub, said, scrubbed):
    assert scrub["scrub_text"](said, Path("/srv/check out")) == scrubbed


@pytest.mark.parametrize(
    "said",
    [
        "https://github.com/OWNER/NAME/blob/main/cgkit/tracing/trace.py",
        "https://example.org/home/page, 3/tmp/4, and/or, a/root/b, torch/_dynamo/x.py:13",
        "</span></td></tr><path d='M 0/1'/>",
        "transformers/models/mamba/modeling_mamba.py:284",
        "16.2/17.2 ms of /srv/check outside",
    ],
)
def test_all_else_stays(scrub, said):
    assert scrub["scrub_text"](said, Path("/srv/check out")) == said


def test_outputs_and_widgets_are_scrubbed_and_sources_and_pictures_are_not(scrub):
    path, short = "/srv/check out/a.py", "./a.py"
    cell = nbformat.v4.new_code_cell(path)
    data = {
        "text/html": path,
        "image/png": path,
        "image/svg+xml": path,
        "application/json": {"at": [path, 3]},
    }
    cell.outputs = [
        nbformat.v4.new_output("display_data", data),
        nbformat.v4.new_output("stream", name="stderr", text=path),
        nbformat.v4.new_output("error", ename="E", evalue=path, traceback=[path]),
    ]
    notebook = nbformat.v4.new_notebook(cells=[cell, nbformat.v4.new_markdown_cell(path)])
    notebook.metadata["widgets"] = {"state": {"outputs": [{"text": path}]}}
    scrub["scrub"](notebook, Path("/srv/check out"))
    shown, stream, error = cell.outputs
    assert shown.data == {
        "text/html": short,
        "image/png": path,
        "image/svg+xml": short,
        "application/json": {"at": [short, 3]},
    }
    assert stream.text == error.evalue == error.traceback[0] == short
    assert notebook.metadata.widgets == {"state": {"outputs": [{"text": short}]}}
    assert cell.source == notebook.cells[1].source == path
    nbformat.validate(notebook)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_committed_is_scrubbed(scrub, path):
    text = path.read_text()
    assert nbformat.writes(scrub["scrub"](nbformat.reads(text, as_version=4))) == text.rstrip("\n")
