"""Reading traces: what each form of a trace becomes, and real traces against counts from their raw JSON."""

import gzip
import json

import numpy as np
import pytest

import cgkit
from cgkit.measuring.bill import whole
from cgkit.measuring.chrome_trace import parse
from cgkit.measuring.event_kinds import kind_of
from cgkit.measuring.timeline import Timeline
from tests.measuring.foreign import raw_events, trace_path
from tests.measuring.synthetic import AMD, NVIDIA, Trace, eager_step, graph_step

COLUMNS = [
    *("lane", "kind", "name", "start_us", "dur_us", "correlation", "stream", "device", "process", "thread"),
    *("launched_by", "graph_launch", "piece", "stage"),
]


def two_steps(**options) -> Trace:
    trace = Trace(**options)
    end = eager_step(trace, 100, kernels=5, number=1)["end"]
    graph_step(trace, end + 10, nodes=6, number=2)
    return trace


def same(a: Timeline, b: Timeline) -> bool:
    for name in COLUMNS:
        x, y = a.events[name], b.events[name]
        x, y = (x.astype(str), y.astype(str)) if x.dtype == "category" else (x, y)
        if not (np.allclose(x, y) if x.dtype == float else (x.to_numpy() == y.to_numpy()).all()):
            return False
    return True


def test_the_table_has_the_columns_that_the_docstring_names():
    timeline = two_steps().timeline()
    assert list(timeline.events.columns) == COLUMNS
    assert timeline.events.index.tolist() == list(range(len(timeline.events)))
    assert timeline.events["start_us"].is_monotonic_increasing and timeline.events["start_us"].iloc[0] == 0
    assert timeline.to_frame() is timeline.events
    assert cgkit.Timeline is Timeline


@pytest.mark.parametrize("names", [NVIDIA, AMD], ids=["nvidia", "amd"])
def test_every_kernel_is_tied_to_the_row_that_launched_it(names):
    timeline = two_steps(names=names).timeline()
    events, kernels = timeline.events, timeline.kernels
    assert len(kernels) == 11 and (kernels["launched_by"] >= 0).all()
    callers = events.loc[kernels["launched_by"]]
    assert (callers["correlation"].to_numpy() == kernels["correlation"].to_numpy()).all()
    replayed = kernels[kernels["graph_launch"] >= 0]
    assert len(replayed) == 6 and replayed["graph_launch"].nunique() == 1
    assert events.loc[replayed["graph_launch"].iloc[0], "kind"] == "graph_launch"
    assert timeline.launches["kind"].value_counts().to_dict() == {"launch": 5, "graph_launch": 1} | {
        kind: 0 for kind in events["kind"].cat.categories if kind not in ("launch", "graph_launch")
    }
    assert "6 of 11 kernels in one graph launch" in repr(timeline)
    assert "11 of 11 kernels tied" in repr(timeline)


def test_a_file_is_the_same_plain_packed_listed_and_in_memory(tmp_path):
    trace = two_steps()
    memory = trace.timeline()
    assert same(Timeline.from_trace(trace.save(tmp_path / "t.json")), memory)
    assert same(Timeline.from_trace(str(trace.save(tmp_path / "t.json.gz"))), memory)
    (tmp_path / "list.json").write_text(json.dumps(trace.events))
    assert same(Timeline.from_trace(tmp_path / "list.json"), memory)
    packed = (tmp_path / "t.json.gz").read_bytes()
    (tmp_path / "twice.gz").write_bytes(gzip.compress(trace.text()[:500]) + gzip.compress(trace.text()[500:]))
    assert same(Timeline.from_trace(tmp_path / "twice.gz"), memory)
    (tmp_path / "padded.gz").write_bytes(packed + b"\0" * 100)
    assert same(Timeline.from_trace(tmp_path / "padded.gz"), memory)
    (tmp_path / "bom.json").write_bytes(b"\xef\xbb\xbf" + trace.text())
    assert same(Timeline.from_trace(tmp_path / "bom.json"), memory)


def test_begin_and_end_events_are_whole_events():
    trace = two_steps()
    events = []
    for event in trace.events:
        begin = {**event, "ph": "B"}
        dur = begin.pop("dur")
        events += [
            (begin["ts"], 1, -dur, begin),
            (begin["ts"] + dur, 0, dur, {**begin, "ph": "E", "ts": begin["ts"] + dur}),
        ]
    events.sort(key=lambda one: one[:3])
    assert same(Timeline.from_events([one[3] for one in events]), trace.timeline())


@pytest.mark.parametrize(
    "write", [str, float, lambda ts: f"{ts}.000"], ids=["text", "float", "text with fraction"]
)
def test_times_as_text_and_as_numbers(write):
    trace = two_steps()
    memory = trace.timeline()
    for event in trace.events:
        event["ts"] = write(event["ts"])
    assert same(trace.timeline(), memory)


