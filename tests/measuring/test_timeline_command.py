import json
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from cgkit import cli, recordings
from cgkit.errors import CgkitError, TimelineError
from cgkit.measuring import timeline_command
from tests.measuring.foreign import trace_path
from tests.measuring.synthetic import Trace, eager_step, graph_step


@pytest.fixture
def trace(tmp_path):
    trace = Trace(header={"deviceProperties": [{"id": 0, "name": "<Some> GPU"}]})
    end = eager_step(trace, 0, 6, number=1)["end"]
    graph_step(trace, end, nodes=5, number=2)
    return trace.save(tmp_path / "trace.json.gz")


def facts_of(capfd, *arguments) -> dict:
    assert cli.main(["timeline", *map(str, arguments), "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def test_json_has_the_promised_keys(trace, tmp_path, capfd):
    facts = facts_of(capfd, trace, "--out", tmp_path / "page.html")
    promised = {"events", "kernels", "kernels_tied", "launches", "graph_launches"}
    promised |= {"wall_us", "gpu_busy_us", "parts", "complete"}
    assert promised <= set(facts)
    assert (facts["kernels"], facts["kernels_tied"], facts["launches"], facts["graph_launches"]) == (
        11,
        11,
        6,
        1,
    )
    assert facts["kernels_in_graphs"] == 5
    assert sum(facts["parts"].values()) == pytest.approx(facts["wall_us"])
    assert sum(facts["gpu_parts"].values()) == pytest.approx(facts["wall_us"])
    assert facts["gpu_busy_us"] == 6 * 3 + 5 * 10
    assert facts["complete"] is True and facts["number_of_steps"] == 2


def test_a_step_by_number(trace, tmp_path, capfd):
    facts = facts_of(capfd, trace, "--step", 2, "--out", tmp_path / "page.html")
    assert facts["step"] == "ProfilerStep#2" and facts["gpu_busy_us"] == 50
    assert facts["kernels"] == 11 and facts["step_kernels"] == 5
    assert cli.main(["timeline", str(trace), "--step", "9", "--out", str(tmp_path / "other.html")]) == 1
    assert "step 9 is not in the trace" in capfd.readouterr().err
    assert not (tmp_path / "other.html").exists()


def test_the_terminal_has_the_bill_and_how_complete_it_is(trace, tmp_path, capfd):
    assert cli.main(["timeline", str(trace), "--out", str(tmp_path / "page.html")]) == 0
    out = capfd.readouterr().out
    for part in (
        "waiting for the GPU",
        "11 of 11",
        "5 of 11 kernels in one graph launch",
        "ProfilerStep",
        "page.html",
    ):
        assert part in out


def test_what_is_said_of_the_trace_and_of_its_step_is_said_once(tmp_path, capfd):
    found = recordings.folder() / "h200-trace-llama-3.2-1b-b1-FULL.json.gz"
    assert cli.main(["timeline", str(found), "--out", str(tmp_path / "page.html")]) == 0
    assert capfd.readouterr().out.count("the profiler lists every kernel of a graph") == 1


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def test_the_page_is_whole_self_contained_and_escaped(trace, tmp_path):
    page = tmp_path / "new folder" / "page.html"
    timeline_command.run([trace], out=page)
    text = page.read_text()
    parser = _Tags()
    parser.feed(text)
    assert text.rstrip().endswith("</html>")
    assert "<Some>" not in text and "&lt;Some&gt;" in text
    for tag, attributes in parser.tags:
        assert not str(attributes.get("src", "")).startswith(("http", "//")), tag
    pictures = [attributes for tag, attributes in parser.tags if tag == "svg" and "aria-label" in attributes]
    assert any("Stacked bars" in attributes["aria-label"] for attributes in pictures)
    assert [path.name for path in page.parent.iterdir()] == ["page.html"]


def test_on_an_error_an_older_page_stays_as_it_is(trace, tmp_path, monkeypatch):
    page = tmp_path / "page.html"
    page.write_text("older")
    broken = tmp_path / "broken.json"
    broken.write_bytes(b"\x89PNG")
    with pytest.raises(TimelineError):
        timeline_command.run([broken], out=page)
    monkeypatch.setattr(timeline_command, "_html", lambda result: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        timeline_command.run([trace], out=page)
    assert page.read_text() == "older"
    assert {path.name for path in tmp_path.iterdir()} == {"page.html", "broken.json", "trace.json.gz"}


@pytest.mark.parametrize(
    "content", [b"", b"\x89PNG\r\n", b"a,b\n1,2\n", b'{"traceEvents": []}', b"\x1f\x8b\x08"]
)
def test_bad_input_is_one_clear_line_and_status_1(tmp_path, content):
    (tmp_path / "bad.json").write_bytes(content)
    command = [
        sys.executable,
        "-m",
        "cgkit",
        "timeline",
        str(tmp_path / "bad.json"),
        "--out",
        str(tmp_path / "p.html"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("cgkit: ") and done.stderr.count("\n") == 1 and "bad.json" in done.stderr
    assert not (tmp_path / "p.html").exists()


def test_a_page_that_cannot_be_written(trace, tmp_path):
    with pytest.raises(CgkitError, match="cannot be written"):
        timeline_command.run([trace], out=tmp_path)
    with pytest.raises(CgkitError, match="cannot be written"):
        timeline_command.run([trace], out=trace / "page.html")


def test_two_ranks_are_two_columns(tmp_path, capfd):
    paths = []
    for rank, kernels in enumerate((3, 7)):
        trace = Trace(header={"distributedInfo": {"rank": rank}})
        eager_step(trace, 0, kernels, number=None)
        paths.append(trace.save(tmp_path / f"{rank}.json"))
    facts = facts_of(capfd, *paths, "--out", tmp_path / "page.html")
    assert [one["step_kernels"] for one in facts["processes"]] == [7, 3]
    assert [one["process"] for one in facts["processes"]] == [1, 0]
    assert facts["kernels"] == 10 and facts["wall_us"] == facts["processes"][0]["wall_us"]


def test_a_cut_file_is_said_to_be_incomplete(trace, tmp_path, capfd):
    cut = tmp_path / "cut.gz"
    cut.write_bytes(trace.read_bytes()[:-60])
    facts = facts_of(capfd, cut, "--out", tmp_path / "page.html")
    assert facts["complete"] is False and facts["truncated"] is True
    assert "ends in the middle" in (tmp_path / "page.html").read_text()


def test_a_foreign_trace(tmp_path, capfd):
    facts = facts_of(capfd, trace_path("vllm-decode-full-mi300.json.gz"), "--out", tmp_path / "page.html")
    assert (facts["kernels"], facts["kernels_tied"], facts["kernels_in_graphs"]) == (425, 425, 421)
    assert facts["graph_launches"] == 1


def test_the_page_is_never_written_over_a_trace_or_in_place_of_a_folder(trace, tmp_path):
    before = trace.read_bytes()
    with pytest.raises(CgkitError, match="is one of the traces"):
        timeline_command.run([trace], out=trace)
    assert trace.read_bytes() == before
    with pytest.raises(CgkitError, match="it is a folder"):
        timeline_command.run([trace], out=f"{tmp_path}/pages/")
    assert not (tmp_path / "pages").is_file()


@pytest.mark.parametrize("long", ["trace", "out"])
def test_a_name_that_no_file_can_have(tmp_path, long):
    trace = tmp_path / ("n" * 300 if long == "trace" else "trace.json")
    with pytest.raises(CgkitError, match="nnn"):
        timeline_command.run([trace], out=tmp_path / ("n" * 300 if long == "out" else "page.html"))
