"""Traces of other people, which are not in the repository: tests that read them are skipped where they are absent.

They are looked for in the folder that ``CGKIT_FOREIGN_TRACES`` names, else in a ``shared/data/traces`` beside or above
the repository.
"""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest


def trace_path(name: str) -> Path:
    """Where the trace lies; skips the test if it is nowhere."""
    named = os.environ.get("CGKIT_FOREIGN_TRACES")
    folders = (
        [Path(named)] if named else [up / "shared/data/traces" for up in Path(__file__).resolve().parents]
    )
    for folder in folders:
        if (folder / name).exists():
            return folder / name
    pytest.skip(f"{name} is not on this machine")


def raw_events(name: str) -> list[dict[str, Any]]:
    """Its events as they stand in the file, read with nothing of ours."""
    with gzip.open(trace_path(name)) as file:
        return json.load(file)["traceEvents"]