def test_nanoseconds_survive_times_since_1970():
    """1.7e15 us: a float64 knows them to a quarter of a microsecond only."""
    one = '{"ph":"X","cat":"cpu_op","name":"a","pid":1,"tid":1,"ts":1751410836123456.NS,"dur":0.001}'
    events = ",".join(one.replace("NS", ns) for ns in ("007", "001", "002", "501"))
    timeline = Timeline._from_raw([parse(b'{"traceEvents": [' + events.encode() + b"]}")], None)
    assert timeline.events["start_us"].tolist() == pytest.approx([0, 0.001, 0.006, 0.5], abs=1e-9)


def test_files_are_put_on_one_clock_by_their_base_time(tmp_path):
    paths = []
    for rank, (base, start) in enumerate(
        [(1_700_000_000_000_000_000, 500), (1_700_000_000_000_200_000, 400)]
    ):
        trace = Trace(header={"baseTimeNanoseconds": base, "distributedInfo": {"rank": rank + 3}})
        eager_step(trace, start, kernels=4)
        paths.append(trace.save(tmp_path / f"{rank}.json"))
    timeline = Timeline.from_trace(paths)
    assert timeline.steps["start_us"].tolist() == [0, 100]
    assert timeline.steps["process"].tolist() == [0, 1]
    assert sorted(timeline.events["lane"].unique()) == [
        "rank 3 · GPU 0 stream 7",
        "rank 3 · thread 100 (main)",
        "rank 4 · GPU 0 stream 7",
        "rank 4 · thread 100 (main)",
    ]
    tied = timeline.kernels["launched_by"]
    assert (timeline.events.loc[tied, "process"].to_numpy() == timeline.kernels["process"].to_numpy()).all()


def test_an_id_used_twice_means_the_latest_launch_before_the_kernel():
    trace = Trace()
    for at in (0, 100, 200):
        trace.add("cuda_runtime", "cudaLaunchKernel", at, 5, correlation=9)
    for at in (10, 110, 210):
        trace.gpu(at, 5, 9)
    timeline = trace.timeline()
    assert timeline.events.loc[timeline.kernels["launched_by"], "start_us"].tolist() == [0, 100, 200]


def test_a_launch_goes_before_another_call_with_its_id():
    trace = Trace()
    trace.add("cuda_runtime", "cudaStreamSynchronize", 0, 5, correlation=9)
    trace.add("cuda_driver", "cuLaunchKernelEx", 10, 5, correlation=9)
    trace.gpu(20, 5, 9)
    timeline = trace.timeline()
    assert timeline.events.loc[timeline.kernels["launched_by"].iloc[0], "kind"] == "launch"


def test_pieces_and_stages_come_from_the_marks_around_the_launch():
    trace = Trace()
    trace.mark("cgkit step", 0, 100)
    trace.mark("cgkit:copy_inputs", 0, 10)
    trace.gpu(200, 5, trace.call("copy", 2, 3), category="gpu_memcpy", name="Memcpy DtoD")
    trace.mark("cgkit:replay", 10, 50)
    trace.mark("cgkit:replay:submod_0", 20, 20)
    graph = trace.call("graph", 25, 5)
    for i in range(3):
        trace.gpu(300 + 10 * i, 5, graph)
    trace.mark("cgkit:attention:submod_1", 62, 10)
    trace.op("cgkit::unified_attention", 63, 8)
    trace.gpu(400, 5, trace.call("launch", 65, 2))
    trace.gpu(500, 5, trace.call("launch", 80, 2))
    timeline = trace.timeline()
    gpu = timeline.events[timeline.events["device"] >= 0]
    assert list(zip(gpu["stage"], gpu["piece"])) == [
        ("copy_inputs", ""),
        *[("replay", "submod_0")] * 3,
        ("attention", "submod_1"),
        ("", ""),
    ]
    assert (timeline.steps["name"] == "cgkit step").all() and timeline.bill().kernels == 5
    (op,) = timeline.events[timeline.events["name"] == "cgkit::unified_attention"].itertuples()
    assert (op.kind, op.stage) == ("op", "attention")


def test_python_functions_come_only_when_asked_for():
    trace = two_steps()
    trace.add("python_function", "f", 100, 50)
    assert "python" not in set(trace.timeline().events["kind"])
    assert trace.timeline().completeness["skipped"] == {"python_function": 1}
    assert "python" in set(trace.timeline(python=True).events["kind"])


