"""One self-contained HTML page: no script, no network, readable on light and dark screens.

The page knows nothing of a pipeline: it is given a heading, some facts, and sections of text, tables
and pictures (:mod:`cgkit.plotting.tour_page` says which ones the tour has).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

CSS = """
:root{color-scheme:light dark;--bg:#fbfbf9;--paper:#fff;--ink:#24292f;--soft:#57606a;--line:#d8dde3;
--accent:#0072b2;--warn-bg:#fff4e0;--warn-line:#e69f00;--code:#f2f4f6}
@media(prefers-color-scheme:dark){:root{--bg:#14171b;--paper:#1b1f24;--ink:#e6e9ec;--soft:#a3adb8;
--line:#343b43;--accent:#6cb6e8;--warn-bg:#33280f;--warn-line:#e69f00;--code:#22272e}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15.5px/1.55 system-ui,-apple-system,"Segoe UI",
"DejaVu Sans",sans-serif}
main{max-width:1060px;margin:0 auto;padding:2.6rem 1.4rem 4rem}
h1{font-size:1.95rem;line-height:1.2;margin:0 0 .35rem;letter-spacing:-.015em}
.lead{color:var(--soft);font-size:1.06rem;margin:0 0 1.4rem;max-width:48rem}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(128px,1fr));gap:.7rem;margin:1.3rem 0}
.fact{background:var(--paper);border:1px solid var(--line);border-radius:9px;padding:.65rem .85rem}
.fact b{display:block;font-size:1.24rem;font-weight:650;font-variant-numeric:tabular-nums;line-height:1.25}
.fact span{color:var(--soft);font-size:.84rem}
.note{background:var(--warn-bg);border-left:4px solid var(--warn-line);border-radius:4px;padding:.7rem 1rem;
margin:1.2rem 0}
nav{display:flex;flex-wrap:wrap;gap:.35rem .5rem;margin:1.6rem 0 .4rem;font-size:.93rem}
nav a{color:var(--accent);text-decoration:none;border:1px solid var(--line);border-radius:99px;
padding:.12rem .75rem;background:var(--paper)}
nav a:hover,nav a:focus{border-color:var(--accent)}
section{background:var(--paper);border:1px solid var(--line);border-radius:12px;padding:1.35rem 1.6rem 1.2rem;
margin:1.25rem 0}
h2{font-size:1.28rem;margin:0 0 .3rem;line-height:1.3}
h2 .n{display:inline-block;min-width:1.65rem;height:1.65rem;line-height:1.65rem;text-align:center;
border-radius:50%;background:var(--accent);color:var(--paper);font-size:.95rem;margin-right:.55rem}
section>p{margin:.35rem 0 .8rem;max-width:50rem}
figure{margin:1rem 0 .6rem}
figcaption{color:var(--soft);font-size:.9rem;max-width:50rem}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(440px,1fr));gap:.4rem 1.6rem}
.cg-scroll{overflow-x:auto;margin:.7rem 0}
.cg-table{border-collapse:collapse;font-size:.9rem}
.cg-table caption{text-align:left;color:var(--soft);padding-bottom:.3rem}
.cg-table th{font-weight:600;border-bottom:1.5px solid var(--line);white-space:nowrap}
.cg-table th,.cg-table td{padding:.28rem 1.3rem .28rem 0;text-align:left;vertical-align:top}
.cg-table tbody tr+tr td{border-top:1px solid var(--line)}
.cg-table .cg-num{text-align:right;font-variant-numeric:tabular-nums}
details{margin:.5rem 0}summary{cursor:pointer;color:var(--accent)}
code{background:var(--code);border-radius:4px;padding:.08em .35em;font:.88em/1.5 ui-monospace,"SF Mono",
Menlo,Consolas,"DejaVu Sans Mono",monospace}
pre{background:var(--code);border-radius:8px;padding:.85rem 1rem;overflow-x:auto;font:.82rem/1.5 ui-monospace,
"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;margin:.6rem 0}
.chat{margin:.9rem 0;padding:0;list-style:none}
.chat li{margin:.55rem 0;border-left:3px solid var(--line);padding:.1rem 0 .1rem .9rem}
.chat .q{color:var(--soft)}.chat .a{white-space:pre-wrap}
footer{color:var(--soft);font-size:.88rem;margin-top:2rem}
@media print{section{break-inside:avoid}nav{display:none}}
"""


@dataclass
class Section:
    """A part of the page. ``body`` holds HTML fragments in order; ``number`` marks a stage."""

    title: str
    lead: str = ""
    body: list[str] = field(default_factory=list)
    number: int | None = None

    @property
    def anchor(self) -> str:
        """The section's id on the page."""
        return "".join(c if c.isalnum() else "-" for c in self.title.lower()).strip("-")

    def html(self) -> str:
        """The section as an element."""
        mark = f'<span class="n">{self.number}</span>' if self.number else ""
        lead = f"<p>{self.lead}</p>" if self.lead else ""
        inside = "\n".join([f"<h2>{mark}{escape(self.title)}</h2>{lead}", *self.body])
        return f'<section id="{self.anchor}">{inside}</section>'


def figure(picture: str, caption: str = "") -> str:
    """A picture (an SVG element) with a caption (HTML)."""
    under = f"<figcaption>{caption}</figcaption>" if caption else ""
    return f"<figure>{picture}{under}</figure>"


def folded(summary: str, inside: str) -> str:
    """``inside`` (HTML) behind a line that opens it."""
    return f"<details><summary>{escape(summary)}</summary>{inside}</details>"


def pre(text: str) -> str:
    """Text as it is written, for code and graphs."""
    return f"<pre>{escape(text)}</pre>"


def page(
    title: str,
    lead: str,
    facts: Sequence[tuple[str, str]],
    sections: Sequence[Section],
    *,
    note: str = "",
    footer: str = "",
) -> str:
    """The page as text.

    Args:
        title: the heading; ``lead``, ``note`` and ``footer`` are HTML.
        facts: pairs of (what, value), shown as tiles.
        sections: in order; those with a number are stages.
        note: what a reader must know before believing any number, such as that graphs are emulated.
    """
    tiles = "".join(
        f'<div class="fact"><b>{escape(value)}</b><span>{escape(what)}</span></div>' for what, value in facts
    )
    links = "".join(f'<a href="#{section.anchor}">{escape(section.title)}</a>' for section in sections)
    warning = f'<div class="note" role="note">{note}</div>' if note else ""
    body = "\n".join(section.html() for section in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>\n<body><main>"
        f'<header><h1>{escape(title)}</h1><p class="lead">{lead}</p></header>{warning}'
        f'<div class="facts">{tiles}</div><nav aria-label="Sections">{links}</nav>\n'
        f"{body}\n<footer>{footer}</footer></main></body></html>\n"
    )
