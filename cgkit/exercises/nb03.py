"""Exercises of notebook 03, "Splitting the graph"."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cgkit.exercises.core import Verdict, exercise, nearly, right, wrong
from cgkit.exercises.random_graphs import is_splitting, judge, random_graph
from cgkit.splitting import register_op, split_graph
from cgkit.tracing import trace

# --- models --------------------------------------------------------------------------------------

#: What the host knows of a step; the first two operators look at it.
STEP = {"length": 3}


def _attend(q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor) -> None:
    keys = cache[: STEP["length"]]
    out.copy_(torch.softmax(q @ keys.T, -1) @ keys)


def _mix(x: torch.Tensor, state: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x + state[: STEP["length"]].sum(0))


def _scale(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * x.abs().amax(-1, keepdim=True))


#: What the operators of these models do, by name.
IMPLEMENTATIONS: dict[str, Callable[..., None]] = {"attend": _attend, "mix": _mix, "scale": _scale}


def operators() -> None:
    """Registers ``nb03::attend``, ``nb03::mix`` and ``nb03::scale``."""
    for name, function in IMPLEMENTATIONS.items():
        register_op(name, function, ["out"], namespace="nb03")


class Layer(nn.Module):
    """Attention, or, where ``mixes``, a mixer, which has no norm before it."""

    def __init__(self, mixes: bool, eps: float) -> None:
        super().__init__()
        self.mixes = mixes
        self.norm, self.last_norm = nn.RMSNorm(8), nn.RMSNorm(8, eps=eps)
        self.q, self.mlp = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.register_buffer("cache", torch.ones(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x if self.mixes else self.norm(x))
        out = torch.empty_like(q)
        if self.mixes:
            torch.ops.nb03.mix(q, self.cache, out)
        else:
            torch.ops.nb03.attend(q, self.cache, out)
        return self.last_norm(x + self.mlp(out))


class Hybrid(nn.Module):
    """Twelve layers. Each third one mixes; the sixth has another epsilon in its last norm."""

    def __init__(self) -> None:
        super().__init__()
        operators()
        kinds = [(number % 3 == 2, 1e-3 if number == 5 else 1e-5) for number in range(12)]
        self.layers = nn.ModuleList(Layer(mixes, eps) for mixes, eps in kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class ThreeOperators(nn.Module):
    """Two layers that call all three operators."""

    def __init__(self) -> None:
        super().__init__()
        operators()
        self.register_buffer("cache", torch.ones(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            for op in (torch.ops.nb03.attend, torch.ops.nb03.mix):
                out = torch.empty_like(x)
                op(x + 1, self.cache, out)
                x = x + torch.tanh(out)
            scaled = torch.empty_like(x)
            torch.ops.nb03.scale(x, scaled)
            x = torch.relu(scaled)
        return x


def _split(model: nn.Module, ops: Any) -> Any:
    return split_graph(trace(model, torch.ones(4, 8)), ops)


# --- 03-1 ----------------------------------------------------------------------------------------


@exercise(
    "03-1",
    question=(
        "cgkit.exercises.nb03.Hybrid is cut at nb03::attend and nb03::mix. How many pieces are there, how many of "
        "them are capturable, and how many of the capturable ones are different? Answer with a dict: {'pieces': "
        "..., 'capturable': ..., 'different': ...}."
    ),
    hints=(
        "A capturable piece in the middle is the end of one layer and the beginning of the next.",
        "Write down for each gap: which epsilon does the layer before it have, and is there a norm after it? The "
        "first and the last piece are no gaps.",
    ),
)
def predict_the_pieces(answer: dict[str, int]) -> Verdict:
    split = _split(Hybrid(), ["nb03::attend", "nb03::mix"])
    capturable = split.to_frame().query("kind == 'capturable'")
    wanted = {
        "pieces": len(split.pieces),
        "capturable": len(capturable),
        "different": capturable["content"].nunique(),
    }
    off = [name for name in wanted if answer.get(name) != wanted[name]]
    if not off:
        return right("Only the different ones are compiled; all of the capturable ones are recorded.")
    say = f"Not as split_graph has it: {', '.join(off)}."
    return nearly(say) if len(off) == 1 else wrong(say)


# --- 03-2 ----------------------------------------------------------------------------------------


@exercise(
    "03-2",
    question=(
        "cgkit.exercises.nb03.ThreeOperators calls nb03::attend, nb03::mix and nb03::scale. Read what they do, "
        "and choose where to cut, so that a recorded step is right at every length and has no more pieces than it "
        "needs. Answer with the list for splitting_ops."
    ),
    hints=(
        "Which of the three would do something else at the next step for tensors of the same shape?",
        "STEP['length'] is a Python number: what is recorded keeps the one that it saw.",
    ),
)
def choose_the_cuts(answer: Sequence[str]) -> Verdict:
    split = _split(ThreeOperators(), list(answer))
    inside = {op for piece in split.capturable for op in piece.ops}
    frozen = sorted(inside & {"nb03::attend", "nb03::mix"})
    if frozen:
        return wrong(f"{', '.join(frozen)} would be recorded, and with it the length of the first step.")
    least = len(_split(ThreeOperators(), ["nb03::attend", "nb03::mix"]).pieces)
    if len(split.pieces) > least:
        return nearly(f"Right at every length, but in {len(split.pieces)} pieces; {least} are enough.")
    return right(f"{least} pieces. nb03::scale depends on nothing but its tensors, so it may be recorded.")


# --- 03-3 ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class Value:
    """Stands for a tensor in exercise 03-3: it has a name, and dies when nobody holds it."""

    name: str


@dataclass(frozen=True)
class Step:
    """A piece in exercise 03-3: ``run`` takes the values called ``inputs`` and returns a tuple, the ``outputs``."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    run: Callable[..., tuple[Value, ...]]


