"""Stack frames: which line of the user's code something comes from."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import torch
from torch import fx

#: (file, line, source line)
Frame = tuple[str, int, str]

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*\n?[ \t]*([^\n]*)')
TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
_LIBRARY = (TORCH_FOLDER, os.path.dirname(__file__) + os.sep, "<frozen ")


def frames_in(text: str) -> list[Frame]:
    """The frames of a printed traceback, in its order."""
    return [(file, int(line), source.strip()) for file, line, source in _FRAME.findall(text)]


def is_library_file(file: str) -> bool:
    """Whether a source file is torch's or of this stage, and so not the user's."""
    return file.startswith(_LIBRARY)


def innermost_outside_torch(frames: Sequence[Frame]) -> Frame | None:
    """Of frames from the outermost to the innermost, the last that is not torch's or this stage's."""
    outside = [frame for frame in frames if not is_library_file(frame[0])]
    return outside[-1] if outside else (frames[-1] if frames else None)


def user_line(node: fx.Node) -> Frame | None:
    """The line of the user's code behind a node: the innermost outside of torch."""
    return innermost_outside_torch(frames_in(node.stack_trace or ""))
