"""How far Inductor is tuned for the batch sizes that a benchmark measures: policies by name.

Each sets ``compile_sizes`` to the batches, so that every piece is compiled for exactly them. What becomes of a matrix
product then, on a GPU: with coordinate descent, at batch 1, Inductor makes it a generated reduction (a matrix-vector
product that reads the weight once, and into which it can fuse what comes before and after); with ``max_autotune`` it
is timed in cuBLAS and in Triton templates; else it is cuBLAS. Implements the article's
"set_inductor_config：动态 shape 与静态 shape 的两种编译策略" (two strategies), taken apart.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from cgkit import torch_hooks
from cgkit.errors import ConfigError

#: name -> Inductor's options on top of those that cgkit sets for a static size (``max_autotune`` and
#: ``coordinate_descent_tuning``), which are on where they are not named.
POLICIES: dict[str, dict[str, Any]] = {
    # products in cuBLAS; sizes are constants in every other kernel, whose launches are tuned by measuring
    "library": {"max_autotune": False, "coordinate_descent_tuning": False, "max_autotune_pointwise": True},
    # products timed in cuBLAS and in Triton templates, at every batch
    "templates": {"coordinate_descent_tuning": False},
    # as cgkit compiles a static size: at batch 1 products are generated reductions, else templates
    "reductions": {},
    # at batch 1 generated reductions, else cuBLAS: the quick way to the first
    "reductions-only": {"max_autotune": False},
}

#: Independent small kernels in one launch. Reductions stay out of it where that can be said (torch 2.13).
_COMBO = {"combo_kernels": True, "combo_kernels_pointwise_only": True}


def add_tuning_arguments(parser: argparse.ArgumentParser) -> None:
    """``--tuned [POLICY]`` and ``--no-combo-kernels``."""
    parser.add_argument(
        "--tuned",
        nargs="?",
        const="reductions",
        default=None,
        choices=sorted(POLICIES),
        metavar="POLICY",
        help="compile each piece for exactly the batches too, and tune it: "
        f"{', '.join(POLICIES)} (without a name: reductions)",
    )
    parser.add_argument(
        "--combo-kernels",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="with --tuned: let Inductor put independent small kernels into one (default: yes)",
    )


def tuned_fields(policy: str | None, batches: Sequence[int], combo_kernels: bool = True) -> dict[str, Any]:
    """Fields of :class:`~cgkit.config.CompilationConfig` for ``policy``; none without one.

    Options that this torch does not have are left out.

    Raises:
        ConfigError: there is no such policy.
    """
    if policy is None:
        return {}
    if policy not in POLICIES:
        raise ConfigError(f"there is no tuning {policy!r}; use one of {', '.join(POLICIES)}")
    wanted = {**POLICIES[policy], **(_COMBO if combo_kernels else {})}
    known = torch_hooks.inductor_options()
    options = {name: value for name, value in wanted.items() if name in known}
    return {"compile_sizes": tuple(sorted(set(batches))), "inductor_compile_config": options}
