"""The plan is the best list there is: held against all lists, one by one."""

import itertools
import json
import math

import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cgkit
from cgkit.errors import ConfigError
from cgkit.measuring import best_sizes
from cgkit.measuring.padding import BatchHistogram, named_ladder
from cgkit.measuring.plan_sizes import (
    best_part,
    cut_to_budget,
    plan_capture_sizes,
    price_sizes,
    two_ways_to_save_memory,
)
from cgkit.measuring.pool_model import PoolModel
from cgkit.measuring.step_cost import StepCost


def every_list(histogram, replayed, uncaptured, shared, each, candidates, budget, most):
    """(cost of all steps, number of sizes, bytes, sizes) of each list within the budget, in whole numbers."""
    for number in range(min(len(candidates), most) + 1):
        for sizes in itertools.combinations(sorted(candidates), number):
            taken = (shared[max(sizes)] if sizes else 0) + sum(each[size] for size in sizes)
            if taken > budget:
                continue
            cost = 0
            for batch, count in histogram.items():
                held = [size for size in sizes if size >= batch]
                cost += count * (replayed[min(held)] if held else uncaptured[batch])
            yield cost, number, taken, sizes


SIZES = range(1, 13)
COSTS = st.fixed_dictionaries({size: st.integers(1, 9) for size in SIZES})
BYTES = st.fixed_dictionaries({size: st.integers(0, 4) for size in SIZES})
EQUAL_BYTES = st.integers(0, 4).map(lambda value: dict.fromkeys(SIZES, value))
HISTOGRAMS = st.dictionaries(st.sampled_from(SIZES), st.integers(1, 5), min_size=1, max_size=7)


@settings(max_examples=250, deadline=None)
@given(
    histogram=HISTOGRAMS,
    replayed=COSTS,
    uncaptured=COSTS,
    shared=BYTES,
    each=st.one_of(BYTES, EQUAL_BYTES),
    candidates=st.sets(st.sampled_from(SIZES), max_size=8),
    budget=st.one_of(st.none(), st.integers(0, 14)),
    most=st.one_of(st.none(), st.integers(0, 9)),
)
@example({3: 1}, dict.fromkeys(SIZES, 1), dict.fromkeys(SIZES, 1), dict.fromkeys(SIZES, 0), dict.fromkeys(SIZES, 0),
         {3, 4}, None, None)  # a tie with recording nothing  # fmt: skip
@example({12: 2}, dict.fromkeys(SIZES, 1), dict.fromkeys(SIZES, 2), dict.fromkeys(SIZES, 0), dict.fromkeys(SIZES, 1),
         {1, 2}, 5, 5)  # above every candidate  # fmt: skip
@example({2: 2}, dict.fromkeys(SIZES, 1), dict.fromkeys(SIZES, 2), dict.fromkeys(SIZES, 1), dict.fromkeys(SIZES, 1),
         {1, 2}, 1, 5)  # the budget is too small for one  # fmt: skip
def test_no_list_is_better(histogram, replayed, uncaptured, shared, each, candidates, budget, most):
    plan = plan_capture_sizes(
        histogram,
        StepCost(lambda size: replayed[size], lambda size: uncaptured[size]),
        budget,
        most,
        memory=PoolModel(lambda size: shared[size], lambda size: each[size]),
        candidates=sorted(candidates),
    )
    limits = (math.inf if budget is None else budget, 99 if most is None else most)
    best = min(every_list(histogram, replayed, uncaptured, shared, each, candidates, *limits))
    steps = sum(histogram.values())
    found = (round(plan.expected_step_cost * steps, 6), len(plan.sizes), plan.pool_bytes)
    assert found == best[:3]
    assert set(plan.sizes) <= candidates


