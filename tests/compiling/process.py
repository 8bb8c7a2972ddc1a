"""The toy Llama compiled in a process of its own: ``python -m tests.compiling.process COMPILER``."""

from __future__ import annotations

import json
import sys
import warnings

import torch

from cgkit.compiling import compile_pieces
from cgkit.config import CompilationConfig
from cgkit.counters import compilation_counter
from tests.compiling.toys import llama_inputs, split_llama

if __name__ == "__main__":
    model, split = split_llama(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = compile_pieces(split, CompilationConfig(compiler=sys.argv[1]))
    results = [compiled(*llama_inputs(n)) for n in (1, 5)]
    expected = [model(*llama_inputs(n)) for n in (1, 5)]
    runnables = [backend.general.runnable for backend in compiled.backends]
    facts = {
        "compiled": compilation_counter.num_inductor_compiles,
        "saved": compilation_counter.num_compiled_artifacts_saved,
        "loaded": compilation_counter.num_compiled_artifacts_loaded,
        "equal": all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(results, expected)),
        "hashes": sorted({r.handle.hash_str for r in runnables if getattr(r, "handle", None)}),
        "warnings": [str(w.message) for w in caught if "compile cache" in str(w.message)],
    }
    print(json.dumps(facts))
