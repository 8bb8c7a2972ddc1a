"""Exercises of notebook 11: predict, repair and build models of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cgkit.exercises.core import Verdict, exercise, nearly, package, right, wrong

WIDTH = 8
RUNNING_MEAN = "course11::running_mean"


def _config(op: str) -> Any:
    return package().CompilationConfig(splitting_ops=[op], compiler="eager")


# --- 11-1: how much is recorded ------------------------------------------------------------------


@exercise(
    "11-1",
    question="""
    Write `predict(layers, sizes)` for a model that calls its own splitting operator once in each of
    `layers` layers and is recorded at the list `sizes` in mode PIECEWISE: a dictionary with `pieces`
    (all of them), `capturable` (those that are compiled) and `graphs` (recorded). It is compared with
    models that are really recorded.
    """,
    hints=(
        "Every cut adds two pieces: the operator itself, and what follows it.",
        "Each capturable piece is recorded once for each size. A size that is listed twice is one size.",
    ),
)
def predict_records(answer: Callable[[int, list[int]], dict[str, int]]) -> Verdict:
    off: dict[str, str] = {}
    for layers, sizes in ((1, [1, 2, 4]), (3, [2, 4]), (2, [1, 4, 4])):
        said, seen = answer(layers, list(sizes)), _records(layers, sizes)
        for name in seen:
            if said.get(name) != seen[name]:
                off.setdefault(
                    name,
                    f"{name}, {layers} layers, sizes {sizes}: you say {said.get(name)}, there are {seen[name]}.",
                )
    if not off:
        return right("L cuts leave L + 1 pieces, and each of those is recorded at each size.")
    if len(off) == 1:
        return nearly(f"One of the three is off. {next(iter(off.values()))}")
    return wrong(" ".join(off.values()))


def _records(layers: int, sizes: list[int]) -> dict[str, int]:
    cgkit = package()
    op = "course11::cut"
    cgkit.register_op("cut", _copy, mutates_args=["output"], namespace="course11")
    model = _stack()(layers, compilation_config=_config(op))
    model(torch.ones(3, WIDTH))
    graphs = len(cgkit.capture_model(model, sorted(set(sizes))).to_frame())
    pieces = cgkit.compiled_model(model).split.pieces
    return {"pieces": len(pieces), "capturable": sum(not p.is_splitting for p in pieces), "graphs": graphs}


def _copy(x: torch.Tensor, output: torch.Tensor) -> None:
    output.copy_(x)


def _stack() -> Any:
    class Stack(nn.Module):
        def __init__(self, layers: int) -> None:
            super().__init__()
            self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers + 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linears[0](x)
            for linear in list(self.linears)[1:]:
                held = torch.empty_like(x)
                torch.ops.course11.cut(x, held)
                x = linear(held)
            return x

    return package().support_torch_compile(Stack)


# --- 11-2: a branch on a value -------------------------------------------------------------------


class Clipped(nn.Module):
    """What exercise 11-2 asks to repair: it looks at values in Python."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.abs().max() > 1:
            return x / x.abs().max()
        return x


@exercise(
    "11-2",
    question="""
    This forward looks at a value in Python, and cannot be one graph:

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.abs().max() > 1:
                return x / x.abs().max()
            return x

    Give a class (an `nn.Module`) that computes the same, and in which the doctor finds no error but `mixed-rows`
    (the maximum is that of the batch, whatever it is padded with).
    """,
    hints=(
        "Compute both, and let a tensor choose: `torch.where`. Or is there one formula for both cases?",
        "Divide by the larger one of the maximum and 1: `torch.clamp`.",
    ),
)
def repair_branch(answer: type[nn.Module]) -> Verdict:
    inputs = {
        "small values": torch.linspace(-0.5, 0.5, 4 * WIDTH).reshape(4, WIDTH),
        "large values": torch.linspace(-5, 4, 4 * WIDTH).reshape(4, WIDTH),
        "zeros": torch.zeros(4, WIDTH),
    }
    model, truth = answer(), Clipped()
    off = [name for name, x in inputs.items() if not torch.allclose(model(x), truth(x), atol=1e-6)]
    report = package().doctor(answer(), inputs["small values"])
    # The maximum of a whole batch mixes its rows, as the question has it.
    errors = [error for error in report.errors if error.code != "mixed-rows"]
    if errors:
        codes = ", ".join(dict.fromkeys(error.code for error in errors))
        say = f"The doctor still finds: {codes}, at `{errors[0].source}`."
        return wrong(say if not off else f"{say} And the values differ for {', '.join(off)}.")
    if not off:
        return right(
            "One graph for both cases: the choice is a value in a tensor, made on the device. The maximum is still "
            "that of the batch: a padded batch needs a mask, or a maximum for each row."
        )
    if len(off) == len(inputs):
        return wrong("It is one graph, but it computes something else everywhere.")
    return nearly(f"It is one graph, but not the same function for: {', '.join(off)}.")


