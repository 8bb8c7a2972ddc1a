"""The compile log and the expected counters: on real compilations by the eager adaptor, and on planted ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import cgkit
from cgkit import events, torch_hooks
from cgkit.capturing import capture
from cgkit.compiling import compile_pieces
from cgkit.config import CompilationConfig
from cgkit.counters import CompilationCounter, compilation_counter
from cgkit.errors import CgkitError
from cgkit.measuring.compile_log import record_compilation
from cgkit.measuring.expected_counters import counters_table
from cgkit.plotting.style import title_of
from cgkit.splitting import split_graph
from cgkit.tracing import trace
from tests.compiling.toys import OPS, Llama, llama_inputs, split_llama, split_of

needs_compiler = pytest.mark.skipif(torch_hooks.find_cpp_compiler() is None, reason="needs a C++ compiler")
DIMS = {"tokens": 0, "positions": 0}


@pytest.fixture(scope="module")
def road():
    """The whole road of a toy of three layers, logged."""
    with record_compilation() as log:
        traced = trace(Llama(3), *llama_inputs(8), dynamic_arg_dims=DIMS)
        split = split_graph(traced, OPS)
        config = CompilationConfig(compiler="eager", compile_sizes=(4,))
        captured = capture(compile_pieces(split, config), [1, 2, 4])
    return log, captured


def test_each_stage_has_its_rows(road):
    frame = road[0].to_frame()
    assert frame["stage"].value_counts().to_dict() == {"trace": 1, "split": 1, "compile": 8, "capture": 3}
    pieces = frame[frame["stage"] == "compile"]
    assert list(pieces["cache"]).count("shared") == 2
    assert set(pieces[pieces["cache"] == "shared"]["shared_with"]) == {"submod_2"}
    sizes = frame[frame["stage"] == "capture"]
    assert list(sizes["num_tokens"]) == [4, 2, 1] and set(sizes["graphs"]) == {4}
    assert (sizes["recording_s"] <= sizes["seconds"]).all()
    assert set(sizes["emulated"]) == {True}


def test_rows_lie_one_after_the_other_inside_the_log(road):
    frame = road[0].to_frame()
    ends = frame["start_s"] + frame["seconds"]
    assert (frame["start_s"] >= 0).all() and (ends <= road[0].seconds).all()
    order = list(frame["stage"].drop_duplicates())
    assert order == ["trace", "split", "compile", "capture"]
    assert (frame["start_s"].iloc[1:].to_numpy() >= ends.iloc[:-1].to_numpy() - 0.005).all()


class Clock:
    """Stands in for the module ``time``: goes on only when it is told to."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("cgkit.measuring.compile_log.time", clock)
    return clock


def test_a_start_is_the_arrival_less_the_seconds(clock):
    with record_compilation() as log:
        clock.now += 0.05
        events.emit(events.GraphSplit("planted", 3, 2, 0.03))
        clock.now += 1
    (row,) = log.to_frame().to_dict("records")
    assert row["start_s"] == pytest.approx(0.02)


def test_a_log_of_pieces_alone_does_not_call_itself_empty():
    _, split = split_llama(1)
    with record_compilation() as log:
        compile_pieces(split, CompilationConfig(compiler="eager"))
    assert repr(log).startswith("CompilationLog of pieces: ") and "nothing" not in repr(log)


def test_it_reads_nothing_after_the_block():
    with record_compilation() as log:
        pass
    before = log.seconds
    events.emit(events.GraphSplit("planted", 3, 2, 0.03))
    assert len(log.to_frame()) == 0 and log.seconds == before
    assert log.counters.as_dict() == CompilationCounter().as_dict()
    assert "nothing was compiled" in log._repr_mimebundle_()["text/html"]


def test_a_capture_that_breaks_off_keeps_what_was_recorded(clock):
    with record_compilation() as log:
        events.emit(events.CaptureTriggered("FULL", 8, True))
        clock.now += 0.01
        events.emit(events.GraphCaptured("planted", "FULL", 8, True, True, 0.004, 0, 0))
        clock.now += 0.05
    (row,) = log.to_frame().to_dict("records")
    assert row["what"] == "FULL decode 8" and row["graphs"] == 1
    assert row["seconds"] == pytest.approx(0.01)


