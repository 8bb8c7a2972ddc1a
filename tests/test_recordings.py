import gzip
import json
import re
from pathlib import Path

import pandas as pd
import pytest

import cgkit
from cgkit import recordings
from cgkit.errors import RecordingError

ROOT = Path(__file__).parent.parent / "data" / "recordings"


@pytest.fixture
def made(tmp_path):
    (tmp_path / "toy-frame.csv").write_text("a,b_us\n1,2.5\n")
    (tmp_path / "toy-facts.json").write_text('{"answer": 42}')
    (tmp_path / "toy-packed.json.gz").write_bytes(gzip.compress(b"[1, 2]"))
    (tmp_path / "toy-text.txt").write_text("said\n")
    (tmp_path / "nobody-knows.csv").write_text("a\n1\n")
    files = {
        "toy-frame.csv": {"what": "a frame", "model": "toy", "batch": "batch 1"},
        "toy-facts.json": {"what": "facts", "commit": "older"},
        "toy-packed.json.gz": {"what": "packed"},
        "toy-text.txt": {"what": "text"},
        "gone.csv": {"what": "a file that is not there"},
    }
    common = {
        "command": "make toys",
        "commit": "abc",
        "gpu": "NVIDIA T0",
        "torch": "2.99",
        "date": "2026-01-02",
    }
    (tmp_path / "manifest-toys.json").write_text(json.dumps({**common, "files": files}))
    return tmp_path


def test_the_list_names_what_manifests_name(made):
    frame = recordings.list(made).set_index("name")
    assert list(frame.index) == ["toy-facts", "toy-frame", "toy-packed", "toy-text"]
    assert frame.loc["toy-frame"].drop("bytes").to_dict() == {
        "what": "a frame",
        "device": "NVIDIA T0",
        "torch": "2.99",
        "commit": "abc",
        "date": "2026-01-02",
        "command": "make toys",
    }
    assert frame.loc["toy-frame", "bytes"] == (made / "toy-frame.csv").stat().st_size
    assert frame.loc["toy-facts", "commit"] == "older"  # a file's own facts win


def test_each_kind_is_loaded_as_what_it_is(made):
    frame = recordings.load("toy-frame", made)
    assert isinstance(frame, pd.DataFrame) and frame["b_us"].tolist() == [2.5]
    assert frame.attrs["recorded"] == "NVIDIA T0, torch 2.99, 2026-01-02"
    assert recordings.load("toy-frame.csv", made).equals(frame)
    assert recordings.load("toy-facts", made) == {"answer": 42}
    assert recordings.load("toy-packed", made) == [1, 2]
    assert recordings.load("toy-text", made) == "said\n"
    about = recordings.about("toy-frame", made)
    assert about.line() == "toy · batch 1 · recorded on NVIDIA T0, torch 2.99, 2026-01-02"


def test_an_unknown_name_lists_near_ones(made):
    with pytest.raises(RecordingError, match=r"no recording 'toy-fram'; near it are 'toy-frame'"):
        recordings.load("toy-fram", made)
    with pytest.raises(RecordingError, match="near it are"):
        recordings.about("zzz", made)


def test_a_broken_file_is_named(made):
    (made / "toy-facts.json").write_text("{")
    with pytest.raises(RecordingError, match=r"'toy-facts' \(toy-facts.json\) cannot be read"):
        recordings.load("toy-facts", made)
    (made / "toy-packed.json.gz").write_bytes(gzip.compress(b"[1, 2]")[:-5])
    with pytest.raises(RecordingError, match="toy-packed"):
        recordings.load("toy-packed", made)
    (made / "manifest-toys.json").write_text('{"files": 3}')
    with pytest.raises(RecordingError, match=r"manifest-toys\.json is no manifest"):
        recordings.list(made)


def test_the_folder_comes_from_the_argument_then_the_environment(made, tmp_path, monkeypatch):
    monkeypatch.setenv("CGKIT_RECORDINGS", str(made))
    assert len(recordings.list()) == 4
    monkeypatch.setenv("CGKIT_RECORDINGS", str(tmp_path / "nowhere"))
    with pytest.raises(RecordingError, match=r"CGKIT_RECORDINGS.*path="):
        recordings.list()
    assert len(recordings.list(made)) == 4


def test_an_installed_package_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.delenv("CGKIT_RECORDINGS", raising=False)
    monkeypatch.setattr(recordings, "__file__", str(tmp_path / "site-packages" / "cgkit" / "recordings.py"))
    with pytest.raises(RecordingError, match=r"this installation has none.*CGKIT_RECORDINGS"):
        recordings.list()


def test_a_trace_becomes_a_timeline(made):
    timeline = pytest.importorskip("cgkit.measuring.timeline")
    event = {
        "ph": "X",
        "cat": "kernel",
        "name": "k",
        "ts": 1.0,
        "dur": 2.0,
        "pid": 0,
        "tid": 7,
        "args": {"stream": 7},
    }
    (made / "toy-trace.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": [event]}).encode()))
    manifest = {"gpu": "NVIDIA T0", "files": {"toy-trace.json.gz": {"what": "a trace"}}}
    (made / "manifest-trace.json").write_text(json.dumps(manifest))
    found = recordings.load("toy-trace", made)
    assert isinstance(found, timeline.Timeline) and len(found.kernels) == 1


def test_the_repository_s_own_recordings_are_all_listed_and_load():
    assert cgkit.recordings is recordings
    frame = recordings.list()
    files = {p.name for p in ROOT.iterdir() if not p.name.startswith("manifest")}
    index = recordings._index(ROOT)
    assert {entry["file"] for entry in index.values()} == files
    assert (frame["command"] != "").all() and (frame["device"] != "").all() and (frame["what"] != "").all()
    for name, entry in index.items():
        if not recordings._is_trace(entry, ROOT / entry["file"]):
            assert recordings.load(name) is not None


@pytest.mark.parametrize("path", sorted(ROOT.glob("*")), ids=lambda path: path.name)
def test_no_recording_names_a_user_a_host_or_a_path(path):
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    assert re.findall(r"/(?:home|root|tmp|work|Users)/\S*", text) == []


def test_the_recorded_crossover_is_drawn():
    from cgkit.plotting.launch_charts import crossover

    for shape in ("llama-3.2-1b", "llama-3.1-8b"):
        name = f"h200-crossover-{shape}"
        found = recordings.load(name)
        ax = crossover(pd.DataFrame(found["rows"]), pd.DataFrame(found["crossings"]), recordings.about(name))
        labels = [text.get_text() for text in ax.figure.legends[0].get_texts()]
        assert any(label.startswith("eager: every batch") for label in labels)


def test_a_recording_is_drawn_and_one_that_is_missing_is_a_sentence(made, tmp_path):
    from cgkit.plotting import start_charts

    drawn = recordings.picture("cpu-bench-startup", start_charts.startup, query="model == 'tiny-llama'")
    assert "recorded on 2 cores" in drawn.alt and drawn.svg().count("tiny-llama, cold") == 1
    missing = recordings.picture("h200-of-nobody", start_charts.startup)
    assert "There is no recording 'h200-of-nobody' here" in repr(missing)
    assert recordings.find("h200-of-nobody") is None and recordings.find("x", tmp_path / "nowhere") is None
    assert len(recordings.find("cpu-bench-dedup")) == 3
