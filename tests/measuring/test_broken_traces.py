"""Broken input: an error of ours in one clear sentence, or a part of the trace that says what is missing."""

import gzip
import json
import struct
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgkit.errors import CgkitError, TimelineError
from cgkit.measuring.bill import whole
from cgkit.measuring.chrome_trace import parse
from cgkit.measuring.timeline import Timeline
from tests.measuring.synthetic import Trace, eager_step, graph_step


def sample() -> Trace:
    trace = Trace(header={"deviceProperties": [{"id": 0, "name": "Some GPU"}], "baseTimeNanoseconds": 17})
    end = eager_step(trace, 100, kernels=4, number=1)["end"]
    graph_step(trace, end + 10, nodes=3, number=2)
    trace.op('名前 {"bracket": [1]} \\ ünï', end, 2)
    return trace


def read(path) -> Timeline:
    return Timeline.from_trace(path)


def of(text: bytes) -> Timeline:
    return Timeline._from_raw([parse(text, source="t.json")], None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes"),
        (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "no chrome trace"),
        (b"a,b,c\n1,2,3\n", "no chrome trace"),
        (b"%PDF-1.7", "no chrome trace"),
        (b"{}", "no chrome trace"),
        (b"null", "no chrome trace"),
        (b"7", "no chrome trace"),
        (b'"traceEvents"', "no chrome trace"),
        (b'{"traceEvents": 7}', "no chrome trace"),
        (b'{"traceEvents": []}', "no event with a duration"),
        (b"[]", "no event with a duration"),
        (b"[1, 2, null]", "no event with a duration"),
        (b'{"traceEvents": [', "before its first whole event"),
        (b'{"traceEvents": [{"ph": "X", "na', "before its first whole event"),
        (b'[{"ph": "i", "ts": 3, "name": "x"}]', "no event with a duration .*1 instant"),
        (gzip.compress(b"", mtime=0), "no chrome trace"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:12], "gzip|no chrome trace"),
        (b"\x1f\x8b" + b"\0" * 40, "gzip"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_sentence(tmp_path, content, message):
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(TimelineError, match=message) as caught:
        read(path)
    assert "trace.json" in str(caught.value)


def test_a_missing_file_and_a_directory(tmp_path):
    with pytest.raises(TimelineError, match="no such file"):
        read(tmp_path / "nothing.json")
    with pytest.raises(TimelineError, match="is a directory"):
        read(tmp_path)
    with pytest.raises(TimelineError, match="no trace file was named"):
        read([])


def test_a_trace_cut_at_every_place_gives_its_whole_events():
    trace = sample()
    text = trace.text()
    ends = []  # of each event in the text
    at = text.index(b'"traceEvents": [') + len(b'"traceEvents": [')
    for event in trace.events:
        at = text.index(json.dumps(event).encode(), at) + len(json.dumps(event))
        ends.append(at)
    for cut in [*range(ends[0] - 3, ends[0] + 3), *range(ends[5], len(text), 37), len(text) - 1]:
        whole_events = sum(end <= cut for end in ends)
        if not whole_events:
            with pytest.raises(TimelineError):
                of(text[:cut])
            continue
        timeline = of(text[:cut])
        assert len(timeline.events) == whole_events
        assert timeline.completeness["truncated"]
        assert any("cut off or damaged" in line for line in timeline.complete())
        assert timeline.about["device"] == "Some GPU"


def test_a_packed_trace_that_ends_in_the_middle(tmp_path):
    trace = Trace()
    for i in range(300):
        eager_step(trace, 1000 * i, 3, number=i)
    packed = gzip.compress(trace.text())
    (tmp_path / "t.json.gz").write_bytes(packed[: len(packed) // 2])
    timeline = read(tmp_path / "t.json.gz")
    assert 0 < len(timeline.events) < len(trace.events)
    assert timeline.completeness["truncated"] and "gzip stream ends in the middle" in repr(timeline)
    last = timeline.steps["step"].max()
    assert timeline.bill().step != f"ProfilerStep#{last}"


def test_a_hole_in_the_middle_costs_only_what_is_in_it():
    trace = sample()
    text = trace.text()
    middle = text.index(json.dumps(trace.events[6]).encode())
    timeline = of(text[: middle + 5] + b"\0\xff garbage" + text[middle + 20 :])
    assert len(timeline.events) == len(trace.events) - 1
    assert "1 places inside the file" in repr(timeline)


def test_no_gpu_events():
    trace = Trace()
    trace.step(1, 0, 100)
    trace.call("launch", 10, 5)
    timeline = trace.timeline()
    assert "no GPU events" in repr(timeline)
    one = timeline.bill()
    assert (one.kernels, one.gpu["busy"], one.wall_us) == (0, 0, 100)


def test_no_cpu_events():
    trace = Trace()
    trace.gpu(0, 10, 5)
    trace.gpu(20, 10, 6)
    timeline = trace.timeline()
    assert "no CPU events" in repr(timeline)
    one = timeline.bill()
    assert (one.kernels, one.kernels_tied, one.gpu["busy"], one.wall_us) == (2, 0, 20, 30)
    assert one.parts["unexplained"] == sum(one.parts.values()) == 30
    assert one.gpu["idle_elsewhere"] == 10 and set(timeline.gaps()["cause"]) == {"idle_elsewhere"}


def test_only_events_that_are_neither():
    trace = Trace()
    trace.add("Trace", "PyTorch Profiler (0)", 0, 100)
    with pytest.raises(TimelineError, match="nothing that could be billed"):
        trace.timeline().bill()


def test_clock_jumps_are_said():
    trace = Trace()
    end = eager_step(trace, 0, 3, number=1)["end"]
    eager_step(trace, end + 3_600_000_000, 3, number=2)
    assert "nothing happens for 3,600.0 s" in repr(trace.timeline())
    assert trace.timeline().bill().wall_us < 1000
    early = Trace()
    early.gpu(10, 5, early.call("launch", 50, 5))
    assert "clocks of CPU and GPU disagree" in repr(early.timeline())


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-5", '"x"', "1e400", "null", "[]", "{}"])
@pytest.mark.parametrize("key", ["ts", "dur", "pid", "tid", "name", "cat", "args"])
def test_one_odd_field_costs_one_event_at_most(key, value):
    trace = sample()
    trace.add("cpu_op", "odd", 120, 1)
    trace.events[-1][key] = "MARK"
    text = trace.text().replace(b'"MARK"', value.encode())
    timeline = of(text)
    assert len(timeline.events) >= len(trace.events) - 1
    assert whole(timeline).kernels == 7


def test_names_in_any_language_and_of_any_length():
    trace = Trace()
    for i, name in enumerate(["カーネル", "核", "ядро", "🚀" * 5000, "", "\u0000", "a\nb", "‮rtl"]):
        trace.op(name, 10 * i, 5)
    timeline = trace.timeline()
    assert set(timeline.events["name"]) >= {"カーネル", "核", "ядро", "🚀" * 5000, "", "a\nb"}
    half = b'[{"ph":"X","cat":"cpu_op","name":"\\ud800","pid":1,"tid":1,"ts":1,"dur":2}]'  # half a surrogate
    assert of(half).events["name"].tolist() == ["?"]


def test_numbers_that_do_not_fit():
    trace = sample()
    trace.add("kernel", "k", 500, 5, correlation=2**63 + 5, stream=2**40, device=-(2**70))
    trace.add("cpu_op", "x", 500, 5, tid=2**80)
    assert len(trace.timeline().events) == len(trace.events)


TEXT = sample().text()
PACKED = gzip.compress(TEXT)


def survives(data: bytes, path) -> None:
    """A result that can be billed and that says so if something is missing, or an error of ours; no warning."""
    path.write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            timeline = read(path)
            assert timeline.complete() and repr(timeline)
            one = whole(timeline)
            assert sum(one.parts.values()) == pytest.approx(one.wall_us, rel=1e-6, abs=1e-3)
            assert sum(one.gpu.values()) == pytest.approx(one.wall_us, rel=1e-6, abs=1e-3)
        except CgkitError as error:
            assert str(error)


@given(
    st.booleans(),
    st.lists(st.tuples(st.integers(0, len(TEXT)), st.binary(max_size=3), st.integers(0, 3)), max_size=4),
    st.none() | st.integers(0, len(TEXT)),
)
@settings(max_examples=150, deadline=None)
def test_fuzz_mutated_and_cut_files(tmp_path_factory, packed, changes, cut):
    data = PACKED if packed else TEXT
    for at, insert, remove in changes:
        at = at % (len(data) + 1)
        data = data[:at] + insert + data[at + remove :]
    survives(data if cut is None else data[: cut % (len(data) + 1)], tmp_path_factory.getbasetemp() / "fuzz")


@given(st.binary(max_size=300))
@settings(max_examples=60, deadline=None)
def test_fuzz_any_bytes(tmp_path_factory, data):
    survives(data, tmp_path_factory.getbasetemp() / "fuzz")
    survives(b'{"traceEvents": [' + data, tmp_path_factory.getbasetemp() / "fuzz")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
odd_events = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "ph": st.sampled_from(["X", "B", "E", "M", "i", "s", "f"]) | json_values,
            "cat": st.sampled_from(["kernel", "cuda_runtime", "cpu_op", "user_annotation"]) | json_values,
            "name": st.sampled_from(["cudaLaunchKernel", "ProfilerStep#1", "cgkit step", "cgkit:a:b"])
            | json_values,
            "ts": st.integers(0, 50) | json_values,
            "dur": st.integers(0, 50) | json_values,
            "pid": st.integers(0, 2) | json_values,
            "tid": st.integers(0, 2) | json_values,
            "args": st.fixed_dictionaries({"correlation": st.integers(0, 3) | json_values}) | json_values,
        },
    ),
    max_size=8,
)


