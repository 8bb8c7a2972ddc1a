"""The queue against one that runs every step and every token by itself."""

import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgkit import events
from cgkit.errors import ConfigError
from cgkit.measuring.plan_sizes import plan_capture_sizes
from cgkit.measuring.request_trace import RequestTrace, read_requests
from cgkit.measuring.simulate_traffic import simulate_traffic
from cgkit.measuring.step_cost import recorded_step_cost


def cost(tokens):
    """Milliseconds that are whole numbers of 1/1024 s: sums of them are exact."""
    return (2 + tokens // 8) * 1000 / 1024


def step_by_step(trace, seats, budget, split):
    """Every step of its own; a request is a dict that counts its tokens down."""
    waiting = [
        {"at": at, "prompt": 0 if split else prompt, "left": output - split, "made": 0}
        for at, prompt, output in zip(trace.arrivals, trace.prompts, trace.outputs)
    ]
    waiting = [request for request in waiting if request["left"]]
    running, gone, counts, now, most = [], [], Counter(), 0.0, 0
    while waiting or running:
        if not running and waiting[0]["at"] > now:
            now = waiting[0]["at"]
        if split:
            while waiting and waiting[0]["at"] <= now and len(running) < seats:
                running.append(waiting.pop(0))
        decoding = [request for request in running if not request["prompt"]]
        left = budget - len(decoding)
        served = 0
        for request in running:
            part = min(request["prompt"], left)
            request["prompt"] -= part
            left, served = left - part, served + part
            if part and not request["prompt"]:
                request["made"] += 1
        while not split and left and waiting and waiting[0]["at"] <= now and len(running) < seats:
            request = waiting.pop(0)
            running.append(request)
            part = min(request["prompt"], left)
            request["prompt"] -= part
            left, served = left - part, served + part
            if not request["prompt"]:
                request["made"] += 1
        for request in decoding:
            request["made"] += 1
        tokens = len(decoding) + served
        assert 0 < tokens <= budget and len(running) <= seats
        most = max(most, len(running))
        counts["mixed" if served else "decode", tokens] += 1
        now += cost(tokens) / 1e3
        gone += [request for request in running if request["made"] == request["left"]]
        running = [request for request in running if request["made"] < request["left"]]
    assert all(request["made"] == request["left"] for request in gone)
    return counts, now, most


@st.composite
def traces(draw):
    gaps = draw(st.lists(st.integers(0, 60), min_size=0, max_size=14))
    times, now = [], 0
    for index, gap in enumerate(gaps):
        now += gap if index else 0
        times.append(now / 1024)
    lengths = st.lists(st.integers(1, 30), min_size=len(gaps), max_size=len(gaps))
    return RequestTrace(times, draw(lengths), draw(lengths))


@settings(max_examples=200, deadline=None)
@given(trace=traces(), seats=st.integers(1, 6), extra=st.integers(0, 20), split=st.booleans())
def test_it_is_the_queue_that_runs_each_step(trace, seats, extra, split):
    found = simulate_traffic(
        trace, cost, max_num_seqs=seats, max_num_batched_tokens=seats + extra, split=split
    )
    counts, end, most = step_by_step(trace, seats, seats + extra, split)
    assert found.counts == counts
    assert found.end_s == pytest.approx(end, abs=1e-9) and found.most_running == most <= seats
    assert found.requests == len(trace)


@settings(max_examples=120, deadline=None)
@given(
    trace=traces(),
    seats=st.integers(1, 6),
    extra=st.integers(0, 20),
    split=st.booleans(),
    speed=st.floats(0.1, 20),
)
def test_every_token_is_made_once_and_no_step_is_too_large(trace, seats, extra, split, speed):
    budget = seats + extra
    found = simulate_traffic(
        trace, cost, max_num_seqs=seats, max_num_batched_tokens=budget, split=split, speed=speed
    )
    assert found.generated_tokens == sum(trace.outputs) - split * len(trace)
    assert found.prompt_tokens == (0 if split else sum(trace.prompts))
    decoded = found.generated_tokens - (
        0 if split else len(trace)
    )  # first tokens come with the prompt's last
    assert sum(tokens * count for (_, tokens), count in found.counts.items()) == decoded + found.prompt_tokens
    for (kind, tokens), count in found.counts.items():
        assert count > 0 and 0 < tokens <= (seats if kind == "decode" else budget)
    assert found.busy_s == pytest.approx(sum(cost(n) / 1e3 * c for (_, n), c in found.counts.items()))


def test_faster_arrivals_make_larger_batches():
    trace = RequestTrace([n / 10 for n in range(400)], [64] * 400, [50] * 400)
    slow, fast = (simulate_traffic(trace, lambda n: 5.0, speed=speed) for speed in (0.2, 5))
    mean = [(f.prompt_tokens + f.generated_tokens) / f.steps for f in (slow, fast)]
    assert mean[0] * 2 < mean[1] and fast.most_running > slow.most_running
    assert slow.counts == simulate_traffic(trace, lambda n: 5.0, speed=0.2).counts


def test_a_short_time_is_said_in_seconds():
    trace = RequestTrace([0.0, 2.9], [5, 5], [4, 4])
    assert "2 requests in 2.9 s" in repr(trace)
    assert "simulated s, " in repr(simulate_traffic(trace, lambda n: 5.0))
    late = RequestTrace([0.0, 7200.0], [5, 5], [4, 4])
    assert "2 requests in 2.00 h" in repr(late)
    assert "2.00 simulated hours" in repr(simulate_traffic(late, lambda n: 5.0))


def test_nothing_to_serve():
    found = simulate_traffic(RequestTrace([], [], []), cost)
    assert found.steps == 0 and "0 requests" in repr(found)
    only_first = simulate_traffic(RequestTrace([0.0], [5], [1]), cost, split=True)
    assert only_first.steps == 0 and only_first.requests == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_batched_tokens": 2.5}, "max_num_batched_tokens=2.5"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "below max_num_seqs"),
        ({"speed": 0}, "speed=0"),
        ({"speed": float("inf")}, "speed=inf"),
    ],
)
def test_limits_that_make_no_sense(arguments, said):
    with pytest.raises(ConfigError, match=said):
        simulate_traffic(RequestTrace([0.0], [5], [5]), cost, **arguments)
    with pytest.raises(ConfigError, match="costs 0"):
        simulate_traffic(RequestTrace([0.0], [5], [5]), lambda n: 0)


