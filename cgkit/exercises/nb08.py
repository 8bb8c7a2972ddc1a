"""The exercises of notebook 08: memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from cgkit.capturing.emulated import EmulatedPlatform
from cgkit.exercises.core import Verdict, exercise, nearly, right, wrong
from cgkit.measuring.caching_allocator import CUDA_RULES, EMULATED_RULES, AllocatorRules, PoolSimulator
from cgkit.plotting.tables import human_bytes

MIB = 2**20


# --- 08-1 ------------------------------------------------------------------------------------------------


def _ledger(chance: random.Random) -> Any:
    """A made-up ledger of three pieces and four sizes, that grows here and there, also after the first size."""
    import pandas as pd

    rows: list[tuple[Any, ...]] = []
    reserved = 0
    for size in (8, 4, 2, 1):
        for piece in ("submod_0", "submod_2", "submod_4"):
            growth = 512 * chance.choice([0, 0, 0, 1, 2, 9]) if rows else 4096
            rows.append((piece, size, reserved, reserved + growth, growth))
            reserved += growth
    columns = ["name", "num_tokens", "reserved_before_bytes", "reserved_after_bytes", "growth_bytes"]
    return pd.DataFrame(rows, columns=columns)


@exercise(
    "08-1",
    question="""A start ran out of memory while recording. Which recording was the last one that made the pool grow?

Write `last_growth(frame)`. `frame` is a ledger (`ledger.to_frame()`: a row a recording, in order, with the columns
name, num_tokens, reserved_before_bytes, reserved_after_bytes, growth_bytes). Give back the pair (name, num_tokens).""",
    hints=(
        "Select the rows whose growth_bytes is above 0, and look at one of them.",
        "`rows.iloc[-1]` is the last row of a frame.",
    ),
)
def last_growth(answer: Callable[[Any], Any]) -> Verdict:
    seen = {"right": 0, "first": 0, "largest": 0}
    tries = 20
    for seed in range(tries):
        frame = _ledger(random.Random(seed))
        grown = frame[frame["growth_bytes"] > 0]
        rows = {"right": grown.iloc[-1], "first": grown.iloc[0]}
        rows["largest"] = grown.loc[grown["growth_bytes"].idxmax()]
        name, size = answer(frame.copy())
        for kind, row in rows.items():
            seen[kind] += (name, int(size)) == (row["name"], int(row["num_tokens"]))
    if seen["right"] == tries:
        return right("The pool reached its final size there; whatever came later found room.")
    if seen["first"] == tries:
        return nearly("That is the first recording that made the pool grow. The last one is asked for.")
    if seen["largest"] == tries:
        return nearly(
            "That is the recording with the largest growth. The last one that grew at all is asked for."
        )
    return wrong(f"Right for {seen['right']} of {tries} ledgers.")


# --- 08-2 ------------------------------------------------------------------------------------------------


def _pieces(chance: random.Random) -> list[tuple[list[str], list[str]]]:
    """Random pieces: what each reads of the ones before, and what it writes."""
    pieces: list[tuple[list[str], list[str]]] = []
    names: list[str] = []
    for index in range(chance.randint(2, 6)):
        reads = chance.sample(names, min(len(names), chance.randint(0, 3)))
        writes = [f"t{index}_{k}" for k in range(chance.randint(1, 3))]
        pieces.append((reads, writes))
        names += writes
    return pieces


@exercise(
    "08-2",
    question="""After the recording of which piece may the memory of each output be given out again?

Write `may_go(pieces)`. `pieces` is a list with a pair (reads, writes) for each piece, in order: the names of
the tensors that
it reads and of those that it makes. Give back a dict: name -> number of the piece (from 0) after whose recording nobody
needs to own that tensor any more. What no later piece reads may go right after the piece that made it.""",
    hints=(
        "Begin with the piece that writes each name; then go through the pieces once more.",
        "A later reader always has a larger number than an earlier one, so it may simply overwrite what is noted.",
    ),
)
def may_go(answer: Callable[[Any], dict[str, int]]) -> Verdict:
    late = ""
    for seed in range(40):
        pieces = _pieces(random.Random(seed))
        expected = {name: index for index, (_, writes) in enumerate(pieces) for name in writes}
        expected |= {name: index for index, (reads, _) in enumerate(pieces) for name in reads}
        given = answer([(list(reads), list(writes)) for reads, writes in pieces])
        if set(given) != set(expected):
            return wrong(
                f"For {pieces} the dict should have the names {sorted(expected)}, and has {sorted(given)}."
            )
        for name, index in expected.items():
            if given[name] < index:
                return wrong(
                    f"For {pieces}: {name} would go after piece {given[name]}, and piece {index} reads "
                    f"it: it would read "
                    "what another recording wrote there."
                )
            if given[name] > index:
                late = (
                    f"For {pieces}: {name} is kept until piece {given[name]}; nobody reads it after {index}."
                )
    if late:
        return nearly(f"Nothing is ever read too late, but memory is kept longer than needed. {late}")
    return right("This is what the generated stitching code does with its `del` lines.")


# --- 08-3 ------------------------------------------------------------------------------------------------


@exercise(
    "08-3",
    question="""`run(batch)` replays a graph. The function below returns a list in which all answers are the same.
