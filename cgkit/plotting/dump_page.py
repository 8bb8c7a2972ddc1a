"""The index page of a dumped compilation: the picture, the pieces, the counters, and a link to each file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import import_module
from typing import Any
from urllib.parse import quote

from cgkit.counters import compilation_counter
from cgkit.plotting import report
from cgkit.plotting.split_graph import of_artefact
from cgkit.plotting.style import About
from cgkit.plotting.tables import table


def dump_page(compiled: Any, files: Sequence[tuple[str, str]]) -> str:
    """The page as HTML text.

    Args:
        compiled: something with ``split``, ``to_frame()``, ``model_name`` and ``num_unique``.
        files: (path from the page's folder, what it is), in the order in which to link them.
    """
    frame, pieces = compiled.to_frame(), compiled.split.to_frame()
    keys = dict(zip(frame["piece"], frame["key"]))
    keyed = pieces.assign(key=[keys.get(piece, "") for piece in pieces["piece"]])
    picture = of_artefact(compiled.split, About(model=compiled.model_name), frame=keyed)
    opened = import_module("cgkit.plotting.artefacts").opened_pieces(compiled.split, pieces, picture)
    sections = [
        report.Section("Files", "", [_links(files)]),
        report.Section("The split graph", "", [report.figure(picture.svg()), *opened]),
        report.Section("What was compiled", "", [table(frame, rows=12, chars=24)]),
        _counters(compiled),
    ]
    facts = [
        ("pieces after the split", f"{len(pieces)}"),
        ("to compile and record", f"{len(keys)}"),
        ("different ones", f"{compiled.num_unique}"),
        ("compiled in", f"{compiled.seconds:.1f} s"),
    ]
    lead = f"What was compiled for {escape(compiled.model_name)}, with links to the files of this folder."
    return report.page(f"{compiled.model_name}, compiled", lead, facts, sections)


def _links(files: Sequence[tuple[str, str]]) -> str:
    rows = "".join(
        f'<tr><td><a href="{quote(where)}">{escape(where)}</a></td><td>{escape(what)}</td></tr>'
        for where, what in files
    )
    return f'<div class="cg-scroll"><table class="cg-table"><tbody>{rows}</tbody></table></div>'


def _counters(compiled: Any) -> report.Section:
    """Expected of this model, and seen in the whole process: unmarked, since others may have been counted."""
    expected = import_module("cgkit.measuring.expected_counters").counters_table(
        compiled, compilation_counter.clone()
    )
    frame = (
        expected.to_frame()
        .drop(columns="sign")
        .rename(columns={"expected": "of this model", "seen": "in this process"})
    )
    lead = (
        "What this model must have caused, beside all that was counted in the process when the page was "
        "written: they are equal if it was the only model, counted from zero."
    )
    return report.Section("Counters", lead, [table(frame, rows=20, chars=110)])
