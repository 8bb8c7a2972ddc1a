"""Traffic that is served, the benchmarks above it, and their chart; on a CPU, with a clock of the tests' own."""

import argparse

import pandas as pd
import pytest

from cgkit import Engine, events
from cgkit.capturing.dispatcher import Route
from cgkit.cli import main
from cgkit.config import CompilationConfig, CUDAGraphMode
from cgkit.errors import ConfigError
from cgkit.measuring import bench_engine, bench_serve
from cgkit.measuring.histogram_file import read_histogram
from cgkit.measuring.make_requests import fit_requests, synthetic_requests
from cgkit.measuring.request_trace import RequestTrace
from cgkit.measuring.serve_traffic import serve_traffic
from cgkit.measuring.step_clock import StepClock, recorded_step_ms
from cgkit.measuring.step_cost import recorded_step_cost
from cgkit.plotting import About, serve_charts, title_of
from cgkit.serving.runner import Runner
from cgkit.serving.step_report import StepReport

from ..serving.helpers import toy

TRACE = RequestTrace([0.0, 0.0, 0.5, 3.0, 3.1], [9, 4, 17, 2, 5], [6, 1, 9, 3, 20], "five")


class Clock:
    """Each step of the model takes 10 ms; looking takes nothing."""

    def __init__(self):
        self.now = 50.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture(scope="module")
def runner():
    return Runner(toy(), config=CompilationConfig(level=0), max_num_seqs=3, max_model_len=64)


def served(runner, ahead=False):
    clock = Clock()
    engine = Engine(runner, async_scheduling=ahead)
    step = engine.step

    def timed():
        clock.now += 0.010
        return step()

    engine.step = timed
    return serve_traffic(engine, TRACE, label="NONE", clock=clock, sleep=clock.sleep)


def test_latencies_are_those_of_the_clock(runner):
    result = served(runner)
    frame = result.to_frame()
    assert list(frame["output_tokens"]) == TRACE.outputs and list(frame["prompt_tokens"]) == TRACE.prompts
    # the first two arrive together and are prefilled in one step of 10 ms; then a token each 10 ms
    assert frame["ttft_ms"][0] == pytest.approx(10) and frame["total_ms"][0] == pytest.approx(60)
    assert frame["tpot_ms"][0] == pytest.approx(10) and frame["tpot_ms"].isna()[1]
    assert frame["ttft_ms"][3] == pytest.approx(10)  # nobody was served when it came
    row = result.summary()
    assert row["ttft_p50_ms"] == pytest.approx(10) and row["tpot_p99_ms"] == pytest.approx(10)
    assert row["steps"] == row["uncaptured_steps"] == len(result.steps) and row["padding_of_computed"] == 0
    assert row["tokens_per_second"] == pytest.approx(sum(TRACE.outputs) / result.wall_s)
    assert "5 requests" in repr(result)
    assert "to first token" in title_of(result.plot()).lower()


def test_a_request_that_waits_for_a_seat_waits_from_its_arrival(runner):
    crowded = RequestTrace([0.0] * 6, [3] * 6, [10] * 6)
    clock, engine = Clock(), Engine(runner, async_scheduling=False)
    step = engine.step

    def timed():
        clock.now += 0.010
        return step()

    engine.step = timed
    result = serve_traffic(engine, crowded, clock=clock, sleep=clock.sleep)
    # three seats: the others are seated after ten steps
    assert sorted(result.requests["ttft_ms"].round()) == [10, 10, 10, 110, 110, 110]


def test_requests_that_do_not_fit_are_refused_and_counted(runner):
    trace = RequestTrace([0.0, 0.0], [90, 3], [2, 2])
    result = serve_traffic(Engine(runner), trace)
    assert list(result.requests["refused"]) == [True, False]
    assert result.summary()["refused"] == 1 and result.summary()["requests"] == 1
    rows = pd.DataFrame([result.summary() | {"round": 1}, result.summary() | {"round": 1, "refused": 0}])
    assert "refused" in bench_serve._shown(rows) and "refused" not in bench_serve._shown(rows.tail(1))


def test_a_trace_of_which_nothing_can_be_served_is_an_error_with_the_reason(runner):
    engine = Engine(runner)
    with pytest.raises(ConfigError, match=r"none of the 2 requests .*90 tokens"):
        serve_traffic(engine, RequestTrace([0.0, 0.0], [90, 70], [2, 2]))
    assert serve_traffic(engine, TRACE).summary()["requests"] == 5


def test_the_histogram_is_what_plan_reads(runner, tmp_path):
    result = served(runner)
    path = tmp_path / "histogram.csv"
    result.histogram().to_csv(path, index=False)
    read = read_histogram(path)
    assert read["count"].sum() == len(result.steps)
    assert set(read["kind"]) == {"decode", "mixed"}


def test_an_engine_at_work_takes_no_trace_and_too_few_reports_are_an_error(runner):
    engine = Engine(runner)
    engine.add_request([1], 2)
    with pytest.raises(ConfigError, match="serving requests"):
        serve_traffic(engine, TRACE)
    engine.close()
    with pytest.raises(ConfigError, match="keeps reports of 3"):
        serve_traffic(Engine(runner, keep_reports=3), TRACE)


