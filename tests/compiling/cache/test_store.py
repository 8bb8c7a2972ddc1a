"""The cache inside one process: factors, trust, whole files, and a disk that refuses."""

from __future__ import annotations

import errno
import io
import json
import os
import tarfile
import threading
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cgkit import CompilationConfig, compilation_counter, compile_pieces, trace
from cgkit import split_graph as cut
from cgkit.compiling.adaptors import EagerAdaptor, InductorStandaloneAdaptor
from cgkit.compiling.cache import CacheKey, cache_key, explain_cache, pack, unpack, why_miss
from cgkit.compiling.cache import folder as places
from cgkit.compiling.cache.inductor_files import InductorFiles
from cgkit.compiling.cache.store import CompileCache, _pack, _unpack
from cgkit.compiling.content_key import ContentKey
from cgkit.errors import CompileError, ConfigError
from cgkit.torch_hooks import find_cpp_compiler

CPU = (torch.device("cpu"),)


class Net(torch.nn.Module):
    def forward(self, x: torch.Tensor):
        return torch.relu(x) + 1


def split():
    return cut(trace(Net(), torch.randn(4, 8)), [])


def key(**changed) -> CacheKey:
    return cache_key(CompilationConfig(**changed), [__file__], CPU)


def test_only_fields_that_change_what_is_compiled_are_in_the_key():
    other = key(
        max_num_seqs=3, cudagraph_mode="FULL", debug=True, compile_sizes=(4,), dispatch="guard_filter"
    )
    assert other == key() and other.digest == key().digest
    for change in ({"splitting_ops": ("a::b",)}, {"custom_ops": ("none",)}, {"compiler": "eager"}):
        (difference,) = explain_cache(key(), key(**change))
        assert difference.factor == "config" and difference.name in change


@pytest.mark.parametrize(
    ("name", "matters"),
    [("TORCHINDUCTOR_FOO", True), ("CXX", True), ("TORCHINDUCTOR_CACHE_DIR", False), ("HOME", False)],
)
def test_the_environment_counts_where_it_changes_code(monkeypatch, name, matters):
    before = key()
    monkeypatch.setenv(name, "/somewhere/else")
    assert (key().hashes["environment"] != before.hashes["environment"]) is matters


def test_an_assembler_counts_unless_it_is_the_one_that_came_with_torch(monkeypatch):
    before = key()
    for path, matters in ((Path(torch.__file__).parent / "bin" / "ptxas", False), ("/my/ptxas", True)):
        monkeypatch.setenv("TRITON_PTXAS_PATH", str(path))
        assert (key().hashes["environment"] != before.hashes["environment"]) is matters


def test_the_compilers_state_counts(monkeypatch):
    before = key()
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    (difference,) = explain_cache(before, key())
    assert (difference.factor, difference.name, difference.b) == ("compiler", "torch", "9.9.9")
    monkeypatch.undo()
    with torch._inductor.config.patch(epilogue_fusion=False):
        (difference,) = explain_cache(before, key())
    assert difference.name == "inductor.epilogue_fusion"
    assert "is True in the one, False in the other" in repr(explain_cache(before, before)) or str(difference)


def test_a_file_counts_by_content_and_not_by_place(tmp_path):
    keys = []
    for place, text in (("a", "x = 1\n"), ("b", "x = 1\n"), ("c", "x = 2\n")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "model.py").write_text(text)
        keys.append(cache_key(CompilationConfig(), [str(tmp_path / place / "model.py")], CPU))
    assert keys[0].digest == keys[1].digest != keys[2].digest
    (difference,) = explain_cache(keys[0], keys[2])
    assert difference.lines == ("- line 1: x = 1", "+ line 1: x = 2")
    assert keys[0].to_frame()["factor"].unique().tolist() == ["environment", "config", "code", "compiler"]


def test_a_key_is_written_read_and_found(tmp_path):
    folder = places.rank_folder(key(), tmp_path)
    places.make_private(folder)
    assert why_miss(key(), tmp_path) is None
    places.write_key(folder, key())
    assert folder.parts[-1] == "rank_0_0" and folder.parts[-3] == "torch_compile_cache"
    assert places.read_key(folder.parent) == key()
    missed = why_miss(key(custom_ops=("all",)), tmp_path)
    assert [each.name for each in missed] == ["custom_ops"] and key().digest in repr(missed)
    assert why_miss(key(), tmp_path) is None  # no other is there
    (folder / places.FACTORS_FILE).write_text("{")
    assert places.read_key(folder.parent) is None and why_miss(key(), tmp_path) is None


def test_ranks_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("DATA_PARALLEL_RANK", "1")
    assert places.rank_folder(key(), tmp_path).name == "rank_3_1"
    monkeypatch.setenv("RANK", "../..")
    with pytest.raises(ConfigError, match="RANK"):
        places.rank_folder(key(), tmp_path)


