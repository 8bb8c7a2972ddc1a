"""What an event of a Kineto trace is: from its category and its name to one of our kinds.

NVIDIA and AMD name their calls differently (``cudaLaunchKernel``, ``hipExtModuleLaunchKernel``), and
the categories changed with torch's versions; everything that knows those names stands here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

#: All kinds, as the ``kind`` column has them. CPU, then GPU, then what is neither.
KINDS = (
    "python",
    "annotation",
    "op",
    "guard",
    "launch",
    "graph_launch",
    "copy_call",
    "sync",
    "runtime",
    "kernel",
    "memcpy",
    "memset",
    "gpu_annotation",
    "other",
)
CODE = {kind: code for code, kind in enumerate(KINDS)}
#: Calls into the driver or the runtime, by which GPU work may be launched.
CALLS = ("launch", "graph_launch", "copy_call", "sync", "runtime")
#: Work on the GPU: what makes it busy.
GPU_WORK = ("kernel", "memcpy", "memset")
GPU_KINDS = (*GPU_WORK, "gpu_annotation")

_CATEGORIES = {
    "python_function": "python",
    "user_annotation": "annotation",
    "cpu_op": "op",
    "operator": "op",  # before torch 1.12
    "kernel": "kernel",
    "gpu_memcpy": "memcpy",
    "memcpy": "memcpy",
    "gpu_memset": "memset",
    "memset": "memset",
    "gpu_user_annotation": "gpu_annotation",
}
_RUNTIME = re.compile(r"(?:^|_)(?:runtime|driver)$")
_GRAPH_LAUNCH = re.compile(r"^(?:cuda|cu|hip)GraphLaunch")
_LAUNCH = re.compile(r"Launch(?!HostFunc)|^hipLaunchByPtr")
_COPY = re.compile(r"Memcpy|Memset|MemPrefetch", re.I)
_SYNC = re.compile(r"Synchronize")
# ranges of Python code that torch reports as if they were operators, and Dynamo's look-up of its cache
_GUARD = re.compile(r"^(?:TorchDynamo Cache Lookup|cgkit:guard\b)")
_RANGE = re.compile(
    r"^(?:Torch-Compiled Region|## Call CompiledFxGraph|Pregraph bytecode|CompiledFunction$|"
    r"AOTDispatcher Runtime Wrapper|ProfilerStep|cgkit step$|cgkit:(?!:))"
)


def kind_of(category: str, name: str) -> str:
    """The kind of an event with this category and name; ``other`` if it is none that we know."""
    category = category.lower()
    if _RUNTIME.search(category):
        return call_kind(name)
    kind = _CATEGORIES.get(category, "other")
    if kind in ("op", "annotation"):
        if _GUARD.match(name):
            return "guard"
        if _RANGE.match(name):
            return "annotation"
    return kind


def call_kind(name: str) -> str:
    """The kind of a call into a runtime or a driver."""
    if _GRAPH_LAUNCH.match(name):
        return "graph_launch"
    if _SYNC.search(name):
        return "sync"
    if _LAUNCH.search(name):
        return "launch"
    return "copy_call" if _COPY.search(name) else "runtime"


def kinds_of(
    categories: Sequence[str], names: Sequence[str], category: NDArray[np.integer], name: NDArray[np.integer]
) -> NDArray[np.int8]:
    """Codes into :data:`KINDS` of many events that are given as codes: each different pair is asked once."""
    pair = category.astype(np.int64) * max(len(names), 1) + name
    different, where = np.unique(pair, return_inverse=True)
    codes = [
        CODE[kind_of(categories[int(p) // max(len(names), 1)], names[int(p) % max(len(names), 1)])]
        for p in different
    ]
    return np.asarray(codes, np.int8)[where] if len(codes) else np.empty(0, np.int8)