# --- 11-3: a counter in a buffer -----------------------------------------------------------------


@exercise(
    "11-3",
    question="""
    A model adds to each batch how often it was called before: `self.seen += 1; return x + self.seen`.
    Under recorded graphs warm-ups count too. Give a class whose `forward(self, x, seen)` takes the
    count as a tensor of one number and returns `(x + new_seen, new_seen)`, with nothing written in
    place; the caller carries the count.
    """,
    hints=(
        "`new_seen = seen + 1` makes a new tensor; `seen += 1` writes into the caller's.",
        "A count kept as a Python number is frozen into the graph at its value in the trace.",
    ),
)
def carry_count(answer: type[nn.Module]) -> Verdict:
    x, start = torch.zeros(4, WIDTH), torch.zeros(1)
    model = answer()
    seen, right_values, in_place = start, True, False
    for call in (1, 2, 3):
        given = seen.clone()
        out, new = model(x, given)
        in_place |= not torch.equal(given, seen)
        right_values &= torch.equal(out, x + call) and torch.equal(
            torch.as_tensor(new).reshape(-1), start + call
        )
        seen = torch.as_tensor(new).reshape(-1).clone()
    report = package().doctor(answer(), x, start.clone(), dynamic_arg_dims={"x": 0})
    if not right_values:
        return wrong("After three calls that hand the count on, values or count are not 1, 2, 3.")
    if in_place:
        return nearly("The numbers are right, but the caller's tensor was written in place.")
    if report.errors:
        return nearly(f"The numbers are right in eager, but the doctor finds {report.errors[0].code}.")
    return right("State that goes in and comes out is data; a replay carries it like any other.")


# --- 11-4: a module with an operator -------------------------------------------------------------


@exercise(
    "11-4",
    question="""
    Build one. Register an operator `course11::running_mean` that fills `output` (same shape as `x`)
    with the mean of the rows up to and with each row, and give a class, decorated with
    `cgkit.support_torch_compile`, whose `forward(self, x)` returns `2 * running_mean(x + 1)`. It is
    split at the operator, recorded at 1, 2, 4 and 8 rows, and replayed at sizes that need padding.
    """,
    hints=(
        "`cgkit.register_op('running_mean', function, mutates_args=['output'], namespace='course11')`.",
        "Annotate `x: torch.Tensor`, or no dimension is dynamic. The output: `torch.empty_like`.",
        "`x.cumsum(0)` over `torch.arange(1, rows + 1)`, as a column.",
    ),
)
def build_running_mean(answer: type[nn.Module]) -> Verdict:
    cgkit = package()
    try:
        model = answer(compilation_config=_config(RUNNING_MEAN))  # type: ignore[call-arg]
    except TypeError as error:
        if "compilation_config" not in str(error):
            raise
        return wrong(f"The class is not decorated with `@cgkit.support_torch_compile`: {error}.")
    torch.manual_seed(0)
    model(torch.randn(6, WIDTH))
    pieces = cgkit.compiled_model(model).split.pieces
    cuts = sum(piece.is_splitting for piece in pieces)
    cgkit.capture_model(model, [1, 2, 4, 8])
    off = []
    for rows in (1, 3, 5, 8):
        x = torch.randn(rows, WIDTH)
        truth = 2 * (x + 1).cumsum(0) / torch.arange(1, rows + 1)[:, None]
        if not torch.allclose(model(x), truth, atol=1e-5):
            off.append(rows)
    if off and len(off) == 4:
        return wrong("At no size does a replay give twice the running mean of x + 1.")
    if off:
        return nearly(f"Replays are wrong at {off} rows and right at the other sizes of 1, 3, 5, 8.")
    if cuts != 1:
        return nearly(f"The values are right, but the graph is cut {cuts} times at {RUNNING_MEAN}, not once.")
    return right(f"{len(pieces)} pieces, one cut, and padding changes no row: rows look only backwards.")
