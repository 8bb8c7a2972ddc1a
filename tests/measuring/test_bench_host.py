"""Where the host's time goes: the parts add up, nothing stays swapped, and a dry run says that it is one."""

from __future__ import annotations

import argparse
import json

import pandas as pd
import pytest
import torch

from cgkit.config import CUDAGraphMode
from cgkit.errors import CaptureError, ConfigError
from cgkit.forward_context import set_forward_context
from cgkit.measuring import bench_host
from cgkit.measuring.bench_host import HostTime, host_time, parts_of
from cgkit.measuring.decode_bench import DecodeBench, any_shape
from cgkit.measuring.hollow import empty_attention
from cgkit.measuring.host_paths import PARTS, PATHS, REST, full_chain, module_chain, traced_chain
from cgkit.measuring.manifest import manifest_path
from cgkit.splitting import registered_ops
from cgkit.splitting.register import direct_call

ATTENTION = "cgkit::unified_attention_with_output"


def test_parts_are_differences_and_the_rest_is_unexplained():
    parts = parts_of(
        ["", "attention launches", "graph replays", "forward context"], [100.0, 60.0, 20.0, 2.0, 0.3]
    )
    assert parts == {"attention launches": 40.0, "graph replays": 40.0, "forward context": 18.0, REST: 2.0}
    assert sum(parts.values()) == 100.0
    noisy = parts_of(["", "dispatcher"], [10.0, 11.0, 0.1])
    assert noisy["dispatcher"] == -1.0 and sum(noisy.values()) == 10.0  # shown as it came out


@pytest.fixture(scope="module")
def found() -> HostTime:
    return host_time("tiny-llama", [1, 2], device="cpu", layers=2, context=16, rounds=2, compiler="eager")


def test_the_parts_add_up_to_the_whole(found):
    frame = found.to_frame()
    for _, rows in frame.groupby(["path", "batch"]):
        assert rows["step_us"].sum() == pytest.approx(rows["whole_us"].iloc[0])
        assert rows["share"].sum() == pytest.approx(1)
        assert list(rows["part"])[-1] == REST and list(rows["part"]) == [
            p for p in PARTS if p in set(rows["part"])
        ]
        assert (rows["piece_us"] * rows["pieces"]).sum() == pytest.approx(rows["whole_us"].iloc[0])
        assert (rows["each_us"] * rows["count"]).to_list() == pytest.approx(rows["step_us"].to_list())
    assert frame["emulated"].all() and (frame["device"] == "cpu (emulated)").all()


def test_each_path_has_its_own_parts(found):
    frame = found.to_frame()
    parts = {path: set(rows["part"]) for path, rows in frame.groupby("path")}
    assert set(parts) | set(found.missing) == set(PATHS)
    assert {"attention launches", "operator dispatch", "weights fetch", "wrapper"} <= parts["as traced"]
    assert "operator dispatch" not in parts["module"] and {"stitching code", "entry"} <= parts["module"]
    assert "attention launches" not in parts["full"] and "graph replays" in parts["full"]
    counts = {(r.path, r.part): r.count for r in frame.itertuples(index=False, name="Row")}
    assert counts["module", "graph replays"] == 3 and counts["module", "attention launches"] == 2
    assert counts["full", "graph replays"] == 1
    # what is large on a CPU is large: the emulated replays and the attention run in the step
    mine = frame[(frame["path"] == "module") & (frame["batch"] == 1)].set_index("part")["share"]
    assert mine["graph replays"] + mine["attention launches"] > 0.3


def test_table_and_summary(found):
    table, summary = found.table(), found.summary().set_index(["path", "batch"])
    heads = table[table["part"] == "the whole step"]
    assert len(heads) == len(summary) and (heads["share"] == 1).all()
    rows = found.to_frame()
    rows = rows[(rows["path"] == "full") & (rows["batch"] == 1)].set_index("part")["step_us"]
    kept = [
        p for p in rows.index if not p.startswith("input") and p not in ("dispatcher", "attention launches")
    ]
    assert summary.loc[("full", 1), "empty_attention_us"] == pytest.approx(rows[kept].sum())
    assert summary.loc[("full", 1), "empty_replays_us"] == pytest.approx(
        rows[kept].drop("graph replays").sum()
    )
    assert "emulated" in repr(found) and "us a piece" in repr(found)


def test_it_shows_itself(found):
    bundle = found._repr_mimebundle_()
    assert "could not be drawn" not in bundle["text/plain"]
    assert "<svg" in bundle["text/html"] and "emulated graphs" in bundle["text/html"]


