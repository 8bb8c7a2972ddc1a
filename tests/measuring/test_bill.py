"""Bills that are known by construction: every number is worked out by hand or by brute force."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgkit.errors import TimelineError
from cgkit.measuring.bill import CPU_PARTS, Bill, plot, whole
from cgkit.measuring.chrome_trace import parse
from cgkit.measuring.timeline import Timeline
from cgkit.plotting.style import title_of
from tests.measuring.synthetic import AMD, NVIDIA, Trace, eager_step, graph_step


def some(parts: dict[str, float]) -> dict[str, float]:
    return {name: pytest.approx(us) for name, us in parts.items() if us > 1e-9}


def adds_up(one: Bill) -> None:
    for parts in (one.parts, one.gpu):
        assert sum(parts.values()) == pytest.approx(one.wall_us, rel=1e-9, abs=1e-6)
        assert min(parts.values()) >= 0


@pytest.mark.parametrize("names", [NVIDIA, AMD], ids=["nvidia", "amd"])
@pytest.mark.parametrize("start", [0, 1_751_410_836_123_456], ids=["from zero", "since 1970"])
def test_an_eager_step(names, start):
    trace = Trace(names=names)
    known = eager_step(trace, start, kernels=10, run=3)
    one = trace.timeline().bill()
    adds_up(one)
    assert one.wall_us == known["wall"] == 206
    assert some(one.parts) == known["parts"]
    assert one.gpu["busy"] == known["busy"] == 30
    # between the kernels the CPU is 3 us in an operator's end, 6 in Python, 6 in the next operator, 4 in its launch
    # and 2 us in the operator again; the first kernel comes after 18 us, the last one is waited for
    assert some(one.gpu) == {
        "busy": 30,
        "idle_launching": 40,
        "idle_python": 12 + 2 + 9 * 13,
        "idle_sync": 5,
    }
    assert (one.kernels, one.kernels_tied, one.launches, one.graph_launches) == (10, 10, 10, 0)
    assert one.median_launch_us == 4
    assert one.article_formula_us == 10 * 4
    assert one.queue_depth == {"median": 1, "max": 1, "median_ahead_us": 2, "max_ahead_us": 2}


def test_a_replayed_step_is_one_launch_and_many_kernels():
    trace = Trace()
    known = graph_step(trace, 50, graphs=1, nodes=8, run=10)
    one = trace.timeline().bill()
    adds_up(one)
    assert some(one.parts) == known["parts"] == {"python": 3, "graph_launches": 7, "waiting": 87}
    assert some(one.gpu) == {"busy": 80, "idle_inside_graph": 7, "idle_python": 3, "idle_launching": 7}
    assert (one.kernels, one.kernels_in_graphs, one.launches, one.graph_launches) == (8, 8, 0, 1)
    assert one.median_graph_launch_us == 7
    assert one.article_formula_us == 80
    assert one.queue_depth["max"] == 7  # the first starts as its launch returns


def test_pieces_between_replays():
    trace = Trace()
    known = graph_step(trace, 0, graphs=3, nodes=4, run=10)
    one = trace.timeline().bill()
    adds_up(one)
    assert some(one.parts) == known["parts"]
    assert {name: one.gpu[name] for name in known["gpu"]} == known["gpu"]
    assert one.gpu["idle_sync"] == 2 * 2  # between two graphs: the GPU's gap while the CPU already waits


def test_streams_that_overlap_are_busy_once():
    trace = Trace()
    a, b = trace.call("launch", 0, 2), trace.call("launch", 2, 2)
    trace.gpu(10, 20, a, stream=7)
    trace.gpu(20, 20, b, stream=8)
    trace.gpu(25, 2, b, stream=9)
    trace.step(3, 0, 4)
    one = trace.timeline().bill()
    adds_up(one)
    assert one.gpu["busy"] == 30
    assert one.wall_us == 40  # to the end of the GPU's work
    assert one.parts["waiting"] == 36


def test_a_step_that_is_not_waited_for_ends_with_its_own_work():
    """Two steps in a queue: the second one's kernels wait for the first one's; each step's wall time is its own."""
    trace = Trace()
    for i, gpu in ((1, 10), (2, 110)):
        at = 20 * i
        trace.step(i, at, 10)
        trace.gpu(at + gpu - 20 * i + 20, 100, trace.call("launch", at, 10))
    first, second = (trace.timeline().bill(step=i) for i in (1, 2))
    adds_up(first), adds_up(second)
    assert (first.wall_us, second.wall_us) == (130 - 20, 230 - 40)
    assert first.kernels == second.kernels == 1
    assert second.gpu["busy"] == 190  # also with what the first step had queued


