"""The exercises of notebook 10: serving real traffic."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

from cgkit.capturing.dispatcher import CudagraphDispatcher
from cgkit.capturing.sizes import CaptureSizes
from cgkit.config import LADDERS
from cgkit.exercises.core import Verdict, exercise, nearly, right, wrong
from cgkit.measuring.compare_sizes import compare_sizes
from cgkit.measuring.make_requests import synthetic_requests
from cgkit.measuring.plan_sizes import plan_capture_sizes, price_sizes
from cgkit.measuring.pool_model import PoolModel, recorded_memory
from cgkit.measuring.simulate_traffic import SimulatedTraffic, simulate_traffic
from cgkit.measuring.step_cost import StepCost, recorded_step_cost

SEATS = 64
BUDGET = 48 * 2**20
SHAPE = "llama-3.1-8b"


@functools.cache
def busy_hour() -> tuple[SimulatedTraffic, StepCost, PoolModel]:
    """The traffic of notebook 10, what a step of the 8B shape costs, and what its sizes take (recorded on an H200).

    600 made-up requests, 30 a second, prompts of 200 and answers of 100 tokens on average; 64 seats.
    """
    cost, memory = recorded_step_cost(SHAPE, "FULL"), recorded_memory(SHAPE, "FULL")
    requests = synthetic_requests(600, rate=30, prompt_tokens=200, output_tokens=100, seed=0)
    return simulate_traffic(requests, cost, max_num_seqs=SEATS), cost, memory


# --- 10-1 ------------------------------------------------------------------------------------------------


def _routes(chance: random.Random) -> list[tuple[Any, ...]]:
    sizes = sorted(chance.sample(range(1, 65), chance.randint(1, 6)))
    seats = chance.randint(1, sizes[-1])
    resolved = CaptureSizes(sizes)
    dispatcher = CudagraphDispatcher("FULL_AND_PIECEWISE", resolved)
    dispatcher.initialize_cudagraph_keys(
        dispatcher.planned_keys(uniform_sizes=[size for size in sizes if size <= seats])
    )
    cases = []
    for tokens in sorted(chance.sample(range(1, 80), 12)):
        for decode in (True, False):
            route = dispatcher.route_of(tokens, decode)
            cases.append((tokens, decode, sizes, seats, (route.mode.name, route.num_tokens)))
    return cases


@exercise(
    "10-1",
    question="""Be the dispatcher. Write `route(num_tokens, decode, sizes, max_num_seqs)` for FULL_AND_PIECEWISE.

`sizes` is the ascending list of recorded sizes. PIECEWISE graphs exist at all of them and serve any batch; FULL
graphs exist for
decode steps, at the sizes that are not larger than `max_num_seqs`. Give back the pair (mode, tokens): "FULL",
"PIECEWISE" or "NONE",
and how many tokens the step runs with.""",
    hints=(
        "First find the least size that holds the tokens. If there is none, nothing is padded.",
        "A decode step may need a PIECEWISE graph too: when its padded size is above max_num_seqs.",
    ),
)
def route(answer: Callable[..., Any]) -> Verdict:
    missed = {"decode": 0, "mode": 0, "all": 0}
    said = ""
    for seed in range(20):
        for tokens, decode, sizes, seats, expected in _routes(random.Random(seed)):
            mode, padded = answer(tokens, decode, list(sizes), seats)
            if (mode, int(padded)) == expected:
                continue
            missed["all"] += 1
            missed["mode"] += mode != expected[0]
            above = decode and expected[0] == "PIECEWISE"
            missed["decode"] += above
            said = (
                f"route({tokens}, {decode}, {sizes}, {seats}) is {expected}, and yours says {(mode, padded)}."
            )
    if not missed["all"]:
        return right(
            "The same answers as cgkit's dispatcher, which worked them out once, when it was captured."
        )
    if missed["decode"] == missed["all"]:
        return nearly(f"Only decode steps whose padded size is above max_num_seqs go wrong: {said}")
    if not missed["mode"]:
        return nearly(f"Every mode is right; the number of tokens is not: {said}")
    return wrong(f"{missed['all']} of 480 steps go wrong. One of them: {said}")


# --- 10-2 ------------------------------------------------------------------------------------------------

_ONE = StepCost(lambda size: 1.0, lambda size: 1.0, unit="steps")


def _counts(chance: random.Random, top: int = 40) -> dict[int, int]:
    return {batch: chance.randint(1, 50) for batch in sorted(chance.sample(range(1, top), 8))}


@exercise(
    "10-2",
    question="""Which share of all tokens that run is padding? Write `waste(counts, sizes)`.

