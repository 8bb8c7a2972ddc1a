"""Launching a compiled Triton kernel whose grid and arguments never change again, or a recorded graph.

Every private reach into Triton and into the CUDA driver that a prepared launch needs stands here: the compiled
kernel's ``run``, ``cuLaunchKernel`` through ctypes with the parameter block packed once, and ``cuGraphLaunch``. What is
not as it was on the versions named here gives way to the next slower form, and says so in ``how``.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cgkit.errors import ReplayError
from cgkit.torch_hooks.cuda import current_raw_stream
from cgkit.torch_hooks.triton import triton_direct_launch

_INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE: what cuFuncGetParamInfo says behind the last parameter
_MOST_HIDDEN = 2  # scratch pointers that Triton appends: global and profile


class LaunchStream:
    """The stream on which prepared launches run: looked up once a step (:attr:`follow`), read by all of them.

    Run on torch 2.13 (CPU, with a stand-in for the driver).
    """

    __slots__ = ("argument", "device_index", "follow")

    def __init__(self, device_index: int) -> None:
        self.device_index = device_index
        self.argument = argument = ctypes.c_void_p(current_raw_stream(device_index))
        look_up = current_raw_stream

        def follow() -> None:
            argument.value = look_up(device_index)

        self.follow: Callable[[], None] = follow

    @property
    def raw(self) -> int:
        """The stream's address, as of the last :attr:`follow`."""
        return self.argument.value or 0


def fixed_launch(
    compiled_kernel: Any,
    grid: Sequence[int],
    pointers: Sequence[int],
    numbers: Sequence[int],
    constants: Sequence[Any],
    stream: LaunchStream,
) -> Callable[[], None] | None:
    """A callable without arguments that launches ``compiled_kernel`` so; None where no way is known.

    ``pointers`` (64 bits), then ``numbers`` (32 bits, not specialised on), then ``constants`` are the kernel's
    parameters in order. The callable's ``how`` says which way it is: the driver's ``cuLaunchKernel``, or the
    kernel's own ``run`` and why not the driver's. Launch hooks of Triton's profiler do not fire.

    Run on torch 2.13 (CPU, with stand-ins for driver and kernel). Written for Triton 3.6 with torch 2.11 (CUDA); other
    versions of Triton give None.
    """
    run = triton_direct_launch(compiled_kernel)
    if run is None:
        return None
    try:
        launch = _driver_launch(compiled_kernel, grid, pointers, numbers, stream)
        launch.how = "cuLaunchKernel"  # type: ignore[attr-defined]
    except _OtherwiseError as why:
        arguments = (*pointers, *numbers, *constants)
        launch = functools.partial(_run, run, tuple(grid), stream, arguments)
        launch.how = f"Triton's run ({why})"  # type: ignore[attr-defined]
    return launch


def fixed_graph_launch(
    graph: torch.cuda.CUDAGraph, device_index: int, stream: LaunchStream
) -> Callable[[], None] | None:
    """A callable without arguments that launches ``graph`` on ``stream``; None where ``graph.replay`` must do it.

    ``replay`` looks up device, stream and random generators at each call, a third of its time on the host. A graph
    that draws random numbers needs that: its generator moves on with each replay. It is replayed once here to see.

    Run on torch 2.13 (CPU, with stand-ins for driver and graph). Written for torch 2.11 (CUDA).
    """
    try:
        launch = _driver().cuGraphLaunch
        executable = ctypes.c_void_p(int(graph.raw_cuda_graph_exec()))
    except (_OtherwiseError, AttributeError, RuntimeError, TypeError):
        return None
    generator = torch.cuda.default_generators[device_index]
    before = generator.get_offset()
    graph.replay()
    if generator.get_offset() != before:
        return None
    return functools.partial(launch, executable, stream.argument)


def _run(run: Callable[..., None], grid: Any, stream: LaunchStream, arguments: tuple[Any, ...]) -> None:
    run(grid, stream.raw, arguments)


class _OtherwiseError(Exception):
    """Something is not as the packed launch knows it; ``str()`` says what."""


