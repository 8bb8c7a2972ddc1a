"""Exercises of notebook 02, "One trace, no guards"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cgkit import compilation_counter, torch_hooks
from cgkit.errors import TraceError
from cgkit.exercises.core import Verdict, exercise, nearly, right, wrong
from cgkit.measuring.after_trace import FOLLOWED, REFUSED, UNNOTICED, after_trace
from cgkit.measuring.retraces import count_traces
from cgkit.tracing import trace

#: The batches of exercise 02-1.
SIZES = (6, 6, 1, 3, 1, 8, 2)
#: What the three ways of 02-1 are called in :func:`cgkit.measuring.retraces.count_traces`.
_WAYS = {
    "dynamic=False": "torch.compile, dynamic=False",
    "torch.compile": "torch.compile",
    "cgkit.trace": "cgkit.trace",
}


# --- 02-1 ----------------------------------------------------------------------------------------


class Plain(nn.Module):
    """A layer that treats every size alike."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


@exercise(
    "02-1",
    question=(
        f"A server gets batches of {', '.join(map(str, SIZES))} tokens, in this order. How many graphs has Dynamo made "
        "at the end? Answer with a dict: {'dynamic=False': ..., 'torch.compile': ..., 'cgkit.trace': ...}."
    ),
    hints=(
        "With dynamic=False each size that was not there before is a graph.",
        "Plain torch.compile believes that the first size is the only one. The second size makes it think again, "
        "and then it has a symbol; but a symbol stands for sizes from 2 up.",
    ),
)
def predict_the_counter(answer: dict[str, int]) -> Verdict:
    calls = [(torch.ones(size, 8),) for size in SIZES]
    frame = count_traces(Plain(), calls, _WAYS.values())
    graphs = frame.groupby("way")["graphs"].max()
    off = [name for name, way in _WAYS.items() if answer.get(name) != graphs[way]]
    if not off:
        return right("Each of the graphs beyond the first is a compilation that a request waits for.")
    say = f"Not as measured: {', '.join(off)}."
    return nearly(say) if len(off) == 1 else wrong(say)


# --- 02-2 ----------------------------------------------------------------------------------------

SCALE = 2.0


class Small(nn.Module):
    """Two layers, a norm, a table that is no parameter, and a constant of the module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm = nn.RMSNorm(8, eps=1e-5)
        self.tables = {"bias": torch.ones(8)}

    def forward(self, ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(ids) * SCALE + self.tables["bias"]
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.norm(x if positions is None else x + positions[:, None])


def _third_layer(model: Any, args: tuple[Any, ...]) -> None:
    model.layers.append(nn.Linear(8, 8))


def _swap_layers(model: Any, args: tuple[Any, ...]) -> None:
    model.layers[0], model.layers[1] = model.layers[1], model.layers[0]


def _scale(model: Any, args: tuple[Any, ...]) -> None:
    """Of a copy of the module's constant: forward reads SCALE from its globals."""
    globals()["SCALE"] = 3.0


def _other_weight(model: Any, args: tuple[Any, ...]) -> None:
    model.norm.weight = nn.Parameter(torch.full((8,), 0.5))


def _other_eps(model: Any, args: tuple[Any, ...]) -> None:
    model.norm.eps = 0.5


def _other_table(model: Any, args: tuple[Any, ...]) -> None:
    model.tables["bias"] = torch.zeros(8)


#: Each change of 02-2: what is written, and the function that does it.
CHANGES: dict[str, Callable[[Any, tuple[Any, ...]], Any]] = {
    "model.norm.weight = another parameter": _other_weight,
    "model.norm.eps = 0.5": _other_eps,
    "the two layers change places": _swap_layers,
    "a third layer is appended": _third_layer,
    "model.tables['bias'] = another tensor": _other_table,
    "SCALE = 3.0 (the global)": _scale,
    "9 ids instead of 4": lambda model, args: (torch.arange(9), torch.arange(9.0)),
    "ids as int32 instead of int64": lambda model, args: (args[0].int(), args[1]),
    "positions=None": lambda model, args: (args[0], None),
}
_WHY = {
    FOLLOWED: "tensors are fetched anew at each call, and the token count is a symbol",
    REFUSED: "what a call brings is compared with the first call",
    UNNOTICED: "Dynamo made it part of the graph, and the guard that watched it is gone",
}


