"""The offline link check finds what is broken, and only that."""

import json
import runpy
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
prepare = runpy.run_path(str(DOCS / "prepare.py"))
problems = runpy.run_path(str(DOCS / "linkcheck.py"))["problems"]


def test_the_link_check_tells_broken_from_whole(tmp_path):
    (tmp_path / "b.html").write_text('<h1 id="top">b</h1><a href="https://example.org">out</a>')
    (tmp_path / "a.html").write_text('<a href="b.html#top">b</a><img src="data:image/png;base64,AA">')
    assert problems(tmp_path) == []
    (tmp_path / "a.html").write_text(
        '<a href="b.html#no">1</a><a href="c.html">2</a><script src="https://example.org/x.js"></script>'
    )
    assert [line.split(": ")[-1] for line in problems(tmp_path)] == [
        "no such anchor",
        "not there",
        "fetched from the network",
    ]
    assert problems(tmp_path / "empty") != []


def test_every_link_between_the_committed_pages_leads_to_a_file():
    root, broken = DOCS.parent, []
    pages = [
        root / "README.md",
        *(p for name in ("cgkit", "data", "docs", "notebooks") for p in (root / name).rglob("*.md")),
    ]
    for page in (page for page in pages if "_build" not in page.parts):
        for _, _, target in prepare["LINK"].findall(page.read_text(encoding="utf-8")):
            path = target.split("#")[0]
            if path and not target.startswith(("http", "mailto:")) and not (page.parent / path).exists():
                broken.append(f"{page.relative_to(root)}: {target}")
    assert len(pages) > 15 and broken == []


def test_a_page_of_the_docs_links_out_of_its_folder_in_the_site_too():
    text = (DOCS / "zh" / "quickstart.md").read_text(encoding="utf-8")
    assert "](../../notebooks/README.md)" in text and "](../notebooks/README.md)" in prepare["placed"](text)


def test_a_badge_keeps_its_picture_and_its_address_and_a_link_to_no_page_only_its_words(tmp_path):
    (tmp_path / "colab.svg").write_text("<svg/>")
    (tmp_path / "src").mkdir()
    badge = "[![Open](colab.svg)](https://example.org/x)"
    text = prepare["unlinked"](f"{badge} [sources](src/) [page](page.md)", tmp_path, {tmp_path / "page.md"})
    assert text == f"{badge} sources [page](page.md)"


def test_a_notebook_as_a_page_has_no_set_up_and_folds_what_jupyter_folds():
    text = next((DOCS.parent / "notebooks").glob("00_*.ipynb")).read_text(encoding="utf-8")
    page = json.loads(prepare["as_a_page"](text))
    assert "google.colab" in text and "google.colab" not in str(page)
    folded = [cell for cell in page["cells"] if "hide-input" in cell["metadata"].get("tags", ())]
    assert folded and all("cgkit.claim(" in "".join(cell["source"]) for cell in folded)
