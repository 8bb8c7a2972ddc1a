"""Triton's interpreter is chosen by the environment before Triton is imported: a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_interpreted(file: str) -> None:
    """Runs the tests of ``file`` (in this folder) in the interpreter; AssertionError with their output if one fails."""
    here = Path(__file__)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(here.with_name(file))]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, cwd=here.parents[2], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
