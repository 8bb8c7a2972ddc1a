"""Inductor's artefacts as bytes, the folder it keeps its files in, and the state that its code depends on."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from cgkit.environment import environment
from cgkit.torch_hooks.inductor import find_cpp_compiler
from cgkit.torch_hooks.versions import gone

#: Options that say where Inductor keeps things, how it works and what it prints, not what it makes. Beside
#: them those that begin with ``trace.`` and those that end with ``remote_cache``.
_NO_STATE = {
    "autotune_local_cache",
    "compile_threads",
    "compile_worker_wait_timeout",
    "cpp_cache_precompile_headers",
    "debug",
    "force_disable_caches",
    "fx_graph_cache",
    "global_cache_dir",
    "log_tlparse",
    "torchinductor_worker_logpath",
    "verbose_progress",
    "worker_log_path",
    "worker_start_method",
    "worker_suppress_logging",
}


def artifact_bytes(artifact: Any) -> bytes | None:
    """A compiled artefact as bytes; None for what cannot be saved (an eager callable, caches off).

    Run on torch 2.13 (CPU).
    """
    save = getattr(artifact, "save", None)
    if save is None or not getattr(artifact, "is_saveable", lambda: True)():
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "artifact")
        try:
            save(path=path, format="binary")
        except (RuntimeError, AssertionError):  # torch: nothing in it that can be serialised
            return None
        return Path(path).read_bytes()


def load_artifact(content: bytes) -> Any:
    """The callable that :func:`artifact_bytes` wrote, in any process with the same torch.

    Raises whatever torch raises on bytes that it cannot use. Run on torch 2.13 (CPU).
    """
    try:
        from torch._inductor import CompiledArtifact
    except ImportError:
        raise gone("torch._inductor.CompiledArtifact") from None
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "artifact")
        Path(path).write_bytes(content)
        with torch.inference_mode(False), torch.no_grad():
            return CompiledArtifact.load(path=path, format="binary")


@contextlib.contextmanager
def inductor_cache_dir(folder: str | None) -> Iterator[None]:
    """In the block Inductor keeps its files (generated code, libraries, kernels) in ``folder``.

    None: in its own default place.
    It is an environment variable, and Inductor itself writes its default into it when it is first asked.
    Run on torch 2.13 (CPU).
    """
    with environment(TORCHINDUCTOR_CACHE_DIR=folder, TRITON_CACHE_DIR=None):
        yield


def inductor_state() -> dict[str, Any]:
    """Inductor's options by name, as far as they decide about generated code.

    Run on torch 2.13 (CPU).
    """
    from torch._inductor import config

    try:
        state = config.save_config_portable()
    except AttributeError:
        raise gone("torch._inductor.config.save_config_portable") from None
    return {name: value for name, value in state.items() if not _is_no_state(name)}


def _is_no_state(option: str) -> bool:
    return option in _NO_STATE or option.startswith("trace.") or option.endswith("remote_cache")


def cpu_vector_isa(known: str | None = None) -> str:
    """The vector instructions that Inductor's C++ is written for; "" where nothing can compile it.

    Inductor finds out by compiling and loading a test in another process. ``known``: what it found on this very
    machine before; then it only compares with what the processor lists, and tests where the two differ.

    Run on torch 2.13 (CPU).
    """
    if find_cpp_compiler() is None:
        return ""
    try:
        from torch._inductor import config, cpu_vec_isa
    except ImportError:
        raise gone("torch._inductor.cpu_vec_isa.pick_vec_isa") from None
    if known and known == _most_that_is_listed(cpu_vec_isa) and _each_look_compiles():
        return known
    if known and hasattr(config.cpp, "vec_isa_ok") and config.cpp.vec_isa_ok is None:
        clear = getattr(cpu_vec_isa.valid_vec_isa_list, "cache_clear", None)
        if clear is not None and cpu_vec_isa.valid_vec_isa_list.cache_info().currsize == 0:
            with config.patch({"cpp.vec_isa_ok": True}):
                found = str(cpu_vec_isa.pick_vec_isa())
            if found == known:
                return found
            clear()
    return str(cpu_vec_isa.pick_vec_isa())


def _most_that_is_listed(cpu_vec_isa: Any) -> str:
    """The vector type that Inductor would try first, by the processor's own list; "" where it cannot be told.
    Run on torch 2.11 and 2.13 (CPU)."""
    listed: list[str] = getattr(cpu_vec_isa, "x86_isa_checker", list)()
    kinds = map(str, getattr(cpu_vec_isa, "supported_vec_isa_list", ()))
    return next((kind for kind in kinds if listed and all(flag in listed for flag in kind.split())), "")


def _each_look_compiles() -> bool:
    """Whether Inductor compiles a test for each vector type though it was told that they work: of these processors it
    asks for one instruction more. Run on torch 2.11 and 2.13 (CPU)."""
    asked = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in asked)


@functools.cache
def cpp_compiler_version() -> str:
    """The first line of what the C++ compiler says of itself; "" without one.

    Run on torch 2.13 (CPU).
    """
    compiler = find_cpp_compiler()
    if compiler is None:
        return ""
    try:
        said = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return compiler
    return (said.stdout or said.stderr).splitlines()[0] if (said.stdout or said.stderr) else compiler
