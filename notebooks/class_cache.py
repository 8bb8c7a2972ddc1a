"""One file with all that the notebooks compile, for a class: ``python notebooks/class_cache.py FILE 00 05``.

Runs the notebooks (without numbers: all of them) with an empty compile cache and packs what they left there. On each
machine of the class, ``cgkit cache unpack FILE`` puts it in place, and their first run compiles nothing. That holds for
machines with the same versions, the same checkout and the same kind of processor (and GPU): the file holds machine
code. Where one of these differs, nothing breaks: the key differs too, and the notebook compiles. The file is code that
runs: hand it out yourself, and take none from people whom you do not trust.

Two notebooks (04, 11) compile into an empty cache of their own, because they show it, and leave nothing here.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import jupytext
import nbformat

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import run  # noqa: E402 - of this folder

from cgkit.compiling.cache import pack  # noqa: E402 - the package beside this folder, installed or not

COUNT = "import dataclasses, json\nprint(json.dumps(dataclasses.asdict(cgkit.compilation_counter)))"


def run_and_count(notebook: nbformat.NotebookNode, cache: Path) -> dict[str, int]:
    """Runs ``notebook`` with the compile cache at ``cache``; returns the counters of its process."""
    notebook.cells.append(nbformat.v4.new_code_cell(COUNT))
    paths = os.pathsep.join(filter(None, (str(HERE.parent), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "CGKIT_CACHE_DIR": str(cache)}
    run.client(notebook, timeout=900).execute(env=environment)
    return json.loads(notebook.cells[-1].outputs[-1].text)


def main(file: str, *numbers: str) -> int:
    sources = [path for path in sorted((HERE / "src").glob("*.py")) if not numbers or path.stem.startswith(numbers)]
    if not sources:
        print(f"there is no notebook {', '.join(numbers)}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="cgkit-class-") as folder:
        for source in sources:
            counts = run_and_count(jupytext.read(source), Path(folder))
            print(f"{source.stem}: {counts['num_compiled_artifacts_saved']} compiled pieces kept")
        keys = pack(file, Path(folder))
    size = Path(file).stat().st_size / 2**20
    print(f"{file}: {len(keys)} keys, {size:.1f} MiB; elsewhere: cgkit cache unpack {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) if sys.argv[1:] else "usage: python notebooks/class_cache.py FILE [NN ...]")
