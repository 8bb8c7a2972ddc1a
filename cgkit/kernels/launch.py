"""A cheap launch of a Triton kernel.

``kernel[grid](...)`` binds arguments, computes a specialisation key and looks the compiled kernel up
at each call: 23 us of host time with 4 arguments and 32 us with 15 on the machine measured (Triton 3.6),
where the launch itself takes 9 to 11. Between replayed pieces that is most of a step's host time
(the article's "CUDA Graph 基础：三阶段协议与五条约束" is about what is left when it is gone altogether).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor

from cgkit.torch_hooks import LaunchStream, current_raw_stream, fixed_launch, triton_direct_launch

_INT32_MAX = 2**31 - 1
#: What :class:`CachedLaunch` is called with: grid, tensors, whole numbers, constants.
Launch = tuple[tuple[int, int, int], tuple[Tensor, ...], tuple[int, ...], tuple[Any, ...]]


class CachedLaunch:
    """Launches one Triton kernel; from the second call of a kind on, directly.

    The kernel's parameters must come in this order: tensors, then whole numbers below 2**31 (all marked
    ``do_not_specialize``), then constants. What Triton specialises on, and what is therefore checked at
    each call: the device, the constants, each tensor's dtype and whether its address is a multiple of 16.
    On a Triton that :func:`cgkit.torch_hooks.triton_direct_launch` does not know, and in Triton's
    interpreter, every launch goes the public way.

    Attributes:
        direct, plain: how many launches went which way (for tests).
    """

    def __init__(self, kernel: Any, **options: int) -> None:
        """``kernel``: a ``@triton.jit`` function; ``options``: num_warps, num_stages."""
        self.kernel, self.options = kernel, options
        self.direct = self.plain = 0
        self._launches: dict[Hashable, tuple[Any, Callable[..., None]] | None] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[Tensor],
        numbers: tuple[int, ...] = (),
        constants: tuple[Any, ...] = (),
    ) -> None:
        """Launches on the current stream of the tensors' device, which must be the current device."""
        pointers, bits = [], 0
        for tensor in tensors:
            pointers.append(pointer := tensor.data_ptr())
            bits |= pointer
        device = tensors[0].get_device()
        key = (
            device,
            constants,
            tuple([tensor.dtype for tensor in tensors]),
            tuple([pointer & 15 for pointer in pointers]) if bits & 15 else None,
        )
        known = self._launches.get(key)
        if known is not None:
            self.direct += 1
            known[1](grid, current_raw_stream(device), (*pointers, *numbers, *constants))
            return
        if numbers and max(numbers) > _INT32_MAX:
            raise OverflowError(f"kernel arguments {numbers} must be below 2**31")
        self.plain += 1
        compiled = self.kernel[grid](*tensors, *numbers, *constants, **self.options)
        if key not in self._launches:
            launch = None if compiled is None else triton_direct_launch(compiled)
            # The compiled kernel is kept too: its module must stay loaded.
            self._launches[key] = None if launch is None else (compiled, launch)

    def prepared(self, tensors: Sequence[Tensor], constants: tuple[Any, ...]) -> Callable[..., None] | None:
        """The direct launch for tensors of these dtypes whose addresses are all multiples of 16.

        ``launch(grid, raw_stream, (*pointers, *numbers, *constants))``. None before the first launch of
        the kind, or where launches go the public way. For callers that know the kind beforehand and
        check the alignment themselves.
        """
        key = (tensors[0].get_device(), constants, tuple([tensor.dtype for tensor in tensors]), None)
        known = self._launches.get(key)
        return None if known is None else known[1]

    def fixed(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[Tensor],
        numbers: tuple[int, ...],
        constants: tuple[Any, ...],
        stream: LaunchStream,
    ) -> Callable[[], None] | None:
        """A launch of exactly this, to be called without arguments; see :func:`cgkit.torch_hooks.fixed_launch`.

        Launches once, so that the kernel is compiled. The tensors must outlive the callable, which keeps their
        addresses alone. None where launches go the public way.
        """
        self(grid, tensors, numbers, constants)
        pointers = [tensor.data_ptr() for tensor in tensors]
        aligned = tuple([pointer & 15 for pointer in pointers])
        key = (
            tensors[0].get_device(),
            constants,
            tuple([tensor.dtype for tensor in tensors]),
            aligned if any(aligned) else None,
        )
        known = self._launches.get(key)
        if known is None:
            return None
        return fixed_launch(known[0], grid, pointers, numbers, constants, stream)