class _Results(dict):  # type: ignore[type-arg]
    """Looks up what a driver call returned: nothing for success, an error for anything else."""

    def __missing__(self, result: int) -> None:
        raise ReplayError(
            f"the CUDA driver refused a prepared launch with error {result}; the device is in an undefined state: "
            "start the process again, and use replay_path='module' to see which operator it is"
        )


@functools.cache
def _driver() -> Any:
    """The driver library, by a handle of our own: its functions' result types are ours to set. The GIL is kept:
    a launch takes less time than giving it away and getting it back."""
    try:
        library = ctypes.PyDLL("libcuda.so.1")
        library.cuLaunchKernel.restype = library.cuGraphLaunch.restype = _Results({0: None}).__getitem__
        library.cuFuncGetParamInfo.restype = ctypes.c_int
    except (OSError, AttributeError) as error:  # no driver, or one older than 12.4
        raise _OtherwiseError(f"no driver that lists a kernel's parameters: {error}") from error
    return library


def _driver_launch(
    compiled_kernel: Any,
    grid: Sequence[int],
    pointers: Sequence[int],
    numbers: Sequence[int],
    stream: LaunchStream,
) -> functools.partial[None]:
    threads, shared = _launch_shape(compiled_kernel)
    if len(grid) != 3 or not math.prod(grid):
        raise _OtherwiseError(f"a grid of {tuple(grid)}")
    driver, function = _driver(), ctypes.c_void_p(compiled_kernel.function)
    values: list[Any] = [*map(ctypes.c_uint64, pointers), *map(ctypes.c_int32, numbers)]
    sizes = _parameter_sizes(driver, function, len(values) + _MOST_HIDDEN + 1)
    hidden = sizes[len(values) :]
    if sizes[: len(values)] != [ctypes.sizeof(value) for value in values] or hidden not in ([], [8], [8, 8]):
        raise _OtherwiseError(
            f"the kernel has parameters of {sizes} bytes, where {len(pointers)} pointers and {len(numbers)} "
            "numbers were expected"
        )
    values += [ctypes.c_uint64(0) for _ in hidden]  # no scratch memory
    block = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    whole = [ctypes.c_uint(number) for number in (*grid, threads, 1, 1, shared)]
    launch = functools.partial(driver.cuLaunchKernel, function, *whole, stream.argument, block, None)
    launch.keeps = values, compiled_kernel  # type: ignore[attr-defined]  # the block points at them
    return launch


def _launch_shape(compiled_kernel: Any) -> tuple[int, int]:
    """Threads of a block, and its bytes of shared memory."""
    metadata = getattr(compiled_kernel, "metadata", None)
    try:
        warps, shared = int(metadata.num_warps), int(metadata.shared)  # type: ignore[union-attr]
    except (AttributeError, TypeError) as error:
        raise _OtherwiseError("the compiled kernel does not tell its warps and shared memory") from error
    for name, usual in _USUAL.items():
        value = getattr(metadata, name, usual)
        if value not in (usual, None, False) and tuple(_as_tuple(value)) != _as_tuple(usual):
            raise _OtherwiseError(f"{name} is {value!r}")
    return warps * 32, shared


#: What a kernel may not ask for, since the packed launch does not give it.
_USUAL: dict[str, Any] = {
    "num_ctas": 1, "cluster_dims": (1, 1, 1), "launch_cooperative_grid": 0, "launch_pdl": 0,
    "global_scratch_size": 0, "profile_scratch_size": 0, "warp_size": 32,
}  # fmt: skip


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _parameter_sizes(driver: Any, function: ctypes.c_void_p, most: int) -> list[int]:
    """Bytes of each parameter of a loaded kernel, the hidden ones too."""
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    for index in range(most):
        result = driver.cuFuncGetParamInfo(
            function, ctypes.c_size_t(index), ctypes.byref(offset), ctypes.byref(size)
        )
        if result == _INVALID_VALUE:
            return sizes
        if result:
            raise _OtherwiseError(f"cuFuncGetParamInfo gives error {result}")
        sizes.append(size.value)
    return sizes
