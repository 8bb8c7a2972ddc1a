import json

import pytest
import torch

import cgkit
from cgkit import events
from cgkit.capturing import capture
from cgkit.errors import CgkitError, ReplayError
from cgkit.measuring.lifetimes import output_lifetimes
from cgkit.measuring.memory import Ledger, compare_orders
from cgkit.measuring.record_memory import record_memory
from cgkit.measuring.segments import pool_segments
from cgkit.measuring.waterfall import PARTS, waterfall
from cgkit.plotting import memory_charts
from cgkit.plotting.style import title_of
from tests.capturing.models import Layers, toy
from tests.measuring.test_predict_pool import runner

SIZES = [2, 4, 8]


@pytest.fixture(scope="module")
def compiled():
    return toy("cpu", Layers(3, 128), width=128)


@pytest.fixture
def watched(compiled):
    with Ledger() as ledger:
        captured = capture(compiled, SIZES, mode="FULL_AND_PIECEWISE")
    yield ledger, captured
    captured.free()


def test_the_ledger_has_a_row_a_graph_in_order(watched):
    ledger, captured = watched
    frame = ledger.to_frame()
    assert len(frame) == captured.num_graphs == 4 * 3 + 2 * 3 - 3
    assert list(frame["num_tokens"].unique()) == SIZES[::-1]
    assert list(frame["order"]) == list(range(len(frame)))
    assert (
        frame["reserved_before_bytes"].iloc[1:].values == frame["reserved_after_bytes"].iloc[:-1].values
    ).all()
    assert (frame["growth_bytes"] >= 0).all()
    assert frame["growth_bytes"].sum() == captured.pool_bytes.reserved
    assert (frame["allocated_after_bytes"] <= frame["peak_allocated_bytes"]).all()
    assert (frame["peak_allocated_bytes"] <= frame["reserved_after_bytes"]).all()
    assert frame["peak_allocated_bytes"].max() == captured.peak_allocated_bytes
    assert (frame["nodes"] >= 1).all()
    assert frame["emulated"].all()


def test_a_ledger_of_graphs_that_are_there_already_knows_what_was_noted(watched):
    ledger, captured = watched
    later = Ledger.of(captured).to_frame()
    then = ledger.to_frame()
    for column in ("name", "mode", "num_tokens", "nodes", "reserved_after_bytes", "growth_bytes"):
        assert list(later[column]) == list(then[column])
    assert later["allocated_after_bytes"].isna().all()
    with pytest.raises(CgkitError, match="with Ledger"):
        Ledger.of(captured).plot_segments()


def test_the_estimate_of_vllm_extrapolates_from_the_two_largest_full_graphs(watched):
    ledger, _ = watched
    frame = ledger.to_frame()
    full = frame.loc[frame["mode"] == "FULL", "growth_bytes"].tolist()
    assert len(full) == 3 and max(full[1:]) < 2**20  # smaller ones live in the memory of the largest
    piecewise = frame.loc[frame["mode"] == "PIECEWISE", "growth_bytes"].sum()
    assert ledger.vllm_estimate_bytes() == piecewise + full[0] + 2 * 2**20
    assert Ledger().vllm_estimate_bytes() is None


def test_without_a_ledger_nothing_looks_at_the_pool(compiled, monkeypatch):
    from cgkit.capturing import wrapper

    monkeypatch.setattr(wrapper, "RecordingMemory", lambda *args: pytest.fail("the pool was walked"))
    assert not events.has_readers(events.GraphMemory)
    capture(compiled, [2], mode="PIECEWISE").free()


def test_the_pool_at_its_fullest(watched):
    ledger, captured = watched
    fullest, now = ledger.fullest, pool_segments(captured)
    live = fullest.loc[fullest["state"] == "live", "block_bytes"].sum()
    assert live == ledger.to_frame()["allocated_after_bytes"].max() > 0
    assert now["block_bytes"].sum() == captured.pool_bytes.reserved
    assert (now["state"] == "free").all()  # outputs are weak: no graph owns anything


def test_small_to_large_takes_more(compiled):
    frame = compare_orders(lambda first: capture(compiled, SIZES, mode="PIECEWISE", largest_first=first))
    ends = frame.groupby("order_of_sizes")["reserved_after_bytes"].last()
    assert ends["small to large"] > ends["large to small"] > 0
    assert "Small to large takes" in str(memory_charts.orders(frame).get_figure().get_suptitle())
    first = frame.drop_duplicates("order_of_sizes").set_index("order_of_sizes")["num_tokens"]
    assert (first["large to small"], first["small to large"]) == (8, 2)


def test_an_output_lasts_until_a_replay_writes_over_its_bytes(watched):
    _, captured = watched
    lives = output_lifetimes(captured, [8, 4, 8])
    frame = lives.to_frame()
    assert len(lives.replays) == 4 * 3
    for row in frame[frame["overwritten_at"].notna()].to_dict("records"):
        over = frame[frame["written_at"] == row["overwritten_at"]]
        same = over[over["segment"] == row["segment"]]
        assert ((same["start_bytes"] < row["stop_bytes"]) & (same["stop_bytes"] > row["start_bytes"])).any()
        between = frame[
            (frame["written_at"] > row["written_at"]) & (frame["written_at"] < row["overwritten_at"])
        ]
        between = between[between["segment"] == row["segment"]]
        apart = (between["start_bytes"] >= row["stop_bytes"]) | (between["stop_bytes"] <= row["start_bytes"])
        assert apart.all()
    read = frame[frame["last_read_at"].notna() & frame["overwritten_at"].notna()]
    assert len(read) and (read["last_read_at"] < read["overwritten_at"]).all()
    results = frame[frame["name"] == captured.pieces[-1].name]
    assert results["last_read_at"].isna().all() and len(results) == 3
    assert "<svg" in lives._repr_mimebundle_()["text/html"]


