"""Attention into FP8 against float64 and against attention and quantisation apart, in any form."""

from __future__ import annotations

import pytest
import torch

from cgkit.errors import ServingError
from cgkit.kernels import attend
from cgkit.kernels.fused_torch import FP8, FP8_MAX
from tests.kernels.cases import TOLERANCE, Case, arguments, assert_caches, assert_right
from tests.kernels.fused_checks import FP8_LEAST, FP8_RELATIVE

#: One that keeps all of a row of attention inside FP8's range, and one that does not.
SCALES = [0.01, 1e-5]


def nearest(wide):
    """What FP8 holds for ``wide`` (float64)."""
    return wide.clamp(-FP8_MAX, FP8_MAX).float().to(FP8).double()


def check(case: Case, scale: float, attention, carried=lambda got, right: got) -> None:
    """Runs ``attention`` (:func:`cgkit.kernels.attend`'s arguments) without and with a scale of the output.

    ``carried(got, right)`` may take out what is known to be wrong with a machine's conversion.
    """
    attention(*arguments(case))
    assert_right(case)
    output = torch.full(case.query.shape, 0x7F, dtype=torch.uint8, device=case.query.device).view(FP8)  # NaN
    given = list(arguments(case))
    given[6] = output
    attention(*given, torch.tensor(scale, device=output.device))
    assert_caches(case)

    apart = case.output.cpu().double() / scale
    got = carried(output.cpu().double(), nearest(apart))
    # From what attention writes otherwise it is half a step of FP8 (and a division's last bit) away.
    wide = apart.clamp(-FP8_MAX, FP8_MAX)
    assert ((got - wide).abs() <= 1.001 * wide.abs() * FP8_RELATIVE + FP8_LEAST).all()
    # From float64 that, and what attention itself rounds.
    error = TOLERANCE[case.query.dtype] / scale
    wide = (case.expected / scale).clamp(-FP8_MAX, FP8_MAX)
    allowed = 1.001 * (wide.abs() + error) * FP8_RELATIVE + FP8_LEAST + error
    assert ((got - wide).abs() <= allowed).all()
    tokens = case.metadata.num_tokens
    assert not output.view(torch.uint8)[tokens:].any()
    if scale == min(SCALES) and tokens:
        assert got.abs().max() == FP8_MAX  # something was too large, and saturated


def check_refusals(case: Case) -> None:
    """What does not fit is refused by name."""
    scale = torch.tensor(0.01, device=case.query.device)
    given = list(arguments(case))
    with pytest.raises(ServingError, match=r"output is torch\..*must be torch.float8_e4m3fn"):
        attend(*given, scale)
    given[6] = torch.empty(case.query.shape, dtype=FP8, device=case.query.device)
    for wrong in (scale.double(), torch.ones(2, device=scale.device), torch.empty((), device="meta")):
        with pytest.raises(ServingError, match="must be one float32 number"):
            attend(*given, wrong)
