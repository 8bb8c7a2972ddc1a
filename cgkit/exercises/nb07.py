"""The exercises of notebook 07: sizes, padding, keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cgkit.capturing.dispatcher import CudagraphDispatcher
from cgkit.capturing.sizes import CaptureSizes, ladder
from cgkit.exercises.core import Verdict, exercise, nearly, right, wrong
from cgkit.forward_context import BatchDescriptor

#: Steps by number of tokens: a chat service with quiet hours (few requests) and rush hours (40 to 48).
HISTOGRAM = {
    **{n: 400 // n for n in range(1, 13)},
    **dict.fromkeys(range(22, 28), 60),
    **dict.fromkeys(range(40, 49), 90),
}
BYTES_A_SIZE = 24 * 2**20
BUDGET_BYTES = 8 * BYTES_A_SIZE


def step_ms(tokens: int, captured: bool) -> float:
    """What a step costs: weights and launches, a little for each token, and much without a graph."""
    return 1.0 + 0.02 * tokens if captured else 5.0 + 0.02 * tokens


# --- 07-1 ------------------------------------------------------------------------------------------------


@exercise(
    "07-1",
    question="""Write padded_size(num_tokens, sizes): the least recorded size that holds num_tokens, or None
where the batch is larger than all of them. sizes is a list in any order.""",
    hints=(
        "Which sizes hold the batch? The least of those.",
        "A batch that is exactly a recorded size is not padded.",
    ),
)
def padded_size(answer: Callable[..., int | None]) -> Verdict:
    off = []
    for sizes in ([8, 1, 4, 2], list(ladder("sglang", 64)), [5], list(ladder("article", 33))):
        table = CaptureSizes(sizes)
        for n in range(1, table.largest + 3):
            expected = table.pad_for_cudagraph(n) if table.is_captured(n) else None
            try:
                given: Any = answer(n, list(sizes))
            except (ValueError, IndexError) as error:
                if expected is not None:
                    raise
                given = error
            if given != expected:
                off.append((n, sizes, given, expected))
    if not off:
        return right("Engines put the answers into a table, because they ask at every step.")
    n, sizes, given, expected = off[0]
    where = f"padded_size({n}, {_short(sizes)}) gave {given!r}"
    if all(each[3] is None for each in off):
        return nearly(f"Right up to the largest size. Above it, {where}: there is no graph for that.")
    if all(each[0] in each[1] for each in off):
        return nearly(f"{where}: a batch of exactly a recorded size needs no padding.")
    return wrong(f"{where}.")


def _short(sizes: Sequence[int]) -> str:
    return str(list(sizes)) if len(sizes) < 8 else f"[{sizes[0]}, ..., {sizes[-1]}]"


# --- 07-2 ------------------------------------------------------------------------------------------------

_ASKED = ((3, True), (3, False), (9, True), (16, False), (20, True))


def _dispatcher(mode: str, sizes: Sequence[int], max_num_seqs: int) -> CudagraphDispatcher:
    listed = CaptureSizes(sizes)
    made = CudagraphDispatcher(mode, listed)
    top = listed.pad(min(max_num_seqs, listed.largest))
    made.initialize_cudagraph_keys(made.planned_keys(uniform_sizes=[size for size in listed if size <= top]))
    return made


@exercise(
    "07-2",
    question="""Mode FULL_AND_PIECEWISE, sizes 1, 2, 4, 8, 16, at most 8 requests (so FULL graphs of decode end
at 8). For these five batches, (tokens, is it a decode batch): (3, True), (3, False), (9, True), (16, False),
(20, True): give a list of five pairs (mode, size), such as ("FULL", 8). Without a graph: ("NONE", None).""",
    hints=(
        "First pad, then look: is it decode, and is there a FULL graph of that size?",
        "A decode batch of 9 is padded to 16. FULL graphs end at 8, and PIECEWISE graphs serve any batch.",
    ),
)
def mode_and_key(answer: Sequence[tuple[str, int | None]]) -> Verdict:
    made = _dispatcher("FULL_AND_PIECEWISE", (1, 2, 4, 8, 16), 8)
    routes = [made.route_of(*asked) for asked in _ASKED]
    expected = [(route.mode.name, route.key.num_tokens if route.key else None) for route in routes]
    given = [(str(getattr(mode, "name", mode)).upper(), size) for mode, size in answer]
    if len(given) != len(expected):
        return wrong(f"Five pairs are asked for, and you gave {len(given)}.")
    off = [asked for asked, one, other in zip(_ASKED, given, expected) if one != other]
    if not off:
        return right("Pad, then the exact FULL key, then PIECEWISE for any batch, then none.")
    named = ", ".join(map(str, off))
    return nearly(f"All but {named}.") if len(off) == 1 else wrong(f"Not right: {named}.")


# --- 07-3 ------------------------------------------------------------------------------------------------


@exercise(
    "07-3",
    question="""Write dispatch(num_tokens, uniform, full_keys, piecewise_keys). The keys are sets of pairs
