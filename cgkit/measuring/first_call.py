"""How long a model's first call takes, in a process of its own: cold (an empty cache folder), then warm (the same one).

The first call is tracing, splitting, compiling and one decode step at batch 1; what comes before it (importing torch,
weights) and after it (recording graphs) is told apart. Only a fresh process knows: in one that has compiled
before, Inductor, Triton and the pieces' own cache remember.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cgkit.errors import CaptureError

_CHILD = (
    "import time; started = time.perf_counter(); from cgkit.measuring.first_call import main; main(started)"
)
#: What keeps compiled code from one process to the next.
CACHES = {"CGKIT_CACHE_DIR": "pieces", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def environment_with_caches(folder: Path) -> dict[str, str]:
    """This process's environment with every compile cache in ``folder``."""
    here = str(Path(__file__).resolve().parents[2])
    found = os.environ | {name: str(folder / part) for name, part in CACHES.items()}
    found["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    found.pop("CGKIT_DISABLE_COMPILE_CACHE", None)
    return found


@contextmanager
def empty_caches() -> Iterator[Path]:
    """A folder for the caches that is gone after the block."""
    with tempfile.TemporaryDirectory(prefix="cgkit-cold-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def first_calls(
    shapes: Sequence[str],
    *,
    device: str = "cuda",
    layers: int | None = None,
    compiler: str = "inductor",
    context: int = 256,
    timeout_s: float = 300.0,
) -> dict[str, dict[str, dict[str, Any]]]:
    """Shape -> "cold" and "warm" -> seconds. All shapes start at the same time, a process each; the warm starts
    follow when all cold ones have ended.

    ``first_call_s`` is ``compile_s`` (trace, split, compile) and ``step_s``; beside it ``import_s``, ``build_s``
    (weights, buffers) and ``capture_s`` (one size in both modes); ``compilations`` and ``loaded`` pieces.

    Raises:
        CaptureError: a process failed or took too long.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {shape: {} for shape in shapes}
    with empty_caches() as folder:
        for kind in ("cold", "warm"):
            running = [(s, _start(s, folder / s, device, layers, compiler, context)) for s in shapes]
            try:
                for shape, process in running:
                    found[shape][kind] = _answer(shape, process, timeout_s)
            finally:
                for _, process in running:
                    if process.poll() is None:
                        process.kill()
    return found


def _start(
    shape: str, caches: Path, device: str, layers: int | None, compiler: str, context: int
) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _CHILD, shape, device, str(layers or 0), compiler, str(context)]
    environment = environment_with_caches(caches)
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _answer(shape: str, process: subprocess.Popen[str], timeout_s: float) -> dict[str, Any]:
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise CaptureError(f"the first call of {shape} took longer than timeout_s={timeout_s}") from None
    if process.returncode:
        raise CaptureError(f"the process for the first call of {shape} failed:\n{err[-2000:]}")
    return json.loads(out.splitlines()[-1])


def main(started: float) -> None:
    """The child: one first call, printed as JSON."""
    shape, device, layers, compiler, context = sys.argv[1:6]
    import torch

    from cgkit.counters import compilation_counter
    from cgkit.measuring.decode_bench import DecodeBench, any_shape

    imported = time.perf_counter()
    synchronize = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    with torch.no_grad():
        chosen = any_shape(shape, int(layers) or None)
        bench = DecodeBench(chosen, [1], device=device, context=int(context), compiler=compiler)
        synchronize()
        built = time.perf_counter()
        bench.executor.compile(bench.runner.inputs)
        compiled = time.perf_counter()
        bench.steps(1)["compiled"]()
        synchronize()
        stepped = time.perf_counter()
        bench.capture()
        synchronize()
        captured = time.perf_counter()
    counter = compilation_counter
    facts = {
        "import_s": imported - started,
        "build_s": built - imported,
        "compile_s": compiled - built,
        "step_s": stepped - compiled,
        "first_call_s": stepped - built,
        "capture_s": captured - stepped,
        "compilations": counter.num_inductor_compiles + counter.num_eager_compiles,
        "loaded": counter.num_compiled_artifacts_loaded,
    }
    print(json.dumps(facts))
