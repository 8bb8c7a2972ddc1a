"""Takes out of the notebooks' outputs where they were made: ``python notebooks/scrub.py 09`` (no numbers: all of them).

A warning names the file that warns, an error the line that raised, and both say in which folder somebody's machine
keeps it. No reader has that folder, and with it two runs of one source differ. ``run.py`` scrubs whatever it writes;
this command does the same to the files that are there. Nothing else of an output changes.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat

HERE = Path(__file__).resolve().parent

#: Where an absolute path can begin: not inside of a word, of another path or of an address on the web.
_START = r"(?<![\w:/.~-])"
_FOLDERS = r"(?:/[\w.+@~-]+)*"
_TEMPORARY = "|".join(re.escape(folder) for folder in sorted({"/tmp", "/var/tmp", tempfile.gettempdir()}))

#: What is replaced, in this order, and by what.
_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # A cell's code: ipykernel gives it a file in a temporary folder. torch cuts such names from the left.
        (r"(?:\.\.\.|/)[\w./-]*_\d+/\d+\.py:(?=\d)", "this notebook, line "),
        (r"(?:\.\.\.|/)[\w./-]*_\d+/\d+\.py\b", "this notebook"),
        (_START + _FOLDERS + r"/(?:site|dist)-packages\b", "site-packages"),
        (_START + _FOLDERS + r"/(lib/python3\.\d+)\b", r"\1"),
        (_START + _FOLDERS + r"/((?:cgkit|notebooks|tests)/[\w/]+\.py)\b", r"./\1"),
        (_START + rf"(?:{_TEMPORARY})/[\w.+@~-]+", "..."),
        (_START + r"/(?:home|Users)/[\w.+@-]+|" + _START + r"/root\b", "~"),
        # torch's log: the time of day and the number of the process.
        (r"(?m)^([VIWEC])\d{4} \d\d:\d\d:\d\d\.\d+ \d+ (?=\S+:\d+\])", r"\1 "),
    )
)


def scrub_text(text: str, checkout: Path = HERE.parent) -> str:
    """``text`` without the folders of the machine: ``checkout`` becomes ``.``, that of packages ``site-packages``."""
    if len(checkout.parts) > 1:
        text = re.sub(re.escape(str(checkout)) + r"(?![\w.-])", ".", text)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


def scrub(notebook: nbformat.NotebookNode, checkout: Path = HERE.parent) -> nbformat.NotebookNode:
    """Scrubs the outputs of ``notebook`` in place, those kept for its widgets too; returns it. Pictures stay."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = _in_all(cell.outputs, lambda text: scrub_text(text, checkout))
    if "widgets" in notebook.metadata:
        notebook.metadata.widgets = _in_all(notebook.metadata.widgets, lambda text: scrub_text(text, checkout))
    return notebook


def _in_all(value: Any, change: Callable[[str], str]) -> Any:
    """``value`` (JSON) with ``change`` made to each text in it, but not to the base64 of a picture."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_in_all(each, change) for each in value]
    if isinstance(value, dict):
        return type(value)({key: part if _is_base64(key) else _in_all(part, change) for key, part in value.items()})
    return value


def _is_base64(mime: str) -> bool:
    return mime.startswith("image/") and mime != "image/svg+xml"


if __name__ == "__main__":
    for path in sorted(HERE.glob("[0-9]*.ipynb")):
        if not sys.argv[1:] or path.stem.startswith(tuple(sys.argv[1:])):
            before = path.read_text()
            nbformat.write(scrub(nbformat.reads(before, as_version=4)), path)
            print(f"{path.name}: {'scrubbed' if path.read_text() != before else 'nothing to scrub'}")
