"""Nothing of reporting or marking is on the replay path, and what is beside it costs nothing measurable."""

from __future__ import annotations

import argparse
import dis

import pytest
import torch

from cgkit import compilation_counter, events
from cgkit.measuring import events_off
from cgkit.measuring.decode_bench import DecodeBench, shape_of
from cgkit.measuring.profile_step import trace_steps
from cgkit.serving.runner import Runner


@pytest.fixture(scope="module")
def bench() -> DecodeBench:
    with torch.no_grad():
        bench = DecodeBench(shape_of("tiny-llama", 2), [1], device="cpu", context=16, compiler="eager")
        bench.capture()
    return bench


@pytest.fixture(scope="module")
def steps(bench):
    with torch.no_grad():
        yield events_off.replay_steps(bench, 1)


def test_a_piecewise_step_runs_by_the_plan_of_decode_batches_and_records_nothing_more(bench):
    frame = bench.executor.captured.plans.to_frame()
    assert list(frame["kind"]) == ["any batch", "decode"] and frame["laid_out"].all()
    with torch.no_grad(), compilation_counter.expect(num_cudagraph_captured=0, num_module_path_steps=0):
        for step in bench.steps(1).values():
            step()


def names_in(code) -> set[str]:
    """Every global, attribute and free variable that a code object names."""
    named = {i.argval for i in dis.get_instructions(code) if isinstance(i.argval, str)}
    return named | set(code.co_names) | set(code.co_freevars)


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_the_replay_path_names_nothing_of_events_or_marks(steps, mode):
    with torch.no_grad():
        steps[mode]()
        ran = events_off.executed_code(steps[mode])
    way = {
        "PIECEWISE": "CapturedGraphs._planned.<locals>.run",
        "FULL": "CUDAGraphWrapper._make_call.<locals>.call",
    }
    assert {way[mode], "set_forward_context.__enter__"} <= {code.co_qualname for code in ran}
    reporting = {"events", "marks", "emit", "has_readers", "marker", "put_marks", "profiler_range"}
    assert {code.co_qualname: names_in(code) & reporting for code in ran if names_in(code) & reporting} == {}
    files = {code.co_filename.rsplit("/", 1)[-1] for code in ran}
    assert not files & {"events.py", "marks.py", "profile_step.py", "counters.py"}


def test_after_a_profile_the_path_is_the_same_code_as_before(steps):
    with torch.no_grad():
        before = events_off.executed_code(steps["PIECEWISE"])
        trace_steps(steps["PIECEWISE"], steps=1)
        after = events_off.executed_code(steps["PIECEWISE"])
    assert after == before


def test_the_runners_step_asks_once_whether_somebody_reads(steps):
    with torch.no_grad():
        ran = {code.co_qualname: code for code in events_off.executed_code(steps["Runner.execute"])}
    reporting = {name for name, code in ran.items() if "events" in names_in(code)}
    assert reporting <= {"Runner.execute", "Executor.compile"}
    assert "has_readers" in ran and "emit" not in ran


def test_the_stripped_build_has_no_events_left():
    codes = events_off.stripped_codes()
    names = {key[1] for key in codes}
    assert {"Runner.execute", "CUDAGraphWrapper._record", "_Capture.run"} <= names
    for plain, bare in codes.values():
        assert "emit" in plain.co_names and "emit" not in bare.co_names and "has_readers" not in bare.co_names


def test_builds_are_switched_and_switched_back(steps):
    plain = Runner.execute.__wrapped__.__code__  # under torch.no_grad()
    with torch.no_grad(), events.record(events.StepRan) as log, events_off.Build().turns() as build:
        assert "cgkit.serving.runner.Runner.execute" in build.names
        steps["Runner.execute"]()
        assert len(log) == 1
        build.use(stripped=True)
        assert Runner.execute.__wrapped__.__code__ is not plain
        steps["Runner.execute"]()
        assert len(log) == 1  # the same step, and nobody says so
    assert Runner.execute.__wrapped__.__code__ is plain


def test_ratios_come_from_pairs_of_turns():
    row = events_off._row("x", [2.0, 4.0, 3.0], [1.0, 4.0, 3.0])
    assert (row["ratio"], row["rounds"], row["within_goal"]) == (1.0, 3, True)
    assert events_off._row("x", [1.05, 1.05], [1.0, 1.0])["within_goal"] is False


@pytest.mark.slow
def test_the_benchmark_runs_emulated():
    parser = argparse.ArgumentParser()
    events_off.add_arguments(parser)
    facts = events_off.run(parser.parse_args(["--layers", "1", "--rounds", "2", "--device", "cpu"]))
    rows = {row["step"]: row for row in facts["rows"]}
    assert set(rows) == {"PIECEWISE", "FULL", "Runner.execute"} and facts["emulated"] is True
    assert rows["PIECEWISE"]["reporting_functions_run"] == rows["FULL"]["reporting_functions_run"] == []
    assert all(0.2 < row["ratio"] < 5 for row in rows.values())  # two rounds say no more


@pytest.mark.gpu
def test_on_a_gpu_events_cost_at_most_a_hundredth():
    parser = argparse.ArgumentParser()
    events_off.add_arguments(parser)
    facts = events_off.run(parser.parse_args(["--rounds", "80", "--device", "cuda"]))
    for row in facts["rows"]:
        assert row["ratio_low"] <= events_off.GOAL, row
        if row["step"] != "Runner.execute":
            assert row["reporting_functions_run"] == []
