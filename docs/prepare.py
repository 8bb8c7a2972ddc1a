"""Puts what the site is built from into ``docs/_build/source``: ``python docs/prepare.py``.

The pages of ``docs/``, README, the notebooks and a page of docstrings for every public name, so that the site can never
disagree with what is committed. A relative link to a file that is not a page (a source folder, a picture) is left out
or follows the file.
"""

from __future__ import annotations

import json
import re
import shutil
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SOURCE = HERE / "_build" / "source"
LINK = re.compile(r"(!?)\[([^\[\]]*)\]\(([^)\s]+)\)")


def unlinked(text: str, folder: Path, pages: set[Path]) -> str:
    """``text`` with links only to what is a page of the site, an image or an address; of others the words are kept."""

    def keep(found: re.Match[str]) -> str:
        image, words, target = found.groups()
        there = (folder / target.split("#")[0]).resolve()
        if target.startswith(("http", "#", "mailto:")) or there in pages or (image and there.is_file()):
            return found[0]
        return words

    return LINK.sub(keep, text)


def placed(text: str) -> str:
    """A page of ``docs/`` as it stands in the site, whose root is ``docs/``: a link out of it is one folder shorter."""
    return text.replace("](../../", "](../")


def as_a_page(text: str) -> str:
    """A notebook's text without the cell that only Colab needs; code that Jupyter folds away is folded here too."""
    notebook = json.loads(text)
    notebook["cells"] = [cell for cell in notebook["cells"] if "setup" not in cell["metadata"].get("tags", ())]
    for cell in notebook["cells"]:
        if cell["metadata"].get("jupyter", {}).get("source_hidden"):
            cell["metadata"]["tags"] = sorted({*cell["metadata"].get("tags", ()), "hide-input"})
    return json.dumps(notebook)


def api() -> str:
    """One page: every public name of ``cgkit`` with its docstring."""
    cgkit = import_module("cgkit")
    lines = ["# Public names", "", "What `import cgkit` offers, loaded when first used.", ""]
    for name in cgkit.__all__:
        value = getattr(cgkit, name)
        kind = "class" if isinstance(value, type) else "function" if callable(value) else "data"
        if isinstance(value, type(cgkit)):
            directive, target = "automodule", value.__name__
        elif kind == "data":
            directive, target = "autodata", f"cgkit.{name}"
        else:
            directive, target = f"auto{kind}", f"{value.__module__}.{value.__qualname__}"
        members = ":members:\n" if kind == "class" else ""
        lines += [f"## {name}", "", "```{eval-rst}", f".. {directive}:: {target}", "   " + members, "```", ""]
    return "\n".join(lines)


def main() -> None:
    shutil.rmtree(SOURCE, ignore_errors=True)
    SOURCE.mkdir(parents=True)
    copied = {ROOT / "README.md": SOURCE / "readme.md"}
    for path in [*HERE.glob("*.md"), *HERE.glob("zh/*.md"), HERE / "conf.py"]:
        copied[path] = SOURCE / path.relative_to(HERE)
    copied[HERE / "site.css"] = SOURCE / "_static" / "site.css"
    for ending in ("*.ipynb", "*.md", "*.html", "**/*.svg"):
        copied |= {path: SOURCE / path.relative_to(ROOT) for path in (ROOT / "notebooks").glob(ending)}
    pages = {path.resolve() for path in copied}
    for path, target in copied.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".ipynb":
            target.write_text(as_a_page(path.read_text(encoding="utf-8")), encoding="utf-8")
            continue
        if path.suffix != ".md":
            shutil.copyfile(path, target)
            continue
        text = path.read_text(encoding="utf-8")
        elsewhere = path.parent == ROOT or "notebooks" in path.parts
        target.write_text(unlinked(text, path.parent, pages) if elsewhere else placed(text))

    def no_picture(_: str, names: list[str]) -> list[str]:
        return [name for name in names if "." in name and not name.endswith(".svg")]

    shutil.copytree(ROOT / "data", SOURCE / "data", ignore=no_picture)
    conf = (SOURCE / "conf.py").read_text().replace("parent.parent", "parents[3]")
    (SOURCE / "conf.py").write_text(conf)
    (SOURCE / "api.md").write_text(api(), encoding="utf-8")


if __name__ == "__main__":
    main()
