"""``cgkit plan`` from the outside: what it prints, what it writes, what it refuses."""

import json
import random

import pandas as pd
import pytest

from cgkit import cli
from cgkit.config import LADDERS
from cgkit.errors import ConfigError
from cgkit.measuring.compare_sizes import compare_sizes
from cgkit.measuring.plan_command import parse_budget
from cgkit.measuring.plan_sizes import plan_capture_sizes, price_sizes
from cgkit.measuring.pool_model import recorded_memory
from cgkit.measuring.step_cost import StepCost, recorded_step_cost

MIB = 2**20


@pytest.fixture
def histogram(tmp_path):
    """Batches around 20, and a few large ones."""
    draw = random.Random(1)
    sizes = [max(1, round(draw.gauss(20, 6))) for _ in range(3000)] + [150] * 20
    counts = pd.Series(sizes).value_counts().sort_index()
    path = tmp_path / "histogram.csv"
    counts.rename_axis("batch_size").reset_index(name="count").to_csv(path, index=False)
    return path


@pytest.fixture
def trace(tmp_path):
    draw, now, lines = random.Random(2), 0.0, ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for _ in range(200):
        now += draw.expovariate(8)
        lines.append(f"{now:.6f},{draw.randint(10, 2000)},{draw.randint(1, 120)}")
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(lines))
    return path


def run(capfd, *arguments):
    status = cli.main(["plan", *map(str, arguments)])
    out, err = capfd.readouterr()
    return status, out, err


def test_json_is_the_plan_and_the_ladders_by_name(histogram, capfd):
    status, out, _ = run(capfd, "--histogram", histogram, "--budget", "12graphs", "--json")
    facts = json.loads(out)
    assert status == 0
    assert set(LADDERS) <= set(facts["ladders"])
    for one in (facts["plan"], *facts["ladders"].values()):
        assert {"sizes", "expected_step_cost", "waste", "pool_bytes"} <= set(one)
        assert len(one["sizes"]) <= 12 and one["graphs"] <= 12
        assert facts["plan"]["expected_step_cost"] <= one["expected_step_cost"]
        assert one["pool_bytes"] == recorded_memory().bytes(one["sizes"])
    counts = pd.read_csv(histogram)
    cost, sizes = recorded_step_cost(), facts["ladders"]["article"]["sizes"]
    held = [min((s for s in sizes if s >= batch), default=None) for batch in counts["batch_size"]]
    total = sum(
        count * (cost.replayed(size) if size else cost.uncaptured(batch))
        for batch, count, size in zip(counts["batch_size"], counts["count"], held)
    )
    assert facts["ladders"]["article"]["expected_step_cost"] == pytest.approx(total / counts["count"].sum())
    padded = sum((size or batch) * n for batch, n, size in zip(counts["batch_size"], counts["count"], held))
    real = (counts["batch_size"] * counts["count"]).sum()
    assert facts["ladders"]["article"]["waste"] == pytest.approx((padded - real) / padded)
    assert "H200" in facts["step_cost"]["source"] and any(
        "not measured on your machine" in n for n in facts["notes"]
    )


def test_the_table_names_every_ladder_and_the_options(histogram, capfd):
    status, out, _ = run(capfd, "--histogram", histogram, "--max-graphs", 10)
    assert status == 0
    options = ["--cuda-graph-bs-decode", "--cuda-graph-bs ", "cudagraph_capture_sizes", "batch_sizes:"]
    for word in [*LADDERS, "trimmed", *options, "10 of 35", "recorded on"]:
        assert word in out, word


def test_a_trace_becomes_batches_first(trace, capfd):
    status, out, err = run(capfd, "--trace", trace, "--budget", "40", "--mode", "PIECEWISE", "--json")
    facts = json.loads(out)
    assert status == 0 and "simulating" in err
    lines = pd.read_csv(trace)
    assert facts["traffic"]["generated_tokens"] == lines["GeneratedTokens"].sum()
    assert facts["graphs_per_size"] == 33
    assert facts["plan"]["graphs"] == 33 * len(facts["plan"]["sizes"])
    for one in (facts["plan"], *facts["ladders"].values()):
        assert one["pool_bytes"] <= 40 * MIB
    faster = json.loads(run(capfd, "--trace", trace, "--speed", 4, "--split", "--json")[1])
    assert faster["traffic"]["most_running"] > 0 and faster["traffic"]["prompt_tokens"] == 0
    assert faster["budget"] == {"bytes": None, "graphs": 51, "default": True}


