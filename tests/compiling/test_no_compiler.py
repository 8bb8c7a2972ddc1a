"""Without a C++ compiler the pieces run eagerly, and a warning says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cgkit import torch_hooks
from cgkit.compiling import EagerAdaptor, InductorStandaloneAdaptor, adaptors
from cgkit.compiling.adaptors import make_adaptor
from cgkit.config import CompilationConfig

PROGRAM = """
import warnings
import torch
from cgkit.compiling import compile_pieces
from cgkit.counters import compilation_counter
from tests.compiling.toys import split_of

split = split_of(lambda self, x: x * 2 + 1, torch.ones(8, 4), ops=[])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    compiled = compile_pieces(split)
assert any("no C++ compiler was found" in str(w.message) for w in caught), [str(w.message) for w in caught]
assert torch.equal(compiled(torch.ones(3, 4)), torch.full((3, 4), 3.0))
assert compilation_counter.num_eager_compiles == 1 and compilation_counter.num_inductor_compiles == 0
print("ran eagerly")
"""


def test_a_process_without_a_compiler_falls_back(tmp_path):
    environment = os.environ | {"PATH": str(tmp_path), "CXX": "no-such-compiler"}
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stdout.splitlines()[-1:] == ["ran eagerly"], done.stderr[-2000:]


def test_only_the_cpu_needs_one(monkeypatch, recwarn):
    monkeypatch.setattr(torch_hooks, "find_cpp_compiler", lambda: None)
    on_gpu = make_adaptor(CompilationConfig(), [torch.device("cuda")])
    assert isinstance(on_gpu, InductorStandaloneAdaptor)
    assert isinstance(make_adaptor(CompilationConfig(compiler="eager"), [torch.device("cpu")]), EagerAdaptor)
    assert not recwarn
    adaptors._say_no_compiler.cache_clear()
    with pytest.warns(UserWarning, match=r"no C\+\+ compiler"):
        assert isinstance(make_adaptor(CompilationConfig(), [torch.device("cpu")]), EagerAdaptor)
    recwarn.clear()
    assert isinstance(make_adaptor(CompilationConfig(), [torch.device("cpu")]), EagerAdaptor)
    assert not recwarn, "it is said once"


@pytest.mark.skipif(torch_hooks.find_cpp_compiler() is None, reason="needs a C++ compiler")
def test_known_vector_instructions_are_looked_for_unless_each_look_compiles_and_they_are_the_most(
    monkeypatch,
):
    def compiles():
        raise AssertionError("a test was compiled")

    monkeypatch.setattr("torch._inductor.cpu_vec_isa.pick_vec_isa", compiles)
    monkeypatch.setattr(
        "torch._inductor.cpu_vec_isa.x86_isa_checker", lambda: ["avx2", "avx512", "avx512_vnni"]
    )
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert torch_hooks.cpu_vector_isa("avx512 avx512_vnni") == "avx512 avx512_vnni"
    for known in ("avx2", "INVALID_VEC_ISA", None):
        with pytest.raises(AssertionError, match="compiled"):
            torch_hooks.cpu_vector_isa(known)
