"""Where the course is opened without installing anything: ``python notebooks/hosted.py`` (``make notebooks`` does).

Colab and Binder have to know the address of the repository. It stands in one place, ``[tool.cgkit] repository`` of
``pyproject.toml``; from there it goes into the badges of ``README.md`` and into the set-up cell of every notebook and
its source. The cell does something in Colab only. Binder installs by itself what ``.binder/`` names.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import jupytext
import nbformat

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import run  # noqa: E402 - of this folder

#: What stands for the address while nobody has set it: a badge made of it leads nowhere, and says so.
UNKNOWN = "OWNER/NAME"

CELL = """\
# Only Colab needs this cell: it fetches cgkit there. Anywhere else it does nothing.
import sys

if "google.colab" in sys.modules:
    get_ipython().system("test -d /content/cgkit || git clone -q --depth 1 -b {branch} {address} /content/cgkit")
    get_ipython().run_line_magic("cd", "-q /content/cgkit/notebooks")
    get_ipython().run_line_magic("run", "colab.py")"""


def setting() -> tuple[str, str]:
    """The repository as ``OWNER/NAME`` on GitHub, and the branch that is opened."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))
    ours = project["tool"]["cgkit"]
    return ours["repository"], ours["branch"]


def set_up() -> str:
    """The source of the set-up cell."""
    repository, branch = setting()
    return CELL.format(address=f"https://github.com/{repository}", branch=branch)


def badges(file: str) -> str:
    """Markdown: a badge for Colab and one for Binder. The pictures are ours, so that showing them asks no network."""
    repository, branch = setting()
    colab = f"https://colab.research.google.com/github/{repository}/blob/{branch}/notebooks/{file}"
    binder = f"https://mybinder.org/v2/gh/{repository}/{branch}?urlpath=lab/tree/notebooks/{file}"
    return f"[![Open in Colab](badges/colab.svg)]({colab}) [![Open in Binder](badges/binder.svg)]({binder})"


def put(notebook: nbformat.NotebookNode) -> bool:
    """Makes the set-up cell of ``notebook``, the second one, say what it must; True if that changed anything."""
    second = notebook.cells[1]
    if "setup" not in second.metadata.get("tags", ()):
        second = nbformat.v4.new_code_cell(metadata={"tags": ["setup"]})
        notebook.cells.insert(1, second)
    changed, second.source = second.source != set_up(), set_up()
    return changed


def main() -> None:
    for source in sorted((HERE / "src").glob("*.py")):
        read = jupytext.read(source)
        if put(read):
            jupytext.write(read, source, fmt="py:percent")
            print(f"set-up cell: {source.name}")
    for path in sorted(HERE.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        if put(notebook):
            nbformat.write(run.dress(notebook), path)
            print(f"set-up cell: {path.name}")
    if setting()[0] == UNKNOWN:
        print(f"the badges lead nowhere: [tool.cgkit] repository is still {UNKNOWN!r}", file=sys.stderr)


if __name__ == "__main__":
    main()