@given(
    odd_events,
    st.dictionaries(
        st.sampled_from(["cgkit", "deviceProperties", "distributedInfo", "baseTimeNanoseconds"]), json_values
    ),
)
@settings(max_examples=200, deadline=None)
def test_fuzz_any_json_where_an_event_should_be(tmp_path_factory, events, header):
    data = json.dumps({**header, "traceEvents": events}).encode()
    survives(data, tmp_path_factory.getbasetemp() / "fuzz")


def test_the_fuzzer_would_notice_a_wrong_bill(tmp_path):
    """A check of the check: a bill that does not add up fails it."""
    with pytest.raises(AssertionError):
        one = whole(of(TEXT))
        one.parts["python"] += struct.calcsize("d")
        assert sum(one.parts.values()) == pytest.approx(one.wall_us, rel=1e-6, abs=1e-3)


def test_times_whose_sum_is_no_number_and_steps_without_end():
    trace = sample()
    whole_before = len(trace.timeline().events)
    trace.events.append(
        {"ph": "X", "cat": "cpu_op", "name": "far", "pid": 1, "tid": 1, "ts": 1e308, "dur": 1e308}
    )
    trace.events.append(
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#" + "9" * 30, "pid": 100, "tid": 100, "ts": 100,
         "dur": 1}
    )  # fmt: skip
    timeline = trace.timeline()
    assert len(timeline.events) == whole_before + 1
    assert timeline.completeness["skipped"]["time or duration is no number"] == 1
    assert set(timeline.steps["step"]) == {1, 2}