@pytest.mark.parametrize(
    ("category", "name", "kind"),
    [
        ("cuda_runtime", "cudaLaunchKernelExC_v11060", "launch"),
        ("cuda_driver", "cuLaunchKernelEx", "launch"),
        ("cuda_driver", "cuLaunchCooperativeKernel", "launch"),
        ("cuda_runtime", "hipModuleLaunchKernel", "launch"),
        ("cuda_runtime", "cudaLaunchHostFunc", "runtime"),
        ("cuda_runtime", "cudaGraphLaunch_v10000", "graph_launch"),
        ("cuda_driver", "cuGraphLaunch", "graph_launch"),
        ("Runtime", "cudaMemsetAsync", "copy_call"),
        ("cuda_driver", "cuMemcpyDtoHAsync_v2", "copy_call"),
        ("cuda_runtime", "hipStreamSynchronize", "sync"),
        ("cuda_runtime", "cudaStreamWaitEvent", "runtime"),
        ("cuda_runtime", "cudaEventQuery", "runtime"),
        ("cpu_op", "TorchDynamo Cache Lookup", "guard"),
        ("cpu_op", "Torch-Compiled Region: 0/0", "annotation"),
        ("cpu_op", "cgkit::unified_attention_with_output", "op"),
        ("user_annotation", "cgkit:guard:check", "guard"),
        ("user_annotation", "cgkit:replay:submod_0", "annotation"),
        ("gpu_user_annotation", "ProfilerStep#3", "gpu_annotation"),
        ("ac2g", "ac2g", "other"),
    ],
)
def test_kinds(category, name, kind):
    assert kind_of(category, name) == kind


def test_it_shows_itself_and_says_of_what(tmp_path):
    trace = two_steps(header={"deviceProperties": [{"id": 0, "name": "Some GPU"}], "cgkit": {"mode": "FULL"}})
    timeline = Timeline.from_trace(trace.save(tmp_path / "名前.json"), name="my run")
    assert timeline.about["device"] == "Some GPU" and timeline.about["mode"] == "FULL"
    assert "my run" in repr(timeline)
    bundle = timeline._repr_mimebundle_()
    assert bundle["text/plain"] == repr(timeline)
    assert timeline.bill().mode == "FULL"


# real traces of others, read where they lie


def foreign(name: str) -> tuple[Timeline, list[dict]]:
    return Timeline.from_trace(trace_path(name)), raw_events(name)


def brute_busy_ns(raw: list[dict]) -> int:
    """Independent of the code under test: whole nanoseconds, a counter that goes up and down."""
    changes: dict[int, int] = {}
    for event in raw:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            start = round(event["ts"] * 1000)
            changes[start] = changes.get(start, 0) + 1
            end = round((event["ts"] + event["dur"]) * 1000)
            changes[end] = changes.get(end, 0) - 1
    busy = running = last = 0
    for at in sorted(changes):
        busy += (at - last) if running else 0
        running, last = running + changes[at], at
    return busy


@pytest.mark.parametrize(
    ("name", "kernels", "tied", "in_graph"),
    [("qwen-eager-h100.json.gz", 1465, 1029, 0), ("vllm-decode-full-mi300.json.gz", 425, 425, 421)],
)
def test_foreign_traces_against_their_raw_json(name, kernels, tied, in_graph):
    timeline, raw = foreign(name)
    assert sum(event.get("cat") == "kernel" for event in raw) == len(timeline.kernels) == kernels
    ids = {
        event["args"]["correlation"]
        for event in raw
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "Launch" in event["name"]
    }
    assert sum(e.get("cat") == "kernel" and e["args"]["correlation"] in ids for e in raw) == tied
    assert timeline.completeness["kernels_tied"] == tied
    assert timeline.completeness["kernels_in_graphs"] == in_graph
    one = whole(timeline)
    assert one.gpu["busy"] == pytest.approx(brute_busy_ns(raw) / 1000, rel=1e-5)
    for parts in (one.parts, one.gpu):
        assert sum(parts.values()) == pytest.approx(one.wall_us, rel=1e-9)


def test_the_amd_replay_is_one_launch_with_421_kernels():
    timeline, _ = foreign("vllm-decode-full-mi300.json.gz")
    (launch,) = timeline.events[timeline.events["kind"] == "graph_launch"].index
    assert (timeline.kernels["graph_launch"] == launch).sum() == 421
    notes = timeline.bill().notes
    assert any("earlier work is probably missing" in note for note in notes)


def test_files_that_say_the_same_rank_are_kept_apart(tmp_path):
    paths = []
    for number in range(2):
        trace = Trace(header={"distributedInfo": {"rank": 3}})
        eager_step(trace, 0, kernels=2 + number)
        paths.append(trace.save(tmp_path / f"{number}.json"))
    events = Timeline.from_trace(paths).events
    per_lane = events.groupby("lane", observed=True)["process"].nunique()
    assert len(per_lane) == 4 and (per_lane == 1).all()
    assert Timeline.from_trace(paths[0]).events["lane"].iloc[0].startswith("rank 3 ·")


def test_threads_that_torch_does_not_know_are_not_called_main():
    events = [
        {"ph": "X", "cat": "python_function", "name": "wait", "pid": 0, "tid": 0, "ts": 0, "dur": 9},
        {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 5, "tid": 5, "ts": 1, "dur": 2},
    ]
    lanes = set(Timeline.from_events(events, python=True).events["lane"])
    assert lanes == {"rank 0 · thread 0", "rank 0 · thread 5 (main)"}