def test_inner_events_win_and_a_sync_wins_over_everything():
    trace = Trace()
    trace.step(1, 0, 100)
    trace.add("cpu_op", "TorchDynamo Cache Lookup", 0, 10)
    trace.op("aten::item", 20, 60)
    trace.call("copy", 30, 10)
    trace.call("sync", 40, 30)
    trace.call("other", 70, 5)
    one = trace.timeline().bill()
    adds_up(one)
    assert some(one.parts) == {
        "guards": 10,
        "python": 30,
        "dispatch": 15,
        "copies": 10,
        "waiting": 30,
        "runtime_other": 5,
    }


def test_without_marks_what_no_event_covers_is_unexplained():
    trace = Trace()
    trace.op("aten::add", 0, 10)
    trace.op("aten::add", 90, 10)
    one = trace.timeline().bill()
    assert one.step == "whole trace"
    assert some(one.parts) == {"dispatch": 20, "unexplained": 80}
    assert some(one.gpu) == {"idle_python": 20, "idle_elsewhere": 80}


def test_the_median_step_is_billed_and_named():
    trace = Trace()
    at = 0
    for number, kernels in enumerate([4, 20, 9, 5, 30]):
        at = eager_step(trace, at, kernels, number=number)["end"] + 10
    one = trace.timeline().bill()
    assert one.step == "ProfilerStep#2" and one.kernels == 9
    assert any("median of 5 steps" in note for note in one.notes)
    assert trace.timeline().bill(step=4).kernels == 30
    assert whole(trace.timeline()).kernels == 68
    with pytest.raises(TimelineError, match=r"step 9 .* 0, 1, 2, 3, 4"):
        trace.timeline().bill(step=9)
    with pytest.raises(TimelineError, match="process 7"):
        trace.timeline().bill(process=7)


def test_launches_on_another_thread_are_billed_there_and_said():
    trace = Trace()
    trace.step(1, 0, 100)
    trace.call("launch", 10, 5)
    for i in range(3):
        trace.call("launch", 20 + 10 * i, 5, tid=200)
    one = trace.timeline().bill()
    adds_up(one)
    assert one.parts["kernel_launches"] == 15
    assert any("1 of 4 launches" in note for note in one.notes)
    assert any("which is billed" in note for note in one.notes) and one.parts["unexplained"] == 85


def test_the_articles_three_costs_and_three_weapons():
    """Level 0 pays Python, launches and kernels; Dynamo takes the first, graphs the second, fusion the third."""
    bills = []
    for mode, build in {
        "eager": lambda t: eager_step(t, 0, kernels=40, run=9),
        "FULL": lambda t: graph_step(t, 0, nodes=40, run=9),
        "FULL, fused": lambda t: graph_step(t, 0, nodes=15, run=12),
    }.items():
        trace = Trace(header={"cgkit": {"mode": mode}})
        build(trace)
        bills.append(trace.timeline().bill())
    table = Bill.compare(bills).set_index(["side", "part"])
    assert list(table.columns) == ["eager", "FULL", "FULL, fused"]
    cpu = table.loc["cpu"].drop("waiting").sum()
    assert cpu["FULL"] < cpu["eager"] / 10
    busy = table.loc["gpu", "busy"]
    assert busy["FULL, fused"] < busy["FULL"] == busy["eager"]
    assert list(table.loc["facts", "kernels"]) == [40, 40, 15]
    for side in ("cpu", "gpu"):
        assert table.loc[side].sum().tolist() == pytest.approx(table.loc["facts", "wall_us"].tolist())