Make it right, with one replay a batch.

    def collect(run, batches):
        return [run(batch) for batch in batches]""",
    hints=(
        "Print `answer.data_ptr()` of each answer in the list.",
        "All are the same tensor: its memory belongs to the graph. When must it be copied: in the loop, or after it?",
    ),
)
def collect(answer: Callable[[Any, Any], Any]) -> Verdict:
    platform, static = EmulatedPlatform(), torch.zeros(4)
    graph, out = platform.record(lambda: static * 2 + 1, platform.new_pool())
    replays = [0]

    def run(batch: torch.Tensor) -> torch.Tensor:
        replays[0] += 1
        static.copy_(batch)
        graph.replay()
        return out

    batches = [torch.full((4,), float(number)) for number in range(5)]
    results = list(answer(run, [batch.clone() for batch in batches]))
    if len(results) != len(batches):
        return wrong(f"{len(batches)} batches, and {len(results)} answers.")
    good = [torch.equal(torch.as_tensor(r), b * 2 + 1) for r, b in zip(results, batches)]
    if not all(good):
        return wrong(
            f"{sum(good)} of {len(batches)} answers are right; the last replay's is {out.tolist()}, and you "
            f"have {[torch.as_tensor(r).tolist()[0] for r in results]} as first numbers."
        )
    if replays[0] != len(batches):
        return nearly(f"The answers are right, but it took {replays[0]} replays for {len(batches)} batches.")
    kept = [float(torch.as_tensor(r).flatten()[0]) for r in results]
    run(torch.full((4,), 100.0))
    if kept != [float(torch.as_tensor(r).flatten()[0]) for r in results]:
        return nearly(
            "The answers are right, until the next replay: one of them still lies in the graph's memory."
        )
    return right("Copied before the next replay: now they are yours.")


# --- 08-4 ------------------------------------------------------------------------------------------------


def _reserved(graphs: Sequence[Sequence[int]], rules: AllocatorRules) -> int:
    """Records graph after graph: all of its blocks live at once, then none (their owner is weak)."""
    pool = PoolSimulator(rules)
    for blocks in graphs:
        for number in [pool.alloc(nbytes) for nbytes in blocks]:
            pool.free(number)
    return pool.reserved


@exercise(
    "08-4",
    question="""On the recorded GPU both orders of recording took the same memory. Find two graphs for which the
order matters there too.