def test_unknown_keys_are_named(cache_dir):
    with pytest.raises(ConfigError, match="names 0 keys"):
        explain_cache("0123456789", key())
    for name in ("/no/such/folder", "x" * 300, "*", "["):
        with pytest.raises(ConfigError, match="names 0 keys"):
            explain_cache(name, key())


def test_what_is_no_utf_8_can_be_printed(monkeypatch):
    """As ``os.environ`` and a source in another encoding have it: with a surrogate for each such byte."""
    before = key()
    monkeypatch.setenv("CXX", "g++\udcff")
    text = repr(explain_cache(before, key()))
    assert text.encode() and "g++\\udcff in the other" in text


@given(st.binary(), st.binary(min_size=1, max_size=40), st.integers(0, 10**6))
def test_no_changed_byte_is_taken_for_what_was_written(payload, noise, at):
    content = _pack({"files": {}}, payload)
    assert _unpack(content) == ({"files": {}}, payload)
    at %= len(content)
    for broken in (content[:at], content[:at] + noise + content[at + len(noise) :]):
        if broken != content:
            with pytest.raises(ValueError):
                _unpack(broken)


def test_writing_is_all_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "file"
    places.write_atomically(path, b"old")
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError):
        places.write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


def test_writers_at_once_leave_one_whole_file(tmp_path):
    path, contents = tmp_path / "file", [bytes([n]) * 200_000 for n in range(8)]
    threads = [threading.Thread(target=places.write_atomically, args=(path, c)) for c in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() in contents and os.listdir(tmp_path) == ["file"]


class FullDisk(EagerAdaptor):
    """Refuses as Inductor does on a full disk, the first ``times`` times."""

    name, saves = "inductor", True

    def __init__(self, times):
        self.times = times

    def compile(self, *request):
        self.times -= 1
        if self.times >= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().compile(*request)


def test_a_full_disk_costs_the_cache_and_not_the_run(compile_cache):
    x = torch.randn(3, 8)
    with pytest.warns(UserWarning, match="No space left"):
        compiled = compile_pieces(split(), adaptor=FullDisk(1))
    assert torch.equal(compiled(x), Net()(x))
    with pytest.raises(CompileError, match="No space left"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compile_pieces(split(), adaptor=FullDisk(2))  # the disk of the default place is full as well


def test_a_cache_folder_that_is_a_file(tmp_path, compile_cache, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CGKIT_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot be made"):
        compiled = compile_pieces(split(), adaptor=FullDisk(0))
    assert compiled.manager.cache is not None and not compiled.manager.cache.writable


@pytest.mark.skipif(find_cpp_compiler() is None, reason="no C++ compiler")
def test_a_second_model_in_the_process_loads(compile_cache):
    x = torch.randn(3, 8)
    with compilation_counter.expect(num_inductor_compiles=1, num_compiled_artifacts_saved=1):
        first = compile_pieces(split(), adaptor=InductorStandaloneAdaptor())
    with compilation_counter.expect(num_inductor_compiles=0, num_compiled_artifacts_loaded=1):
        second = compile_pieces(split(), adaptor=InductorStandaloneAdaptor())
    assert torch.equal(first(x), second(x))
    assert why_miss() is None
    compile_pieces(split(), CompilationConfig(custom_ops=["none"]), adaptor=InductorStandaloneAdaptor())
    missed = why_miss()
    assert [each.name for each in missed] == ["custom_ops"] and "on disk by now" in repr(missed)
    assert second.to_frame()["loaded"].tolist() == [True] and "1 pieces" in repr(second.manager.cache)


def written(folder, **contents):
    """Files below Inductor's folder, as if it had just written them."""
    for name, content in contents.items():
        path = folder / "inductor" / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return InductorFiles(folder / "inductor")


def left(folder):
    return sorted(path.name for path in (folder / "inductor").rglob("*") if path.is_file())


def test_only_what_a_compilation_finished_is_left_to_the_next_one(tmp_path):
    with written(tmp_path).compiling() as waited:
        written(tmp_path, **{"ab__one.py": "1", "ab__two.so": "2", "fxgraph__k__three": "3"})
    assert waited is False
    with pytest.raises(KeyError), written(tmp_path).compiling():
        written(tmp_path, **{"ab__half.so": "", "triton__h__k.cubin": ""})
        raise KeyError
    with written(tmp_path, **{"ab__one.py": "another"}).compiling():
        assert left(tmp_path) == ["k.cubin", "three", "two.so"]
    (tmp_path / "inductor_files.json").write_text("{")
    with written(tmp_path).compiling():
        assert left(tmp_path) == ["k.cubin"]


def test_a_library_that_changed_goes_and_a_kernel_with_all_that_belongs_to_it(tmp_path):
    files = written(tmp_path, **{"ab__one.so": "1", "triton__h__k.cubin": "2", "triton__h__k.json": "3"})
    known = files.digests()
    files.check({**known, "ab/gone.so": "built again"})
    written(tmp_path, **{"ab__one.so": "other", "triton__h__k.cubin": "other"})
    for _ in known:
        with pytest.raises(ValueError, match="not what was written"):
            files.check(known)
    assert left(tmp_path) == []


def test_one_process_at_a_time_compiles_in_a_folder(tmp_path):
    order = []

    def other():
        with written(tmp_path).compiling() as waited:
            order.append(("other", waited))

    with written(tmp_path).compiling():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.3)
        order.append("first")
    thread.join()
    assert order == ["first", ("other", True)]


@pytest.mark.skipif(os.name == "nt", reason="permissions of POSIX")
def test_a_file_that_others_may_write_is_not_loaded(tmp_path, cache_dir):
    cache = CompileCache(key())
    content = ContentKey(("a line",))
    path = cache.save(content, b"code", None)
    assert cache.load(content, bytes).runnable == b"code"
    path.chmod(0o666)
    with pytest.warns(UserWarning, match="can be written by others"):
        assert cache.load(content, bytes) is None


def test_a_packed_file_that_is_none(tmp_path, cache_dir):
    with pytest.raises(ConfigError, match="is empty"):
        pack(tmp_path / "x.tgz")
    (tmp_path / "x.tgz").write_bytes(b"not a tar")
    with tarfile.open(tmp_path / "y.tgz", "w:gz") as archive:
        archive.add(__file__, "../../evil.py")
    with tarfile.open(tmp_path / "z.tgz", "w:gz") as archive:
        archive.add(__file__, "harmless.py")
    for name in ("x.tgz", "y.tgz", "z.tgz", "missing.tgz"):
        with pytest.raises(ConfigError, match="no packed compile cache"):
            unpack(tmp_path / name)
    assert os.listdir(cache_dir / "torch_compile_cache") == []


@pytest.mark.parametrize("name", ["", ".", "/", ".."])
def test_a_folder_is_no_packed_file(name, cache_dir):
    key_on_disk(places.rank_folder(key()))
    with pytest.raises(ConfigError, match="is a folder: name a file to pack into"):
        pack(name)
    with pytest.raises(ConfigError, match="no packed compile cache"):
        unpack(name)


def test_links_in_a_packed_file(tmp_path, cache_dir):
    """Within its key a link stays what it is, dangling or not; a link in a key's place is left out."""
    content = key_on_disk(tmp_path / "key").read_bytes()
    with tarfile.open(tmp_path / "x.tgz", "w:gz") as archive:
        for name, link in (("a", None), ("a/rank_0_0/gone", "nowhere"), ("b", "a"), ("c", None)):
            member = tarfile.TarInfo(name)
            if link:
                member.type, member.linkname = tarfile.SYMTYPE, link
                archive.addfile(member)
                continue
            member.name = f"{name}/rank_0_0/{places.FACTORS_FILE}"
            body = b"[" * 100_000 if name == "c" else content
            member.size = len(body)
            archive.addfile(member, io.BytesIO(body))
    assert unpack(tmp_path / "x.tgz") == ["a"]
    assert [each.name for each in places.entries()] == ["a"]
    assert (cache_dir / "torch_compile_cache" / "a" / "rank_0_0" / "gone").is_symlink()


def key_on_disk(folder: Path) -> Path:
    """The file of factors of a key in ``folder``."""
    places.make_private(folder)
    places.write_key(folder, key())
    return folder / places.FACTORS_FILE


def test_packing_onto_a_disk_that_refuses(tmp_path, cache_dir, monkeypatch):
    folder = places.rank_folder(key())
    places.make_private(folder)
    places.write_key(folder, key())
    pack(tmp_path / "x.tgz")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"x.tgz cannot be written .*"):
        pack(tmp_path / "file" / "x.tgz")
    with pytest.raises(ConfigError, match=r"cannot be unpacked into .*CGKIT_CACHE_DIR"):
        unpack(tmp_path / "x.tgz", tmp_path / "file")

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tarfile.TarFile, "extractall", full)
    with pytest.raises(ConfigError, match=r"cannot be unpacked into .*No space left"):
        unpack(tmp_path / "x.tgz", tmp_path / "elsewhere")


def test_the_written_factors_are_json(tmp_path):
    cache = CompileCache(key())
    places.make_private(cache.directory)
    places.write_key(cache.directory, key())
    factors = json.loads((cache.directory / places.FACTORS_FILE).read_text())
    assert list(factors) == ["environment", "config", "code", "compiler"]
    assert factors["compiler"]["torch"] == torch.__version__
