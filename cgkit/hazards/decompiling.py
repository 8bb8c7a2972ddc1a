"""A dump that rests on a decompiler, and bytecode that the decompiler does not know yet."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from types import CodeType, SimpleNamespace
from unittest.mock import patch

from cgkit.hazards.exhibit import STOPS, Exhibit, Symptom
from cgkit.tracing import decompile

#: What two tiny decompilers know of. RESUME came with Python 3.11, COPY_FREE_VARS and others with it.
_OLD = {"LOAD_FAST": "{}", "LOAD_CONST": "{!r}", "BINARY_ADD": "+", "RETURN_VALUE": "return"}
_SKIPPED = ("RESUME", "CACHE", "NOP", "PUSH_NULL")


def add_one(x: float) -> float:
    """What is to be shown."""
    return x + 1


def knows_old_bytecode(code: CodeType) -> str:
    """Written for the instructions of Python 3.10."""
    return _assembled(code, dict(_OLD))


def knows_this_bytecode(code: CodeType) -> str:
    """Told of every instruction that this Python has; those that it cannot put into words it skips."""
    return _assembled(code, {**dict.fromkeys(dis.opmap, ""), **dict.fromkeys(_SKIPPED, ""), **_OLD})


def _assembled(code: CodeType, known: dict[str, str]) -> str:
    words = [known[each.opname].format(each.argval) for each in dis.get_instructions(code)]
    return f"def {code.co_name}({', '.join(code.co_varnames[: code.co_argcount])}):\n    " + " ".join(
        filter(None, words)
    )


Decompiler = Callable[[CodeType], str]


def _relied_on(decompiler: Decompiler, device: str) -> Symptom:
    try:
        text = decompiler(add_one.__code__)
    except Exception as error:
        return Symptom(True, f"no dump at all: {type(error).__name__}: {error}")
    return Symptom(False, f"a dump of {len(text.splitlines())} lines")


def _labelled(decompiler: Decompiler, device: str) -> str:
    """What cgkit shows where this is the decompiler that is installed."""
    with patch.dict(sys.modules, {"depyf": SimpleNamespace(decompile=decompiler)}):
        how, text = decompile(add_one.__code__)
    return "" if how == "depyf" else f"a listing by {how}, and labelled so: {len(text.splitlines())} lines"


UNKNOWN_BYTECODE = Exhibit(
    "unknown-bytecode",
    "A decompiler that does not know this Python's bytecode",
    (24,),
    "the dump of the compiled code fails: depyf#86 (torch 2.9), depyf#8, vLLM#20713",
    "bytecode is no interface: each release of Python has other instructions, and a decompiler follows later",
    knows_old_bytecode,
    knows_this_bytecode,
    _relied_on,
    _labelled,
    on_gpu=False,
    kind=STOPS,
    tool="the dump itself",
)

EXHIBITS = (UNKNOWN_BYTECODE,)