def test_made_up_requests_are_the_same_for_a_seed_and_have_the_means_asked_for():
    trace = synthetic_requests(4000, 20.0, prompt_tokens=300, output_tokens=50, seed=3)
    assert trace == synthetic_requests(4000, 20.0, prompt_tokens=300, output_tokens=50, seed=3)
    assert trace != synthetic_requests(4000, 20.0, prompt_tokens=300, output_tokens=50, seed=4)
    frame = trace.to_frame()
    assert frame["arrival_s"].is_monotonic_increasing and frame["arrival_s"][0] == 0
    # four standard errors: lengths deviate by about their mean, gaps by theirs
    for name, mean in (("prompt_tokens", 300), ("output_tokens", 50)):
        assert abs(frame[name].mean() / mean - 1) < 4 / 4000**0.5
        assert frame[name].std() / mean == pytest.approx(1, abs=0.25)
    assert abs(frame["arrival_s"].iloc[-1] * 20 / 4000 - 1) < 4 / 4000**0.5


def test_a_trace_is_cut_scaled_and_sped_up():
    fitted = fit_requests(TRACE, 12, limit=4, speed=2.0, scale_lengths=0.5)
    trace = fitted.trace
    assert trace.arrivals == [0.0, 0.0, 0.25, 1.5]
    assert (trace.prompts, trace.outputs, fitted.cut) == ([4, 2, 8, 1], [3, 1, 4, 2], 0)
    tight = fit_requests(TRACE, 12)
    assert (tight.trace.prompts, tight.trace.outputs) == (
        [9, 4, 11, 2, 5],
        [3, 1, 1, 3, 7],
    ) and tight.cut == 3


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: synthetic_requests(0, 1.0), "count=0"),
        (lambda: synthetic_requests(3, 0.0), "rate=0.0"),
        (lambda: synthetic_requests(3, 1.0, output_tokens=float("nan")), "output_tokens=nan"),
        (lambda: fit_requests(TRACE, 12, speed=0), "speed=0"),
        (lambda: fit_requests(TRACE, 12, scale_lengths=-1.0), "scale_lengths=-1.0"),
        (lambda: fit_requests(TRACE, 12, limit=0), "limit=0"),
        (lambda: fit_requests(TRACE, 1), "max_model_len=1"),
    ],
)
def test_requests_that_make_no_sense(call, says):
    with pytest.raises(ConfigError, match=says):
        call()


def options(bench, *arguments):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(
        ["--device", "cpu", "--shape", "tiny-llama", "--layers", "1", "--compiler", "eager", *arguments]
    )


def test_bench_serve_puts_modes_side_by_side(tmp_path):
    files = {name: tmp_path / f"{name}.csv" for name in ("csv", "requests-csv", "steps-csv", "histogram")}
    arguments = [text for name, path in files.items() for text in (f"--{name}", str(path))]
    with events.record(events.Progress) as seen:
        facts = bench_serve.run(
            options(
                bench_serve, "--synthetic", "12", "--rate", "40", "--prompt-tokens", "20", "--output-tokens", "6",
                "--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--max-model-len", "64",
                "--modes", "NONE", "FULL_AND_PIECEWISE", "--rounds", "2", "--sizes", "1", "2", "4", "8",
                "--chart", str(tmp_path / "serve.svg"), *arguments,
            )
        )  # fmt: skip
    rows = pd.DataFrame(facts["rows"])
    assert list(rows["mode"]) == ["NONE", "FULL_AND_PIECEWISE"] * 2 and list(rows["round"]) == [1, 1, 2, 2]
    assert facts["emulated"] and (rows["requests"] == 12).all()
    assert (rows["full_steps"] + rows["piecewise_steps"] + rows["uncaptured_steps"] == rows["steps"]).all()
    none = rows["mode"] == "NONE"
    assert (rows["uncaptured_steps"] == rows["steps"])[none].all() and (rows["full_steps"] > 0)[~none].all()
    assert (rows["padding_of_computed"] == 0)[none].all()
    requests, steps = pd.read_csv(files["requests-csv"]), pd.read_csv(files["steps-csv"])
    # how much is padded depends on when requests arrive, so on this machine's speed; what the row says does not
    computed, real = (steps[name].sum() for name in ("num_padded_tokens", "num_tokens"))
    padded = rows["padding_of_computed"] * rows["steps"]
    assert (computed > real) == (padded > 0).any()
    assert len(requests) == 4 * 12 and len(steps) == rows["steps"].sum()
    assert requests.groupby("request")["output_tokens"].nunique().eq(1).all()  # the same traffic every time
    assert (requests["ttft_ms"] > 0).all() and pd.read_csv(files["csv"])["emulated"].all()
    assert len(read_histogram(files["histogram"])) > 1
    assert "emulated graphs" in (tmp_path / "serve.svg").read_text()
    assert {event.stage for event in seen} >= {"serving NONE", "serving FULL_AND_PIECEWISE"}