def test_it_says_how_far_it_is_and_shows_itself():
    trace = RequestTrace([n / 10 for n in range(300)], [64] * 300, [5] * 300)
    seen = []
    undo = events.subscribe(events.Progress, seen.append)
    found = simulate_traffic(trace, cost)
    undo()
    assert len(seen) > 50 and seen[-1].done == seen[-1].total
    assert all(event.done < event.total for event in seen[:-1])
    bundle = found._repr_mimebundle_()
    assert "could not be drawn" not in bundle["text/plain"] and "<svg" in bundle["text/html"]
    assert found.to_frame()["count"].sum() == found.facts()["steps"]


def azure(name):
    named = os.environ.get("CGKIT_FOREIGN_TRACES")
    folders = [Path(named)] if named else [up / "shared/data" for up in Path(__file__).resolve().parents]
    for folder in folders:
        if (folder / "azure-llm-2023" / name).exists():
            return folder / "azure-llm-2023" / name
    pytest.skip(f"{name} is not on this machine")


@pytest.mark.parametrize("name", ["conv.csv", "code.csv"])
def test_a_real_trace_from_file_to_plan(name):
    trace = read_requests(azure(name))
    found = simulate_traffic(trace, recorded_step_cost(), speed=2)
    assert found.generated_tokens == sum(trace.outputs) and found.prompt_tokens == sum(trace.prompts)
    plan = plan_capture_sizes(found, recorded_step_cost(), None, 16, mode="FULL_DECODE_ONLY")
    assert 0 < len(plan.sizes) <= 16 and plan.sizes[-1] <= 256