@settings(max_examples=100, deadline=None)
@given(
    histogram=HISTOGRAMS,
    points=st.dictionaries(st.sampled_from(SIZES), st.integers(1, 9), min_size=1, max_size=5),
    most=st.integers(0, 4),
)
def test_the_default_candidates_hold_the_best_of_all_whole_numbers(histogram, points, most):
    cost = StepCost(points, lambda size: 20)
    by_default = plan_capture_sizes(histogram, cost, None, most)
    over_all = plan_capture_sizes(histogram, cost, None, most, candidates=range(1, max(histogram) + 1))
    assert by_default.expected_step_cost == pytest.approx(over_all.expected_step_cost, rel=1e-12)
    assert len(by_default.sizes) == len(over_all.sizes)


def test_a_larger_problem_agrees_with_the_one_that_knows_no_equal_bytes():
    """The two ways through the dynamic programme: all sizes add the same, or not quite."""
    histogram = {batch: 1 + batch * 7919 % 13 for batch in range(1, 60)}
    cost = StepCost(lambda n: 5 + 0.1 * n, lambda n: 20)
    for budget in (10.0, 25.0, 60.5):
        same = plan_capture_sizes(histogram, cost, budget, memory=2.0)
        other = plan_capture_sizes(
            histogram, cost, budget, memory=PoolModel(lambda n: 0.0, lambda n: 2.0 - (n == 59) * 1e-9)
        )
        assert same.expected_step_cost == pytest.approx(other.expected_step_cost, rel=1e-6)
        assert len(same.sizes) == budget // 2


@pytest.mark.parametrize("most", [None, 5])
def test_giving_lists_up_early_loses_nothing(monkeypatch, most):
    histogram = {batch: 1 + batch * 7919 % 13 for batch in range(1, 33)}
    cost = StepCost(lambda n: 5 + 0.1 * n, lambda n: 20)
    memory = PoolModel(lambda n: 3.0 * n, lambda n: 1.0 + 0.37 * n)
    for budget in (40, 90, 160):
        hopeful = plan_capture_sizes(histogram, cost, budget, most, memory=memory)
        with monkeypatch.context() as patched:
            patched.setattr(best_sizes, "SLACK", math.inf)
            every = plan_capture_sizes(histogram, cost, budget, most, memory=memory)
        assert hopeful.sizes == every.sizes and hopeful.sizes


def test_budgets_of_nothing_record_nothing_and_say_why():
    cost = {8: (1.0, 5.0)}
    for budget in ({"max_graphs": 0}, {"memory_budget": 0, "memory": 1}):
        plan = plan_capture_sizes({8: 3}, cost, **budget)
        assert plan.sizes == () and plan.expected_step_cost == 5.0 and plan.graphs == 0
        assert "no sizes" in repr(plan)
        assert (
            "NONE" in plan.vllm
            and plan.sglang == "--disable-cuda-graph"
            and plan.tensorrt_llm.endswith("null")
        )
    piecewise = plan_capture_sizes({8: 3}, cost, None, 16, mode="PIECEWISE", splits=16)
    assert piecewise.sizes == () and "one takes 17 graphs, and 16 are allowed" in repr(piecewise)
    assert plan_capture_sizes({8: 3}, cost, None, 17, mode="PIECEWISE", splits=16).sizes == (8,)


def test_memory_that_costs_nothing_fits_a_budget_of_nothing():
    assert plan_capture_sizes({8: 3}, {8: (1.0, 5.0)}, 0, memory=0).sizes == (8,)


def test_a_batch_above_every_candidate_runs_uncaptured_at_its_own_cost():
    plan = plan_capture_sizes(
        {2: 1, 100: 1}, StepCost(lambda n: 1.0, lambda n: float(n)), candidates=[1, 2, 4]
    )
    assert plan.sizes == (2,)
    assert plan.expected_step_cost == (1.0 + 100.0) / 2
    rows = plan.to_frame()
    assert list(rows["captured"]) == [True, False]
    assert rows["step_cost"].iloc[1] == 100.0 and rows["padding_tokens"].iloc[1] == 0


