"""The exercises of notebook 06: recording and replaying. All checks run on the emulated platform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cgkit.capturing.emulated import EmulatedPlatform
from cgkit.capturing.sizes import CaptureSizes
from cgkit.errors import CgkitError
from cgkit.exercises.core import Verdict, exercise, nearly, right, wrong

# --- 06-1 ------------------------------------------------------------------------------------------------


def _four_prints() -> list[float]:
    """Runs the lines of 06-1 on the emulated platform."""
    platform = EmulatedPlatform()
    x, factor = torch.ones(1), 3
    graph, y = platform.record(lambda: x * factor, platform.new_pool())
    seen = []
    graph.replay()
    seen.append(float(y))
    x.copy_(torch.full((1,), 5.0))
    graph.replay()
    seen.append(float(y))
    factor = 100
    x.add_(1)
    graph.replay()
    seen.append(float(y))
    x = torch.full((1,), 1000.0)
    graph.replay()
    seen.append(float(y))
    return seen


@exercise(
    "06-1",
    question="""What do the four prints say? Answer with a list of four numbers.

        x, factor = torch.ones(1), 3
        graph, y = platform.record(lambda: x * factor, platform.new_pool())
        graph.replay();                       print(y)
        x.copy_(torch.tensor([5.0]));         graph.replay(); print(y)
        factor = 100; x.add_(1);              graph.replay(); print(y)
        x = torch.tensor([1000.0]);           graph.replay(); print(y)""",
    hints=(
        "Which lines change what lies at the recorded address, and which change what a name means?",
        "factor was copied into the graph as a number. x.add_ works in place; x = ... does not.",
    ),
)
def four_prints(answer: Sequence[float]) -> Verdict:
    expected = _four_prints()
    given = [float(value) for value in answer]
    if len(given) != len(expected):
        return wrong(f"Four numbers are asked for, and you gave {len(given)}.")
    off = [number + 1 for number, (one, other) in enumerate(zip(given, expected)) if one != other]
    if not off:
        return right("The graph sees what is written in place, and nothing that a name came to mean later.")
    if off == [4]:
        return nearly("The first three are right. In the last line, does the graph know the new tensor?")
    if off == [3, 4]:
        return nearly(
            "The first two are right. Is factor read at each replay? And does add_ reach the graph?"
        )
    return wrong(f"Not right: print {', '.join(map(str, off))}. Which lines change the recorded memory?")


# --- 06-2 ------------------------------------------------------------------------------------------------

_CASES = (
    (2, (1, 2, 4, 8, 16), "PIECEWISE", 8),
    (16, (1, 2, 4), "FULL", 4),
    (4, (1, 2, 4, 8, 16, 32), "FULL_AND_PIECEWISE", 8),
    (80, tuple(range(8, 513, 8)), "FULL_AND_PIECEWISE", 256),
    (3, (1, 4, 8), "FULL_AND_PIECEWISE", 5),
    (12, (1, 2, 4, 8), "FULL_DECODE_ONLY", 2),
    (5, (2, 4), "NONE", 4),
)


def num_graphs(layers: int, sizes: tuple[int, ...], mode: str, max_num_seqs: int) -> int:
    """How many graphs a runner records: what its dispatcher plans, with a graph a piece for PIECEWISE keys."""
    from cgkit.capturing.dispatcher import CudagraphDispatcher
    from cgkit.config import CUDAGraphMode

    listed = CaptureSizes(sizes)
    uniform = [size for size in listed if size <= listed.pad(max_num_seqs)]
    keys = CudagraphDispatcher(mode, listed).planned_keys(uniform_sizes=uniform)
    return sum(layers + 1 if kind is CUDAGraphMode.PIECEWISE else 1 for kind, _ in keys)


@exercise(
    "06-2",
    question="""Write a function

    def num_graphs(layers, sizes, mode, max_num_seqs): ...

