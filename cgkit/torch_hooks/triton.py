"""Triton: a compiled kernel launched past Triton's own dispatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def triton_direct_launch(compiled_kernel: Any) -> Callable[[Sequence[int], int, Sequence[Any]], None] | None:
    """``launch(grid, raw_stream, arguments)`` for a compiled Triton kernel, past Triton's own dispatch.

    ``arguments`` are all parameters in the order of the signature, constants included; pointers may be
    plain integers. None where the kernel's private ``run`` is not known to take this call: the caller
    then launches in the public way. Launch hooks of Triton's profiler do not fire.

    Run on Triton 3.6 with torch 2.11 (CUDA). Other versions give None, as does Triton's interpreter.
    """
    import triton

    if ".".join(triton.__version__.split(".")[:2]) != "3.6":
        return None
    try:
        run, function = compiled_kernel.run, compiled_kernel.function
        packed = compiled_kernel.packed_metadata
    except AttributeError:
        return None
    if not callable(run) or function is None:
        return None

    def launch(grid: Sequence[int], stream: int, arguments: Sequence[Any]) -> None:
        run(grid[0], grid[1], grid[2], stream, function, packed, None, None, None, *arguments)

    return launch


def triton_version() -> str:
    """Triton's version; "" where it is not installed. Run on torch 2.11 (CUDA) and 2.13 (CPU)."""
    try:
        import triton
    except ImportError:
        return ""
    return triton.__version__
