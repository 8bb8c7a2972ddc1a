import argparse
import os
import sys

import pytest

from cgkit.measuring import bench_traces, synthetic_trace
from cgkit.measuring.bill import whole
from cgkit.measuring.timeline import Timeline
from tests.measuring.foreign import trace_path

#: A Python that has HolisticTraceAnalysis; it needs other versions of our packages, hence an environment of its own.
HTA = os.environ.get("CGKIT_HTA_PYTHON", sys.executable)
needs_hta = pytest.mark.skipif(
    not bench_traces._has_hta(HTA), reason="no HolisticTraceAnalysis (CGKIT_HTA_PYTHON)"
)


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_traces.add_arguments(parser)
    return parser.parse_args(arguments)


def test_the_synthetic_trace_is_what_it_says(tmp_path):
    kernels = synthetic_trace.write(tmp_path / "t.json", 10_000)
    timeline = Timeline.from_trace(tmp_path / "t.json")
    assert 10_000 <= timeline.completeness["events_read"] < 14_000
    assert timeline.completeness["kernels"] == timeline.completeness["kernels_tied"] == kernels
    assert not timeline.completeness["warnings"]
    one = whole(timeline)
    assert one.gpu["busy"] == pytest.approx(sum(3 + n % 7 for n in range(1, kernels + 1)))
    assert one.parts["kernel_launches"] == pytest.approx(5.5 * kernels)


def test_a_small_run_has_its_rows_and_its_csv(tmp_path):
    without = options("--events", "3000", "--repeat", "1", "--csv", str(tmp_path / "t.csv"))
    facts = bench_traces.run(without)
    assert facts["rows"][0]["tool"] == "cgkit" and facts["rows"][0]["total_s"] > 0
    assert facts["peak_bytes"] > 2**20
    assert (tmp_path / "t.csv").read_text().startswith("tool,version,pandas,run,events")


def graph_free(tmp_path):
    """A synthetic trace of launches on two streams, no graphs."""
    from tests.measuring.synthetic import Trace

    trace = Trace()
    for step in range(3):
        trace.step(step, 2000.25 * step, 1500)
        for i in range(60):
            at = 2000.25 * step + 20.5 * i
            trace.op("aten::mul", at, 15.125)
            trace.gpu(at + 20 + i % 3, 4.75 + i % 11, trace.call("launch", at + 5, 6.5), stream=7 + i % 2)
        trace.call("sync", 2000.25 * step + 1400, 50)
    return trace.save(tmp_path / "two-streams.json")


@needs_hta
@pytest.mark.parametrize("which", ["qwen-eager-h100.json.gz", "synthetic"])
def test_without_graphs_hta_finds_the_same(tmp_path, which):
    """Within 2 %, HTA's rounding switched off and its restrictions applied; launches.py says why they are needed."""
    path = graph_free(tmp_path) if which == "synthetic" else trace_path(which)
    rows = bench_traces.compare(str(path), HTA).set_index("quantity")
    for quantity, row in rows.iterrows():
        assert row["cgkit_like_hta"] == pytest.approx(row["hta_unrounded"], rel=0.02, abs=1.0), quantity
    assert rows.loc["GPU works with a launch", "cgkit_like_hta"] > 100


@needs_hta
def test_with_a_graph_hta_misses_its_kernels():
    rows = bench_traces.compare(str(trace_path("vllm-decode-full-mi300.json.gz")), HTA).set_index("quantity")
    assert rows.loc["GPU works with a launch", "cgkit"] == 434
    assert rows.loc["GPU works with a launch", "hta"] == 0
