"""The dump: what is in the folder, that it is whole or not there, and what it will not touch."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgkit import display, torch_hooks
from cgkit.compiling import compile_pieces, debug_dump
from cgkit.compiling.debug_dump import dump_pieces, safe_name
from cgkit.config import CompilationConfig
from cgkit.errors import ConfigError
from tests.compiling.toys import split_llama


def compiled(layers=3, **more):
    return compile_pieces(
        split_llama(layers)[1], CompilationConfig(compiler="eager", cudagraph_mode="NONE", **more)
    )


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_debug_dump_holds_each_different_piece_once(tmp_path):
    graph = compiled(debug_dump_path=str(tmp_path))
    root = tmp_path / "Llama"
    text = (root / "computation_graph.py").read_text()
    assert text.count("def forward") == 3 + 3  # three different pieces, three attentions
    assert "submod_4: the same as submod_2" in text and "def execute(" in text
    for folder, ending in (("keys", ".general.txt"), ("pieces", ".py")):
        names = sorted(path.name for path in (root / folder).iterdir())
        assert names == [f"{name}{ending}" for name in ("submod_0", "submod_2", "submod_6")]
    key = graph.backends[0].general.key
    assert (root / "keys" / "submod_0.general.txt").read_text() == "\n".join(key.lines) + "\n"


def test_every_python_file_is_python(tmp_path):
    root = dump_pieces(compiled(), str(tmp_path))
    files = sorted(root.rglob("*.py"))
    assert {"transformed_code.py", "original_code.py", "computation_graph.py"} <= {f.name for f in files}
    for file in files:
        ast.parse(file.read_text())
    assert "__compiled_fn" in (root / "transformed_code.py").read_text()


def test_the_index_links_every_file_and_needs_nothing_from_outside(tmp_path):
    root = dump_pieces(compiled(compile_sizes=[4]), str(tmp_path))
    html = (root / "index.html").read_text()
    links = [unquote(link) for link in re.findall(r'<a href="([^"#]+)"', html)]
    held = set(everything(root)) - {"index.html", "files.json"}
    assert set(links) == held and len(links) == len(held)
    assert re.findall(r'(?:src|href)="(?:https?:)?//|<script|@import', html) == []
    for part in ("<svg", "submod_2", "num_backend_compilations", "shared with"):
        assert part in html
    assert set(json.loads((root / "files.json").read_text())["files"]) == held | {"index.html"}


@pytest.mark.skipif(torch_hooks.find_cpp_compiler() is None, reason="needs a C++ compiler")
def test_inductors_code_is_in_it(tmp_path):
    config = CompilationConfig(cudagraph_mode="NONE", debug_dump_path=str(tmp_path))
    compile_pieces(split_llama(1)[1], config)
    generated = tmp_path / "Llama" / "generated"
    assert "async_compile" in (generated / "submod_0.general.py").read_text()
    assert "torch.ops.aten" in (generated / "submod_0.general.graph.txt").read_text()


def test_a_second_dump_replaces_the_first(tmp_path):
    dump_pieces(compiled(3), str(tmp_path))
    root = dump_pieces(compiled(1), str(tmp_path))
    assert sorted(path.name for path in (root / "pieces").iterdir()) == ["submod_0.py", "submod_2.py"]
    assert [path.name for path in tmp_path.iterdir()] == ["Llama"]


@pytest.mark.parametrize("where", ["notes.txt", "pieces/mine.py", "deep/er/x"])
def test_a_folder_with_other_files_in_it_is_left_alone(tmp_path, where):
    root = dump_pieces(compiled(1), str(tmp_path))
    (root / where).parent.mkdir(parents=True, exist_ok=True)
    (root / where).write_text("mine")
    before = everything(tmp_path)
    with pytest.raises(ConfigError, match=rf"holds '{re.escape(where)}' that no dump of cgkit wrote"):
        dump_pieces(compiled(1), str(tmp_path))
    assert everything(tmp_path) == before


def test_an_empty_folder_may_be_filled_and_a_manifest_of_nonsense_is_no_manifest(tmp_path):
    (tmp_path / "Llama").mkdir()
    root = dump_pieces(compiled(1), str(tmp_path))
    (root / "files.json").write_text("[1, 2")
    with pytest.raises(ConfigError, match="that no dump of cgkit wrote"):
        dump_pieces(compiled(1), str(tmp_path))


@pytest.mark.parametrize("there_before", [False, True])
@pytest.mark.parametrize("at", [0, 1, 3, "last"])
def test_when_the_disk_is_full_nothing_half_done_stays(tmp_path, monkeypatch, at, there_before):
    graph = compiled(1)
    if there_before:
        dump_pieces(graph, str(tmp_path))
    before = everything(tmp_path)
    write, count = debug_dump._write, []

    def full(path, text):
        if len(count) == at or (at == "last" and path.name == "files.json"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text[:10])
            raise OSError(28, "No space left on device")
        count.append(path)
        write(path, text)

    monkeypatch.setattr(debug_dump, "_write", full)
    with pytest.raises(
        ConfigError, match=r"debug_dump_path=.*No space left on device.*Nothing was left behind"
    ):
        dump_pieces(graph, str(tmp_path))
    assert everything(tmp_path) == before
    assert [p.name for p in tmp_path.iterdir()] == (["Llama"] if there_before else [])


def test_when_the_last_step_fails_the_old_dump_is_there_again(tmp_path, monkeypatch):
    graph = compiled(1)
    dump_pieces(graph, str(tmp_path))
    before, rename, calls = everything(tmp_path), debug_dump.os.rename, []

    def failing(a, b):
        calls.append(a)
        if len(calls) == 2:  # the old one is out of the way, the new one is to come
            raise OSError(5, "Input/output error")
        rename(a, b)

    monkeypatch.setattr(debug_dump.os, "rename", failing)
    with pytest.raises(ConfigError, match="Input/output error"):
        dump_pieces(graph, str(tmp_path))
    assert everything(tmp_path) == before and len(calls) == 3


def test_a_dump_into_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="debug_dump_path"):
        compiled(1, debug_dump_path=str(tmp_path / "file"))
    (tmp_path / "Llama").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        dump_pieces(compiled(1), str(tmp_path))


def test_without_pictures_the_page_still_links_the_files(tmp_path, monkeypatch):
    def broken(*_):
        raise ModuleNotFoundError("No module named 'pandas'")

    monkeypatch.setattr(display, "import_module", broken)
    root = dump_pieces(compiled(1), str(tmp_path))
    html = (root / "index.html").read_text()
    assert 'href="computation_graph.py"' in html and "No module named" in html


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("模型-é", "模型-é"),
        ("../../etc/passwd", "_.._etc_passwd"),
        ("..", "model"),
        ("", "model"),
        ("a/b\\c:d\0e", "a_b_c_d_e"),
        (".hidden", "hidden"),
        ("\ud800", "_"),
    ],
)
def test_names_of_folders(name, folder):
    assert safe_name(name) == folder


@given(st.text())
def test_any_name_makes_a_folder_of_one_level(name):
    made = safe_name(name)
    assert made and not made.startswith(".") and Path(made).name == made and len(made.encode()) <= 255


@pytest.mark.parametrize("name", ["模型\n# injected = 1", "\ud800 x", "a" * 400])
def test_models_of_any_name_are_dumped(tmp_path, name, monkeypatch):
    graph = compiled(1)
    monkeypatch.setattr(graph.split, "model_name", name)
    root = dump_pieces(graph, str(tmp_path))
    ast.parse((root / "computation_graph.py").read_text())
    assert "<svg" in (root / "index.html").read_text()