@needs_compiler
def test_inductors_cache_is_told_from_a_compilation(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    split = split_of(lambda self, x: (x * 5).cos() + 11, torch.ones(8, 4), ops=[])
    caches = []
    for _ in range(2):
        with record_compilation() as log:
            compile_pieces(split, CompilationConfig(cudagraph_mode="NONE"))
        caches.append(list(log.to_frame()["cache"]))
    assert caches == [["miss"], ["hit"]]
    assert "1 found in Inductor's cache" in title_of(log.plot())


@needs_compiler
def test_pieces_from_the_compile_cache_are_loaded_counted_and_explained(compile_cache):
    split = split_llama(2)[1]
    seen = []
    for _ in range(2):
        with record_compilation() as log:
            compiled = compile_pieces(split, CompilationConfig(cudagraph_mode="NONE"))
        table = counters_table(compiled, {**log.counters.as_dict(), "num_graphs_seen": 1})
        wrong = set(table.wrong) - {"num_piecewise_graphs_seen", "num_piecewise_capturable_graphs_seen"}
        assert wrong == set()  # the split was made before the log began
        rows = cgkit.explain(compiled).to_frame()
        seen.append((list(log.to_frame()["cache"]), list(rows["kernels"]), table.seen))
    assert [caches for caches, _, _ in seen] == [["miss"] * 3, ["loaded"] * 3]
    assert seen[0][1] == seen[1][1] and min(seen[0][1]) > 0
    assert [counts["num_compiled_artifacts_loaded"] for _, _, counts in seen] == [0, 3]
    assert "3 loaded from the compile cache" in title_of(log.plot())


def test_it_shows_itself_as_a_chart(road):
    log, _ = road
    ax = log.plot()
    title = title_of(ax)
    assert "8 compilations asked for: 6 taken as they are, 2 shared" in title and "emulated" in title
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels[:2] == ["trace", "split"] and "compile  submod_2 @ 4" in labels
    assert any("shared with 1 equal piece" in text.get_text() for text in ax.texts)
    assert "<svg" in log._repr_mimebundle_()["text/html"]
    assert "compile" in repr(log) and "2 shared" in repr(log)


# --- counters ---------------------------------------------------------------------------------------


def test_all_counters_of_a_real_run_are_as_the_laws_say(road):
    log, captured = road
    table = counters_table(captured, log)
    assert table.wrong == []
    frame = table.to_frame().set_index("counter")
    expected = {
        "num_graphs_seen": 1,
        "num_piecewise_graphs_seen": 2 * 3 + 1,
        "num_piecewise_capturable_graphs_seen": 3 + 1,
        "num_backend_compilations": 4 * 2,
        "num_eager_compiles": 3 * 2,
        "num_inductor_compiles": 0,
        "num_gpu_runner_capture_triggers": 3,
        "num_cudagraph_captured": 3 * 4,
    }
    assert frame.loc[list(expected), "expected"].to_dict() == expected
    assert (frame.loc[list(expected), "sign"] == "=").all()


@pytest.mark.parametrize("name", ["num_graphs_seen", "num_backend_compilations", "num_cudagraph_captured"])
def test_a_planted_difference_is_marked(road, name):
    log, captured = road
    seen = {**log.counters.as_dict()}
    seen[name] += 1
    table = counters_table(captured, seen)
    assert table.wrong == [name]
    count = len(table.to_frame())
    assert f"≠ {name}" in repr(table) and f": 1 of {count} counters differ" in repr(table)
    html = table._repr_mimebundle_()["text/html"]
    assert html.count("class=cg-wrong") == 1 and "≠" in html


def test_without_seen_it_is_the_process_counter(road):
    _, captured = road
    table = counters_table(captured)
    assert table.seen["num_graphs_seen"] == compilation_counter.num_graphs_seen
    assert "since the last reset" in repr(table)


def test_before_capture_the_graphs_are_not_predicted():
    compiled = compile_pieces(split_llama(1)[1], CompilationConfig(compiler="eager"))
    frame = counters_table(compiled).to_frame().set_index("counter")
    assert frame.loc["num_cudagraph_captured", "sign"] == "·"
    assert frame["expected"].isna()["num_cudagraph_captured"]


def forwards():
    """Where the law needs its corrections: calls in a row, at the ends, and none at all."""

    def attention(x):
        out = torch.empty_like(x)
        torch.ops.compiletoy.attention(x, x, x, out)
        return out

    return {
        "none": (lambda self, x: x * 2 + 1, []),
        "in a row": (lambda self, x: attention(attention(x + 1)) * 2, OPS),
        "at the end": (lambda self, x: attention(x + 1), OPS),
        "two layers": (lambda self, x: attention(attention(x + 1) + 1) + 1, OPS),
    }


@pytest.mark.parametrize("which", ["none", "in a row", "at the end", "two layers"])
def test_the_laws_hold_for_odd_graphs_too(which):
    forward, ops = forwards()[which]
    with record_compilation() as log:
        split = split_of(forward, torch.ones(8, 4), ops=ops)
        compiled = compile_pieces(split, CompilationConfig(compiler="eager"))
        captured = capture(compiled, [2, 4])
    table = counters_table(captured, log)
    assert table.wrong == [], repr(table)
    law = table.laws["num_piecewise_graphs_seen"].why
    assert ("2 calls: those in a row share a piece" in law) == (which == "in a row")
    assert ("less 1" in law) == (which == "at the end")


def test_a_decorated_model_counts_itself():
    @cgkit.support_torch_compile
    class 模型(nn.Module):  # noqa: N801
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    model = 模型(compilation_config=CompilationConfig(compiler="eager", cudagraph_mode="NONE"))
    with record_compilation() as log:
        model(torch.ones(3))
    state = cgkit.compiled_model(model)
    table = counters_table(state, log)
    assert table.wrong == [] and table.seen["num_models_seen"] == 1
    assert log.model_name == "模型" and "模型" in repr(log)


def test_what_holds_no_pieces_is_refused():
    with pytest.raises(CgkitError, match=r"counters_table.. was given str"):
        counters_table("model")