class _Watched:
    """The steps of a split graph, which look at what they are given and at what is still alive."""

    def __init__(self, split: Any) -> None:
        self.pieces = split.pieces
        self.given = {name: Value(name) for name in split.inputs}
        self.returned = list(split.outputs)
        self.alive: weakref.WeakValueDictionary[str, Value] = weakref.WeakValueDictionary()
        self.mistake = self.leak = ""
        self.ran: list[int] = []
        self.steps = [
            Step(piece.input_names, piece.output_names, lambda *args, p=piece: self.step(p, args))
            for piece in self.pieces
        ]

    def step(self, piece: Any, args: tuple[Any, ...]) -> tuple[Value, ...]:
        names = tuple(getattr(value, "name", "?") for value in args)
        if names != piece.input_names and not self.mistake:
            self.mistake = (
                f"{piece.name} was given {names[:4]}, and takes {piece.input_names[:4]} (the first four)"
            )
        later = {name for other in self.pieces[piece.index :] for name in other.input_names}
        dead = sorted(set(self.alive) - later - set(self.returned))
        if dead and not self.leak:
            self.leak = f"when {piece.name} runs, {', '.join(dead)} is still held"
        self.ran.append(piece.index)
        made = tuple(map(Value, piece.output_names))
        self.alive.update({value.name: value for value in made})
        return made


@exercise(
    "03-3",
    question=(
        "Write what stitches the pieces together: run_all(steps, values, returned). steps are in order, each with "
        ".inputs, .outputs (names) and .run(*values) -> tuple. values is a dict of the graph's inputs by name, "
        "returned a list of names. Return the list of returned values, and hold no value longer than somebody "
        "needs it (when a step runs, values that neither it, nor a later one, nor the caller needs must be gone). "
        "Answer with run_all."
    ),
    hints=(
        "Go through the steps once beforehand, and note for each name the last step that takes it.",
        "After a step, delete the names whose last user it was. Mind local variables: a loop variable or a list of "
        "arguments holds values too.",
    ),
)
def stitch_the_pieces(answer: Callable[..., Any]) -> Verdict:
    watched = _Watched(_split(Hybrid(), ["nb03::attend", "nb03::mix"]))
    found = answer(watched.steps, dict(watched.given), list(watched.returned))
    if watched.mistake:
        return wrong(watched.mistake)
    if watched.ran != list(range(len(watched.pieces))):
        return wrong(f"Of {len(watched.pieces)} pieces {len(watched.ran)} were run, or in another order.")
    if [getattr(value, "name", "?") for value in found] != watched.returned:
        return wrong("All pieces ran, but what is returned is not what was asked for.")
    if watched.leak:
        return nearly(f"Right, but {watched.leak}: in a deep model all activations would stay in memory.")
    return right("Right, and nothing is held too long. split.source does the same with `del`.")


