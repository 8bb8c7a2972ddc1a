"""The offline link check finds what is broken, and only that."""

import runpy
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
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