def test_costs_of_ones_own(histogram, tmp_path, capfd):
    own = tmp_path / "own.csv"
    pd.DataFrame({"batch": [1, 64], "replayed_ms": [1.0, 2.0], "uncaptured_ms": [4.0, 4.0]}).to_csv(
        own, index=False
    )
    facts = json.loads(
        run(
            capfd,
            "--histogram",
            histogram,
            "--step-cost",
            own,
            "--size-mib",
            3,
            "--budget",
            "30MiB",
            "--json",
        )[1]
    )
    assert facts["step_cost"]["source"] == "own.csv"
    assert facts["memory"]["each_bytes"] == 3 * MIB
    assert facts["plan"]["expected_step_cost"] < 4
    assert not any("not measured on your machine" in note for note in facts["notes"])
    assert any("larger than the largest measured one (64 tokens)" in note for note in facts["notes"])


def test_prefill_in_a_histogram_is_not_replayed_under_full_decode_only(tmp_path, capfd):
    path = tmp_path / "kinds.csv"
    path.write_text("batch_size,count,kind\n8,60,decode\n300,40,mixed\n")
    facts = json.loads(run(capfd, "--histogram", path, "--mode", "FULL_DECODE_ONLY", "--json")[1])
    assert facts["plan"]["sizes"] == [8] and facts["plan"]["captured_steps"] == 0.6
    assert facts["ladders"]["vllm-0.33"]["sizes"][-1] == 256
    assert not any("TensorRT-LLM" in note for note in facts["notes"])
    both = json.loads(run(capfd, "--histogram", path, "--json")[1])
    assert both["plan"]["sizes"] == [8, 300]
    assert any("TensorRT-LLM are for decode steps" in note for note in both["notes"])


@pytest.mark.parametrize("ending", [".png", ".svg", ".html"])
def test_the_chart(histogram, tmp_path, capfd, ending):
    out = tmp_path / "deep" / f"plan{ending}"
    status, text, _ = run(capfd, "--histogram", histogram, "--budget", "12graphs", "--out", out)
    assert status == 0 and f"chart: {out}" in text
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    content = out.read_bytes()
    starts = {".png": b"\x89PNG", ".svg": b"<?xml", ".html": b"<!doctype html>"}
    assert content.startswith(starts[ending])
    if ending != ".png":
        for word in (b"12 recorded sizes", b"recorded on NVIDIA H200", b"tensorrt-llm"):
            assert word in content, word


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--histogram", "HISTOGRAM", "--budget", "lots"], "--budget 'lots'"),
        (["--histogram", "HISTOGRAM", "--out", "x.gif"], "--out x.gif"),
        (["--histogram", "HISTOGRAM", "--step-cost", "nowhere.csv"], "nowhere.csv"),
        (["--histogram", "nowhere.json"], "nowhere.json"),
        (["--histogram", ""], "it cannot be read"),
        (["--histogram", "HISTOGRAM", "--step-cost", ""], "it cannot be read"),
        (["--trace", "TRACE", "--speed", "1e-320"], "speed=1e-320: the last request would come after"),
        (
            ["--trace", "HISTOGRAM"],
            "line 1: the columns TIMESTAMP, ContextTokens, GeneratedTokens are missing",
        ),
        (["--trace", "TRACE", "--speed", "0"], "speed=0"),
        (["--histogram", "HISTOGRAM", "--split"], "--split and --speed say how a --trace is served"),
        (["--trace", "TRACE", "--max-num-seqs", "4096"], "max_num_batched_tokens=2048 is below"),
    ],
)
def test_what_makes_no_sense_is_one_line(histogram, trace, capfd, arguments, said):
    files = {"HISTOGRAM": histogram, "TRACE": trace}
    status, out, err = run(capfd, *[files.get(word, word) for word in arguments])
    assert status == 1 and out == ""
    assert said in err.splitlines()[-1] and err.splitlines()[-1].startswith("cgkit: ")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--trace", "a", "--histogram", "b"],
        ["--trace", "a", "--max-graphs", "-1"],
        ["--trace", "a", "--speed", "x"],
        ["--trace", "a", "--max-num-seqs", "1000000000"],
        *(["--trace", "a", name, "9" * 400] for name in ("--largest", "--max-graphs", "--splits")),
    ],
)
def test_wrong_usage(arguments):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", *arguments])
    assert stopped.value.code == 2


def test_a_chart_that_cannot_be_written_is_said_before_the_work(trace, tmp_path, capfd):
    (tmp_path / "folder.png").mkdir()
    for out in (f"{tmp_path}/folder.png", f"{tmp_path}/new.png/"):
        status, text, err = run(capfd, "--trace", trace, "--out", out)
        assert (status, text) == (1, "") and "simulating" not in err
        assert "it is a folder); name another file" in err
    assert not (tmp_path / "new.png").exists()


def test_nothing_may_be_recorded(histogram, capfd):
    status, out, _ = run(capfd, "--histogram", histogram, "--budget", "0")
    assert status == 0 and "no sizes" in out and "--disable-cuda-graph" in out
    assert "trimmed       0 of 4" in out


