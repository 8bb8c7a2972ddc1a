"""Exercises of notebook 00: counting pieces and graphs, padding, and the output that the next replay overwrites."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from cgkit.exercises.core import Verdict, exercise, nearly, package, right, wrong

COUNTS = ("pieces", "compilations", "graphs")
#: By how much two shares may differ and be the same: an answer may come as a float32.
ROUNDING = 1e-6


@exercise(
    "00-1",
    question="""
    Write `predict(layers, sizes)`: for a Llama of `layers` equal layers, recorded in mode PIECEWISE at the sizes in the
    list `sizes`, return a dictionary with `pieces` (attention's own ones included), `compilations` (equal pieces are
    compiled once) and `graphs` (recorded ones). It is checked on real models, of one layer too.
    """,
    hints=(
        "Attention cuts each layer once. L cuts make how many pieces?",
        "The first piece and the last are like no other. How many are left between them if there is one layer?",
        "A graph is recorded for a size and a piece without attention.",
    ),
)
def predict_counters(answer: Callable[[int, list[int]], dict[str, int]]) -> Verdict:
    off = []
    for layers, sizes in ((2, (1, 2, 4)), (3, (1, 8)), (1, (4,))):
        said, counted = answer(layers, list(sizes)), _counted(layers, sizes)
        off += [
            (layers, sizes, name, said.get(name), counted[name])
            for name in COUNTS
            if said.get(name) != counted[name]
        ]
    if not off:
        return right(
            "2 L + 1 pieces, at most three compilations, and a graph for each size and each of L + 1 pieces."
        )
    layers, sizes, name, said_one, was = off[0]
    saw = f"{layers} layers, sizes {list(sizes)}: you say {said_one} {name}, there were {was}."
    if {case[0] for case in off} == {1}:
        return nearly(f"Right from two layers on. {saw}")
    if len({case[2] for case in off}) == 1:
        return nearly(f"Only the number of {name} is off. {saw}")
    return wrong(saw)


@cache
def _counted(layers: int, sizes: tuple[int, ...]) -> dict[str, int]:
    cgkit = package()
    from cgkit.serving import Runner
    from cgkit.serving.llama import PRESETS
    from cgkit.serving.weights import build_model, random_weights

    shape = PRESETS["tiny-llama"].scaled(num_hidden_layers=layers)
    config = cgkit.CompilationConfig(
        compiler="eager", cudagraph_mode="PIECEWISE", cudagraph_capture_sizes=list(sizes)
    )
    before = cgkit.compilation_counter.clone()
    runner = Runner(
        build_model(shape, random_weights(shape)), config=config, max_num_seqs=4, max_model_len=64
    )
    runner.capture_model()
    names = ("num_piecewise_graphs_seen", "num_eager_compiles", "num_cudagraph_captured")
    return {
        short: getattr(cgkit.compilation_counter, name) - getattr(before, name)
        for short, name in zip(COUNTS, names)
    }


@exercise(
    "00-2",
    question="""
    Write `waste(batch, sizes)`: which share of the tokens that run is padding, if `batch` tokens are padded to the
    next of `sizes`? (0 to 1. A batch above the largest size runs as it is.) It is tested on random lists of sizes.
    """,
    hints=("Divide by what runs, not by what was asked for.", "`sizes` need not be in order."),
)
def padding_share(answer: Callable[[int, list[int]], float]) -> Verdict:
    cases = _padding_cases()
    off = [case for case in cases if abs(answer(case[0], list(case[1])) - case[2]) > ROUNDING]
    if not off:
        return right(f"In all {len(cases)} cases.")
    batch, sizes, share = off[0][:3]
    saw = f"{batch} tokens with sizes {sizes}: you say {answer(batch, list(sizes)):.6g}, it is {share:.6g}."
    if all(abs(answer(case[0], list(case[1])) - case[3]) <= ROUNDING for case in cases):
        return nearly(f"That is padding over real tokens, the article's metric. Over those that run: {saw}")
    if all(case[4] for case in off):
        return nearly(f"Only batches above the largest size are off. {saw}")
    return wrong(f"{len(off)} of {len(cases)} cases are off. {saw}")


def _padding_cases() -> list[tuple[int, list[int], float, float, bool]]:
    """Batch, sizes, share of what runs, share of real tokens, and whether it is above the largest."""
    from cgkit.capturing import CaptureSizes

    rng, cases = random.Random(2), []
    for _ in range(12):
        sizes = rng.sample(range(1, 40), 4)
        for row in CaptureSizes(sizes).to_frame(range(1, 45, 3)).itertuples():
            cases.append((row.batch, sizes, row.waste_of_padded, row.waste_of_real, not row.captured))
    return cases


@exercise(
    "00-3",
    question="""
    Write `collect(step, batches)`: call `step` once for each batch and return the list of results. `step` is a recorded
    model without any care: **what it returns lies where its next call writes**. All results must be right at the end.
    """,
    hints=(
        "Look at `data_ptr()` of two results.",
        "Who keeps a result over the next call has to own its memory.",
    ),
)
def collect_outputs(answer: Callable[[Callable[..., Any], Sequence[Any]], list[Any]]) -> Verdict:
    captured, model = _careless()
    batches = [torch.full((4, 8), float(number)) for number in (1, 2, 3)]
    calls = 0

    def step(batch: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return captured(batch)

    got = list(answer(step, batches))
    with torch.no_grad():
        good = [torch.allclose(one, model(batch), atol=1e-5) for one, batch in zip(got, batches)]
    if len(got) != len(batches):
        return wrong(f"{len(got)} results for {len(batches)} batches.")
    if not all(good):
        return wrong(
            f"Right is: {good}. All results lie in one place, so that each is what the last call computed."
        )
    if calls > len(batches):
        return nearly(f"The results are right, but it took {calls} calls for {len(batches)} batches.")
    return right("Each result was copied out before the next replay.")


@cache
def _careless() -> tuple[Any, torch.nn.Module]:
    """A recorded model that returns its own memory, and the model."""
    cgkit = package()

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    traced = cgkit.trace(model, torch.ones(4, 8), dynamic_arg_dims={"input": 0})
    config = cgkit.CompilationConfig(compiler="eager", cudagraph_mode="FULL")
    compiled = cgkit.compile_pieces(cgkit.split_graph(traced, []), config)
    return cgkit.capture(compiled, [4], clone_outputs=False), model