`counts` maps the tokens of a step to how many such steps there were; `sizes` is the list of recorded sizes. A
step runs with the
least size that holds it; above the largest size it runs as it is.""",
    hints=(
        "Add up two numbers over all steps: the padding, and the tokens that run (the padding included).",
        "Weight each step by its count. Divide by what ran, not by what was asked for.",
    ),
)
def waste(answer: Callable[..., float]) -> Verdict:
    off = {"waste": 0, "waste_of_real": 0, "unweighted": 0}
    tries = 30
    for seed in range(tries):
        chance = random.Random(seed)
        counts, sizes = _counts(chance), sorted(chance.sample(range(1, 36), 4))
        given = float(answer(dict(counts), list(sizes)))
        priced = price_sizes(sizes, counts, _ONE)
        flat = price_sizes(sizes, dict.fromkeys(counts, 1), _ONE)
        for kind, value in (
            ("waste", priced.waste),
            ("waste_of_real", priced.waste_of_real),
            ("unweighted", flat.waste),
        ):
            off[kind] += abs(given - value) > 1e-6  # an answer may come as a float32
    if not off["waste"]:
        return right("The same as `CapturePlan.waste`.")
    if not off["waste_of_real"]:
        return nearly(
            "You divide by the tokens that were asked for. That is in use too; asked is the share of what runs."
        )
    if not off["unweighted"]:
        return nearly("Every batch size counts once. Weight it by how many steps had it.")
    return wrong(f"Off for {off['waste']} of {tries} random histograms.")


# --- 10-3 ------------------------------------------------------------------------------------------------


def _cost_of(sizes: Sequence[int], counts: dict[int, int]) -> int:
    return sum(n * min(size for size in sizes if size >= batch) for batch, n in counts.items())


@exercise(
    "10-3",
    question="""Write the planner: `best(counts, k)` gives back a list of at most `k` sizes so that as few
tokens as possible run in all.

`counts` maps the tokens of a step to how many such steps there were. Every step must find a size (so the
largest batch is one of them).
Trying all lists is too slow: there may be 30 different batches and 8 sizes.""",
    hints=(
        "Some best list has only batches that occur as sizes: a size between two of them could be lowered.",
        "Let c[j][i] be the least number of tokens for all batches up to the i-th, with j sizes of "
        "which the i-th batch is the largest.",
        "c[j][i] is the least, over all p before i, of c[j-1][p] + batch[i] * (steps with batches after p, up to i).",
    ),
)
def best(answer: Callable[..., Any]) -> Verdict:
    worst, said = 0.0, ""
    token_cost = StepCost(float, lambda size: 1e9, unit="tokens")
    for seed in range(15):
        chance = random.Random(seed)
        counts = {
            batch: chance.randint(1, 99) for batch in chance.sample(range(1, 200), chance.randint(3, 30))
        }
        limit = chance.randint(1, 8)
        given = sorted({int(size) for size in answer(dict(counts), limit)})
        if not given or given[-1] < max(counts):
            return wrong(f"For {counts} the list {given} has no size for a batch of {max(counts)}.")
        if len(given) > limit:
            return wrong(f"{len(given)} sizes where {limit} are allowed: {given}.")
        exact = plan_capture_sizes(counts, token_cost, max_graphs=limit)
        over = _cost_of(given, counts) / _cost_of(exact.sizes, counts) - 1
        if over > worst:
            worst, said = over, f"for {counts} and k={limit} {list(exact.sizes)} is better than {given}"
    if worst < 1e-9:
        return right("As good as cgkit's own for every random histogram.")
    if worst < 0.10:
        return nearly(f"Always allowed, and at most {worst:.1%} above the best; {said}.")
    return wrong(f"Up to {worst:.0%} above the best: {said}.")


# --- 10-4 ------------------------------------------------------------------------------------------------


@exercise(
    "10-4",
    question=f"""Beat the ladders. Answer with a list of sizes for the traffic of this notebook (`traffic, cost,
memory = busy_hour()`): at most
{BUDGET // 2**20} MiB (`price_sizes(sizes, traffic, cost, memory=memory).pool_bytes`), and a lower expected step
cost than every list of the
engines cut to the same budget. Do it by hand first, looking at the histogram.""",
    hints=(
        "Above the largest size a step runs without a graph, which costs nearly twice as much: where "
        "does the histogram end?",
        "Steps with prefill are few and large. A few large sizes catch them; padding them costs little.",
    ),
)
def beat(answer: Sequence[int]) -> Verdict:
    traffic, cost, memory = busy_hour()
    mine = price_sizes(list(answer), traffic, cost, memory=memory)
    taken = mine.pool_bytes or 0
    if taken > BUDGET:
        return wrong(f"These sizes take {taken / 2**20:.1f} MiB; the budget is {BUDGET // 2**20} MiB.")
    plan = plan_capture_sizes(traffic, cost, memory_budget=BUDGET, memory=memory)
    lists = compare_sizes(plan, dict.fromkeys(LADDERS), max_num_seqs=SEATS).ladders
    costs = {name: one.expected_step_cost for name, one in lists.items()}
    ahead = [name for name, each in costs.items() if each <= mine.expected_step_cost]
    said = (
        f"{mine.expected_step_cost:.3f} ms a step, {taken / 2**20:.0f} MiB; "
        f"the least possible is {plan.expected_step_cost:.3f}"
    )
    if not ahead:
        return right(f"{said}; the best ladder has {min(costs.values()):.3f}.")
    if len(ahead) < len(costs):
        return nearly(f"{said}. Still ahead: {', '.join(f'{name} ({costs[name]:.3f})' for name in ahead)}.")
    return wrong(f"{said}. Every ladder is as good or better (from {min(costs.values()):.3f}).")
