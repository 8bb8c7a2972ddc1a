"""Follows every internal link of the built site, offline: ``python docs/linkcheck.py docs/_build/html``.

A link to a page or file that is not there, or to an anchor that its page does not have, is an error. So is whatever
a page would fetch from the network by itself (script, style, picture, frame, font).
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHED = dict.fromkeys(("script", "img", "iframe", "source", "video"), "src") | {"link": "href", "object": "data"}


class Page(HTMLParser):
    """The anchors, links and fetched resources of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if FETCHED.get(tag, "") in given:
            self.fetched.append(given[FETCHED[tag]])


def problems(site: Path) -> list[str]:
    """What is wrong in the site at ``site``: a line each; [] if nothing is."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = [] if pages else [f"{site}: there is no page"]
    for path, page in pages.items():
        for link in page.links + page.fetched:
            if wrong := _wrong(path, link, link in page.fetched, pages):
                found.append(f"{path.relative_to(site)}: {link}: {wrong}")
    for style in site.rglob("*.css"):
        addresses = re.findall(r"url\(\s*['\"]?((?:https?:)?//[^)]+)", style.read_text())
        found += [f"{style.name}: {address}: fetched" for address in addresses]
    return found


def _wrong(path: Path, link: str, fetched: bool, pages: dict[Path, Page]) -> str:
    parts = urlsplit(link)
    if parts.scheme == "data" or (parts.scheme and not fetched):
        return ""
    if parts.scheme or parts.netloc:
        return "fetched from the network"
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
    target = target / "index.html" if target.is_dir() else target
    if not target.exists():
        return "not there"
    page = pages.get(next((p for p in pages if p.resolve() == target), path)) if target.suffix == ".html" else None
    if page and parts.fragment and unquote(parts.fragment) not in page.anchors:
        return "no such anchor"
    return ""


if __name__ == "__main__":
    wrong = problems(Path(sys.argv[1]))
    print(*wrong, f"{len(wrong)} broken", sep="\n")
    sys.exit(bool(wrong))
