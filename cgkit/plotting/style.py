"""How cgkit's pictures look: colours by meaning, reproducible SVG, and no global state.

Every drawing function takes ``ax=None`` and returns the Axes; without one it makes a figure inside
:func:`style`, which leaves matplotlib's global settings as they were. Colours are of the Okabe-Ito set,
told apart also by people who see no red or no green, and each carries one meaning everywhere. What
depends on the colour alone is hatched as well.
"""

from __future__ import annotations

import base64
import functools
import io
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P = ParamSpec("P")
T = TypeVar("T")

#: Text and axes. In HTML it becomes ``currentColor``, so that a picture follows a dark page.
INK = "#24292f"
#: Text on a light bar or box: it stays dark on a dark page, where the bar stays light.
ON_FILL = "#1b1f24"
COMPILED = "#0072b2"  # a piece that is compiled and recorded
SPLITTING = "#e69f00"  # a piece that runs between the recorded ones (attention)
SHARED = "#8fb9d6"  # a piece that uses the callable of an equal one
REAL = "#0072b2"  # tokens that somebody asked for
PADDING = "#d55e00"  # tokens that only fill a recorded size
MEMORY = "#009e73"
EAGER = "#8c8c8c"
MODES = {
    "eager": EAGER,
    "compiled": "#56b4e9",
    "NONE": "#56b4e9",
    "PIECEWISE": "#0072b2",
    "FULL": "#009e73",
}
#: Bars of modes stacked on each other are told apart without colours too.
MODE_HATCHES = {"PIECEWISE": "///"}
#: For sets of equal things (pieces with one content), in order.
SERIES = ("#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#f0e442", "#d55e00", "#999999")

_RC: dict[str, Any] = {
    "svg.hashsalt": "cgkit",
    "svg.fonttype": "none",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "grid.color": "#8c959f",
    "grid.alpha": 0.28,
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.constrained_layout.use": True,
}
_FONTS = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


@dataclass(frozen=True)
class About:
    """What a figure was made of: it stands in every title, so that no number travels alone.

    ``emulated``: graphs were emulated on a CPU; ``recorded``: where the numbers were measured, if not
    in this process (for instance "an H200, torch 2.11").
    """

    model: str = ""
    mode: str = ""
    batch: str = ""
    device: str = ""
    emulated: bool | None = None
    recorded: str = ""

    def line(self) -> str:
        """All that is known, in one line: ``SmolLM2-135M · FULL · batch 8 · cpu · emulated graphs``."""
        batch = f"batch {self.batch}" if self.batch.isdigit() else self.batch
        parts = [self.model, self.mode, batch, self.device]
        if self.emulated:
            parts.append("emulated graphs: CPU figures, not a GPU's")
        if self.recorded:
            parts.append(f"recorded on {self.recorded}")
        return " · ".join(part for part in parts if part)


LONGEST_NAME = 36  # characters of a mode's or a piece's name, with room left for the axes
_UNDRAWABLE = re.compile("[\x00-\x1f\x7f\ufffe\uffff]+")


def literal(text: str, most: int | None = None) -> str:
    """One line of somebody's text, as matplotlib must get it to draw it as it is, in ``most`` characters at most.

    Names come from traces and models: a ``$`` in them begins no formula, a control character must not end an SVG, and
    a label of any length would leave no room for the axes.
    """
    text = text if most is None or len(text) <= most else text[: most - 1] + "…"
    return _UNDRAWABLE.sub(" ", text).replace("$", r"\$")


def _literal_lines(text: str) -> str:
    return "\n".join(map(literal, text.split("\n")))


def titled(what: str, about: About | None) -> str:
    """A title of one or two lines: what is shown, and of what."""
    line = about.line() if about else ""
    return f"{what}\n{line}" if line else what


def put_title(ax: Axes, what: str, about: About | None, *, panels: int = 1) -> None:
    """The title: over the whole figure where the axes have it for themselves, else over the axes.

    ``panels``: so many axes beside each other are one picture (:func:`new_panels`).
    """
    figure = ax.get_figure(root=True)
    assert figure is not None
    if len(figure.axes) > panels:
        ax.set_title(_literal_lines(titled(what, about)))
        return
    line = "\n".join(textwrap.wrap(about.line() if about else "", int(figure.get_figwidth() * 12)))
    heading = figure.suptitle(
        _literal_lines(f"{what}\n{line}" if line else what), x=0.008, ha="left", fontsize=10.5
    )
    heading.set_gid("cg-title")


def title_of(ax: Axes) -> str:
    """The title that :func:`put_title` gave, as one line."""
    figure = ax.get_figure()
    text = ax.get_title(loc="left") or (figure.get_suptitle() if figure is not None else "")
    return " ".join(text.replace(r"\$", "$").split())


