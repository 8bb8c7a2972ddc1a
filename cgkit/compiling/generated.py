"""What Inductor made of a piece: its generated code, and the kernels that stand in it.

Read from the code itself, so that it is what runs, also where Inductor found it in its cache. With the
``eager`` adaptor there is none.
"""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cgkit import torch_hooks

if TYPE_CHECKING:
    from cgkit.compiling.manager import CompiledPiece

#: Where a name must begin to be an operator of torch that the code calls as it is.
_OPERATORS = ("torch.ops.", "aten.", "inductor_ops.", "_quantized.")
#: Helpers of the generated code that are called like operators and start no kernel of their own.
_HELPERS = ("inductor_ops._alloc_from_pool",)
_NODE = re.compile(r'^ {8}\w+(?:: "[^"]*")? = (?!self\.)', re.M)


@dataclass(frozen=True)
class Kernel:
    """One kernel of a piece. ``kind``: "c++" and "triton" are Inductor's own; "extern" is a library's (a
    matrix product), "operator" an operator of torch called as it is. ``calls``: how often a run starts it."""

    name: str
    kind: str
    calls: int


@dataclass(frozen=True)
class GeneratedCode:
    """``code`` as Inductor wrote it; ``path`` where it lies ("" if nowhere any more); ``post_grad`` the graph
    after Inductor's passes, as text ("" if it was not kept)."""

    code: str
    path: str
    post_grad: str

    @functools.cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels in the order in which they are defined or first called."""
        return find_kernels(self.code)

    @property
    def calls_after(self) -> int | None:
        """How many calls the graph has after Inductor's passes; None if the graph was not kept."""
        return len(_NODE.findall(self.post_grad)) or None


def generated_code(piece: CompiledPiece) -> GeneratedCode | None:
    """The code of a compiled piece; None where Inductor did not compile it, or hides it."""
    if piece.adaptor != "inductor":
        return None
    found = torch_hooks.generated_code(piece.runnable)
    return GeneratedCode(found["code"], found["path"], found["post_grad"]) if found else None


def find_kernels(code: str) -> tuple[Kernel, ...]:
    """The kernels in Inductor's generated Python. Empty if it is no Python that we can read."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError):
        return ()
    kinds: dict[str, str] = {}
    calls: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            name = _dotted(node.value.func)
            if name.startswith("async_compile.") and isinstance(node.targets[0], ast.Name):
                kinds[node.targets[0].id] = _language(name.removeprefix("async_compile."))
                calls[node.targets[0].id] = 0
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name == "call":
            for node in ast.walk(function):
                if isinstance(node, ast.Call):
                    _count(_dotted(node.func), kinds, calls)
    return tuple(Kernel(name, kind, calls[name]) for name, kind in kinds.items())


def _count(name: str, kinds: dict[str, str], calls: dict[str, int]) -> None:
    """Counts a call of ``name`` if it starts a kernel."""
    own = name.removesuffix(".run")
    if own in kinds:
        calls[own] += 1
    elif name.startswith("extern_kernels."):
        kinds.setdefault(name, "extern")
        calls[name] = calls.get(name, 0) + 1
    elif name.startswith(_OPERATORS) and name not in _HELPERS:
        kinds.setdefault(name, "operator")
        calls[name] = calls.get(name, 0) + 1


def _language(function: str) -> str:
    return "c++" if function.startswith("cpp") else function


def _dotted(node: ast.expr) -> str:
    """``a.b.c`` of an attribute chain, "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = _dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return ""
