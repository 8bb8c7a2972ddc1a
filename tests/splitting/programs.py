"""Random programs for the property tests: one description, run eagerly, by fx and by Dynamo.

A program is a list of steps over a growing list of tensors (all float, first dimension the batch).
It is full of what a cut can break: in-place writes, views, aliases, out-parameters, sizes, tuples.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import fx

import tests.splitting.toys  # noqa: F401 - registers the operators

WIDTH = 4

#: What may be drawn as operators to cut at; those that a program does not hold are left out.
OPERATORS = (
    "splittoy::attention",
    "splittoy.mixer.default",
    *(
        f"aten::{name}"
        for name in ("add", "mul_", "chunk", "view", "sin", "copy_", "empty_like", "zeros_like")
    ),
    *(f"aten.{name}" for name in ("new_empty", "fill_", "add_", "t", "reshape", "add.Tensor")),
)


@dataclass(frozen=True)
class Step:
    """One step: what to do, on which tensors (indices, taken modulo how many there are)."""

    kind: str
    a: int
    b: int
    number: int


KINDS = (
    *("add", "mul_inplace", "add_inplace", "chunk", "chunk_whole", "view_row", "setitem", "reshape"),
    *("attention", "attention", "mixer", "empty_fill", "size_arithmetic", "size_as_value", "zeros"),
    *("between", "between", "gather", "number_between"),
    *("slice_view", "transpose", "operator_sin", "operator_copy", "constant", "empty_of_size"),
)

steps = st.builds(Step, st.sampled_from(KINDS), st.integers(0, 50), st.integers(0, 50), st.integers(1, 3))
programs = st.lists(steps, min_size=1, max_size=14)
#: Mostly with the two operators that programs are full of, so that much is cut.
splitting_sets = st.builds(
    lambda own, others: list(dict.fromkeys([*own, *others])),
    st.sampled_from([(), OPERATORS[:1], OPERATORS[:2], OPERATORS[:2]]),
    st.lists(st.sampled_from(OPERATORS), unique=True, max_size=3),
)


class Program(torch.nn.Module):
    """Runs ``steps`` on ``x`` and ``y`` (``(n, 4)`` both) and ``state`` (``(4,)``); returns the last
    three tensors, and a size."""

    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self.steps = steps
        self.register_buffer("constant", torch.arange(1.0, 1 + WIDTH))

    def forward(self, x, y, state):
        values = [x, y]
        for step in self.steps:
            a, b = values[step.a % len(values)], values[step.b % len(values)]
            values.extend(self.run_step(step, a, b, state))
        return (*values[-3:], values[step.a % len(values)].size(0) * 2)

    def run_step(self, step, a, b, state):
        n, ops = a.size(0), torch.ops
        match step.kind:
            case "add":
                return [a + b * step.number]
            case "mul_inplace":
                a.mul_(0.5)
            case "add_inplace":
                a.add_(b)
            case "chunk":
                left, right = a.chunk(2, dim=1)
                return [torch.cat((right, left), dim=1) + a]
            case "chunk_whole":
                return [torch.cat(a.split(2, 1), dim=1) * b]
            case "view_row":
                a.view(n, 2, 2).mul_(step.number)
            case "setitem":
                index = (slice(None), slice(None, step.number))
                if isinstance(a, fx.Proxy):  # takes no item assignment, but fx graphs may hold one
                    a.tracer.create_proxy("call_function", operator.setitem, (a, index, 1.5), {})
                else:
                    a[index] = 1.5
            case "reshape":
                return [(a.reshape(n * 2, 2) + 1).reshape(a.shape)]
            case "attention":
                out = torch.empty_like(b)
                ops.splittoy.attention(a, b, a, out)
                return [out]
            case "between":  # one step alone between two operators to cut at
                out = torch.empty_like(a)
                ops.splittoy.attention(a, b, b, out)
                between = (out.add_, b.mul_, torch.zeros_like, torch.empty_like)[step.b % 4](a)
                ops.splittoy.attention(a, out, b, between)
                return [out, between]
            case "number_between":
                out = torch.empty_like(a)
                ops.splittoy.attention(a, b, b, out)
                wide = torch.empty((out.size(0) + n, WIDTH))
                ops.splittoy.attention(torch.cat((a, a)), torch.cat((out, b)), torch.cat((b, a)), wide)
                return [wide[:n] + out]
            case "gather":  # a copy, unlike the other elements
                taken = a[:, [3, 1, 0, 2]]
                ops.splittoy.attention(a, b, a, b)
                return [taken + a[:, [0, 1, 3, 2]]]
            case "mixer":
                out = torch.empty_like(a)
                ops.splittoy.mixer(a, state, out, 0.5)
                return [out]
            case "empty_fill":
                made = a.new_empty(n, WIDTH)
                made.fill_(step.number)
                return [made]
            case "empty_of_size":
                made = torch.empty(a.size())
                ops.splittoy.attention(a, a, b, made)
                return [made]
            case "size_arithmetic":
                half = n * 2 // 2 + 0
                return [a.view(half, WIDTH) + half]
            case "size_as_value":
                return [a * (1.0 / n) + b.shape[0]]
            case "zeros":
                return [torch.zeros_like(a).add_(b)]
            case "slice_view":
                a[:, 1:3].add_(1)
            case "transpose":
                return [a.t().contiguous().t() + 1]
            case "operator_sin":
                return [ops.aten.sin.default(a)]
            case "operator_copy":
                ops.aten.copy_.default(a, b * 0.5)
            case "constant":
                return [a + self.constant]
        return []
