"""The interactive timeline: a widget in a notebook, or one HTML file; both run the same JavaScript.

The JavaScript is ours, plain files without a build, joined in the order of :data:`SCRIPTS`. Nothing is
fetched from anywhere. Where no widget can run (GitHub, nbviewer) the cell keeps a static picture.
"""

from __future__ import annotations

import base64
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cgkit.files import whole_file
from cgkit.plotting import timeline_layout as rows_of
from cgkit.plotting.explore.pack import pack
from cgkit.plotting.style import About

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

_HERE = Path(__file__).parent
SCRIPTS = ("explorer_data.js", "explorer_columns.js", "explorer_draw.js", "explorer_input.js", "explorer.js")
_TITLE = "Timeline: the CPU against the GPU"


def script() -> str:
    """The explorer as one JavaScript module."""
    return "\n".join((_HERE / name).read_text(encoding="utf-8") for name in SCRIPTS)


def css() -> str:
    """Its style sheet."""
    return (_HERE / "explorer.css").read_text(encoding="utf-8")


def explore(
    events: pd.DataFrame,
    about: About | None = None,
    *,
    steps: pd.DataFrame | None = None,
    step: int | None = None,
    gaps: pd.DataFrame | None = None,
    notes: Sequence[str] = (),
    height: int = 440,
    title: str = _TITLE,
) -> Explorer:
    """An explorer of ``Timeline.events``; put last in a cell it is a widget.

    Args:
        about: the line of provenance.
        steps: ``Timeline.steps``: marked, and to choose from.
        step: show only this one (a value of ``steps["step"]``), with the GPU work that it launched.
        gaps: idle times with their cause, as for :func:`cgkit.plotting.timeline_chart.timeline`.
        notes: sentences on how complete the trace is.
        height: of the drawing, in pixels, at most.
        title: heading of the saved page.

    Raises:
        ValueError: there is no such step.
    """
    if step is not None:
        events, steps = one_step(events, steps, step)
    return Explorer(events, about or About(), steps, gaps, list(notes), height, title)


def one_step(
    events: pd.DataFrame, steps: pd.DataFrame | None, step: int
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The events of one step in every process: what overlaps it, and GPU work that it launched.

    Raises:
        ValueError: there is no such step.
    """
    chosen = steps[steps["step"] == step] if steps is not None else None
    if steps is None or chosen is None or not len(chosen):
        known = "none" if steps is None else ", ".join(str(s) for s in sorted(set(steps["step"]))[:12])
        raise ValueError(f"step {step} is not in this timeline; it has: {known}")
    start = events["start_us"].to_numpy(float)
    end = start + events["dur_us"].to_numpy(float)
    inside = np.zeros(len(events), dtype=bool)
    process, on_gpu = events["process"].to_numpy(), events["kind"].isin(rows_of.GPU).to_numpy()
    for row in chosen.to_dict("records"):
        left, right = row["start_us"], row["start_us"] + row["dur_us"]
        inside |= (process == row["process"]) & (start < right) & (end > left) & ~on_gpu
    by = events.index.get_indexer(events["launched_by"])
    inside |= on_gpu & (by >= 0) & inside[by]
    return events[inside], chosen


class Explorer:
    """An interactive timeline: shows itself in a notebook, :meth:`save` writes one HTML file.

    ``block``: the events, packed for the browser. ``widget``: the anywidget, to place among other widgets.
    """

    def __init__(
        self,
        events: pd.DataFrame,
        about: About,
        steps: pd.DataFrame | None,
        gaps: pd.DataFrame | None,
        notes: list[str],
        height: int,
        title: str,
    ) -> None:
        self.events, self.about, self.steps, self.gaps = events, about, steps, gaps
        self.notes, self.height, self.title = notes, height, title

    @cached_property
    def block(self) -> bytes:
        """The events as the browser reads them (see :mod:`cgkit.plotting.explore.pack`)."""
        return pack(
            self.events,
            steps=self.steps,
            gaps=self.gaps,
            title=self.title,
            about=self.about.line(),
            notes=self.notes,
        )

    @cached_property
    def widget(self) -> Any:
        """The widget.

        Raises:
            CgkitError: anywidget is not installed.
        """
        from cgkit.plotting.explore.widget import make_widget

        return make_widget(self.block, self.height)

    def picture(self) -> bytes:
        """A static picture (PNG) of the same: what GitHub and nbviewer show."""
        import io

        from cgkit.plotting.style import style
        from cgkit.plotting.timeline_chart import timeline

        window = None
        if self.steps is not None and len(self.steps) > 1:  # one step can be read, all of them cannot
            row = self.steps.iloc[len(self.steps) // 2]
            window = (float(row["start_us"]), float(row["start_us"] + row["dur_us"]))
        figure = timeline(self.events, self.about, gaps=self.gaps, window=window).get_figure(root=True)
        buffer = io.BytesIO()
        with style():
            figure.savefig(buffer, format="png", dpi=110, facecolor="white")  # type: ignore[union-attr]
        return buffer.getvalue()

    def save(self, path: str | Path, *, bill: pd.DataFrame | None = None) -> Path:
        """Writes one HTML file that needs no network: the explorer, and under it the bill if it is given.

        Args:
            path: of the file.
            bill: ``Bill.to_frame()``, or any DataFrame to stand under the timeline.
        """
        from cgkit.plotting.explore.page import page

        text = page(self, bill)
        with whole_file(path) as part:
            part.write_text(text, encoding="utf-8")
        return Path(path)

    def html(self) -> str:
        """The explorer as an HTML fragment, to stand in a page of anybody's; it needs no network."""
        from cgkit.plotting.explore.page import fragment

        return fragment(self)

    def alt(self) -> str:
        """What the picture shows, in a sentence."""
        first, last = rows_of.extent(self.events)
        scale, unit = rows_of.time_unit(last - first)
        line = self.about.line()
        lanes = self.events["lane"].astype(str).nunique()
        return (
            f"Timeline{f' of {line}' if line else ''}: {len(self.events):,} events in {lanes} lanes over "
            f"{(last - first) / scale:,.2f} {unit}"
        )

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> Any:
        data: dict[str, Any] = {"text/plain": repr(self)}
        png = base64.b64encode(self.picture()).decode()
        data["image/png"] = png
        metadata = {"image/png": {"alt": self.alt()}}
        from cgkit.errors import CgkitError

        try:
            shown = self.widget._repr_mimebundle_()
        except CgkitError as error:
            data["text/html"] = (
                f'<img alt="{escape(self.alt())}" style="max-width:100%" src="data:image/png;base64,{png}">'
                f"<p>{escape(str(error))}</p>"
            )
            return data, metadata
        bundle = shown[0] if isinstance(shown, tuple) else shown or {}
        return data | {key: value for key, value in bundle.items() if key != "text/plain"}, metadata

    def __repr__(self) -> str:
        return f"<explorer. {self.alt()}>"
