"""Stack frames: which line of the user's code something comes from."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Sequence

import torch
from torch import fx

#: (file, line, source line)
Frame = tuple[str, int, str]

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*\n?[ \t]*([^\n]*)')
TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
_LIBRARY = (TORCH_FOLDER, os.path.dirname(__file__) + os.sep, "<frozen ")
_PYTHONS_OWN = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = ("site-packages", "dist-packages")  # may lie inside of it, and is what somebody wrote as a model


def frames_in(text: str) -> list[Frame]:
    """The frames of a printed traceback, in its order."""
    return [(file, int(line), source.strip()) for file, line, source in _FRAME.findall(text)]


def is_library_file(file: str) -> bool:
    """Whether a source file is torch's, Python's or of this stage, and so not the user's."""
    if file.startswith(_LIBRARY):
        return True
    return file.startswith(_PYTHONS_OWN) and not file[len(_PYTHONS_OWN) :].startswith(_INSTALLED)


def innermost_outside_torch(frames: Sequence[Frame]) -> Frame | None:
    """Of frames from the outermost to the innermost, the last that is not torch's or this stage's."""
    outside = [frame for frame in frames if not is_library_file(frame[0])]
    return outside[-1] if outside else (frames[-1] if frames else None)


def called_from(graph: fx.Graph, frame: Frame) -> Frame:
    """``frame``; if it is a line of one of torch's own modules, the user's line that first calls such a module."""
    if not is_library_file(frame[0]):
        return frame
    for node in graph.nodes:
        classes = [entry[1] for entry in (node.meta.get("nn_module_stack") or {}).values()]
        files = [
            getattr(sys.modules.get(getattr(each, "__module__", "")), "__file__", "") for each in classes
        ]
        if frame[0] in files:
            return user_line(node) or frame
    return frame


def user_line(node: fx.Node) -> Frame | None:
    """The line of the user's code behind a node: the innermost outside of torch."""
    return innermost_outside_torch(frames_in(node.stack_trace or ""))