Answer with two lists of block sizes in bytes: `(small, large)`, as many blocks in each, every block of `large`
at least twice the
one of `small`, and none above 64 MiB. Recording a graph allocates all of its blocks, then lets all go. The
check asks PyTorch's
rules: blocks up to 1 MiB come from segments of 2 MiB, those below 10 MiB from segments of 20 MiB, and larger
ones get a segment
of their own.""",
    hints=(
        "What kind of block gets a segment just for itself?",
        "After a block of 10 MiB was recorded its segment is free, and too small for a block of 20 MiB.",
    ),
)
def order_matters(answer: Sequence[Sequence[int]]) -> Verdict:
    small, large = ([int(block) for block in blocks] for blocks in answer)
    if not small or len(small) != len(large) or min(small) < 1:
        return wrong("Give two lists of equal length with at least one positive number each.")
    if any(2 * a > b for a, b in zip(small, large)) or max(large) > 64 * MIB:
        return wrong("Each block of `large` is to be at least twice that of `small`, and none above 64 MiB.")
    up = {rules.name: _reserved([small, large], rules) for rules in (CUDA_RULES, EMULATED_RULES)}
    down = {rules.name: _reserved([large, small], rules) for rules in (CUDA_RULES, EMULATED_RULES)}
    cuda, emulated = CUDA_RULES.name, EMULATED_RULES.name
    said = f"small to large {human_bytes(up[cuda])}, large to small {human_bytes(down[cuda])}"
    if up[cuda] > down[cuda]:
        return right(f"By PyTorch's rules: {said}.")
    if up[emulated] > down[emulated]:
        return nearly(
            f"The order matters in the emulated pool ({human_bytes(up[emulated])} against "
            f"{human_bytes(down[emulated])}), but not "
            f"by PyTorch's rules: {said}."
        )
    return wrong(f"The order makes nothing worse: {said}.")


# --- 08-5 ------------------------------------------------------------------------------------------------


class _NoMerge(PoolSimulator):
    """Free neighbours stay apart."""

    def free(self, number: int) -> None:
        if number:
            block, nbytes = self._lent.pop(number)
            self.allocated -= block.size
            self.requested -= nbytes
            self._offer(block)


def _play(pool: PoolSimulator, events: Sequence[tuple[str, int]]) -> int:
    numbers: dict[str, int] = {}
    for name, nbytes in events:
        if nbytes:
            numbers[name] = pool.alloc(nbytes)
        else:
            pool.free(numbers.pop(name))
    return pool.reserved


def _events(chance: random.Random) -> list[tuple[str, int]]:
    """Random requests, sizes both round and odd; more come than go at first."""
    events: list[tuple[str, int]] = []
    live: list[str] = []
    for number in range(chance.randint(5, 40)):
        if live and chance.random() < 0.45:
            events.append((live.pop(chance.randrange(len(live))), 0))
        else:
            live.append(f"t{number}")
            events.append((live[-1], chance.choice([100, 512, 700, 1024, 1500, 4096, 5000])))
    return events


_MISTAKES: dict[str, Callable[[], PoolSimulator]] = {
    "it does not merge free blocks that lie side by side": lambda: _NoMerge(EMULATED_RULES),
    "it gives out a free block whole instead of splitting off what is left": lambda: PoolSimulator(
        replace(EMULATED_RULES, large_remainder=2**60)
    ),
    "it does not round requests up to multiples of 512 bytes": lambda: PoolSimulator(
        replace(EMULATED_RULES, granule=1, segment_granule=1)
    ),
}


@exercise(
    "08-5",
    question="""Write the pool's allocator: `reserved(events)` gives back how many bytes it reserved in all.

`events` is a list of pairs: ("a", 1500) asks for a block of 1500 bytes and calls it a; ("a", 0) gives it back.
The rules of the emulated pool:
- a request is rounded up to a multiple of 512 bytes;
- it takes the smallest free block that is large enough; of equal ones that in the earliest segment, there the
  one with the least offset;
- what is left of that block is split off and stays free;
- if none is large enough, a new segment of exactly that size is reserved;
- a block that is given back merges with free neighbours of the same segment. Segments are never given back.""",
    hints=(
        "Keep one list of blocks, each [segment, offset, size, name or None]. Sorted by (segment, "
        "offset), neighbours stand side by side.",
        "Taking: `min` over the free blocks that fit, by (size, segment, offset). Splitting: shorten "
        "it, add the rest as a free block.",
        "Giving back: mark it free, then go through the sorted list and join two blocks in a row that "
        "are both free and of one segment.",
    ),
)
def allocator(answer: Callable[[Any], int]) -> Verdict:
    cases = [_events(random.Random(seed)) for seed in range(120)]
    given = [int(answer(list(events))) for events in cases]
    expected = [_play(PoolSimulator(EMULATED_RULES), events) for events in cases]
    if given == expected:
        return right(f"The same bytes as cgkit's own for {len(cases)} random series of requests.")
    for mistake, make in _MISTAKES.items():
        if given == [_play(make(), events) for events in cases]:
            return nearly(f"One rule is missing: {mistake}.")
    same = sum(one == other for one, other in zip(given, expected))
    shortest = min((e for e, g, x in zip(cases, given, expected) if g != x), key=len)
    index = cases.index(shortest)
    return wrong(
        f"Right for {same} of {len(cases)}. The shortest one that is not: {shortest} reserves "
        f"{expected[index]:,} bytes, "
        f"and yours says {given[index]:,}."
    )
