"""A class starts from one file: what a notebook compiled on one machine is not compiled on the next."""

import re
import runpy
from pathlib import Path

import pytest

from cgkit.compiling.cache import pack, unpack
from cgkit.torch_hooks import find_cpp_compiler

jupytext = pytest.importorskip("jupytext", reason="the notebooks' sources are paired by jupytext")
FOLDER = Path(__file__).parent.parent / "notebooks"


@pytest.fixture
def class_cache():
    return runpy.run_path(str(FOLDER / "class_cache.py"))


def tour():
    """The tour up to its third stage, the compiled pieces, with a small model."""
    notebook = jupytext.read(FOLDER / "src" / "00_tour.py")
    stop = next(number for number, cell in enumerate(notebook.cells) if "## 4 ·" in cell.source)
    notebook.cells = notebook.cells[:stop]
    for cell in notebook.cells:
        cell.source = re.sub(r"^MODEL = .*$", 'MODEL = "tiny-llama"', cell.source, flags=re.MULTILINE)
    return notebook


@pytest.mark.slow
@pytest.mark.skipif(find_cpp_compiler() is None, reason="no C++ compiler")
def test_a_notebook_compiles_nothing_after_unpack(class_cache, tmp_path):
    first = class_cache["run_and_count"](tour(), tmp_path / "teacher")
    keys = pack(tmp_path / "class.tgz", tmp_path / "teacher")
    assert sorted(unpack(tmp_path / "class.tgz", tmp_path / "student")) == sorted(keys)
    second = class_cache["run_and_count"](tour(), tmp_path / "student")
    assert first["num_inductor_compiles"] == first["num_compiled_artifacts_saved"] == 3
    assert second["num_inductor_compiles"] == second["num_compiled_artifacts_saved"] == 0
    assert second["num_compiled_artifacts_loaded"] == 3


def test_a_number_without_a_notebook(class_cache, tmp_path, capfd):
    assert class_cache["main"](str(tmp_path / "x.tgz"), "99") == 1
    assert "there is no notebook 99" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())
