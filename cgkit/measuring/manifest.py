"""The manifest beside a table: how it was made, as :mod:`cgkit.recordings` reads it."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from cgkit import torch_hooks
from cgkit.files import whole_file


def manifest_path(table: Path) -> Path:
    """Where the manifest of the file ``table`` lies: ``manifest-<name>.json`` beside it."""
    return table.with_name(f"manifest-{table.stem}.json")  # a shape's name holds a dot, too


def write_manifest(table: str | Path, what: str, command: str, **facts: Any) -> Path:
    """Writes the manifest of one file: command, commit, date, device, versions, and what the file holds.

    ``facts`` are added on top. Names no user, host or folder.
    """
    table = Path(table)
    held: dict[str, Any] = {**machine(), "command": command, **facts, "files": {table.name: {"what": what}}}
    path = manifest_path(table)
    with whole_file(path) as part:
        part.write_text(json.dumps(held, indent=1, default=str) + "\n", encoding="utf-8")
    return path


def machine() -> Mapping[str, Any]:
    """Commit, date, device and versions of this process."""
    gpu = torch.cuda.is_available()
    return {
        "commit": os.environ.get("COMMIT") or _commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        **({"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda} if gpu else {"device": "cpu"}),
        "torch": torch.__version__,
        "triton": torch_hooks.triton_version(),
        "python": platform.python_version(),
    }


def _commit() -> str:
    """The checkout's commit; "unknown" where this is none."""
    here = Path(__file__).resolve().parents[2]
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False
        )
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"
