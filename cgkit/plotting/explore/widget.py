"""The explorer as an anywidget (extra ``cgkit[notebook]``)."""

from __future__ import annotations

from functools import cache
from typing import Any

from cgkit.errors import CgkitError


@cache
def _widget_class() -> Any:
    try:
        import anywidget
        import traitlets
    except ModuleNotFoundError as error:
        raise CgkitError(
            f"the interactive timeline needs {error.name}: pip install 'cgkit[notebook]'; "
            ".save('timeline.html') works without it"
        ) from None
    from cgkit.plotting import explore

    class TimelineExplorer(anywidget.AnyWidget):
        """Draws ``block`` (bytes of :func:`cgkit.plotting.explore.pack.pack`) at most ``height`` pixels high."""

        _esm = explore.script()
        _css = explore.css()
        block = traitlets.Bytes(b"").tag(sync=True)
        height = traitlets.Int(440).tag(sync=True)

    return TimelineExplorer


def make_widget(block: bytes, height: int) -> Any:
    """A widget of the packed events.

    Raises:
        CgkitError: anywidget is not installed.
    """
    return _widget_class()(block=block, height=height)
