"""A small project of a user's, written to disk: a model, a helper that is inlined, a file that is not."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

HELPER = """
import torch


def scale(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * 2.0
"""
UNTRACED = "# never inlined\nVALUE = 1\n"
MODEL = """
import json, sys, warnings
import torch
from torch import nn
import cgkit
from helper import scale
import untraced


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor):
        y = torch.tanh(scale(self.a(x)))
        out = torch.empty_like(y)
        torch.ops.project.cut(y, out)
        return torch.tanh(scale(self.b(out)))


def cut(y: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(y + 1)


cgkit.register_op("cut", cut, mutates_args=["out"], namespace="project")
torch.manual_seed(0)
torch.set_num_threads(1)
options = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    net = Net()
    x = torch.linspace(-1, 1, 40).view(5, 8)
    compiled = cgkit.compile_pieces(
        cgkit.split_graph(cgkit.trace(net, x), ["project::cut"]), cgkit.CompilationConfig(**options)
    )
    with torch.no_grad():
        result, reference = compiled(x), net(x)
print(json.dumps({
    "counters": {name: count for name, count in cgkit.compilation_counter.as_dict().items() if count},
    "equal": torch.allclose(result, reference),
    "key": compiled.cache_key.digest,
    "seconds": compiled.seconds,
    "warnings": [str(w.message) for w in caught if "compile cache" in str(w.message)],
}))
"""


def write(folder: Path) -> Path:
    """The project in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("helper.py", HELPER), ("untraced.py", UNTRACED), ("model.py", MODEL)):
        (folder / name).write_text(text)
    return folder


def bound_by_permissions() -> None:
    """In a child before its exec: root, too, may then write only where the permissions say so (Linux).

    The power to pass them by (CAP_DAC_OVERRIDE) leaves the set that an exec can get.
    """
    if os.name != "nt" and os.geteuid() == 0:
        drop_from_bounding_set, dac_override = 24, 1
        if ctypes.CDLL(None, use_errno=True).prctl(drop_from_bounding_set, dac_override, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "CAP_DAC_OVERRIDE cannot be dropped")


def is_bound(folder: Path) -> bool:
    """Whether a child after :func:`bound_by_permissions` cannot write into ``folder``."""
    program = "import sys, pathlib; pathlib.Path(sys.argv[1], 'x').write_text('')"
    command = [sys.executable, "-c", program, str(folder)]
    try:
        run = subprocess.run(command, preexec_fn=bound_by_permissions, capture_output=True, text=True)
    except (OSError, subprocess.SubprocessError):
        return False
    return run.returncode != 0 and "PermissionError" in run.stderr


def start(
    folder: Path, cache: Path, options: dict | None = None, before_exec=None, **environment: str
) -> subprocess.Popen:
    """The project's model in a process of its own."""
    home = Path(__file__).parents[3]
    env = {**os.environ, "CGKIT_CACHE_DIR": str(cache), "PYTHONPATH": str(home), **environment}
    command = [sys.executable, "model.py", json.dumps(options or {})]
    return subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=before_exec,
    )  # fmt: skip


def finish(process: subprocess.Popen) -> dict:
    """What the process found out."""
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def run(folder: Path, cache: Path, options: dict | None = None, before_exec=None, **environment: str) -> dict:
    """Starts and finishes."""
    return finish(start(folder, cache, options, before_exec, **environment))
