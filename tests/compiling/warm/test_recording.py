"""A loaded model is recorded, gets its replay plans and is replayed: by what was stored, without a trace."""

from __future__ import annotations

import pytest
import torch

import cgkit
from cgkit import CompilationConfig, compilation_counter
from cgkit.compiling import compile_model, compiled_graph
from cgkit.compiling.warm import entry, road
from cgkit.measuring.profile_step import trace_steps
from cgkit.tracing.loaded import LoadedTrace
from tests.compiling.warm import models

X = torch.linspace(-1, 1, 40).view(5, 8)
CUT = "warm_toys::cut"


@pytest.fixture(autouse=True)
def quick(compile_cache, monkeypatch):
    models.register()
    for module in (road, compiled_graph):
        monkeypatch.setattr(module, "make_adaptor", lambda config, devices: models.PickledAdaptor())


@pytest.fixture
def no_trace(monkeypatch):
    """From when it is called, whoever asks a loaded model for its graph fails."""

    def again(self):
        raise AssertionError("the model is traced again")

    return lambda: monkeypatch.setattr(LoadedTrace, "again", property(again))


def start(model, mode="PIECEWISE", ops=(CUT,)):
    config = CompilationConfig(splitting_ops=list(ops), cudagraph_mode=mode, compiler="eager")
    return compile_model(model, (X,), config=config)


def served(captured, model):
    """Replays of every size up to the largest are what the model computes of as many rows as were recorded."""
    with torch.no_grad():
        for rows, padded in ((5, 8), (1, 2), (3, 8), (8, 8), (2, 2)):
            x = torch.linspace(-2, 2, rows * 8).view(rows, 8)
            filled = torch.cat([x, torch.zeros(padded - rows, 8)])
            assert torch.equal(captured(x), model(filled)[:rows])


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
def test_nothing_is_traced(mode, no_trace):
    cold = cgkit.capture(start(models.Base(), mode), [2, 8])
    no_trace()
    model = models.Base()
    with compilation_counter.expect(num_graphs_seen=0, num_traces_loaded=1):
        compiled = start(model, mode)
    assert isinstance(compiled.split.traced, LoadedTrace)
    with compilation_counter.expect(num_module_path_steps=0, num_replay_plans_refused=0):
        captured = cgkit.capture(compiled, [2, 8])
        served(captured, model)
    assert captured.num_graphs == cold.num_graphs > 0
    ours, theirs = captured.plans.to_frame(), cold.plans.to_frame()
    assert len(ours) == (0 if mode == "FULL" else 2)
    for name in ("kind", "laid_out", "calls", "replays", "between") if len(ours) else ():
        assert list(ours[name]) == list(theirs[name])
    assert not compiled.split.traced.is_remade


def test_a_profiler_marks_its_pieces(no_trace):
    start(models.Base())
    no_trace()
    captured = cgkit.capture(start(models.Base()), [8])
    trace = trace_steps(lambda: captured(X), steps=1, warmup=0)
    names = {str(each.get("name", "")) for each in trace["traceEvents"]}
    assert {"cgkit:replay:submod_0", "cgkit:splitting:submod_1", "cgkit:replay:submod_2"} <= names


def test_a_refusal_is_the_same_as_with_a_graph(no_trace):
    ops = [CUT, "aten::softmax"]
    cold = cgkit.capture(start(models.SoftMax(), ops=ops), [4]).plans.refused
    no_trace()
    loaded = start(models.SoftMax(), ops=ops)
    assert isinstance(loaded.split.traced, LoadedTrace)
    assert cgkit.capture(loaded, [4]).plans.refused == cold
    (reason,) = cold
    assert "submod_1 calls Tensor.softmax between recorded pieces" in reason and "register_op" in reason


def test_a_piece_whose_code_cannot_be_stored_is_traced_again_before_the_recording(monkeypatch):
    monkeypatch.setattr(entry, "_code", lambda piece: None)
    start(models.Base())
    model = models.Base()
    compiled = start(model)
    assert isinstance(compiled.split.traced, LoadedTrace) and not compiled.split.traced.is_remade
    captured = cgkit.capture(compiled, [2, 8])
    assert compiled.split.traced.is_remade and not captured.plans.refused
    served(captured, model)
