"""Dynamo's failure in a user's words: which line, why, and what to do."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from cgkit.errors import TraceError
from cgkit.tracing.frames import Frame, frames_in, innermost_outside_torch, is_library_file

#: Where Dynamo's message ends and its advice to report bugs begins.
_TAIL = re.compile(
    r"\n\s*(Developer debug context:|For more details about this graph break|from user code:|User stack:)"
)

_ADVICE = {
    "Unsupported": (
        "cgkit needs forward as one graph. Rewrite that line so that it does not depend on a tensor's values "
        "or on what Dynamo cannot follow; or move it out of forward; or hide it in an operator "
        "(cgkit.register_op), which is not looked into"
    ),
    "ConstraintViolationError": (
        "that line needs one fixed size. Take the size from the tensor (x.shape[0], or -1 in view) "
        "instead of a number; or, if it really never changes, leave that dimension out of dynamic_arg_dims"
    ),
    "TorchRuntimeError": (
        "the line fails on these shapes: call the model eagerly with the same arguments. (Dynamic dimensions "
        "of size 0 or 1 are traced as 2; two arguments that must agree in size both need their dimension in "
        "dynamic_arg_dims)"
    ),
}


def explain(error: Exception, model: str, forward: Callable[..., Any]) -> TraceError:
    """A TraceError with the user's line, Dynamo's reason and the way out; ``error`` is its cause."""
    if isinstance(error, TraceError):
        return error
    frames = _frames(error)
    where = innermost_outside_torch(frames)
    if where is None or is_library_file(where[0]):
        function = inspect.unwrap(getattr(forward, "__func__", forward))
        code = getattr(function, "__code__", None)
        where = (code.co_filename, code.co_firstlineno, f"(in {model}.forward)") if code else ("?", 0, "")
    file, line, text = where
    message = [
        f"{model} cannot be traced as one graph",
        f"  at {file}:{line}",
        f"      {text}",
        f"  reason: {_reason(error)}",
        f"  what to do: {_advice(error)}",
    ]
    through = [f"{frame[0]}:{frame[1]}" for frame in frames if frame != where]
    if through:
        message.insert(3, f"  reached through {' -> '.join(through[:6])}")
    return TraceError("\n".join(message))


def _frames(error: Exception) -> list[Frame]:
    stack = getattr(error, "real_stack", None)
    frames = [(frame.filename, frame.lineno or 0, frame.line or "") for frame in stack or ()]
    return frames or frames_in(str(error))


def _reason(error: Exception) -> str:
    text = _TAIL.split(str(error), maxsplit=1)[0].strip()
    context = re.search(r"Developer debug context: (raised exception .*)", str(error))
    if context:  # forward itself raised: that is the reason
        return f"forward raises: {_exception(context.group(1).removeprefix('raised exception '))}"
    lines = [line for line in text.splitlines() if line.strip() and "report an issue to PyTorch" not in line]
    return f"{type(error).__name__}: " + "\n    ".join(lines)


def _exception(shown: str) -> str:
    """An exception as one writes it: torch 2.11 shows Dynamo's variables instead of their values."""
    if "Variable(" not in shown:
        return shown
    name = re.search(r"<class '(?:\w+\.)*(\w+)'>", shown) or re.match(r"(\w+?)(?:\(|$)", shown)
    values = re.findall(r"ConstantVariable\(\w+: (.*?)\)(?=[,\])]|$)", shown)
    return f"{name[1] if name else 'an exception'}({', '.join(values)})"


def _advice(error: Exception) -> str:
    if "raised exception" in str(error):
        return "call the model eagerly with the same arguments: the same line fails there"
    for cls in type(error).__mro__:
        if cls.__name__ in _ADVICE:
            return _ADVICE[cls.__name__]
    return "call the model eagerly with the same arguments to see whether it works without tracing"
