"""Text in an SVG that we write ourselves: what may stand in it, and how much room it takes."""

from __future__ import annotations

import re
import unicodedata
from html import escape

_NOT_XML = re.compile(r"[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_NARROW = set("ijlt.,:;'|!()[]{}fIr ·")


def clean(text: object) -> str:
    """``text`` without what no XML file may hold (control characters, halves of pairs)."""
    return _NOT_XML.sub("\ufffd", str(text))


def xml(text: object) -> str:
    """``text`` escaped for an element or an attribute."""
    return escape(clean(text))


def text_width(text: str, size: float, bold: bool = False) -> float:
    """About how wide ``text`` is at ``size`` pixels in a sans-serif font, a little on the wide side."""
    ems = 0.0
    for char in text:
        if unicodedata.combining(char):
            continue
        if unicodedata.east_asian_width(char) in "WF" or ord(char) > 0x1F000:
            ems += 1.02
        elif char in _NARROW:
            ems += 0.38
        elif char.isupper() or char in "mwMW@%—…→×":
            ems += 0.78
        else:
            ems += 0.62
    return ems * size * (1.14 if bold else 1.0)


def cut(text: str, width: float, size: float, bold: bool = False, keep_end: bool = False) -> str:
    """``text``, or as much of it as fits ``width`` pixels and an ellipsis: its start, or its end."""
    text = clean(text)
    if text_width(text, size, bold) <= width:
        return text
    while text and text_width(text + "…", size, bold) > width:
        text = text[1:] if keep_end else text[:-1]
    return f"…{text}" if keep_end else f"{text}…"


def weight_line(name: str, width: float, size: float) -> str:
    """How a node shows a weight that it takes: the end of a long name says most."""
    return f"⟵ {cut(name, width - text_width('⟵ ', size), size, keep_end=True)}"