def test_the_frame_is_tidy_and_the_table_readable():
    trace = Trace(header={"cgkit": {"mode": "eager", "model": "toy", "batch": "1", "emulated": False}})
    eager_step(trace, 0)
    one = trace.timeline().bill()
    frame = one.to_frame()
    assert list(frame.columns) == ["side", "part", "us", "share", "mode"]
    assert set(frame[frame["side"] == "cpu"]["part"]) == {*CPU_PARTS, "unexplained"}
    assert frame.groupby("side")["share"].sum().tolist() == pytest.approx([1, 1])
    assert "10 of 10" in repr(one) and "eager" in repr(one)
    assert "toy" in title_of(one.plot())


def test_bills_side_by_side_in_one_picture():
    bills = []
    for mode in ("eager", "eager"):
        trace = Trace(header={"cgkit": {"mode": mode}})
        eager_step(trace, 0)
        bills.append(trace.timeline().bill())
    ax = plot(bills)
    labels = [text.get_text() for text in ax.texts]
    assert any("eager" in label for label in labels)
    drawn = sum(bar.get_width() for bar in ax.patches)
    assert drawn == pytest.approx(4 * bills[0].wall_us)  # two bars for each of two modes, in us


KINDS = {
    "op": ("cpu_op", "aten::x"),
    "sync": ("cuda_runtime", "cudaStreamSynchronize"),
    "launch": ("cuda_runtime", "cudaLaunchKernel"),
    "graph_launch": ("cuda_runtime", "cudaGraphLaunch"),
    "copy": ("cuda_runtime", "cudaMemcpyAsync"),
    "other": ("cuda_driver", "cuFuncGetAttribute"),
    "guard": ("cpu_op", "TorchDynamo Cache Lookup"),
    "annotation": ("user_annotation", "anything"),
}
ORDER = ["sync", "graph_launch", "launch", "copy", "other", "guard", "op", "annotation"]
PART = dict(
    zip(
        ORDER,
        [
            "waiting",
            "graph_launches",
            "kernel_launches",
            "copies",
            "runtime_other",
            "guards",
            "dispatch",
            "python",
        ],
    )
)
events = st.lists(
    st.tuples(st.sampled_from(sorted(KINDS)), st.integers(0, 60), st.integers(0, 25)), min_size=1, max_size=25
)
work = st.lists(
    st.tuples(st.integers(0, 80), st.integers(0, 25), st.integers(0, 3), st.integers(0, 24)), max_size=25
)


def random_trace(cpu, gpu) -> Trace:
    """Events without any order or nesting; GPU work belongs to the call with its number, if there is one."""
    trace = Trace()
    for i, (kind, start, dur) in enumerate(cpu):
        category, name = KINDS[kind]
        trace.add(category, name, start, dur, **({"correlation": i + 1} if "cuda" in category else {}))
    for start, dur, stream, launch in gpu:
        trace.gpu(start, dur, launch + 1, stream=stream)
    return trace


@given(events, work)
@settings(max_examples=80, deadline=None)
def test_law_every_microsecond_is_billed_once_and_to_the_right_part(cpu, gpu):
    """Against a brute force that asks of each whole microsecond what covers it."""
    one = whole(random_trace(cpu, gpu).timeline())
    adds_up(one)
    spans = [(s, s + d) for _, s, d in cpu] + [(s, s + d) for s, d, *_ in gpu]
    first, last = min(s for s, _ in spans), max(e for _, e in spans)
    cpu_end = max(s + d for _, s, d in cpu)
    expected = dict.fromkeys([*CPU_PARTS, "unexplained"], 0)
    busy = 0
    for at in range(first, last):
        here = {kind for kind, s, d in cpu if s <= at < s + d}
        kind = next((k for k in ORDER if k in here), None)
        part = "waiting" if at >= cpu_end else PART[kind] if kind else "unexplained"
        expected[part] += 1
        busy += any(s <= at < s + d for s, d, *_ in gpu)
    assert one.wall_us == last - first
    assert one.parts == pytest.approx(expected)
    assert one.gpu["busy"] == pytest.approx(busy)


