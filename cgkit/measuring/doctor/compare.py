"""Two outputs of a model compared: is it the same but for rounding?"""

from __future__ import annotations

from typing import Any

import torch

from cgkit.tensor_trees import tensor_leaves

#: Relative to the largest value: the same operators on the same numbers, perhaps in other kernels.
_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


def difference(expected: Any, got: Any) -> str:
    """ "" if equal but for rounding, else how they differ."""
    wanted, found = list(tensor_leaves(expected)), list(tensor_leaves(got))
    if len(wanted) != len(found):
        return f"{len(found)} tensors instead of {len(wanted)}"
    for (path, a), (_, b) in zip(wanted, found):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"output{path}: {b.dtype}{list(b.shape)} instead of {a.dtype}{list(a.shape)}"
        if not a.is_floating_point():
            if not torch.equal(a, b):
                return f"output{path}: {int((a != b).sum())} of {a.numel()} values differ"
            continue
        limit = _CLOSE.get(a.dtype, 0.1) * max(
            float(a.abs().nan_to_num(0.0).max()) if a.numel() else 0.0, 1e-6
        )
        if not torch.allclose(a, b, rtol=0.0, atol=limit, equal_nan=True):
            apart = (a.double() - b.double()).abs()
            return f"output{path}: up to {float(apart.nan_to_num(float('inf')).max()):.3g} apart"
    return ""
