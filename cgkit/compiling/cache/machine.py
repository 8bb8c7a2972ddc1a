"""What was found out about this machine's processor: kept, because finding out starts a compiler.

``cpu_vectors.json`` lies beside the keys and is never packed: another machine asks for itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from pathlib import Path

import torch

from cgkit import torch_hooks
from cgkit.compiling.cache import folder as places

FILE = "cpu_vectors.json"


def cpu_vectors() -> str:
    """The vector instructions that Inductor's C++ is written for (:func:`cgkit.torch_hooks.cpu_vector_isa`)."""
    if places.disabled():
        return torch_hooks.cpu_vector_isa()
    path, machine = places.keys_folder() / FILE, _machine()
    known = _read(path).get(machine)
    found = torch_hooks.cpu_vector_isa(known)
    if found and found != known:
        with contextlib.suppress(OSError):  # then the next process asks again
            places.make_private(path.parent)
            places.write_atomically(path, json.dumps({machine: found}).encode())
    return found


def _read(path: Path) -> dict[str, str]:
    if places.why_untrusted(path.parent):
        return {}
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return {str(machine): str(vectors) for machine, vectors in known.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _machine() -> str:
    """A hash of all that the answer depends on."""
    processor = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = "\n".join(
            sorted({line for line in lines if line.startswith(("flags", "model name", "Features"))})
        )
    parts = [
        processor,
        platform.machine(),
        torch.__version__,
        torch_hooks.cpp_compiler_version(),
        torch.__file__,
        os.environ.get("ATEN_CPU_CAPABILITY", ""),
        str(torch_hooks.inductor_state().get("cpp.simdlen")),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]
