"""What a compiled piece depends on: the four factors of the cache's key, each a named part.

Implements the article's "影响编译产物的所有因子都要进 hash" (every factor of what is compiled belongs
into the hash). Where it differs: a file counts by its content and its module's name, not by its
place, so that a checkout may move; and only fields that change what is compiled are in the config's
part, so that another capture ladder is no miss.
"""

from __future__ import annotations

import hashlib
import json
import linecache
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cgkit import torch_hooks
from cgkit.compiling.content_key import process_settings
from cgkit.config import CompilationConfig

#: The factors, in the article's order.
FACTORS = ("environment", "config", "code", "compiler")

#: Fields of :class:`~cgkit.config.CompilationConfig` that change what is compiled. All others change
#: what is recorded, when a piece is compiled, or what is reported.
CONFIG_FIELDS = ("level", "splitting_ops", "custom_ops", "compiler", "inductor_compile_config", "passes")

_ENVIRONMENT = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE_", "TRITON_")
_ENVIRONMENT_NAMES = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "PTXAS_OPTIONS")
#: These say where and how fast something is compiled, not what comes out.
_NOT_ENVIRONMENT = (
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TRITON_HOME",
    "TRITON_DUMP_DIR",
    "TORCHINDUCTOR_COMPILE_THREADS",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES",
)


@dataclass(frozen=True)
class CacheKey:
    """The four factors of one model's compilations, each a mapping from a name to its value as text.

    ``sources`` holds the text of each traced file, so that a later difference can be shown by line.
    """

    environment: Mapping[str, str]
    config: Mapping[str, str]
    code: Mapping[str, str]
    compiler: Mapping[str, str]
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def factor(self, name: str) -> Mapping[str, str]:
        """One of :data:`FACTORS` by name."""
        return getattr(self, name)

    def as_dict(self) -> dict[str, dict[str, str]]:
        """The factors by name, as ``cache_key_factors.json`` has them."""
        return {name: dict(sorted(self.factor(name).items())) for name in FACTORS}

    @property
    def hashes(self) -> dict[str, str]:
        """The SHA-256 of each factor."""
        return {name: _sha256(json.dumps(parts)) for name, parts in self.as_dict().items()}

    @property
    def digest(self) -> str:
        """Ten hexadecimal digits of the hash over all four: the folder's name."""
        return _sha256(json.dumps(list(self.hashes.values())))[:10]

    def to_frame(self) -> Any:
        """A DataFrame with the columns ``factor``, ``name`` and ``value``."""
        import pandas as pd

        rows = [
            (factor, name, value) for factor, parts in self.as_dict().items() for name, value in parts.items()
        ]
        return pd.DataFrame(rows, columns=["factor", "name", "value"])

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {len(self.factor(name))}" for name in FACTORS)
        return f"CacheKey({self.digest}: {sizes})"


def cache_key(
    config: CompilationConfig,
    traced_files: Iterable[str],
    devices: Iterable[torch.device],
    settings: Mapping[str, Any] | None = None,
) -> CacheKey:
    """The key under which a model's compiled pieces lie on disk.

    Args:
        config: of the model.
        traced_files: of every function that Dynamo inlined (``TracedGraph.traced_files``).
        devices: on which the model computes.
        settings: how the adaptor is set for the general shape.
    """
    sources = dict(map(_source, sorted(set(traced_files))))
    return CacheKey(
        environment=_environment(),
        config={name: _text(getattr(config, name)) for name in CONFIG_FIELDS},
        code={name: _sha256(text) for name, text in sources.items()},
        compiler=_compiler(set(devices), settings or {}),
        sources=sources,
    )


def _environment() -> dict[str, str]:
    found = {
        name: value
        for name, value in os.environ.items()
        if (name.startswith(_ENVIRONMENT) or name in _ENVIRONMENT_NAMES) and name not in _NOT_ENVIRONMENT
    }
    if torch_hooks.is_bundled_ptxas(found.get("TRITON_PTXAS_PATH", "")):
        del found["TRITON_PTXAS_PATH"]  # Inductor put it there: nobody asked
    return {**found, "python": platform.python_version(), "machine": platform.machine()}


def _source(file: str) -> tuple[str, str]:
    """A file by a name that is the same in every checkout, and its text."""
    try:
        text = Path(file).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:  # a notebook's cell, or what was made by exec
        text = "".join(linecache.getlines(file))
    return _module_of(file) or f"{Path(file).name}", text


def _module_of(file: str) -> str | None:
    """The name of the module that was loaded from ``file``; None for scripts and cells."""
    for name, module in sys.modules.copy().items():
        if name != "__main__" and getattr(module, "__file__", None) == file:
            return name
    return None


def _compiler(devices: set[torch.device], settings: Mapping[str, Any]) -> dict[str, str]:
    facts: dict[str, Any] = {**process_settings(), **settings, "torch_git": torch.version.git_version}
    facts["triton"] = torch_hooks.triton_version()
    facts.update({f"inductor.{name}": value for name, value in torch_hooks.inductor_state().items()})
    for device in sorted(devices, key=str):
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            facts["gpu"] = f"{properties.name}, {properties.major}.{properties.minor}"
            facts["gpu_multiprocessors"] = properties.multi_processor_count
            facts["cuda"] = torch.version.cuda or torch.version.hip
        elif device.type == "cpu":
            from cgkit.compiling.cache.machine import cpu_vectors  # which needs the folder, which needs keys

            facts["cpu_threads"] = torch.get_num_threads()  # written into generated C++
            facts["cpu_vectors"] = cpu_vectors()
            facts["cpp_compiler"] = torch_hooks.cpp_compiler_version()
    return {name: _text(value) for name, value in facts.items()}


def _text(value: Any) -> str:
    """``value`` as text that is the same in every process."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_text(value[key])}" for key in sorted(value, key=str)) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(_text, value))) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_text, value)) + "]"
    if uuid := getattr(value, "uuid", None):  # a graph pass names itself
        return f"{type(value).__qualname__} {uuid() if callable(uuid) else uuid}"
    if callable(value):
        return (
            f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
        )
    return str(value)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
