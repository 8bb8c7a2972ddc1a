"""The file for Perfetto, read back with our own reader and as plain JSON. Traces are synthetic, or somebody's."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from cgkit.measuring.event_kinds import KINDS
from cgkit.measuring.timeline import Timeline
from tests.measuring.foreign import trace_path
from tests.plotting import timelines

FOREIGN = ("qwen-eager-h100.json.gz", "vllm-decode-full-mi300.json.gz")


def synthetic(frame) -> Timeline:
    return Timeline(frame, {"model": "toy", "mode": "PIECEWISE", "device": "none", "source": "secret-name"})


def raw(path: Path) -> list[dict]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return json.loads(text)["traceEvents"]


def same(one: Timeline, other: Timeline) -> None:
    """Kernels, busy time and ties."""
    names = ("kernels", "kernels_tied", "kernels_in_graphs", "launches", "graph_launches")
    assert {n: one.completeness[n] for n in names} == {n: other.completeness[n] for n in names}
    mine, theirs = one.kernels, other.kernels
    assert Counter(mine["name"]) == Counter(theirs["name"])
    for part, us in one.bill().gpu.items():
        assert other.bill().gpu[part] == pytest.approx(us, abs=0.01 * max(len(mine), 1))
    assert _ties(one) == _ties(other)
    starts = [t.kernels["start_us"].to_numpy() - t.kernels["start_us"].min() for t in (one, other)]
    assert starts[0] == pytest.approx(starts[1], abs=0.01)


def _ties(timeline: Timeline) -> list[tuple[str, str]]:
    """(kernel, what launched it), by the kernel's start."""
    tied = timeline.kernels[timeline.kernels["launched_by"] >= 0]
    calls = timeline.events["name"].astype(str).to_numpy()[tied["launched_by"]]
    return list(zip(tied["name"].astype(str), calls))


@pytest.mark.parametrize("name", FOREIGN)
def test_a_trace_of_somebody_else_survives(name, tmp_path):
    before = Timeline.from_trace(trace_path(name))
    same(before, Timeline.from_trace(before.to_perfetto(tmp_path / "out.json.gz")))


@pytest.mark.parametrize("ending", ["json", "json.gz"])
@pytest.mark.parametrize("frame", [timelines.eager(12), timelines.pieces(3)], ids=["eager", "pieces"])
def test_our_own_survives(frame, ending, tmp_path):
    before = synthetic(frame)
    after = Timeline.from_trace(before.to_perfetto(tmp_path / f"out.{ending}"))
    same(before, after)
    assert after.about["model"] == "toy"
    both = [t.kernels[["piece", "stage"]].astype(str).to_numpy().tolist() for t in (before, after)]
    assert both[0] == both[1]


def test_an_arrow_from_the_launch_to_each_of_its_kernels(tmp_path):
    events = timelines.pieces(3, nodes=5)
    written = raw(synthetic(events).to_perfetto(tmp_path / "out.json"))
    begins = {e["id"]: e for e in written if e["ph"] == "s"}
    ends = {e["id"]: e for e in written if e["ph"] == "f"}
    assert len(begins) == len(ends) == (events["kind"] == "kernel").sum()
    slices = {
        (e["pid"], e["tid"], e["ts"]): e
        for e in written
        if e["ph"] == "X" and e["cat"] in ("cuda_runtime", "kernel")
    }
    fan_out = Counter()
    for number, begin in begins.items():
        end = ends[number]
        assert end["bp"] == "e"
        call = slices[begin["pid"], begin["tid"], begin["ts"]]
        kernel = slices[end["pid"], end["tid"], end["ts"]]
        assert call["args"]["correlation"] == kernel["args"]["correlation"]
        fan_out[call["args"]["correlation"]] += 1
    assert sorted(fan_out.values()) == [1, 1, 1, 5, 5, 5, 5]


def test_stages_and_pieces_are_slices_on_lanes_of_their_own(tmp_path):
    written = raw(synthetic(timelines.pieces(3)).to_perfetto(tmp_path / "out.json"))
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in written if e["name"] == "thread_name"}
    slices = [e for e in written if e.get("cat") == "cgkit_piece"]
    assert {lanes[e["pid"], e["tid"]] for e in slices} == {"pieces"}
    on_gpu = [e for e in slices if e["pid"] % 1000]
    assert [e["name"] for e in on_gpu] == [f"submod_{i}" for i in range(7)]
    assert [e["name"] for e in slices if not e["pid"] % 1000] == [f"submod_{i}" for i in range(7)]
    kernels = [e for e in written if e.get("cat") == "kernel" and e["args"]["piece"] == "submod_0"]
    assert on_gpu[0]["ts"] == kernels[0]["ts"]
    assert on_gpu[0]["ts"] + on_gpu[0]["dur"] == pytest.approx(kernels[-1]["ts"] + kernels[-1]["dur"])
    stages = [e["name"] for e in written if e.get("cat") == "cgkit_stage" and e["pid"] % 1000]
    assert stages == ["replay", "attention"] * 3 + ["replay"]


def test_slices_of_a_lane_nest_even_where_kernels_of_a_stream_overlap(tmp_path):
    build = timelines.Builder()
    launches = [build.cpu("launch", "cudaLaunchKernel", 10.0 * i, 4, correlation=i + 1) for i in range(6)]
    for i, launch in enumerate(launches):
        build.gpu("kernel", 20 + 3.0 * i, 5.0, launch)  # each begins before the one before has ended
    before = synthetic(build.frame())
    written = raw(before.to_perfetto(tmp_path / "out.json"))
    lanes: dict = {}
    for e in written:
        if e["ph"] == "X":
            lanes.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for spans in lanes.values():
        for a in spans:
            for b in spans:
                assert (
                    a[1] <= b[0]
                    or b[1] <= a[0]
                    or (a[0] <= b[0] and b[1] <= a[1])
                    or (b[0] <= a[0] and a[1] <= b[1])
                )
    same(before, Timeline.from_trace(tmp_path / "out.json"))


def test_processes_with_equal_correlation_ids_stay_apart(tmp_path):
    import pandas as pd

    one, other = timelines.eager(5), timelines.eager(5)
    other["process"], other["thread"] = 1, other["thread"].where(other["thread"] < 0, 2)
    other["launched_by"] = other["launched_by"].where(
        other["launched_by"] < 0, other["launched_by"] + len(one)
    )
    other["start_us"] += 0.25
    for frame, rank in ((one, 0), (other, 1)):
        frame["lane"] = f"rank {rank} · " + frame["lane"].astype(str)
    both = pd.concat([one, other], ignore_index=True)
    order = both.sort_values("start_us", kind="stable").index
    place = pd.Series(range(len(order)), index=order)
    both["launched_by"] = [place[i] if i >= 0 else -1 for i in both["launched_by"]]
    both = both.loc[order].reset_index(drop=True)
    both["kind"] = pd.Categorical(both["kind"].astype(str), KINDS)
    for column in ("lane", "name", "piece", "stage"):
        both[column] = both[column].astype("category")
    before = synthetic(both)
    after = Timeline.from_trace(before.to_perfetto(tmp_path / "out.json"))
    assert after.kernels["process"].value_counts().to_dict() == {0: 5, 1: 5}
    tied = after.kernels
    assert (after.events["process"].to_numpy()[tied["launched_by"]] == tied["process"]).all()


def test_where_the_trace_came_from_is_not_written(tmp_path):
    assert b"secret-name" not in synthetic(timelines.eager(2)).to_perfetto(tmp_path / "out.json").read_bytes()