def bench(device="cpu") -> DecodeBench:
    made = DecodeBench(any_shape("tiny-llama", 2), [2], device=device, context=16, compiler="eager")
    made.executor.compile(made.runner.inputs)
    return made


@torch.no_grad()
def test_nothing_stays_swapped():
    made = bench()
    inputs = made.runner.inputs
    pieces = made.executor.record(inputs, mode=CUDAGraphMode.PIECEWISE)
    whole = made.executor.record(inputs, mode=CUDAGraphMode.FULL_DECODE_ONLY)
    direct = direct_call(registered_ops()[ATTENTION].overload)
    assert direct is not None

    def results():
        metadata, (ids, positions) = made.prepared(2), made.front(2)
        found = []
        for captured in (pieces, whole):
            mode, key, _ = captured.dispatcher.route(2, True)
            with set_forward_context(metadata, cudagraph_runtime_mode=mode, batch_descriptor=key):
                found.append(captured.run(ids, positions).clone())
        return found

    before, function = results(), direct.call
    for chain in (module_chain(made, pieces, 2), traced_chain(made, pieces, 2), full_chain(made, whole, 2)):
        for link in chain.links:
            with link.swapped():
                link.step()
    assert direct.call is function
    assert all(torch.equal(a, b) for a, b in zip(before, results()))
    assert torch.equal(before[0], before[1])


@torch.no_grad()
def test_an_empty_attention_calls_none_and_leaves_the_operator_registered():
    made = bench()
    pieces = made.executor.record(made.runner.inputs, mode=CUDAGraphMode.PIECEWISE)
    called = []
    direct = direct_call(registered_ops()[ATTENTION].overload)
    function, direct.call = direct.call, lambda *args, **kwargs: called.append(1)
    known = registered_ops()[ATTENTION]
    try:
        chain = module_chain(made, pieces, 2)
        called.clear()
        if not getattr(getattr(pieces, "plans", None), "ready", None):
            chain.links[0].step()
            assert len(called) == 2
            called.clear()
        with empty_attention(pieces):
            chain.links[0].step()
        assert called == [] and registered_ops()[ATTENTION] is known
    finally:
        direct.call = function


@pytest.mark.slow
def test_the_command_writes_a_table_a_manifest_and_a_picture(tmp_path):
    parser = argparse.ArgumentParser()
    bench_host.add_arguments(parser)
    options = "--shape tiny-opt --layers 1 --device cpu --compiler eager --context 16 --rounds 1 --paths module full"
    files = ["--csv", str(tmp_path / "host.csv"), "--svg", str(tmp_path / "host.svg")]
    facts = bench_host.run(parser.parse_args([*options.split(), *files]))
    frame = pd.read_csv(tmp_path / "host.csv")
    assert set(frame["path"]) == {"module", "full"} and len(frame) == len(facts["rows"])
    assert facts["emulated"] is True and "emulated graphs" in (tmp_path / "host.svg").read_text()
    manifest = json.loads(manifest_path(tmp_path / "host.csv").read_text())
    assert (
        manifest["command"].startswith("cgkit bench host --shape tiny-opt") and manifest["emulated"] is True
    )
    json.dumps({key: value for key, value in facts.items() if key != "frame"})


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ConfigError, match="module"):
        host_time("tiny-llama", paths=["modul"], device="cpu")
    with pytest.raises(ConfigError, match="positive"):
        host_time("tiny-llama", [0], device="cpu")
    with pytest.raises(ConfigError, match="tiny-llama"):
        host_time("tiny-lama", device="cpu")
    if not torch.cuda.is_available():
        parser = argparse.ArgumentParser()
        bench_host.add_arguments(parser)
        with pytest.raises(CaptureError, match="--device cpu"):
            bench_host.run(parser.parse_args([]))


@pytest.mark.gpu
def test_on_a_gpu_the_same_parts_take_time():
    """How much each takes is a benchmark: beside other work on the machine the paths change places."""
    found = host_time("tiny-llama", [1], layers=8, context=32, rounds=10)
    assert not found.about["emulated"]
    frame = found.to_frame().set_index(["path", "part"])
    parts = {path: set(frame.loc[path].index) for path in ("as traced", "module", "full")}
    assert {"operator dispatch", "weights fetch"} <= parts["as traced"]
    assert "operator dispatch" not in parts["module"] and "attention launches" in parts["module"]
    assert "attention launches" not in parts["full"]
    assert frame.loc[("full", "graph replays"), "count"] == 1
    assert frame.loc[("module", "graph replays"), "count"] == 9
    assert (found.summary()["whole_us"] > 0).all()