@contextmanager
def style() -> Iterator[None]:
    """matplotlib's settings for the block, put back afterwards."""
    import matplotlib as mpl

    with mpl.rc_context(cast(Any, _RC)):
        yield


def styled(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator of a drawing function: cgkit's settings inside, matplotlib's own as they were after it."""

    @functools.wraps(function)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> T:
        with style():
            return function(*args, **kwargs)

    return drawn


def new_axes(ax: Axes | None = None, width: float = 8.4, height: float = 2.8) -> Axes:
    """``ax``, or the axes of a new figure of ``width`` x ``height`` inches that no window knows."""
    if ax is not None:
        return ax
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height)).add_subplot()


def new_panels(
    ax: Axes | None, ratios: Sequence[float], width: float = 8.4, height: float = 2.8
) -> list[Axes]:
    """Axes beside each other with common rows, as wide as ``ratios`` say; only the first one if ``ax`` is given."""
    if ax is not None:
        return [ax]
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    panels = figure.subplots(1, len(ratios), sharey=True, width_ratios=list(ratios), squeeze=False)
    return list(panels[0])


def legend_below(ax: Axes, columns: int, handles: Any = None, *, panels: int = 1) -> None:
    """A legend that covers nothing: under the figure where the axes have it for themselves, else in the axes.

    ``panels``: as in :func:`put_title`.
    """
    figure = ax.get_figure(root=True)
    assert figure is not None
    held = ax.get_legend_handles_labels()[0] if handles is None else handles
    if len(figure.axes) > panels:
        ax.legend(handles=held)
    else:
        figure.legend(handles=held, ncols=columns, loc="outside lower left")


def save(drawing: Axes | str, path: str | Path) -> Path:
    """Writes a picture on white; the ending of ``path`` names the format (an SVG string only as ``.svg``).

    Raises:
        ValueError: an SVG string is to be saved as something else.
    """
    path = Path(path)
    if isinstance(drawing, str):
        if path.suffix != ".svg":
            raise ValueError(f"{path}: this picture is SVG text; name the file *.svg")
        opaque = re.sub(
            r"(<svg[^>]*>)", r'\1<rect width="100%" height="100%" fill="white"/>', drawing, count=1
        )
        path.write_text(opaque.replace("currentColor", INK), encoding="utf-8")
        return path
    figure = drawing.get_figure(root=True)
    assert figure is not None
    with style():
        figure.savefig(path, facecolor="white", metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


_title_group = re.compile(r'<g id="cg-title">.*?</g>', re.S)


def _two_weights(group: str) -> str:
    """The first line of a title stands out, the lines of provenance under it stay quiet."""
    first, *rest = group.split('<text style="')[1:]
    head = group[: group.index('<text style="')]
    rest = [re.sub(r"(font(-size)?: )10\.5px", r"opacity: .75; \g<1>9px", line, count=1) for line in rest]
    return head + "".join(f'<text style="{line}' for line in [f"font-weight: 600; {first}", *rest])


_serial = re.compile(r'(\bid="|url\(#|href="#)')


#: Characters of SVG from which a picture is an image of dots instead: a timeline of a thousand kernels would make a
#: notebook of megabytes.
LARGEST_SVG = 200_000


def svg(ax: Axes, alt: str, prefix: str = "") -> str:
    """The figure of ``ax`` as an SVG element for HTML: it takes the page's ink colour and font.

    Above :data:`LARGEST_SVG` characters: an ``img`` element that holds a PNG.

    ``alt`` describes the picture to somebody who does not see it. ``prefix`` keeps the ids of several
    pictures on one page apart. The text is the same each time: no date, no random ids.
    """
    figure: Figure = ax.get_figure(root=True)  # type: ignore[assignment]
    buffer = io.StringIO()
    with style():
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    label = alt.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    if len(text) > LARGEST_SVG:
        dots = io.BytesIO()
        with style():
            figure.savefig(dots, format="png", dpi=140, facecolor="white")
        content = base64.b64encode(dots.getvalue()).decode()
        return (
            f'<img alt="{label}" style="max-width:100%;height:auto" src="data:image/png;base64,{content}"/>'
        )
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.S)
    text = text.replace(INK, "currentColor").replace("stroke: #000000", "stroke: currentColor")
    # matplotlib lists its own fonts, in a `font-family` (3.10 and newer) or a `font` shorthand
    text = re.sub(r"font-family: [^;\"]+", f"font-family: {_FONTS}", text)
    text = re.sub(r"(font: [^;\"]*?px) [^;\"]+", rf"\1 {_FONTS}", text)
    text = _title_group.sub(lambda m: _two_weights(m[0]), text)
    if prefix:
        text = _serial.sub(lambda m: f"{m[1]}{prefix}-", text)
    head = f'<svg role="img" aria-label="{label}" style="max-width:100%;height:auto"'
    return text.replace("<svg", head, 1)
