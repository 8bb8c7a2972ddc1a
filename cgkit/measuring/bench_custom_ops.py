"""``cgkit bench custom-ops``: the hand-written layers against torch code that Inductor fuses.

The article's trade, measured: with ``custom_ops=["all"]`` norm, SwiGLU and rotary are operators of their own, which a
compiler cannot fuse with anything; with ``["none"]`` they are torch code. Kernels, step time and compile time of both,
and of each layer alone.
"""

from __future__ import annotations

import argparse
from typing import Any

from cgkit.measuring.bench_passes import add_common_arguments, measure

#: What is compared: name -> ``custom_ops``.
VARIANTS: dict[str, tuple[str, ...]] = {
    "none": ("none",),
    "rms_norm": ("none", "+rms_norm"),
    "silu_and_mul": ("none", "+silu_and_mul"),
    "rotary": ("none", "+rotary"),
    "all": ("all",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``cgkit bench custom-ops``."""
    add_common_arguments(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures; returns ``frame`` (a row a variant and batch: see :func:`cgkit.measuring.bench_passes.measure`).

    Raises:
        CaptureError: no GPU, and ``--device cpu`` was not given.
    """
    return measure(args, {name: {"custom_ops": ops} for name, ops in VARIANTS.items()}, scheme=None)