that gives the number of graphs that capture_model records for a Llama of so many layers, cut at each attention.
sizes is a list, mode one of "NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY" and "FULL_AND_PIECEWISE". Decode
batches have at most max_num_seqs tokens, so graphs for decode alone end at the size to which that is padded.""",
    hints=(
        "One cut a layer: how many pieces does that leave between and around the cuts?",
        "FULL_AND_PIECEWISE: all sizes in pieces, and one whole graph for each size a decode batch can be padded to.",
    ),
)
def count_graphs(answer: Callable[..., int]) -> Verdict:
    off = [case for case in _CASES if answer(case[0], list(case[1]), *case[2:]) != num_graphs(*case)]
    if not off:
        return right(
            f"Right for all {len(_CASES)} configurations, from no graph to {num_graphs(*_CASES[3])} of them."
        )
    first = off[0]
    layers, sizes, mode, most = first
    said = answer(layers, list(sizes), mode, most)
    shown = f"{layers} layers, {len(sizes)} sizes up to {max(sizes)}, {mode}, max_num_seqs={most}"
    if not any(case[2] in ("PIECEWISE", "FULL") for case in off):
        return nearly(
            f"Right without a separate decode routine. {shown}: you say {said}. Which sizes can decode have?"
        )
    if len(off) < len(_CASES) / 2:
        return nearly(
            f"Right for {len(_CASES) - len(off)} of {len(_CASES)}. Look at {shown}: you say {said}."
        )
    return wrong(f"Off for {len(off)} of {len(_CASES)}, first for {shown}: you say {said}.")


# --- 06-3 ------------------------------------------------------------------------------------------------


@exercise(
    "06-3",
    question="""make_fast(function, example, platform) shall return a function fast(x) that gives what
