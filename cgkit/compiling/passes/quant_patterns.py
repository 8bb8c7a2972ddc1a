"""How quantisation, the norm, the sum before it and the activation look after Inductor's decompositions.

Each in two forms: plain torch, as the models here are written, and the operator of the same name
(``custom_ops``). Decompositions by version: ``clamp`` comes whole or as ``clamp_min`` and ``clamp_max``, ``mean`` whole
or as a sum over the width, ``silu`` whole or with its ``exp``.
"""

from __future__ import annotations

import torch
from torch import fx

from cgkit.compiling.passes.matching import CONVERT, Call, Cast, Num, OneOf, Pattern, Var, Written
from cgkit.kernels import fused  # registers the operators
from cgkit.kernels.fused_torch import FP8, FP8_MAX, LEAST_SCALE

assert fused.OPERATORS
aten, ops = torch.ops.aten, torch.ops.cgkit
F32 = torch.float32


def _clamped(inner: Pattern) -> Pattern:
    low, high = Num(value=-FP8_MAX), Num(value=FP8_MAX)
    return OneOf(
        (
            Call((aten.clamp_max.default,), (Call((aten.clamp_min.default,), (inner, low)), high)),
            Call((aten.clamp.default,), (inner, low, high)),
        )
    )


def _to_fp8(inner: Pattern) -> Pattern:
    return OneOf((Call((CONVERT,), (inner, FP8)), Call((aten._to_copy.default,), (inner,))))


_VALUE = Cast(Var("value"), F32)

#: ``value`` over a static ``scale``, in FP8.
STATIC_QUANT: Pattern = OneOf(
    (
        Written(ops.static_fp8_quant.default, "out", (("x", Var("value")), ("scale", Var("scale")))),
        _to_fp8(_clamped(Call((aten.div.Tensor,), (_VALUE, Var("scale"))))),
    )
)

_SCALES = Call(
    (aten.clamp_min.default, aten.clamp.default),
    (
        Call(
            (aten.div.Tensor,),
            (
                Call((aten.amax.default,), (Call((aten.abs.default,), (Var("wide"),)), [-1], True)),
                Num(value=FP8_MAX),
            ),
        ),
        Num(value=LEAST_SCALE),
    ),
)

#: ``wide`` (a float32 ``value``) over each row's own ``scales``, in FP8: plain torch.
DYNAMIC_QUANT: Pattern = _to_fp8(_clamped(Call((aten.div.Tensor,), (Var("wide"), Var("scales")))))
DYNAMIC_SCALES: Pattern = _SCALES

#: The same as the operator: the FP8 rows.
DYNAMIC_QUANT_OP: Pattern = Written(ops.dynamic_per_token_fp8_quant.default, "out", (("x", Var("value")),))

_MEAN_OF_SQUARES = OneOf(
    (
        Call(
            (aten.mean.dim,),
            (
                OneOf(
                    (
                        Call((aten.pow.Tensor_Scalar,), (Var("normed"), Num(value=2))),
                        Call((aten.mul.Tensor,), (Var("normed"), Var("normed"))),
                    )
                ),
                [-1],
                True,
            ),
        ),
        Call(
            (aten.div.Tensor,),
            (
                Call(
                    (aten.sum.dim_IntList,),
                    (Call((aten.pow.Tensor_Scalar,), (Var("normed"), Num(value=2))), [-1], True),
                ),
                Num("width"),
            ),
        ),
    )
)

_NORMED = Call(
    (aten.mul.Tensor,),
    (
        Var("normed"),
        Call((aten.rsqrt.default,), (Call((aten.add.Tensor,), (_MEAN_OF_SQUARES, Num("eps")), True),)),
    ),
    True,
)

#: RMSNorm of ``normed`` (float32, or cast to it) with ``weight`` and ``eps``.
RMS_NORM: Pattern = OneOf(
    (
        Written(
            ops.rms_norm.default,
            "out",
            (("x", Var("normed")), ("weight", Var("weight")), ("eps", Num("eps"))),
        ),
        Call((aten.mul.Tensor,), (Cast(_NORMED), Var("weight")), True),
    )
)

#: ``first + second``, rounded or not.
SUM: Pattern = Call((aten.add.Tensor,), (Cast(Var("first")), Cast(Var("second"))))

_GATE = Var("gate_wide")
_SILU = OneOf(
    (
        Call(
            (aten.div.Tensor,),
            (
                _GATE,
                Call(
                    (aten.add.Tensor,),
                    (Call((aten.exp.default,), (Call((aten.neg.default,), (_GATE,)),)), Num(value=1)),
                    True,
                ),
            ),
        ),
        Call((aten.mul.Tensor,), (_GATE, Call((aten.sigmoid.default,), (_GATE,))), True),
        Call((aten.silu.default,), (_GATE,)),
    )
)

#: ``silu(gate) * up``.
SILU_AND_MUL: Pattern = OneOf(
    (
        Written(ops.silu_and_mul.default, "out", (("gate", Var("gate_wide")), ("up", Var("up")))),
        Call((aten.mul.Tensor,), (Cast(_SILU), Var("up")), True),
    )
)


def is_fp8(node: fx.Node) -> bool:
    """Whether ``node`` is an FP8 tensor: where a quantisation ends."""
    return getattr(node.meta.get("val"), "dtype", None) is FP8