def test_steps_beyond_the_largest_size_are_named_as_the_reason(tmp_path, capfd):
    """Nothing is dear here, and nothing lacks room: no size that may be planned is large enough."""
    path = tmp_path / "large.csv"
    path.write_text("batch_size,count\n700,10\n900,3\n")
    status, out, _ = run(capfd, "--histogram", path)
    assert (
        status == 0 and "no sizes: the smallest step has 700 tokens, and of the sizes to choose from" in out
    )
    assert "100.0% of the steps are larger than the largest size that may be planned (512; --largest" in out
    costs = tmp_path / "costs.csv"
    costs.write_text("batch,replayed_ms,uncaptured_ms\n1,1,5\n1000,2,9\n")
    _, out, _ = run(capfd, "--histogram", path, "--step-cost", costs, "--largest", "700")
    assert "sizes: [700]" in out and "23.1% of the steps are larger" in out
    assert "may be planned" not in run(capfd, "--histogram", path, "--largest", "900")[1]


@pytest.mark.parametrize("largest", [(), ("--largest", 2), ("--largest", 100), ("--largest", 512)])
def test_the_lists_reach_no_further_than_the_plan_may(largest, tmp_path, capfd):
    path = tmp_path / "few.csv"
    path.write_text("batch_size,count\n1,100\n3,50\n17,9\n200,1\n")
    limits = ["--max-num-seqs", 4, "--max-graphs", 20, *largest]
    facts = json.loads(run(capfd, "--histogram", path, *limits, "--json")[1])
    for one in facts["ladders"].values():
        assert facts["plan"]["expected_step_cost"] <= one["best_part"]["expected_step_cost"]
        assert facts["plan"]["expected_step_cost"] <= one["expected_step_cost"]
        assert max(one["sizes"], default=0) <= (largest or (0, 8))[1]
    assert facts["ladders"]["tensorrt-llm"]["whole"][-1] == 3072


def test_a_larger_size_that_costs_less_is_planned(tmp_path, capfd):
    path, costs = tmp_path / "few.csv", tmp_path / "costs.csv"
    path.write_text("batch_size,count\n3,50\n")
    costs.write_text("batch,replayed_ms,uncaptured_ms\n1,5,9\n8,1,9\n")
    limits = ["--max-num-seqs", 4, "--step-cost", costs]
    facts = json.loads(run(capfd, "--histogram", path, *limits, "--json")[1])
    assert facts["plan"]["sizes"] == [8] and facts["plan"]["expected_step_cost"] == 1


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("64", (64 * MIB, None)),
        ("64MiB", (64 * MIB, None)),
        ("1.5 GiB", (1.5 * 2**30, None)),
        ("10mb", (1e7, None)),
        ("40graphs", (None, 40)),
        ("1 graph", (None, 1)),
    ],
)
def test_budgets_in_words(text, limits):
    assert parse_budget(text) == limits


@pytest.mark.parametrize(
    "text", ["", "-5", "x", "5.5graphs", "1 TiB", "graphs", "9" * 400, "9" * 400 + "graphs"]
)
def test_budgets_that_are_none(text):
    with pytest.raises(ConfigError, match="--budget"):
        parse_budget(text)


# --- the comparison --------------------------------------------------------------------------------------


def test_a_comparison_shows_itself_and_says_what_was_cut():
    histogram = dict.fromkeys(range(1, 100), 1)
    plan = plan_capture_sizes(histogram, StepCost(lambda n: 5 + n / 10, lambda n: 20.0), None, 6, memory=1000)
    found = compare_sizes(plan, {"vllm-0.33": None, "mine": [10, 100]})
    frame = found.to_frame().set_index("list")
    assert list(frame.index) == ["plan", "vllm-0.33", "mine"]
    assert frame.loc["vllm-0.33", "sizes"] == 6 and frame.loc["vllm-0.33", "of"] == 51
    assert (frame["against_plan"] >= 1).all()
    assert (frame["best_part_cost"].iloc[1:] <= frame["expected_step_cost"].iloc[1:]).all()
    assert "6 of 51" in repr(found)
    bundle = found._repr_mimebundle_()
    assert "could not be drawn" not in bundle["text/plain"] and "<svg" in bundle["text/html"]
    assert found.plot().get_xlabel() == "expected cost of a step, ms"
    with pytest.raises(ConfigError, match="'plan'"):
        compare_sizes(plan, {"plan": [1]})
    with pytest.raises(ConfigError, match="unknown"):
        compare_sizes(plan, {"vllm-99": None})


def test_the_picture_says_what_is_in_the_frame():
    plan = price_sizes([4, 8], {3: 5, 8: 3, 30: 2}, {1: (1.0, 2.0), 64: (2.0, 4.0)})
    ax = plan.plot()
    heights = [patch.get_height() for patch in ax.patches]
    assert sum(heights) == pytest.approx(80.0)  # the two steps of 30 tokens are off the axis, and said
    assert "20.0% of the steps are larger, up to 30" in ax.get_xlabel()
    assert [line.get_xdata()[0] for line in ax.lines] == [4.5, 8.5]
