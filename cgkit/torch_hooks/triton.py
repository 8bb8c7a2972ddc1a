"""Triton: a compiled kernel launched past Triton's own dispatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cgkit.torch_hooks.versions import gone


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


def is_bundled_ptxas(path: str) -> bool:
    """Whether ``path`` is where Inductor looks for the assembler that came with torch: it writes that into the
    environment (``TRITON_PTXAS_PATH``) when it first compiles a kernel in a process, unless something stands there.

    Run on torch 2.11 and 2.13 (CPU).
    """
    root = Path(torch.__file__).absolute().parent
    return path in (str(root / "bin" / "ptxas"), str(root / "_inductor" / "bin" / "ptxas"))


def triton_call(keywords: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """The kernel and the constant arguments behind a call of a Triton kernel of the model's own in a graph
    (``triton_kernel_wrapper_mutation``), whose keywords only say where they stand in a table of this process.

    None where ``keywords`` are of another operator. Run on torch 2.13 (CPU).
    """
    if not {"kernel_idx", "constant_args_idx"} <= keywords.keys():
        return None
    try:
        from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table as table
    except ImportError:
        raise gone("torch._higher_order_ops.triton_kernel_wrap.kernel_side_table") from None
    return table.get_kernel(keywords["kernel_idx"]), table.get_constant_args(keywords["constant_args_idx"])