function(x) gives, for any x of the example's shape, by replaying a graph that is recorded once. The one below
is wrong twice. The answers must stay right when several are kept, and the caller's example must not be changed.""",
    hints=(
        "`example = x` gives a name another meaning. Which memory does the graph read?",
        "Record on a buffer of your own, and copy_ each x into it.",
        "What does the caller hold after the second call, if both calls return the same tensor?",
    ),
)
def stale_buffer(answer: Callable[..., Any]) -> Verdict:
    torch.manual_seed(6)
    platform, runs = EmulatedPlatform(), []
    factor = float(torch.rand(()) + 2)  # nobody knows what function computes but by calling it

    def function(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return torch.tanh(x * factor) + x

    example = torch.randn(3, 2)
    before = example.clone()
    fast = answer(function, example, platform)
    inputs = [torch.randn(3, 2) for _ in range(3)]
    expected = [torch.tanh(x * factor) + x for x in inputs]
    answers, at_once = [], []
    for x in inputs:
        prepared = len(runs)
        answers.append(fast(x))
        at_once.append(answers[-1].clone())
        if len(runs) > prepared:
            return wrong(
                "function was called again by fast(x): record once, in make_fast, and only replay after that."
            )
    if not all(torch.equal(one, other) for one, other in zip(at_once, expected)):
        if not any(torch.equal(one, other) for one, other in zip(at_once, expected)):
            return wrong(
                "fast(x) does not give function(x). Which memory does the graph read, and is x ever in it?"
            )
        return nearly("Some answers are right, and not all.")
    if not all(torch.equal(one, other) for one, other in zip(answers, expected)):
        return nearly(
            "Each answer is right when it comes, and the next call overwrites it: the caller kept all three."
        )
    if not torch.equal(example, before):
        return nearly(
            "The answers are right, but the caller's example was overwritten: use a buffer of your own."
        )
    return right(
        "Own buffer, copy in, replay, copy out: that is what a captured model does around its graphs."
    )


# --- 06-4 ------------------------------------------------------------------------------------------------


def unrecordable(x: torch.Tensor) -> torch.Tensor:
    """What 06-4 has to say in another way."""
    if x.max().item() > 1:
        x = x / x.max()
    return x[x > 0].sum()


@exercise(
    "06-4",
    question="""This function cannot be recorded. Write one that gives the same numbers for every x, and can.

    def f(x):
        if x.max().item() > 1:
            x = x / x.max()
        return x[x > 0].sum()

Its result is a tensor of no dimensions.""",
    hints=(
        "Both halves of the `if` may be computed. What chooses between two tensors without asking the host?",
        "Dividing by 1 changes nothing: torch.clamp(x.max(), min=1).",
        "The sum needs only the positive numbers, not a shorter tensor: torch.where, or relu.",
    ),
)
def make_recordable(answer: Callable[[torch.Tensor], torch.Tensor]) -> Verdict:
    torch.manual_seed(4)
    inputs = [torch.randn(8) * 3, torch.rand(8) * 0.5, torch.tensor([-1.0] * 8), torch.zeros(8)]
    given = [answer(x.clone()) for x in inputs]
    off = [x for x, one in zip(inputs, given) if not _close(one, unrecordable(x))]
    buffer = inputs[0].clone()
    platform = EmulatedPlatform()
    try:
        graph, result = platform.record(lambda: answer(buffer), platform.new_pool())
    except CgkitError as error:
        first = str(error).splitlines()[0]
        return wrong(f"It cannot be recorded yet: {first}")
    if len({str(one + 0 if isinstance(one, torch.Tensor) else one) for one in given}) == 1:  # -0.0 + 0 is 0.0
        return wrong(f"It can be recorded, but gives the same for every x: {given[0]}.")
    if off:
        return nearly(f"It can be recorded, but the numbers differ, for example for {off[0].tolist()}.")
    for x in inputs:
        buffer.copy_(x)
        graph.replay()
        if not _close(result, unrecordable(x)):
            return nearly(
                "It can be recorded, and a replay gives another number than a call: something in it is frozen."
            )
    return right("Same shapes for every input, and nothing that the host has to know.")


def _close(given: Any, expected: torch.Tensor) -> bool:
    return (
        isinstance(given, torch.Tensor) and given.shape == expected.shape and torch.allclose(given, expected)
    )


# --- 06-5 ------------------------------------------------------------------------------------------------


@exercise(
    "06-5",
    question="""Write make_wrapper(function, platform, pool). It returns wrapped(key, x):

- the first call with a key records function(x) and replays it once;
- later calls with that key replay, and return the recorded output;
- if x does not lie where it lay when the key was recorded, it raises a ValueError, and replays nothing.

Different keys have tensors of different sizes, so each has a graph of its own.""",
    hints=(
        "A dict from key to (graph, output, address).",
        "x.data_ptr() is the address. Compare it before you replay.",
        "Recording computes nothing: what must come after it, so that the first answer is right?",
    ),
)
def own_wrapper(answer: Callable[..., Any]) -> Verdict:
    platform, runs = EmulatedPlatform(), []

    def function(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x * 2 + 1

    wrapped = answer(function, platform, platform.new_pool())
    buffers = {size: torch.arange(float(size)) for size in (4, 2, 8)}
    for size, x in buffers.items():
        first = wrapped(size, x).clone()
        if first.isnan().any():
            return nearly(
                "The first answer of a key is NaN: recording computes nothing, so replay once after it."
            )
        if not torch.equal(first, x * 2 + 1):
            return wrong(f"The first call with key {size} gave {first.tolist()}, not function(x).")
    if len(runs) != len(buffers):
        return wrong(
            f"function was called {len(runs)} times for {len(buffers)} keys: once a key, to record it."
        )
    for size, x in buffers.items():
        x.add_(3)
        if not torch.equal(wrapped(size, x), x * 2 + 1):
            return wrong(
                f"A later call with key {size} did not give function(x): does it replay that key's own graph?"
            )
    if len(runs) != len(buffers):
        return wrong("function was called again for a key that was recorded: replay it.")
    held = wrapped(4, buffers[4]).clone()
    try:
        wrapped(4, buffers[4] + 100)
    except ValueError:
        if torch.equal(wrapped(4, buffers[4]), held):
            return right(
                "That is CUDAGraphWrapper without its bookkeeping: one dict, one comparison, one replay."
            )
        return wrong("After the refused call the wrapper no longer gives function(x).")
    except Exception as error:
        return nearly(
            f"It refuses an x at another address, with {type(error).__name__}: a ValueError is asked for."
        )
    return nearly("It records and replays, but took an x at another address without a word: the stale input.")
