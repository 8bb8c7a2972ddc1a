import re
from html.parser import HTMLParser

import pytest

from cgkit.plotting import report
from cgkit.plotting.tour_page import tour_page
from tests.plotting import frames

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Balance(HTMLParser):
    """Fails at the first closing tag that does not fit; collects ids and links."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        self.links += [value[1:] for name, value in attrs if name == "href" and tag == "a"]

    def handle_startendtag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def html():
    return tour_page(frames.tour_data())


def test_the_page_needs_nothing_from_outside(html):
    outside = re.findall(r'(?:src|href)="(?!#)[^"]*"|url\((?!#)[^)]*\)|@import|<script', html)
    assert outside == []
    addresses = set(re.findall(r"https?://[^\"'\s<]+", html))
    assert all(address.startswith("http://www.w3.org/") for address in addresses)  # names of XML, not fetched


def test_tags_are_balanced_and_every_link_has_its_target(html):
    page = Balance()
    page.feed(html)
    assert page.open == []
    assert page.links and set(page.links) <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))


def test_each_picture_says_what_it_shows(html):
    pictures = re.findall(r"<svg[^>]*>", html)
    assert len(pictures) >= 6
    assert all('role="img"' in tag and re.search(r'aria-label="[^"]{10,}"', tag) for tag in pictures)


def test_emulated_graphs_are_announced_first_and_in_each_title(html):
    assert html.index("graphs are emulated") < html.index("<section")
    assert html.count("emulated graphs: CPU figures") >= 6
    real = tour_page(frames.tour_data(emulated=False, device="NVIDIA H200"))
    assert "emulated graphs" not in real and "graphs are emulated" not in real
    assert "NVIDIA H200" in real


def test_text_of_the_model_is_text(html):
    assert "&lt;b&gt;Why?&lt;/b&gt;" in html and "<b>Why?</b>" not in html
    assert "Because &amp; so" in html


def test_tokens_that_differ_are_not_hidden():
    assert "TOKENS DIFFER" in tour_page(frames.tour_data(tokens_equal=False))


def test_sections_keep_their_order():
    sections = [report.Section("One", body=["a"], number=1), report.Section("Two & more", body=["b"])]
    html = report.page("T", "lead", [("layers", "4")], sections)
    assert html.index('id="one"') < html.index("Two &amp; more</h2>")