# --- 03-4 ----------------------------------------------------------------------------------------


class Crossed(nn.Module):
    """Two pieces with the same operators on the same shapes, wired otherwise."""

    def __init__(self) -> None:
        super().__init__()
        operators()
        self.register_buffer("cache", torch.ones(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for crossed in (False, True, False):
            a, b = torch.sin(x), torch.cos(x)
            x = b - a if crossed else a - b
            out = torch.empty_like(x)
            torch.ops.nb03.attend(x, self.cache, out)
            x = out
        return x


@exercise(
    "03-4",
    question=(
        "Write content(lines): something hashable that is equal for two pieces exactly if they do the same. lines "
        "is what split.lines(piece) gives, a list with a line for each node: .name, .role ('weight', 'value', "
        "'number', 'constant', 'call', 'output'), .operator, .arguments (tuples: where, text of a constant, name "
        "of a node or ''), .shape, .dtype. Answer with content."
    ),
    hints=(
        "Names differ between layers and mean nothing. What does a name stand for? The place of a line in the list.",
        "An argument is either a node (take its place) or a constant (take its text). Both, and where it stands, "
        "matter.",
    ),
)
def write_the_hash(answer: Callable[..., Any]) -> Verdict:
    apart = False
    for model in (Hybrid(), Crossed()):
        split = _split(model, ["nb03::attend"])
        wanted = dict(zip(split.to_frame()["piece"], split.to_frame()["content"]))
        found = {piece.name: answer(split.lines(piece)) for piece in split.pieces}
        for one in wanted:
            for other in wanted:
                if found[one] == found[other] and wanted[one] != wanted[other]:
                    return wrong(
                        f"{type(model).__name__}: {one} and {other} do something else and are taken for equal. One of "
                        "them would run the other's code."
                    )
                apart |= found[one] != found[other] and wanted[one] == wanted[other]
    if not all(_hashable(each) for each in found.values()):
        return nearly(
            "It tells pieces apart, but a cache needs a key: something hashable (a tuple, no list)."
        )
    if apart:
        return nearly(
            "Different pieces are told apart, but equal ones are too: each layer would be compiled for itself."
        )
    return right("Equal pieces are equal, and different ones are not.")


def _hashable(value: Any) -> bool:
    """Whether ``hash`` takes it: a tuple with a list in it is a Hashable, and cannot be hashed."""
    try:
        hash(value)
    except TypeError:
        return False
    return isinstance(value, Hashable)


# --- 03-5 ----------------------------------------------------------------------------------------


@exercise(
    "03-5",
    question=(
        "Write split_graph yourself: my_split(graph, is_splitting) takes an fx.Graph and a function of a node, "
        "and returns a dict: node -> number of its piece, for every node but placeholders and the output. Pieces "
        "are run in the order of their numbers. Operators to cut at share no piece with others; the results "
        "(writes in place included) stay the same; an element of a tuple (operator.getitem) is in the piece of "
        "its tuple; no two pieces side by side without a cut between them. It is tried on random graphs. Answer "
        "with my_split."
    ),
    hints=(
        "One pass in the graph's order, a counter that goes up before and after each operator to cut at, is "
        "nearly all.",
        "node.target is operator.getitem, and node.args[0] is the node that made the tuple.",
    ),
)
def write_split_graph(answer: Callable[..., Any]) -> Verdict:
    verdicts = []
    for seed in range(60):
        graph = random_graph(seed)
        verdict = judge(graph, answer(graph, is_splitting))
        if verdict is not None:
            verdicts.append((verdict.outcome == "nearly", seed, verdict))
    if not verdicts:
        return right("Right on 60 random graphs, writes in place and tuples included.")
    only_nearly, seed, verdict = min(verdicts, key=lambda found: found[:2])
    say = f"{verdict.say} (cgkit.exercises.random_graphs.random_graph({seed}), and {len(verdicts) - 1} of 60 more)"
    return nearly(say) if only_nearly else wrong(say)
