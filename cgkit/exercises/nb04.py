"""Exercises of notebook 04: the key of the compile cache, equal pieces, and which callable serves a batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import cache
from typing import Any

from cgkit.exercises.core import Verdict, exercise, nearly, package, right, wrong

#: What 04-1 asks about: a name, and what is changed in the configuration.
EDITS: dict[str, dict[str, Any]] = {
    "record only batches of 1 and 2": {"cudagraph_capture_sizes": [1, 2]},
    "compile 8 tokens exactly, too": {"compile_sizes": [8]},
    "record full graphs": {"cudagraph_mode": "FULL"},
    "turn Inductor's shape padding off": {"inductor_compile_config": {"shape_padding": False}},
    "cut at nothing": {"splitting_ops": (), "cudagraph_mode": "FULL"},
    "debug checks at replay": {"debug": True},
}


@exercise(
    "04-1",
    question="""
    Which of these edits of a configuration makes the compile cache **miss** a piece that was compiled for any size, and
    which is a hit? Give a dictionary from each name to `"hit"` or `"miss"`:
    """
    + ", ".join(f"`{name!r}`" for name in EDITS),
    hints=(
        "Ask of each: does another kernel come out of the compiler for the same piece?",
        "Recording happens after compiling, and how a graph is checked is decided later still.",
    ),
)
def predict_hits(answer: dict[str, str]) -> Verdict:
    if missing := [name for name in EDITS if name not in answer]:
        return wrong(f"There is no answer for {missing[0]!r}.")
    off = [name for name, outcome in _hits().items() if str(answer[name]).lower() != outcome]
    if not off:
        return right(
            "All of them. What is recorded, and how it is checked, is decided after a piece is compiled."
        )
    if len(off) == 1:
        return nearly(f"All but one: look at {off[0]!r} again. Would the compiler write another kernel?")
    return wrong(
        f"{len(off)} of {len(EDITS)} are off. `cgkit.explain_cache(one_key, other_key)` names what differs."
    )


@cache
def _hits() -> dict[str, str]:
    cgkit = package()
    from cgkit.measuring.bench_dedup import toy_llama, toy_split

    _, split = toy_split(toy_llama(1))

    def key(**options: Any) -> str:
        return cgkit.compile_pieces(
            split, cgkit.CompilationConfig(compiler="eager", **options)
        ).cache_key.digest

    return {name: "hit" if key(**options) == key() else "miss" for name, options in EDITS.items()}


@exercise(
    "04-2",
    question="""
    Write `different(kinds)`: the number of **different** pieces to compile for a Llama whose layers are not all alike.
    `kinds` has a number for each layer; two layers with the same number have the same MLP norm, two with different
    numbers do not (its epsilon differs). Attention is cut out, as everywhere here. It is checked against real models.
    """,
    hints=(
        "Write down for three layers what lies in which piece. A piece goes from one attention to the next.",
        "The MLP of a layer comes after its attention. So in which piece is the last layer's MLP, with what else?",
    ),
)
def different_pieces(answer: Callable[[Sequence[int]], int]) -> Verdict:
    alike = ([0, 0], [0, 0, 0])
    uneven = ([0, 1, 0, 1], [0, 0, 1], [1, 0], [0])
    off = [
        (kinds, answer(list(kinds)), count)
        for kinds in (*alike, *uneven)
        if answer(list(kinds)) != (count := _unique(*kinds))
    ]
    if not off:
        return right(
            "It holds for every model tried: one for the first piece, one for the last, and the kinds in between."
        )
    kinds, said, count = off[0]
    saw = f"For {kinds} you say {said}, and {count} were compiled."
    if all(len(each) == 1 for each, _, _ in off):
        return nearly(f"Right from two layers on. {saw}")
    if all(list(kinds) not in [list(even) for even in alike] for kinds, _, _ in off):
        return nearly(f"Right where all layers are alike. {saw}")
    return wrong(saw)


@cache
def _unique(*kinds: int) -> int:
    cgkit = package()
    from cgkit.measuring.bench_dedup import toy_llama, toy_split

    model: Any = toy_llama(len(kinds))
    for layer, kind in zip(model.layers, kinds):
        layer.mlp_norm.eps = 10.0 ** -(5 + kind)
    config = cgkit.CompilationConfig(compiler="eager", cudagraph_mode="NONE")
    return cgkit.compile_pieces(toy_split(model)[1], config).num_unique


@exercise(
    "04-3",
    question="""
    Write `my_key(files, traced, options)` that returns a string: the name of the folder for what was compiled. `files`
    is a dictionary from module name to source text, `traced` a list of the modules from which something was inlined,
    `options` a dictionary of settings (all of them change the code). Equal code must have equal names, and different
    code different ones. Your function is tested with edits of all three.
    """,
    hints=(
        "What is not in `traced` must not count, and no order must count, of a dictionary or of the list.",
        'Joining texts loses where one ends: `"ab" + "c" == "a" + "bc"`. `repr` of a sorted list of pairs does not.',
        "`hash` of a text is another number in each process; `hashlib.sha256` is not.",
    ),
)
def own_key(answer: Callable[[dict[str, str], list[str], dict[str, Any]], str]) -> Verdict:
    base = answer(*_project())
    if not isinstance(base, str) or answer(*_project()) != base:
        return wrong(f"It has to return the same string for the same project; it gave {base!r:.60}.")
    edits = [(what, same, answer(*deepcopy(project)) == base) for what, same, project in _edits()]
    kept = [what for what, same, equal in edits if same and not equal]
    lost = [what for what, same, equal in edits if equal and not same]
    if not kept and not lost:
        return right("Every edit that changes the code is a miss, and no other one is.")
    if not lost:
        return nearly(f"No stale hit, so it is safe. But it misses without need: {kept[0]}.")
    if lost == [_JOINED] and not kept:
        return nearly(f"One stale hit is left: {lost[0]}.")
    return wrong(f"A stale hit, which would run old code: {lost[0]}. ({len(lost)} such edits in all.)")


_JOINED = "a line moved from the end of one file to the beginning of the next"


def _project() -> tuple[dict[str, str], list[str], dict[str, Any]]:
    files = {"a": "x = 1\n", "b": "y = 2\n", "notes": "# nothing\n"}
    return files, ["a", "b"], {"level": 3, "ops": "none"}


def _edits() -> Iterator[tuple[str, bool, tuple[dict[str, str], list[str], dict[str, Any]]]]:
    """What an edit does, whether the code stays the same, and the edited project."""
    files, traced, options = _project()
    yield "an edit in a file that was not traced", True, ({**files, "notes": "# more\n"}, traced, options)
    yield "the files in another order", True, (dict(reversed(files.items())), traced, options)
    yield "traced in another order", True, (files, traced[::-1], options)
    yield "the options in another order", True, (files, traced, dict(reversed(options.items())))
    yield "an edit in a traced file", False, ({**files, "b": "y = 3\n"}, traced, options)
    yield "a file traced in addition", False, (files, [*traced, "notes"], options)
    yield "another value of an option", False, (files, traced, {**options, "level": 2})
    yield "an option more", False, (files, traced, {**options, "more": True})
    yield (
        "two files with their texts exchanged",
        False,
        ({**files, "a": "y = 2\n", "b": "x = 1\n"}, traced, options),
    )
    yield _JOINED, False, ({**files, "a": "x = ", "b": "1\ny = 2\n"}, traced, options)


@exercise(
    "04-4",
    question="""
    Write `choose(tokens, sizes, ends)`: which callable serves a batch of `tokens` tokens? `sizes` are the exact sizes
    compiled, `ends` the ends of the ranges (`[8, 64]`: 1 to 8 and 9 to 64). Return `"size 4"`, `"range 9-64"` or
    `"general"`. It is tested against `PiecewiseBackend` on random sizes and ranges.
    """,
    hints=(
        "A size wins over the range that it lies in.",
        "A range includes its end: with `[8, 64]` a batch of 8 is served by 1-8.",
    ),
)
def choose_callable(answer: Callable[[int, list[int], list[int]], str]) -> Verdict:
    off, tried = [], 0
    for sizes, ends in _choices():
        for tokens, served in _served(tuple(sizes), tuple(ends)).items():
            tried += 1
            if (said := answer(tokens, list(sizes), list(ends))) != served:
                off.append((tokens, sizes, ends, said, served))
    if not off:
        return right(f"The same in all {tried} cases.")
    tokens, sizes, ends, said, served = off[0]
    saw = f"{tokens} tokens with sizes {sizes} and ends {ends}: you say {said!r}, the piece took {served!r}."
    if all(case[0] in case[2] for case in off):
        return nearly(f"Only the ends of ranges are off. {saw}")
    if all(case[0] in case[1] for case in off):
        return nearly(f"Only exact sizes are off. {saw}")
    return wrong(f"{len(off)} of {tried} cases are off. {saw}")


def _choices() -> list[tuple[list[int], list[int]]]:
    rng = random.Random(4)
    drawn = [
        (
            sorted(rng.sample(range(1, 25), rng.randint(0, 3))),
            sorted(rng.sample(range(2, 25), rng.randint(0, 3))),
        )
        for _ in range(10)
    ]
    return [([4], [2, 16]), ([16], [16]), *drawn]


@cache
def _served(sizes: tuple[int, ...], ends: tuple[int, ...]) -> dict[int, str]:
    cgkit = package()

    config = cgkit.CompilationConfig(
        compiler="eager", cudagraph_mode="NONE", compile_sizes=sizes, compile_ranges=ends
    )
    frame = cgkit.compile_pieces(_one_layer(), config).serving_frame()
    rows = frame[frame["piece"] == frame["piece"].iloc[0]]
    served = {}
    for tokens in range(1, 31):
        (row,) = [
            each
            for each in rows.itertuples()
            if each.from_tokens <= tokens and _at_most(tokens, each.to_tokens)
        ]
        served[tokens] = row.callable
    return served


def _at_most(tokens: int, end: Any) -> bool:
    import pandas as pd

    return bool(pd.isna(end)) or tokens <= end


@cache
def _one_layer() -> Any:
    from cgkit.measuring.bench_dedup import toy_llama, toy_split

    return toy_split(toy_llama(1))[1]
