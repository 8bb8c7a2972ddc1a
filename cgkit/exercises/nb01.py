"""Exercises of notebook 01: busy time, a queue of launches, where a mode stops being CPU bound, and launch calls."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

from cgkit.exercises.core import Verdict, exercise, nearly, right, wrong

Spans = list[tuple[float, float]]


@exercise(
    "01-1",
    question="""
    Write `busy(spans)`: for how long was the GPU busy? `spans` is a list of `(start, end)`, one a kernel, in any order.
    Kernels on two streams may overlap; time counts once. It is tested on random lists.
    """,
    hints=(
        "Sort by the start, and remember how far you have counted.",
        "A span may lie wholly inside another one.",
    ),
)
def busy_time(answer: Callable[[Spans], float]) -> Verdict:
    cases = _span_lists()
    off = [spans for spans in cases if abs(answer(list(spans)) - _busy(spans)) > 1e-6]
    if not off:
        return right(f"In all {len(cases)} lists.")
    saw = f"{off[0]}: you say {answer(list(off[0])):g}, it is {_busy(off[0]):g}."
    if all(abs(answer(list(spans)) - sum(end - start for start, end in spans)) < 1e-6 for spans in cases):
        return nearly(f"That is the sum of all kernels. Where two overlap, it counts twice. {saw}")
    if all(_nested(spans) for spans in off):
        return nearly(f"Only lists in which one kernel lies inside another are off. {saw}")
    return wrong(f"{len(off)} of {len(cases)} lists are off. {saw}")


def _busy(spans: Spans) -> float:
    import numpy as np

    from cgkit.measuring import intervals

    starts, ends = (np.array([span[side] for span in spans], dtype=float) for side in (0, 1))
    return float(intervals.length(intervals.union(starts, ends)))


def _nested(spans: Spans) -> bool:
    return any(
        one is not other and other[0] <= one[0] and one[1] <= other[1] for one in spans for other in spans
    )


def _span_lists() -> list[Spans]:
    rng = random.Random(1)
    lists: list[Spans] = [[], [(0, 1)], [(2, 3), (0, 1)], [(0, 5), (1, 2), (4, 6)]]
    for _ in range(30):
        starts = [rng.randint(0, 30) for _ in range(rng.randint(1, 8))]
        lists.append([(start, start + rng.randint(1, 9)) for start in starts])
    return lists


@exercise(
    "01-2",
    question="""
    Write `step_us(cpu, gpu)`: when is the step over? `cpu[i]` is what the CPU spends from the launch before until
    launch `i` returns, `gpu[i]` how long its kernel runs. A kernel starts when its launch has returned **and** the
    kernel before it has ended; the CPU waits for nothing. The step is over when both sides are. It is tested on
    random steps.
    """,
    hints=(
        "Two clocks: one for the CPU, one for the GPU. Each launch moves both on.",
        "When does kernel i start? At the later of two times, and you have just computed both.",
    ),
)
def queued_step(answer: Callable[[list[float], list[float]], float]) -> Verdict:
    from cgkit.measuring.pacing import queued_us, sum_of_max_us

    cases = _steps()
    off = [case for case in cases if abs(answer(*map(list, case)) - queued_us(*case)) > 1e-6]
    if not off:
        return right(f"In all {len(cases)} steps.")
    cpu, gpu = off[0]
    saw = f"CPU {cpu}, GPU {gpu}: you say {answer(list(cpu), list(gpu)):g}, it is {queued_us(cpu, gpu):g}."
    if all(abs(answer(*map(list, case)) - sum_of_max_us(*case)) < 1e-6 for case in cases):
        return nearly(f"That is the article's sum of the larger ones: it lets no launch run ahead. {saw}")
    if all(abs(answer(*map(list, case)) - max(sum(case[0]), sum(case[1]))) < 1e-6 for case in cases):
        return nearly(
            f"The larger of the two sums is a lower bound: the first kernel waits for its launch. {saw}"
        )
    return wrong(f"{len(off)} of {len(cases)} steps are off. {saw}")


def _steps() -> list[tuple[list[float], list[float]]]:
    rng = random.Random(2)
    steps: list[tuple[list[float], list[float]]] = [
        ([2.0, 2.0], [1.0, 1.0]),
        ([1.0, 1.0, 1.0], [5.0, 1.0, 1.0]),
    ]
    for _ in range(30):
        count = rng.randint(1, 8)
        steps.append(
            (
                [float(rng.randint(1, 9)) for _ in range(count)],
                [float(rng.randint(1, 9)) for _ in range(count)],
            )
        )
    return steps


@exercise(
    "01-3",
    question="""
    Write `bound_by(rows, batch)`: `rows` is a list of dictionaries with `mode`, `batch`, `wall_ms`, `cpu_ms` and
    `gpu_busy_ms` (one recording). Return a dictionary from each mode to `"CPU"` or `"GPU"`: which of the two takes
    longer in a step of that batch. It is tested on recordings of two models that have another order and
    more modes than those shown.
    """,
    hints=(
        "Choose the rows of the batch first.",
        "Compare `cpu_ms` with `gpu_busy_ms`; the wall time says nothing of who waits.",
    ),
)
def who_is_slower(answer: Callable[[list[dict[str, Any]], int], dict[str, str]]) -> Verdict:
    off, tried = [], 0
    for rows in _recorded():
        for batch in sorted({row["batch"] for row in rows}):
            said, truth = dict(answer([dict(row) for row in rows], batch)), _bound(rows, batch)
            tried += 1
            if said != truth:
                off.append((batch, said, truth))
    if not off:
        return right(f"In all {tried} recorded batches.")
    batch, said, truth = off[0]
    saw = f"At batch {batch} you say {said}, it is {truth}."
    if all(len(_differ(said, truth)) == 1 for _, said, truth in off):
        return nearly(f"One mode is off in {len(off)} of {tried} cases. {saw}")
    return wrong(f"{len(off)} of {tried} cases are off. {saw}")


def _differ(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return [name for name in one.keys() | other.keys() if one.get(name) != other.get(name)]


def _bound(rows: list[dict[str, Any]], batch: int) -> dict[str, str]:
    chosen = [row for row in rows if row["batch"] == batch]
    return {row["mode"]: "CPU" if row["cpu_ms"] > row["gpu_busy_ms"] else "GPU" for row in chosen}


@cache
def _recorded() -> list[list[dict[str, Any]]]:
    """The rows of two recordings, shuffled, with one mode under another name besides."""
    from cgkit import recordings

    rng, both = random.Random(3), []
    for name in ("h200-crossover-llama-3.2-1b", "h200-crossover-llama-3.1-8b"):
        rows = list(recordings.load(name)["rows"])
        rows += [{**row, "mode": "FULL, again"} for row in rows if row["mode"] == "FULL"]
        rng.shuffle(rows)
        both.append(rows)
    return both


@exercise(
    "01-4",
    question="""
    Write `launch_calls(layers)`: how many times does the CPU call the driver to start something in one **PIECEWISE**
    decode step of a Llama with `layers` layers, if the operator between two pieces launches one kernel?
    Return a pair: (graph launches, kernel launches). It is compared with recorded steps of 16 and 32 layers.
    """,
    hints=(
        "Attention is not recorded in this mode. What is, and how many of these are there?",
        "2 L + 1 pieces, L of them attention.",
    ),
)
def count_launches(answer: Callable[[int], tuple[int, int]]) -> Verdict:
    off = []
    for layers, counted in _launches().items():
        said = tuple(answer(layers))
        if said != counted:
            off.append((layers, said, counted))
    if not off:
        return right("A replay for each of the L + 1 pieces, a launch for each of the L attentions.")
    layers, said, counted = off[0]
    saw = f"{layers} layers: you say {said}, recorded were {counted}."
    if all(sorted(s) == sorted(c) for _, s, c in off):
        return nearly(f"The right numbers in the other order: (graph launches, kernel launches). {saw}")
    if all(len(s) == 2 and abs(s[0] - c[0]) == 1 and s[1] == c[1] for _, s, c in off):
        return nearly(f"One graph off. Where does the step begin, and where does it end? {saw}")
    return wrong(saw)


@cache
def _launches() -> dict[int, tuple[int, int]]:
    """(graph launches, kernel launches) of a recorded step by layers, as the trace has them."""
    from cgkit import recordings

    found = {}
    for layers, size in ((16, "3.2-1b"), (32, "3.1-8b")):
        facts = recordings.load(f"h200-trace-llama-{size}-b1-PIECEWISE").bill().facts()
        found[layers] = (facts["graph_launches"], facts["launches"])
    return found