(size, uniform); num_tokens is padded already. Return (mode, key): ("FULL", key), ("PIECEWISE", key) or
("NONE", None), in the article's order.""",
    hints=(
        "Three look-ups: the exact key in full_keys, the key with uniform=False in full_keys, the same in "
        "piecewise_keys.",
    ),
)
def dispatch(answer: Callable[..., tuple[str, Any]]) -> Verdict:
    off = []
    for mode in ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"):
        made = _dispatcher(mode, (1, 2, 4, 8, 16), 4)
        full, pieces = (
            {tuple(key) for key in keys}
            for kind, keys in sorted(made.cudagraph_keys.items(), key=lambda e: -e[0].value)
        )
        for size in (1, 4, 8, 16, 32):
            for uniform in (True, False):
                found, key = made.dispatch(BatchDescriptor(size, uniform))
                expected = (found.name, None if key is None else tuple(key))
                given = tuple(answer(size, uniform, set(full), set(pieces)))
                if given != expected:
                    off.append((mode, size, uniform, given))
    if not off:
        return right("Five modes and one rule: the mode only decides which keys exist.")
    mode, size, uniform, given = off[0]
    where = f"under {mode}, ({size}, uniform={uniform}) gave {given}"
    if all(uniform for _, _, uniform, _ in off):
        return nearly(f"Right for mixed batches; {where}. May a decode batch use a graph made for any batch?")
    return wrong(f"{where[0].upper()}{where[1:]}; {len(off)} of 50 are off.")


# --- 07-4 ------------------------------------------------------------------------------------------------


@exercise(
    "07-4",
    question="""Give a list of sizes for the traffic HISTOGRAM of cgkit.exercises.nb07 that fits BUDGET_BYTES
(each size takes BYTES_A_SIZE) and whose expected step is cheaper than with the best eight sizes out of the
article's ladder. How near do you come to the best list there is?""",
    hints=(
        "Eight sizes fit. The largest must hold the largest batch: a step without a graph costs 4 ms more.",
        "Where are batches frequent? A size right at the upper end of each cluster wastes least.",
        "cgkit.plan_capture_sizes(HISTOGRAM, step_ms, BUDGET_BYTES, memory=BYTES_A_SIZE) computes one.",
    ),
)
def beat_the_ladder(answer: Sequence[int]) -> Verdict:
    from cgkit.measuring.plan_sizes import plan_capture_sizes, price_sizes

    def planned(**more: Any) -> float:
        return plan_capture_sizes(
            HISTOGRAM, step_ms, BUDGET_BYTES, memory=BYTES_A_SIZE, **more
        ).expected_step_cost

    mine = price_sizes(list(answer), HISTOGRAM, step_ms, memory=BYTES_A_SIZE)
    taken = mine.pool_bytes or 0
    if taken > BUDGET_BYTES:
        return wrong(
            f"{len(mine.sizes)} sizes take {taken / 2**20:.0f} MiB, and {BUDGET_BYTES / 2**20:.0f} MiB are allowed."
        )
    best, bar = planned(), planned(candidates=ladder("article", max(HISTOGRAM)))
    cost = mine.expected_step_cost
    said = f"A step costs {cost:.4f} ms; the ladder's best eight {bar:.4f}, the best list {best:.4f}"
    if cost < bar:
        return right(
            f"{said}. {'None is better.' if cost <= best * (1 + 1e-9) else 'There is still a little to gain.'}"
        )
    if mine.captured_steps < 1:
        return wrong(f"{said}. {1 - mine.captured_steps:.0%} of the steps run without a graph.")
    return nearly(f"{said}. Every step has a graph, but {mine.waste:.1%} of what runs is padding.")