def test_waste_by_both_divisors_is_the_articles_33_to_40():
    plan = price_sizes([40], {33: 5}, {40: (1.0, 9.0)})
    assert plan.waste_of_real == pytest.approx(7 / 33)
    assert plan.waste == pytest.approx(7 / 40)


def test_prefill_is_never_replayed_under_full_decode_only():
    frame = pd.DataFrame({"kind": ["decode", "mixed", "mixed"], "batch": [4, 4, 500], "count": [6, 3, 1]})
    cost = StepCost(lambda n: 1.0 + n / 500, lambda n: 10.0)
    both = plan_capture_sizes(frame, cost)
    decode = plan_capture_sizes(frame, cost, mode="FULL_DECODE_ONLY")
    assert both.sizes == (4, 500) and both.captured_steps == 1.0
    assert decode.sizes == (4,) and decode.captured_steps == 0.6
    assert decode.expected_step_cost == pytest.approx((6 * 1.008 + 4 * 10) / 10)
    assert decode.to_frame()["count"].sum() == 10 and decode.histogram_frame()["count"].sum() == 10
    mixed_only = plan_capture_sizes(frame[frame["kind"] == "mixed"], cost, mode="FULL_DECODE_ONLY")
    assert mixed_only.sizes == () and mixed_only.expected_step_cost == 10.0


def test_the_plan_is_better_than_the_ladders_that_it_is_compared_with():
    histogram = dict.fromkeys(range(1, 200), 1)
    cost = StepCost(lambda n: 5 + 0.02 * n, lambda n: 12 + 0.01 * n)
    memory = PoolModel(lambda n: 1000.0 * n, lambda n: 500.0)
    ladder = price_sizes(list(named_ladder("article")), histogram, cost, memory=memory)
    plan = plan_capture_sizes(histogram, cost, 200_000, 20, memory=memory)
    cut = cut_to_budget(ladder, 200_000, 20)
    best = best_part(ladder, 200_000, 20)
    assert cut.sizes == ladder.sizes[: len(cut.sizes)] and len(cut.sizes) <= 20
    assert cut.pool_bytes <= 200_000 and best.pool_bytes <= 200_000
    assert plan.expected_step_cost <= best.expected_step_cost <= cut.expected_step_cost
    assert set(best.sizes) <= set(ladder.sizes)
    one_more = ladder.sizes[: len(cut.sizes) + 1]
    assert len(one_more) > 20 or memory.bytes(one_more) > 200_000


def test_the_articles_two_ways_to_save_memory():
    histogram = pd.DataFrame(
        {"kind": ["decode", "decode", "mixed"], "batch": [6, 40, 300], "count": [9, 5, 1]}
    )
    ways = two_ways_to_save_memory(
        histogram,
        {"PIECEWISE": {1: (5.0, 10.0), 512: (9.0, 12.0)}, "FULL": {1: (4.8, 10.0), 512: (8.9, 12.0)}},
        memory=PoolModel(lambda n: 1e5 * n, lambda n: 1e6),
        sizes=named_ladder("vllm-0.10.1"),
        splits=16,
    )
    whole, trimmed, decode = ways.to_dict("records")
    assert [whole["sizes"], trimmed["sizes"], decode["sizes"]] == [67, 4, 35]
    assert [whole["graphs"], trimmed["graphs"], decode["graphs"]] == [67 * 17, 4 * 17, 35]
    assert whole["saved_bytes"] == 0 < decode["saved_bytes"] < trimmed["saved_bytes"]
    assert trimmed["expected_step_cost"] > decode["expected_step_cost"]
    assert trimmed["captured_steps"] == pytest.approx(9 / 15) and decode["captured_steps"] == pytest.approx(
        14 / 15
    )


