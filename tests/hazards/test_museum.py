"""Each exhibit: the broken code does harm and is found; the fixed code does none, and nothing is said of it."""

from __future__ import annotations

import json
import sys

import pandas as pd
import pytest

from cgkit import cli, hazards
from cgkit.errors import ConfigError
from cgkit.hazards import EXHIBITS, ROWS, apart
from cgkit.hazards.compiling import CountsSteps
from cgkit.measuring.doctor.codes import CODES

#: What cgkit's words must hold: the code of a finding, the class of an error, or the name of what differs.
WORDS = {
    "fresh-tensor": "moved-input",
    "replaced-buffer": "MovedInputError",
    "overwritten-output": "OverwrittenOutputError",
    "dropped-guard": "dropped-guard (error)",
    "specialised-dim": "makes it the constant 8",
    "size-gap": "size-gap",
    "above-largest": "5 to 8 requests",
    "key-miss": "FULL graphs exist only for decode batches",
    "no-budget": "CaptureOutOfMemoryError",
    "low-estimate": "bytes reserved at the end",
    "forbidden-call": "host-sync (error)",
    "attention-inside": "dynamic-operator",
    "missing-factor": "config: inductor_compile_config",
    "moved-checkout": "moved_model.py was traced in one of them only",
    "unshared-pieces": "'layers.0' → 'layers.1'",
    "unwrapped-load": "num_cudagraph_captured is 0, expected 6",
    "recompiles": "a guard fails: self.steps == 0",
    "guarded-step": "guards are evaluated at each step",
    "unknown-bytecode": "a listing by dis, and labelled so",
    "cleared-workspace": "reads a tensor of 16 bytes that it was not given",
}


#: How what a tool says begins.
SAID_BY = {
    "doctor": tuple(CODES),
    "debug=True": ("MovedInputError", "OverwrittenOutputError"),
    "the recording itself": ("CaptureOutOfMemoryError",),
    "dispatcher.explain": ("FULL",),
    "counters_table": ("num_",),
    "explain_cache": ("config:", "code:"),
    "the dump itself": ("a listing by dis",),
    "predict_pool": ("PoolPrediction",),
}


def test_every_exhibit_has_its_words():
    assert set(WORDS) == set(EXHIBITS) and set(SAID_BY) == set(hazards.TOOLS)
    assert {each.kind for each in EXHIBITS.values()} == set(hazards.KINDS)


@pytest.mark.parametrize("id", EXHIBITS)
def test_an_exhibit_does_what_it_describes(id):
    visit = hazards.show(id)
    assert visit.symptom.harm and not visit.fixed_symptom.harm, repr(visit)
    assert WORDS[id] in visit.says and visit.fixed_says == "", repr(visit)
    assert visit.says.startswith(SAID_BY[visit.exhibit.tool])
    assert visit.as_described and visit.row()["platform"] == "emulated"
    assert visit.symptom.seen != visit.fixed_symptom.seen


@pytest.mark.gpu
@pytest.mark.parametrize("id", [each.id for each in EXHIBITS.values() if each.on_gpu])
def test_the_same_on_a_gpu(id):
    visit = hazards.show(id, "cuda")
    assert visit.as_described, repr(visit)
    assert visit.row()["platform"] == "cuda"


@pytest.mark.gpu
def test_all_of_them_on_a_gpu_in_one_process_of_their_own():
    frame = hazards.run("cuda")
    assert frame["as_described"].all(), frame.loc[~frame["as_described"], ["id", "seen", "says"]].to_string()
    assert len(frame) == sum(each.on_gpu for each in EXHIBITS.values())


def test_all_that_is_known_is_shown_or_says_why_not():
    frame = hazards.table()
    assert list(frame["row"]) == list(range(1, 27)) == [row.number for row in ROWS]
    shown = frame["exhibits"] != ""
    assert (shown ^ (frame["instead"] != "")).all()
    assert set(frame.loc[~shown, "row"]) == {8, 20}
    assert {number for each in EXHIBITS.values() for number in each.rows} == set(frame.loc[shown, "row"])


def test_an_exhibit_can_be_visited_often():
    """Dynamo gives up on a code that it compiled eight times."""
    assert all(EXHIBITS["recompiles"].symptom(CountsSteps, "cpu").harm for _ in range(3))


@pytest.mark.slow
def test_an_exhibit_in_a_process_of_its_own():
    far, near = hazards.show("size-gap", apart=True), hazards.show("size-gap")
    assert far.row() == near.row() and far.as_described


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise SystemExit(3)", "its process ended: status 3"),
        ("import time; time.sleep(60)", "no answer (at most 0.5 s are given)"),
        ('print(\'{"error": "illegal address"}\')', "its process ended: illegal address"),
    ],
)
def test_a_process_that_ends_is_what_is_reported(code, said):
    there = apart.Apart("cuda", [sys.executable, "-c", code], timeout_s=0.5 if "sleep" in code else 30)
    for _ in range(2):  # the second visit has another process
        visit = there.visit(EXHIBITS["replaced-buffer"])
        assert said in visit.symptom.seen and not visit.as_described
        assert visit.says == "" and visit.device == "cuda"


def test_the_two_codes_of_an_exhibit_differ_and_are_shown():
    for each in EXHIBITS.values():
        broken, fixed = each.code()
        assert broken != fixed and broken.startswith(("def ", "class "))
    page = hazards.show("overwritten-output")._repr_mimebundle_()["text/html"]
    assert "keep_the_output" in page and "OverwrittenOutputError" in page


def test_an_unknown_exhibit_and_one_that_runs_on_the_cpu_alone():
    with pytest.raises(ConfigError, match=r"no exhibit 'nothing'; there are .*dropped-guard"):
        hazards.show("nothing")
    with pytest.raises(ConfigError, match="device must be 'cpu'"):
        hazards.show("no-budget", "cuda")


def test_the_command(tmp_path, capfd, monkeypatch):
    kept = {id: EXHIBITS[id] for id in ("size-gap", "key-miss")}
    monkeypatch.setattr(hazards, "EXHIBITS", kept)
    assert cli.main(["hazards", "run", "--csv", str(tmp_path / "run.csv")]) == 0
    assert list(pd.read_csv(tmp_path / "run.csv")["id"]) == list(kept)
    assert capfd.readouterr().err.count("  exhibits: done") == 1  # and nothing of the stages inside of them
    assert cli.main(["hazards", "show", "key-miss", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["as_described"] is True
    assert cli.main(["hazards", "show"]) == 1
    assert "say which exhibit: size-gap, key-miss" in capfd.readouterr().err
    assert cli.main(["hazards", "list"]) == 0
    assert "vllm#19186" in capfd.readouterr().out
