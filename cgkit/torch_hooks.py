"""Every private hook of torch (and Triton) that cgkit needs, one function each.

Nothing else in cgkit touches a private name of torch. Each function says on which versions it was
run; on a version where the hook is gone it raises UnsupportedTorchError with what was tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import torch

from cgkit.errors import UnsupportedTorchError

RUN_ON = "torch 2.11 (CUDA) and 2.13 (CPU)"


def _gone(hook: str) -> UnsupportedTorchError:
    return UnsupportedTorchError(
        f"torch {torch.__version__} has no {hook} as cgkit knows it (run on {RUN_ON}); "
        "install one of these versions, or adapt cgkit/torch_hooks.py"
    )


def triton_direct_launch(compiled_kernel: Any) -> Callable[[Sequence[int], int, Sequence[Any]], None] | None:
    """``launch(grid, raw_stream, arguments)`` for a compiled Triton kernel, past Triton's own dispatch.

    ``arguments`` are all parameters in the order of the signature, constants included; pointers may be
    plain integers. None where the kernel's private ``run`` is not known to take this call: the caller
    then launches in the public way. Launch hooks of Triton's profiler do not fire.

    Read in, and written for, Triton 3.6; other versions give None, as does Triton's interpreter.
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


def current_raw_stream(device_index: int) -> int:
    """The address of the current CUDA stream of a device. torch 2.11; elsewhere by the public way."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw(device_index) if raw is not None else torch.cuda.current_stream(device_index).cuda_stream
