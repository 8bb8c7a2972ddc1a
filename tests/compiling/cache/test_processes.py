"""The cache across processes: real processes, real kills, real files that are broken."""

from __future__ import annotations

import os
import shutil
import signal
import time

import pytest

from cgkit.compiling.cache import entries, explain_cache, pack, unpack, why_miss
from cgkit.compiling.cache.folder import read_key
from cgkit.torch_hooks import find_cpp_compiler
from tests.compiling.cache import project

pytestmark = [
    pytest.mark.skipif(find_cpp_compiler() is None, reason="no C++ compiler"),
    pytest.mark.skipif(os.name == "nt", reason="permissions and signals of POSIX"),
]


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """A project that was compiled once: its folder, the cache, and what the process said."""
    root = tmp_path_factory.mktemp("warm")
    folder = project.write(root / "checkout")
    return folder, root / "cache", project.run(folder, root / "cache")


def copied(warm, tmp_path):
    """The same, in other places: whatever is done to it harms no other test."""
    folder, cache, first = warm
    shutil.copytree(folder, tmp_path / "moved", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(cache, tmp_path / "cache")
    return tmp_path / "moved", tmp_path / "cache", first


#: Put behind generated code, it makes another result of what the code computes.
WRONG = """
right = call
def call(args):
    return [result.mul_(7) for result in right(args)]
"""


def compiles(found) -> int:
    return found["counters"].get("num_inductor_compiles", 0)


def loads(found) -> int:
    return found["counters"].get("num_compiled_artifacts_loaded", 0)


def test_a_second_process_elsewhere_compiles_nothing(warm, tmp_path):
    folder, cache, first = copied(warm, tmp_path)
    assert first["equal"] and compiles(first) == 2 and first["counters"]["num_compiled_artifacts_saved"] == 2
    (folder / "untraced.py").write_text(project.UNTRACED + "# another comment\n")
    again = project.run(folder, cache, {"cudagraph_capture_sizes": [1, 2], "max_num_seqs": 3})
    assert again["equal"] and compiles(again) == 0 and loads(again) == 2 and not again["warnings"]
    assert again["key"] == first["key"]
    assert again["seconds"] < first["seconds"]


def test_a_changed_line_in_an_inlined_helper_is_a_miss_and_is_named(warm, tmp_path, monkeypatch):
    folder, cache, first = copied(warm, tmp_path)
    (folder / "helper.py").write_text(project.HELPER.replace("* 2.0", "* 3.0"))
    changed = project.run(folder, cache)
    assert changed["equal"] and compiles(changed) == 2 and changed["key"] != first["key"]
    monkeypatch.setenv("CGKIT_CACHE_DIR", str(cache))
    (difference,) = explain_cache(first["key"], changed["key"])
    assert (difference.factor, difference.name) == ("code", "helper")
    assert difference.lines == (
        "- line 6: return torch.relu(x) * 2.0",
        "+ line 6: return torch.relu(x) * 3.0",
    )
    key = read_key(next(path for path in entries() if path.name == changed["key"]))
    assert [each.name for each in why_miss(key)] == ["helper"]


@pytest.mark.slow
def test_a_field_that_matters_is_a_miss_and_off_is_off(warm, tmp_path):
    folder, cache, first = copied(warm, tmp_path)
    other = project.run(folder, cache, {"inductor_compile_config": {"epilogue_fusion": False}})
    assert other["equal"] and compiles(other) == 2 and other["key"] != first["key"]
    off = project.run(folder, cache, CGKIT_DISABLE_COMPILE_CACHE="1")
    assert off["equal"] and compiles(off) == 2 and not loads(off)
    assert "num_compiled_artifacts_saved" not in off["counters"]


@pytest.mark.slow
def test_broken_files_are_compiled_again_and_said(warm, tmp_path):
    folder, cache, _ = copied(warm, tmp_path)
    pieces = sorted(cache.rglob("piece_*.bin"))
    pieces[0].write_bytes(pieces[0].read_bytes()[:-100])
    library = next(iter(cache.rglob("*.so")))
    library.write_bytes(library.read_bytes()[:-64] + bytes(64))
    for code in cache.rglob("inductor/*/*.py"):
        code.write_text(code.read_text() + WRONG)
    found = project.run(folder, cache)
    assert found["equal"] and compiles(found) >= 1 and found["warnings"]
    assert any("not what was written" in warning for warning in found["warnings"])
    again = project.run(folder, cache)
    assert again["equal"] and compiles(again) == 0 and loads(again) == 2


@pytest.mark.slow
def test_what_a_killed_process_left_half_is_never_loaded(warm, tmp_path):
    folder, cache, _ = copied(warm, tmp_path)
    for piece in cache.rglob("piece_*.bin"):  # it was killed before it wrote them
        piece.unlink()
    for name in ("fxgraph", "aotautograd"):
        shutil.rmtree(next(cache.rglob(name)))
    for path in cache.rglob("inductor/*/*"):
        if path.suffix in (".so", ".py"):
            path.write_bytes(path.read_bytes()[:3000])  # to load half a library ends a process
    found = project.run(folder, cache)
    assert found["equal"] and compiles(found) == 2 and not found["warnings"]
    again = project.run(folder, cache)
    assert again["equal"] and compiles(again) == 0 and loads(again) == 2


@pytest.mark.slow
def test_others_may_not_put_code_into_the_cache(warm, tmp_path):
    folder, cache, _ = copied(warm, tmp_path)
    for code in cache.rglob("inductor/*/*.py"):
        code.write_text(code.read_text() + WRONG)
    cache.chmod(0o777)
    before = sorted(cache.rglob("*"))
    found = project.run(folder, cache)
    assert sorted(cache.rglob("*")) == before
    assert found["equal"] and compiles(found) == 2 and not loads(found)
    assert any("can be written by others" in warning for warning in found["warnings"])


@pytest.fixture
def read_only():
    """Makes folders read-only, and writable again afterwards; skips where that binds nobody."""
    made = []

    def lock(root):
        for each in sorted([root, *(path for path in root.rglob("*") if path.is_dir())]):
            made.append(each)
            each.chmod(0o500)
        if not project.is_bound(root):
            pytest.skip("permissions bind no process here")

    yield lock
    for each in made:
        each.chmod(0o700)


@pytest.mark.slow
def test_a_folder_that_cannot_be_written(warm, tmp_path, read_only):
    folder, cache, _ = copied(warm, tmp_path)
    shutil.rmtree(cache)
    cache.mkdir()
    read_only(cache)
    found = project.run(folder, cache, before_exec=project.bound_by_permissions)
    assert found["equal"] and compiles(found) == 2 and not loads(found) and found["warnings"]
    assert any("Permission denied" in warning for warning in found["warnings"])
    assert list(cache.iterdir()) == []


@pytest.mark.slow
def test_a_filled_folder_that_cannot_be_written_is_never_wrong(warm, tmp_path, read_only):
    folder, cache, first = copied(warm, tmp_path)
    next(cache.rglob("piece_*.bin")).unlink()
    for name in ("fxgraph", "aotautograd"):  # so that Inductor wants to write
        shutil.rmtree(next(cache.rglob(name)))
    before = sorted(cache.rglob("*"))
    read_only(cache)
    found = project.run(folder, cache, before_exec=project.bound_by_permissions)
    assert found["equal"] and found["key"] == first["key"]
    assert loads(found) + compiles(found) == 2 and compiles(found)
    assert sorted(cache.rglob("*")) == before
    assert any("are not kept" in warning for warning in found["warnings"])


@pytest.mark.slow
def test_two_at_once_and_one_that_is_killed(tmp_path):
    folder, cache = project.write(tmp_path / "checkout"), tmp_path / "cache"
    for delay in (6.0, 9.0, 12.0):
        process = project.start(folder, cache)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    both = [project.finish(each) for each in [project.start(folder, cache) for _ in range(2)]]
    assert all(found["equal"] for found in both)
    last = project.run(folder, cache)
    assert last["equal"] and compiles(last) == 0 and loads(last) == 2 and not last["warnings"]


@pytest.mark.slow
def test_one_file_of_it_and_back(warm, tmp_path):
    folder, cache, first = copied(warm, tmp_path)
    assert pack(tmp_path / "class.tgz", cache) == [first["key"]]
    elsewhere = tmp_path / "elsewhere"
    for _ in range(2):  # a second time changes nothing
        assert unpack(tmp_path / "class.tgz", elsewhere) == [first["key"]]
    found = project.run(folder, elsewhere)
    assert found["equal"] and compiles(found) == 0 and loads(found) == 2 and not found["warnings"]