@given(events, work, st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_law_the_order_of_events_in_the_file_means_nothing(cpu, gpu, random):
    trace = random_trace(cpu, gpu)
    before = whole(trace.timeline())
    random.shuffle(trace.events)
    after = whole(trace.timeline())
    assert after.parts == before.parts and after.gpu == before.gpu and after.facts() == before.facts()


@given(events, work, events, work)
@settings(max_examples=30, deadline=None)
def test_law_two_files_are_billed_as_if_each_were_alone(cpu_a, gpu_a, cpu_b, gpu_b):
    """Ranks with equal pids, threads, streams, devices and correlation ids, a file each."""
    texts = [random_trace(*one).text() for one in ((cpu_a, gpu_a), (cpu_b, gpu_b))]
    both = Timeline._from_raw([parse(text) for text in texts], None)
    for process, text in enumerate(texts):
        alone = whole(Timeline._from_raw([parse(text)], None))
        together = whole(both, process)
        assert together.parts == pytest.approx(alone.parts)
        assert together.gpu == pytest.approx(alone.gpu)
        assert together.facts() == pytest.approx(alone.facts())


@given(st.integers(0, 300), st.integers(1, 12), st.integers(0, 300), st.integers(1, 12), st.booleans())
@settings(max_examples=30, deadline=None)
def test_law_two_processes_in_one_file_are_kept_apart(start_a, kernels_a, start_b, kernels_b, graph):
    """Their ids are equal; each has a device of its own."""
    a, b = Trace(pid=100, device=0), Trace(pid=200, device=1)
    known = [eager_step(a, start_a, kernels_a)]
    known.append(graph_step(b, start_b, nodes=kernels_b) if graph else eager_step(b, start_b, kernels_b))
    timeline = Trace(events=a.events + b.events).timeline()
    for process, one in enumerate(known):
        billed = timeline.bill(process=process)
        assert some(billed.parts) == {name: us for name, us in one["parts"].items() if us}
        assert (billed.wall_us, billed.kernels) == (one["wall"], one["kernels"])
        lanes = timeline.events.loc[timeline.events["process"] == process, "lane"].unique()
        assert len(lanes) == 2 and all(str(100 * (process + 1)) in lane for lane in lanes)


def test_a_copy_that_blocks_is_a_wait():
    for name, part in (
        ("cudaMemcpy", "waiting"),
        ("hipMemcpyWithStream", "waiting"),
        ("cudaMemcpyAsync", "copies"),
    ):
        trace = Trace()
        trace.mark("cgkit step", 0, 100)
        trace.gpu(20, 38, trace.call(name, 10, 50), category="gpu_memcpy", name="Memcpy DtoH")
        one = trace.timeline().bill()
        adds_up(one)
        assert some(one.parts) == {"python": 50, part: 50}, name


def test_gpus_of_one_process_are_told_apart():
    trace = Trace()
    trace.mark("cgkit step", 0, 100)
    for device, start in ((0, 20), (1, 40)):
        trace.gpu(start, 30, trace.call("cudaLaunchKernel", 10 + device, 1), device=device)
    one = trace.timeline().bill()
    assert one.busy_by_gpu == {0: 30, 1: 30} and one.gpu["busy"] == 50
    assert "2 GPUs; busy: GPU 0 30 us, GPU 1 30 us" in one.notes


def test_bill_of_nothing_but_zeros():
    trace = Trace()
    trace.op("aten::x", 5, 0)
    one = whole(trace.timeline())
    assert one.wall_us == 0 and set(one.parts.values()) == {0.0}
    assert np.isfinite(one.to_frame()["share"]).all()


def test_where_no_gpu_was_at_work_none_is_called_idle():
    trace = Trace()
    trace.op("aten::add", 0, 10)
    one = trace.timeline().bill()
    assert not one.saw_gpu
    table = one.table()
    assert set(table[""]) == {"wall", "cpu", "launches"} | ({""} & set(table[""]))
    assert "idle" not in repr(one) and "queue" not in repr(one)
    eager_step(trace, 100, kernels=2)
    assert trace.timeline().bill().saw_gpu and "gpu" in set(trace.timeline().bill().table()[""])