def what_becomes_of(change: str) -> str:
    """The outcome of one of :data:`CHANGES`, measured."""
    before = SCALE
    try:
        return after_trace(Small(), (torch.arange(4), torch.arange(4.0)), CHANGES[change])
    finally:
        globals()["SCALE"] = before


@exercise(
    "02-2",
    question=(
        "cgkit.exercises.nb02.Small was traced with ids and positions. What becomes of each change in "
        "cgkit.exercises.nb02.CHANGES? Answer with a dict: change -> 'followed', 'refused' or 'unnoticed'."
    ),
    hints=(
        "Is it a tensor that the bytecode fetches, an argument that is compared, or Python that has run already?",
        "A place in the model (layers.0.weight) is looked up at each call; how many layers there are is not.",
    ),
)
def predict_what_is_noticed(answer: dict[str, str]) -> Verdict:
    missing = [change for change in CHANGES if change not in answer]
    if missing:
        return wrong(f"Nothing is said of {missing[0]!r}. The changes are in cgkit.exercises.nb02.CHANGES.")
    seen = {change: what_becomes_of(change) for change in CHANGES}
    off = [change for change in CHANGES if str(answer[change]).lower() != seen[change]]
    if not off:
        return right("Three groups: tensors are fetched, arguments are compared, all else is frozen.")
    say = f"{len(off)} of {len(CHANGES)} are otherwise. For instance {off[0]!r}: {_WHY[seen[off[0]]]}."
    return nearly(say) if len(off) <= 2 else wrong(say)


# --- 02-3 ----------------------------------------------------------------------------------------


class OneSize(nn.Module):
    """Right for six tokens, and for no other number of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.view(6, 2, 4)
        rows = []
        for token in range(x.shape[0]):
            rows.append(heads[token] / (1 + token))
        return torch.stack(rows).softmax(-1).view(6, 8)


def _wanted(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([(row / (1 + token)).view(2, 4).softmax(-1).view(1, 8) for token, row in enumerate(x)])


@exercise(
    "02-3",
    question=(
        "cgkit.exercises.nb02.OneSize cannot be traced with a dynamic token count. Write a module that does the same "
        "for any number of tokens, as one graph that assumes nothing of it. Answer with the class."
    ),
    hints=(
        "A loop over the tokens is unrolled: its graph is for that many. Do it for all rows at once.",
        "torch.arange(x.shape[0]) has a symbol for its length; view takes -1, or x.shape[0].",
    ),
)
def repair_the_model(answer: Callable[..., Any]) -> Verdict:
    model: Any = answer() if isinstance(answer, type) else answer
    x = torch.arange(48.0).view(6, 8) / 10
    if not torch.allclose(model(x), _wanted(x)):
        return wrong("It gives something else than OneSize already at six tokens.")
    try:
        traced = trace(model, x, dynamic_arg_dims={"x": 0})
    except TraceError as error:
        return wrong(f"It cannot be traced with a dynamic token count: {error}")
    off = [n for n in (2, 3, 17, 1) if not _agrees_at(traced, n)]
    if off and off != [1]:
        return wrong(f"Traced at 6 tokens, it is wrong at {off[0]}.")
    if off:
        return nearly(
            "Right from two tokens up, but not at one: does something in it ask whether there is one?"
        )
    if traced.dropped_guards:
        return nearly(f"Right at every size tried, but it assumes {', '.join(traced.dropped_guards)}.")
    return right(f"One graph of {len(traced.operators)} operators for every number of tokens.")


def _agrees_at(traced: Any, tokens: int) -> bool:
    x = torch.arange(8.0 * tokens).view(tokens, 8) / 7
    try:
        found = traced(x)
    except (RuntimeError, IndexError):
        return False
    return found.shape == x.shape and torch.allclose(found, _wanted(x))


# --- 02-4 ----------------------------------------------------------------------------------------


class LongOrShort(nn.Module):
    """Takes another way above 16 tokens, as rotary embeddings for long contexts do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] <= 16 else x / x.shape[0]


