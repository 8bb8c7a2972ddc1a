"""The explorer as one HTML file: script, style and data inside, nothing fetched."""

from __future__ import annotations

import base64
import itertools
from html import escape
from typing import TYPE_CHECKING

from cgkit.plotting import report
from cgkit.plotting.tables import table

if TYPE_CHECKING:
    import pandas as pd

    from cgkit.plotting.explore import Explorer

_CSS = """
main.cgx-page .cgx-about,main.cgx-page .cgx-notes{display:none}
main.cgx-page{max-width:1680px;padding:1.6rem 1.6rem 3rem}
.cgx-page h1{font-size:1.6rem}.cgx-page .lead{max-width:none;margin-bottom:1rem}
.cgx-page .bill{display:flex;flex-wrap:wrap;gap:.5rem 4rem;align-items:flex-start}
.cgx-page .complete{color:var(--soft);font-size:.92rem;margin:.7rem 0 0;padding-left:1.2em}
"""
_serial = itertools.count()
#: The browser may refuse what the page does not need: nothing is ever loaded from anywhere.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src data:"


def page(explorer: Explorer, bill: pd.DataFrame | None = None) -> str:
    """The page as text; ``bill`` is shown as a table under the timeline."""
    notes = "".join(f"<li>{escape(note)}</li>" for note in explorer.notes)
    complete = f'<ul class="complete" aria-label="How complete this is">{notes}</ul>' if notes else ""
    under = ""
    if bill is not None:
        under = report.Section("Where the time went", "", [bill_tables(bill)]).html()
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{escape(explorer.title)}</title><style>{report.CSS}{_CSS}</style></head>\n"
        f'<body><main class="cgx-page"><header><h1>{escape(explorer.title)}</h1>'
        f'<p class="lead">{escape(explorer.about.line())}</p></header>\n'
        f"{fragment(explorer)}\n{complete}{under}</main></body></html>\n"
    )


def fragment(explorer: Explorer) -> str:
    """The explorer as an HTML fragment for any page: style, data, script, and a picture where scripts are off."""
    from cgkit.plotting.explore import css, script

    name = f"cgx{next(_serial)}"
    data = base64.b64encode(explorer.block).decode()
    picture = base64.b64encode(explorer.picture()).decode()
    return (
        f'<style>{css()}</style><div id="{name}"></div>\n<noscript><img alt="{escape(explorer.alt())}" '
        f'style="max-width:100%" src="data:image/png;base64,{picture}"></noscript>\n'
        f'<script type="text/plain" id="{name}-events">{data}</script>\n'
        f'<script type="module">\n{_as_page_script(script())}\n'
        f'const text = atob(document.getElementById("{name}-events").textContent);\n'
        "const block = Uint8Array.from(text, (letter) => letter.charCodeAt(0));\n"
        f'const root = document.getElementById("{name}");\n'
        f"root.explorer = await mount(root, block, {{ height: {explorer.height} }});\n</script>"
    )


def bill_tables(bill: pd.DataFrame) -> str:
    """``Bill.to_frame()`` as a table a side (CPU, GPU); any other frame as it is."""
    if not {"side", "part", "us", "share"} <= set(bill.columns):
        return table(bill, rows=80, chars=60)
    parts = []
    for side, rows in bill.groupby("side", sort=False):
        lines = "".join(
            f'<tr><td>{escape(str(row["part"]).replace("_", " "))}</td><td class="cg-num">{row["us"]:,.1f}</td>'
            f'<td class="cg-num">{row["share"]:.1%}</td></tr>'
            for row in rows.to_dict("records")
        )
        parts.append(
            f'<table class="cg-table"><caption>{escape(str(side).upper())}</caption><thead><tr><th>part</th>'
            f'<th class="cg-num">µs</th><th class="cg-num">share of the step</th></tr></thead>'
            f"<tbody>{lines}</tbody></table>"
        )
    return f'<div class="bill">{"".join(parts)}</div>'


def _as_page_script(source: str) -> str:
    """The module's text inside of a page: it exports to nobody, and no text in it may end the element."""
    source = source.replace("export default { render };\n", "").replace("export { mount };\n", "")
    return source.replace("</script", "<\\/script")