def test_what_engines_take():
    plan = price_sizes([1, 2, 8], {1: 1}, {1: (1.0, 2.0)}, mode="FULL_DECODE_ONLY")
    config = plan.vllm.removeprefix("--compilation-config '").removesuffix("'")
    assert json.loads(config) == {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 8]}
    assert plan.sglang == "--cuda-graph-bs-decode 1 2 8"
    assert plan.sglang_older == "--cuda-graph-bs 1 2 8"
    assert plan.tensorrt_llm == "cuda_graph_config:\n  enable_padding: true\n  batch_sizes: [1, 2, 8]"
    assert plan.vllm in repr(plan) and plan.sglang in repr(plan) and plan.sglang_older in repr(plan)


def test_a_histogram_may_be_many_things():
    cost = {1: (1.0, 2.0), 64: (2.0, 4.0)}
    given = {3: 2, 9: 1}
    series = pd.Series([2, 1], index=[3, 9])
    frame = pd.DataFrame({"batch": [3, 9], "count": [2, 1]})
    plans = [plan_capture_sizes(one, cost) for one in (given, series, frame)]
    assert {plan.sizes for plan in plans} == {(3, 9)}
    histogram = BatchHistogram()
    histogram._counts = given
    assert plan_capture_sizes(histogram, cost).sizes == (3, 9)
    assert cgkit.plan_capture_sizes is plan_capture_sizes


def test_facts_are_plain_data():
    plan = plan_capture_sizes({3: 2, 9: 1}, {1: (1.0, 2.0), 64: (2.0, 4.0)}, 10**6, memory={1: 10, 9: 90})
    facts = json.loads(json.dumps(plan.facts()))
    assert facts["sizes"] == [3, 9] and facts["pool_bytes"] == plan.pool_bytes == 30 + 90
    assert {"expected_step_cost", "waste", "graphs", "captured_steps"} <= set(facts)
    assert price_sizes([4], {3: 1}, {1: (1.0, 2.0)}).facts()["pool_bytes"] is None


def test_it_shows_itself():
    plan = plan_capture_sizes({3: 2, 9: 1}, {1: (1.0, 2.0), 64: (2.0, 4.0)}, 10**6, memory=5)
    bundle = plan._repr_mimebundle_()
    assert "could not be drawn" not in bundle["text/plain"]
    assert "<svg" in bundle["text/html"] and "--cuda-graph-bs-decode 3 9" in bundle["text/html"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"memory_budget": 10}, "without memory="),
        ({"memory_budget": -1, "memory": 1}, "memory_budget=-1"),
        ({"max_graphs": -3}, "max_graphs=-3"),
        ({"memory": -2}, "-2"),
        ({"memory": "much"}, "predict_pool"),
        ({"mode": "PIECEWISE"}, "splits="),
        ({"mode": "PIECEWISE", "splits": -1}, "splits=-1"),
        ({"mode": "FULL_AND_PIECEWISE"}, "apart"),
        ({"mode": "NONE"}, "mode=NONE"),
        ({"candidates": [0]}, "least that makes sense"),
        ({"candidates": [2.5]}, "not a whole number"),
    ],
)
def test_arguments_that_make_no_sense(arguments, said):
    with pytest.raises(ConfigError, match=said):
        plan_capture_sizes({8: 1}, {8: (1.0, 2.0)}, **arguments)


@pytest.mark.parametrize(
    ("histogram", "said"),
    [({}, "above 0"), ({0: 1}, "batch 0"), ({2: -1}, "negative"), ({2: 0}, "above 0"), ({2.5: 1}, "2.5")],
)
def test_histograms_that_make_no_sense(histogram, said):
    with pytest.raises(ConfigError, match=said):
        plan_capture_sizes(histogram, {8: (1.0, 2.0)})


def test_a_kind_that_nobody_knows():
    frame = pd.DataFrame({"kind": ["prefil"], "batch": [4], "count": [6]})
    with pytest.raises(ConfigError, match="prefil"):
        plan_capture_sizes(frame, {8: (1.0, 2.0)}, mode="FULL_DECODE_ONLY")
