"""One start of a process, measured: from ``import`` to the first answer of the compiled model.

What ``cgkit bench startup`` and ``cgkit bench adaptors`` run again and again, each time in a fresh process
(:func:`start`), with a cache folder that is empty or full. Models: a shape of
:data:`cgkit.serving.llama.PRESETS` through the runner, or ``toy-llama-N``, the model of ``cgkit bench dedup``
with N layers. Weights are random.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from cgkit.errors import CgkitError

#: What the child runs: the clock starts before anything is imported.
_CHILD = (
    "import time; started = time.perf_counter(); from cgkit.measuring.start_case import main; main(started)"
)
TOY = "toy-llama-"
#: The prompt of the first answer, and by how much answers of other adaptors may differ.
_PROMPT = [1, 2, 3, 4, 5]


def add_device(parser: argparse.ArgumentParser) -> None:
    """The option that says where a start's model lies."""
    parser.add_argument("--device", choices=["cuda", "cpu"], help="(default: the GPU if there is one)")


def device_of(args: argparse.Namespace) -> str:
    """What was asked for, or what there is."""
    import torch  # not above: the child measures this import

    return args.device or ("cuda" if torch.cuda.is_available() else "cpu")


def start(
    model: str, compiler: str, cache: Path, timeout_s: float = 900.0, *, device: str = "cpu"
) -> dict[str, Any]:
    """Starts ``model`` on ``device`` in a fresh process that keeps its compiled pieces in ``cache``.

    Returns:
        ``model``, ``compiler``, ``device``, ``pieces``; the parts of the start in order, in seconds: ``import_s``
        (torch and cgkit), ``compiler_import_s`` (Dynamo and Inductor, which torch imports late), ``model_s`` (random
        weights; a GPU's context), ``trace_s`` (Dynamo's work, or the look into the trace cache), ``split_s``,
        ``compile_s`` (the compile stage: the cache's key, fake runs, pieces compiled or loaded), ``answer_s`` (the
        first answer), and ``start_s``, all of it; ``first_call_s`` is the start without torch's import and the
        weights: what the first call of a model takes, the compiler's import with it. ``first_call_cpu_s`` and
        ``start_cpu_s`` are the same in processor time, compilers included: to be compared where other work shares the
        machine. ``compilations`` and ``loaded`` (pieces), ``traces_loaded``, ``handles`` (pieces that were kept or
        found), and ``answer``: numbers to be compared with another start's.

    Raises:
        CgkitError: the process failed or took too long; holds the end of its output.
    """
    here = str(Path(__file__).resolve().parents[2])
    environment = os.environ | {
        "CGKIT_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH")))),
        # what Inductor and Triton keep beside the pieces must not outlive the folder either
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor_default"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
    }
    environment.pop("CGKIT_DISABLE_COMPILE_CACHE", None)
    command = [sys.executable, "-c", _CHILD, model, compiler, device]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise CgkitError(f"{model} with {compiler} took longer than timeout_s={timeout_s}") from None
    if done.returncode:
        raise CgkitError(f"the process for {model} with {compiler} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def files_in(folder: Path) -> tuple[int, int]:
    """How many files lie below ``folder``, and their bytes."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return len(sizes), sum(sizes)


# --- in the child -------------------------------------------------------------------------------------


def main(started: float) -> None:
    """The child: measures the start that ``sys.argv`` names and prints it as JSON."""
    model, compiler, device = sys.argv[1:4]
    from cgkit import torch_hooks
    from cgkit.config import CompilationConfig

    config = CompilationConfig(compiler=compiler, cudagraph_mode="NONE")  # type: ignore[arg-type]
    import torch

    import cgkit.serving.runner  # noqa: F401

    imported, cpu_imported = time.perf_counter(), cpu_seconds()
    torch_hooks.import_compiler(inductor=compiler != "eager")
    ready_to_compile, cpu_ready = time.perf_counter(), cpu_seconds()
    toy = model.startswith(TOY)
    case = _toy(int(model.removeprefix(TOY)), config, device) if toy else _served(model, config, device)
    compile_it, answer_it = case
    if device != "cpu":
        torch.cuda.synchronize()
    built, cpu_built = time.perf_counter(), cpu_seconds()
    compiled = compile_it()
    split, traced = compiled.split, compiled.split.traced
    ready = time.perf_counter()
    with torch.no_grad():
        answer = answer_it()
    answered = time.perf_counter()
    facts = {
        "model": model,
        "compiler": compiler,
        "device": device,
        "pieces": len(compiled.backends),
        "import_s": imported - started,
        "compiler_import_s": ready_to_compile - imported,
        "model_s": built - ready_to_compile,
        "trace_s": traced.seconds,
        "split_s": split.seconds,
        "compile_s": ready - built - traced.seconds - split.seconds,
        "answer_s": answered - ready,
        "first_call_s": answered - built + ready_to_compile - imported,
        "start_s": answered - started,
        "first_call_cpu_s": cpu_seconds() - cpu_built + cpu_ready - cpu_imported,
        "start_cpu_s": cpu_seconds(),
    }
    print(json.dumps({**facts, **_counts(), "answer": answer}))


def cpu_seconds() -> float:
    """Processor time of this process and of those that it started and that have ended (compilers)."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def _counts() -> dict[str, int]:
    from cgkit.counters import compilation_counter as counter

    return {
        "compilations": counter.num_inductor_compiles + counter.num_eager_compiles,
        "loaded": counter.num_compiled_artifacts_loaded,
        "traces_loaded": counter.num_traces_loaded,
        "handles": counter.num_compiled_artifacts_loaded + counter.num_compiled_artifacts_saved,
    }


def _served(name: str, config: Any, device: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    from cgkit.serving.runner import Runner
    from cgkit.serving.weights import load_model

    runner = Runner(load_model(name, device=device).model, config=config, max_num_seqs=1, max_model_len=64)
    executor = runner.executor

    def compile_it() -> Any:
        executor.compile(runner.inputs)
        return executor.compiled

    return compile_it, lambda: list(runner.generate([_PROMPT], max_tokens=2)[0].token_ids)


def _toy(layers: int, config: Any, device: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    import torch

    from cgkit.compiling import compile_model
    from cgkit.measuring.bench_dedup import DIMS, SPLITTING_OP, toy_example, toy_llama

    torch.manual_seed(0)
    model = toy_llama(layers).to(device)
    made: list[Any] = []
    config = replace(config, splitting_ops=[SPLITTING_OP])

    def compile_it() -> Any:
        made.append(compile_model(model, toy_example(device), config=config, dynamic_arg_dims=DIMS))
        return made[0]

    def answer() -> list[float]:
        tokens = torch.tensor(_PROMPT, device=device)
        return [round(float(value), 3) for value in made[0](tokens, tokens.float()).mean(-1)]

    return compile_it, answer