@pytest.mark.parametrize("time", ["Infinity", '"sNaN"', '"-inf"', "1e9999999", '"1e99999999999"'])
@pytest.mark.parametrize("phases", [("X",), ("B", "E")])
def test_a_time_that_is_no_time_costs_its_own_event_only(time, phases):
    trace = sample()
    for ph in phases:
        trace.add("cpu_op", "odd", 120, 1)
        trace.events[-1] |= {"ph": ph, "ts": "MARK"}
    timeline = of(trace.text().replace(b'"MARK"', time.encode()))
    assert list(timeline.events["name"]) == list(sample().timeline().events["name"])
    assert "1 events left out: time or duration is no number" in timeline.complete()


def test_a_packed_trace_of_a_few_bytes_says_that_it_is_cut(tmp_path):
    path = sample().save(tmp_path / "t.json.gz")
    packed = path.read_bytes()
    for length in (10, 12, 60):
        path.write_bytes(packed[:length])
        with pytest.raises(TimelineError, match="gzip stream ends"):
            read(path)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_what_a_shell_made_of_the_text(tmp_path, encoding):
    plain = sample().timeline()
    text = json.dumps({**sample().header, "traceEvents": sample().events}, ensure_ascii=False)
    (tmp_path / "t.json").write_bytes(text.encode(encoding))
    timeline = read(tmp_path / "t.json")
    assert list(timeline.events["name"]) == list(plain.events["name"])
    assert timeline.completeness["warnings"] == plain.completeness["warnings"]


def test_every_event_that_was_read_is_on_the_timeline_or_counted():
    trace = sample()
    trace.events += [
        {"ph": "M", "name": "process_name", "pid": 100, "args": {"name": "python"}},
        {"ph": "M", "name": "thread_name", "pid": 100, "tid": 100, "args": {"name": "main"}},
        {"ph": "M", "name": "process_labels", "pid": 100, "args": {"labels": "CPU"}},
        {"ph": "i", "name": "now", "pid": 100, "tid": 100, "ts": 5},
    ]
    found = trace.timeline().completeness
    assert found["events"] + sum(found["skipped"].values()) == found["events_read"] == len(trace.events)
    assert found["skipped"] == {"metadata": 3, "instant": 1}