class ThreeWays(nn.Module):
    """Three ways; the check tries this one too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 40:
            return x - x.mean(0)
        return x + 1 if x.shape[0] > 10 else x.cumsum(0)


@exercise(
    "02-4",
    question=(
        "Put the guards back, but only those on sizes. Write guarded(model): a function of x of shape (tokens, "
        "8), 2 tokens or more, that gives what the model gives, and calls cgkit.trace only for a call that breaks "
        "the dropped guards of every trace so far. Models: cgkit.exercises.nb02.LongOrShort, and another one. "
        "Answer with guarded."
    ),
    hints=(
        "Keep a list of traces. traced.dropped_guards are texts such as 's77 <= 16'; eval(text, {'s77': 9}) is a "
        "bool.",
        "The symbol's name is the shape[0] of the input whose kind is 'argument', in traced.inputs.",
    ),
)
def put_guards_back(answer: Callable[..., Any]) -> Verdict:
    more = []
    for model, sizes, ways in (
        (LongOrShort(), (4, 9, 30, 17, 16, 5, 40, 2), 2),
        (ThreeWays(), (50, 3, 12, 41, 10, 11, 40), 3),
    ):
        before = compilation_counter.num_graphs_seen
        run = answer(model)
        for size in sizes:
            x = torch.arange(8.0 * size).view(size, 8)
            if not torch.allclose(run(x), model(x)):
                return wrong(f"{type(model).__name__}: something else than the model at {size} tokens.")
        traces = compilation_counter.num_graphs_seen - before
        if traces < ways:
            return wrong(
                f"{type(model).__name__}: right, but with {traces} traces. Is the model itself called?"
            )
        if traces > ways:
            more.append(f"{type(model).__name__}: {traces} traces for {ways} ways")
    if more:
        return nearly(f"Every result is right, but it traces too often ({'; '.join(more)}).")
    return right("One trace for each way through the model, and a check of sizes that costs next to nothing.")


# --- 02-5 ----------------------------------------------------------------------------------------


class Switch(nn.Module):
    """Does what ``mode`` says; Dynamo guards it."""

    def __init__(self, mode: str = "double") -> None:
        super().__init__()
        self.mode = mode
        self.weight = nn.Parameter(torch.full((8,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight if self.mode == "double" else x - self.weight


@exercise(
    "02-5",
    question=(
        "Write the article's dispatcher yourself: without_guards(model, x) compiles model.forward once "
        "(torch.compile, fullgraph=True, backend='eager'), catches the bytecode in a hook "
        "(cgkit.torch_hooks.register_bytecode_hook, .remove() afterwards), and returns a function of x that runs "
        "this bytecode on the model. No guard may be asked, and the class must be left as it was. Answer with "
        "without_guards."
    ),
    hints=(
        "The hook is called as hook(old_code, new_code). It sees every compilation: keep yours alone "
        "(old_code is type(model).forward.__code__).",
        "types.FunctionType(code, forward.__globals__) makes a function of the bytecode; call it with the model "
        "and x. Then the class need not be touched at all.",
    ),
)
def write_the_dispatcher(answer: Callable[..., Any]) -> Verdict:
    torch_hooks.forget_code(Switch.forward.__code__)
    model, x = Switch(), torch.arange(24.0).view(3, 8)
    code = Switch.forward.__code__
    compiled: list[bool] = []
    watch = torch_hooks.register_bytecode_hook(lambda old, new: compiled.append(old is code))
    hooks = torch_hooks.count_bytecode_hooks()
    try:
        run = answer(model, x)
        first = torch.equal(run(x), x * 2)
        model.mode = "minus"  # a guard would see it
        found = run(x)
        touched = Switch.forward.__code__ is not code
        left = torch_hooks.count_bytecode_hooks() - hooks
    finally:
        watch.remove()
        Switch.forward.__code__ = code
        torch_hooks.forget_code(code)
    if not first:
        return wrong("The function does not give what the model gives.")
    if not torch.equal(found, x * 2):
        return wrong("A guard was asked: after model.mode = 'minus' the function took the other branch.")
    if not any(compiled):
        return wrong("The results are right, but model.forward was never compiled: whose bytecode is it?")
    if touched:
        return nearly(
            "No guard is asked, but the class keeps the bytecode: every other instance would run it."
        )
    if left > 0:
        return nearly(
            f"No guard is asked, but {left} hook is still registered and sees every later compilation."
        )
    return right("The bytecode runs, no guard stands before it, and nobody else notices.")