def test_bench_serve_says_what_is_wrong_with_a_trace(tmp_path, capsys):
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2.0,5,5\n1.0,5,5\n")
    assert main(["bench", "serve", "--device", "cpu", "--trace", str(path)]) == 1
    assert "line 3, column TIMESTAMP" in capsys.readouterr().err
    assert main(["bench", "serve", "--device", "cpu", "--modes", "NONE", "NONE"]) == 1
    assert "each mode once" in capsys.readouterr().err


def test_the_title_compares_modes_only_where_they_are_real():
    requests = pd.DataFrame(
        {"mode": ["NONE"] * 3 + ["FULL"] * 3, "ttft_ms": [5.0] * 6, "tpot_ms": [4.0] * 3 + [2.0] * 3}
    )
    steps = pd.DataFrame(
        {
            "mode": ["NONE", "FULL"],
            "taken": ["NONE", "FULL"],
            "num_tokens": [3, 3],
            "num_padded_tokens": [3, 4],
            "num_reqs": [3, 3],
        }
    )
    real = serve_charts.overview(requests, steps, About("a model", device="a GPU", emulated=False))
    heading = real.get_figure().get_suptitle()
    assert heading.startswith("A token takes 2.00 ms in FULL and 4.00 ms in NONE")
    dry = serve_charts.overview(requests, steps, About("a model", emulated=True)).get_figure().get_suptitle()
    assert dry.startswith("3 requests through 2 modes") and "CPU figures" in dry
    for draw in (serve_charts.steps_taken, serve_charts.batch_sizes):
        assert title_of(draw(steps))
    assert "to first token" in title_of(serve_charts.latencies(requests)).lower()


def test_bench_engine_takes_a_step_apart(tmp_path):
    path = tmp_path / "engine.csv"
    facts = bench_engine.run(
        options(bench_engine, "--batches", "1", "3", "--turns", "1", "--context", "5", "--csv", str(path))
    )
    frame = pd.read_csv(path)
    assert list(frame["batch"]) == [1, 1, 3, 3] and set(frame["way"]) == {"a step ahead", "in turn"}
    assert set(frame["mode"]) == {"FULL"} and facts["emulated"] and frame["emulated"].all()
    assert (frame["steps"] == bench_engine.TURN - 1 - bench_engine.UNCOUNTED).all()
    parts = frame[["schedule_us", "fill_us", "route_us", "sample_us", "post_us"]]
    assert (parts > 0).all().all() and (frame["outside_model_us"] > parts.max(axis=1)).all()


@pytest.mark.parametrize(
    ("bench", "arguments", "says"),
    [
        (bench_engine, ["--turns", "0"], "0 among --batches, --context and --turns"),
        (bench_engine, ["--context", "0"], "0 among"),
        (bench_engine, ["--batches", "4", "-1"], "-1 among"),
        (bench_engine, ["--layers", "0"], "layers=0"),
        (bench_serve, ["--max-num-seqs", "0"], "--max-num-seqs 0: use 1 or more"),
        (bench_serve, ["--max-num-batched-tokens", "0"], "--max-num-batched-tokens 0: use 1"),
        (bench_serve, ["--layers", "0"], "layers=0"),
    ],
)
def test_numbers_that_make_no_sense_are_refused_by_their_own_name(bench, arguments, says):
    with pytest.raises(ConfigError, match=says):
        bench.run(options(bench, *arguments))


def test_benchmarks_of_a_gpu_say_so_without_one(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name in ("serve", "engine"):
        assert main(["bench", name]) == 1
        assert "--device cpu is a dry run" in capsys.readouterr().err


def test_a_step_clock_moves_by_what_each_step_takes_elsewhere(runner):
    engine = Engine(runner, async_scheduling=False)
    clock = StepClock(engine, lambda report: 10.0 * report.num_reqs)
    result = serve_traffic(engine, TRACE, clock=clock, sleep=clock.sleep)
    steps = result.steps
    asleep = result.wall_s - 0.010 * steps["num_reqs"].sum()
    assert asleep > 0 and clock() == pytest.approx(result.wall_s)
    frame = result.to_frame()
    assert frame["ttft_ms"][0] == pytest.approx(20)  # two prompts in one step
    again = Engine(runner, async_scheduling=False)
    clock = StepClock(again, lambda report: 10.0 * report.num_reqs)
    other = serve_traffic(again, TRACE, clock=clock, sleep=clock.sleep)
    assert list(other.steps["num_tokens"]) == list(steps["num_tokens"])  # the same each time


def test_recorded_step_times_are_those_of_the_mode_that_was_taken():
    milliseconds = recorded_step_ms("llama-3.2-1b")
    took = {}
    for mode in ("NONE", "PIECEWISE", "FULL"):
        route = Route(CUDAGraphMode.parse(mode, "mode"), None, 8)
        took[mode] = milliseconds(StepReport(1, route, True, 8, 8))
    full = recorded_step_cost("llama-3.2-1b", "FULL")
    assert took["FULL"] == full.replayed(8) and took["NONE"] == full.uncaptured(8)
    assert took["FULL"] < took["PIECEWISE"] < took["NONE"]