def test_a_full_graph_s_result_is_lost_to_the_next_step(watched):
    _, captured = watched
    frame = output_lifetimes(captured, [8, 8], mode="FULL", uniform=True).to_frame()
    assert list(frame["overwritten_at"].astype(object)) == [1, frame["overwritten_at"].iloc[1]]
    assert frame["overwritten_at"].isna().tolist() == [False, True]
    with pytest.raises(ReplayError, match="no graph of 3 tokens"):
        output_lifetimes(captured, [3])


def test_the_waterfall_adds_up():
    made = runner(sizes=(1, 4))
    made.capture_model()
    total = 64 * 2**20
    found = waterfall(made, total_bytes=total)
    frame = found.to_frame()
    assert tuple(frame["part"]) == PARTS
    assert frame["bytes"].sum() == total == found.total_bytes
    assert list(frame["start_bytes"]) == [0, *frame["bytes"].cumsum().iloc[:-1]]
    parts = dict(zip(frame["part"], frame["bytes"]))
    assert parts["graph pool"] == made.executor.captured.pool_bytes.reserved > 0
    assert parts["KV cache"] == made.kv_cache.num_bytes
    model = made.model
    assert parts["weights"] >= sum(p.numel() * p.element_size() for p in {*model.parameters()}) * 0.99
    assert parts["activations"] > 0
    assert "emulated" in found.plot().get_figure().get_suptitle()
    with pytest.raises(CgkitError, match="total_bytes is 1,000"):
        waterfall(made, total_bytes=1000)
    assert waterfall(made).to_frame()["bytes"].iloc[-1] == 0  # no device, no budget: nothing is free


@pytest.mark.slow
def test_record_memory_writes_what_the_charts_need(tmp_path):
    entries = record_memory(
        tmp_path, ["tiny-llama"], [1, 4], sizes=(1, 2, 4), device="cpu", prefix="cpu", layers=2, context=32,
        compiler="eager",
    )  # fmt: skip
    assert {p.name for p in tmp_path.iterdir()} == set(entries)
    text = "".join(path.read_text() for path in tmp_path.iterdir())
    assert str(tmp_path) not in text and "/root" not in text
    manifest = {
        "command": "a test",
        "commit": "0",
        "device": "cpu",
        "torch": "2",
        "date": "today",
        "files": entries,
    }
    (tmp_path / "manifest-memory.json").write_text(json.dumps(manifest))
    load = lambda part: cgkit.recordings.load(f"cpu-memory-{part}tiny-llama", tmp_path)  # noqa: E731
    about = cgkit.recordings.about("cpu-memory-ledger-tiny-llama", tmp_path)
    assert "emulated" in about.line() and "recorded on cpu" in about.line()
    ledgers = load("ledger-")
    assert set(ledgers["run"]) == {"first of the process", "large to small", "small to large", "both modes"}
    memory_charts.ledger(ledgers[ledgers["run"] == "both modes"], about)
    memory_charts.segments(load("segments-"), about)
    memory_charts.waterfall(load("waterfall-"), about)
    ax = memory_charts.orders(ledgers, about)
    assert len(ax.lines) == 3  # a recorded ledger names its runs; the one in both modes is another story
    lives = load("lifetimes-")
    ax = memory_charts.lifetimes(lives, about=about)
    assert ax.get_xlim()[1] > lives["written_at"].max()
    assert {f"{row['name']} @ {row['num_tokens']}" for row in lives.to_dict("records")} >= {
        label.get_text() for label in ax.get_xticklabels()
    }
    compared = load("prediction-")
    first = compared[compared["run"] == compared["run"].iloc[0]]
    ax = memory_charts.prediction(compared, about=about)
    assert len(ax.patches) == 2 * len(first) and "measured" in title_of(ax)
    rows = compared[compared["run"] == "large to small"]
    assert (rows["predicted_allocated_bytes"] == rows["measured_allocated_bytes"]).all()
    facts = load("")
    for run in ("large to small", "small to large"):
        assert facts["runs"][run]["predicted_reserved_bytes"] == facts["runs"][run]["pool_reserved_bytes"]
    assert facts["emulated"] is True


def test_what_is_recorded_on_this_machine_is_read_like_a_recording(monkeypatch):
    from cgkit import recordings
    from cgkit.measuring import record_memory as module

    def recorded(folder, shapes, **how):
        assert (how["device"], how["compiler"], how["layers"]) == ("cpu", "eager", 1)
        name = f"{how['prefix']}-memory-ledger-{shapes[0]}.csv"
        (folder / name).write_text("order,name\n0,submod_0\n")
        return {name: {"what": "a ledger", "model": shapes[0], "emulated": True}}

    monkeypatch.setattr(module, "record_memory", recorded)
    folder = module.memory_here("a-shape", "cpu", 1)
    assert folder == module.memory_here("a-shape", "cpu", 1)  # once a process
    assert list(recordings.load("h200-memory-ledger-a-shape", folder)["name"]) == ["submod_0"]
    about = recordings.about("h200-memory-ledger-a-shape", folder)
    assert about.emulated and about.model == "a-shape"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to record on")
def test_without_a_gpu_there_is_nothing_to_record_on():
    from cgkit.measuring.record_memory import memory_here

    assert memory_here("tiny-llama") is None
