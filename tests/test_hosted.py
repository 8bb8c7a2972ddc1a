"""Colab and Binder: the set-up cell does nothing elsewhere; installed is what pyproject.toml and the Makefile name."""

import os
import re
import runpy
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import nbformat
import pytest

jupytext = pytest.importorskip("jupytext", reason="the notebooks' sources are paired by jupytext")
ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.fixture(scope="module")
def hosted():
    return runpy.run_path(str(FOLDER / "hosted.py"))


def run_cell(source):
    """Runs the set-up cell; returns what it asked of IPython."""
    asked = []
    shell = types.SimpleNamespace(
        system=lambda line: asked.append(("system", line)),
        run_line_magic=lambda name, line: asked.append((name, line)),
    )
    exec(source, {"get_ipython": lambda: shell})
    return asked


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_notebook_and_its_source_have_the_set_up_cell(path, hosted):
    for cells in (
        nbformat.read(path, as_version=4).cells,
        jupytext.read(FOLDER / "src" / f"{path.stem}.py").cells,
    ):
        tagged = [number for number, cell in enumerate(cells) if "setup" in cell.metadata.get("tags", ())]
        assert tagged == [1] and cells[1].source == hosted["set_up"](), "run `make hosted`"


def test_the_set_up_cell_does_nothing_but_in_colab(hosted, monkeypatch):
    assert "google.colab" not in sys.modules
    assert run_cell(hosted["set_up"]()) == []
    monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    (how, line), (cd, folder), (magic, script) = run_cell(hosted["set_up"]())
    repository, branch = hosted["setting"]()
    assert how == "system" and f"-b {branch} https://github.com/{repository} /content/cgkit" in line
    assert (cd, folder, magic) == ("cd", "-q /content/cgkit/notebooks", "run") and (FOLDER / script).is_file()


def test_a_fork_sets_its_address_in_one_place(hosted, monkeypatch):
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    number, put = len(notebook.cells), hosted["put"]
    assert not put(notebook)
    monkeypatch.setitem(put.__globals__, "setting", lambda: ("somebody/fork", "course"))
    assert put(notebook) and not put(notebook) and len(notebook.cells) == number
    assert "-b course https://github.com/somebody/fork " in notebook.cells[1].source
    links = re.findall(r"\]\((https[^)]+)\)", hosted["badges"]("00_tour.ipynb"))
    assert links == [
        "https://colab.research.google.com/github/somebody/fork/blob/course/notebooks/00_tour.ipynb",
        "https://mybinder.org/v2/gh/somebody/fork/course?urlpath=lab/tree/notebooks/00_tour.ipynb",
    ]
    bare = nbformat.v4.new_notebook(cells=notebook.cells[:1] + notebook.cells[2:])
    assert put(bare) and len(bare.cells) == number


def colab(monkeypatch, installed, torch_after):
    """Runs ``colab.py`` where pip only notes what it was asked; returns that."""
    script = runpy.run_path(str(FOLDER / "colab.py"))
    asked, names = [], script["main"].__globals__

    def pip(command, check):
        assert command[:3] == [sys.executable, "-m", "pip"] and check
        asked.append(command[3:])
        monkeypatch.setitem(names, "torch_version", lambda: torch_after)

    output = types.ModuleType("google.colab.output")
    output.enable_custom_widget_manager = lambda: asked.append("widgets")
    monkeypatch.setitem(sys.modules, "google.colab.output", output)
    for package in ("google", "google.colab"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    monkeypatch.setitem(names, "subprocess", types.SimpleNamespace(run=pip))
    monkeypatch.setitem(names, "find_spec", lambda name: installed or None)
    monkeypatch.setitem(names, "torch_version", lambda: "2.9.0")
    monkeypatch.setattr(sys, "path", [*sys.path])
    names["main"]()
    return asked


def test_colab_installs_what_a_kernel_needs_and_no_more(monkeypatch):
    asked = colab(monkeypatch, installed=False, torch_after="2.13.0")
    assert asked == [
        ["install", "-q", "-e", f"{ROOT.resolve()}[kernel,models]"],
        ["install", "-q", "--no-deps", makefile("WEIGHTS")],
        ["uninstall", "-q", "-y", "torchvision", "torchaudio"],
        "widgets",
    ]
    assert sys.path[0] == str(ROOT.resolve())


def test_colab_keeps_a_torch_that_fits_and_installs_once(monkeypatch):
    assert len(colab(monkeypatch, installed=False, torch_after="2.9.0")) == 3
    assert colab(monkeypatch, installed=True, torch_after="2.9.0") == ["widgets"]


def makefile(name):
    return re.search(rf"^{name} *\?= *(\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]


@pytest.mark.skipif(not Path("/bin/bash").exists(), reason="Binder runs it with bash")
def test_binder_installs_the_versions_of_the_makefile(tmp_path):
    pip = tmp_path / "pip"
    pip.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    pip.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    subprocess.run([str(ROOT / ".binder" / "postBuild")], cwd=ROOT, env={"PATH": path}, check=True)
    torch, ours, weights = (tmp_path / "asked").read_text().splitlines()
    assert torch.endswith(f" {makefile('TORCH')}") and weights.endswith(f"--no-deps {makefile('WEIGHTS')}")
    assert set(re.search(r"\.\[(.+)\]", ours)[1].split(",")) <= set(EXTRAS)
    runtime = (ROOT / ".binder" / "runtime.txt").read_text().strip()
    assert tuple(map(int, runtime.removeprefix("python-").split("."))) >= (3, 11)
    assert "cgkit[kernel]" in EXTRAS["notebook"]
