"""The report as an object, the command, and no false alarm on models that are right."""

from __future__ import annotations

import json

import pytest
import torch

import cgkit
from cgkit import cli
from cgkit.errors import CgkitError
from cgkit.measuring.doctor import Finding
from tests.measuring.doctor import models

X = torch.ones(8, 4)

FILE = """
import torch
from torch import nn


class Good(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def example_inputs(self):
        return torch.ones(8, 4)


class Bad(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("a line on standard output")
        return x * x.sum().item()


class Needs(nn.Module):
    def __init__(self, width):
        super().__init__()


def some_inputs():
    return {"x": torch.ones(8, 4)}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a_model.py"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize("dims", [None, {"input_ids": 1}])
def test_transformers_own_llama_is_healthy(dims):
    transformers = pytest.importorskip("transformers")
    shape = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(shape).eval()
    tokens = torch.arange(12).reshape(2, 6)
    config = cgkit.CompilationConfig(cudagraph_capture_sizes=[1, 2, 4, 8], max_num_seqs=8)
    report = cgkit.doctor(model, tokens, config=config, use_cache=False, dynamic_arg_dims=dims)
    assert report.ok, report
    assert report.not_checked == {}


def test_a_report_is_an_object_worst_first():
    report = cgkit.doctor(models.Counts(), X)
    severities = [finding.severity for finding in report]
    assert severities == sorted(severities, key=["error", "warning", "info"].index)
    assert len(report) == len(report.findings) == len(report.to_frame())
    assert not report.ok
    frame = report.to_frame()
    assert {"code", "severity", "file", "line", "what", "fix", "cost", "again"} <= set(frame.columns)
    assert "frozen-number" in repr(report)
    assert report.codes[0] == report.errors[0].code


def test_a_report_shows_itself_in_a_notebook():
    bundle = cgkit.doctor(models.Prints(), X)._repr_mimebundle_()
    assert "graph-break" in bundle["text/html"]
    assert "models.py:" in bundle["text/html"]
    assert bundle["text/plain"].startswith("doctor's report on Prints")


def test_the_model_is_left_as_it_was():
    model = models.WritesBuffer()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    x = X.clone()
    cgkit.doctor(model, x)
    assert torch.equal(model.seen, torch.zeros(4))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, X)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(CgkitError, match="no such check: nothing; there are graph_breaks"):
        cgkit.doctor(models.Prints(), X, only=["nothing"])
    with pytest.raises(CgkitError, match=r"an nn\.Module, and was given function"):
        cgkit.doctor(lambda x: x, X)
    with pytest.raises(CgkitError, match="severity='bad' is none of"):
        Finding("code", "bad", "what", "fix")
    only = cgkit.doctor(models.Prints(), X, only=["graph_breaks"])
    assert only.codes == ["graph-break"]


@pytest.mark.parametrize(
    "options",
    [
        {"level": 0},
        {"level": 1},
        {"level": 2},
        {"level": 2, "cudagraph_mode": "FULL"},
        {"cudagraph_mode": "NONE"},
    ],
    ids=str,
)
def test_every_level_and_mode(options):
    assert cgkit.doctor(models.PrintsNot(), X, config=cgkit.CompilationConfig(**options)).ok


def run(capfd, *arguments):
    status = cli.main(["doctor", *map(str, arguments)])
    return status, capfd.readouterr()


def test_the_command(file, capfd):
    status, printed = run(capfd, f"{file}:Good")
    assert status == 0
    assert printed.out.startswith("doctor's report on Good: 0 errors, 0 warnings")


@pytest.mark.parametrize("inputs", ["some_inputs", "torch.ones(4, 2)", "(torch.ones(4, 2),)"])
def test_the_command_as_json(file, capfd, inputs):
    status, printed = run(capfd, f"{file}:Bad", "--inputs", inputs, "--json")
    assert status == 1
    findings = json.loads(printed.out)["findings"]
    assert {"graph-break", "host-sync"} <= {each["code"] for each in findings}
    assert all({"code", "severity", "file", "line", "what", "fix"} <= set(each) for each in findings)
    sync = next(each for each in findings if each["code"] == "host-sync")
    assert (sync["file"], sync["line"]) == (
        str(file),
        FILE.splitlines().index("        return x * x.sum().item()") + 1,
    )


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        ("Nope", [], "has no nn.Module class 'Nope'; it has Good, Bad, Needs"),
        ("Bad", [], "Bad has no method example_inputs"),
        ("Needs", [], "The class is built without arguments"),
        ("Good", ["--inputs", "1 / 0"], "raise ZeroDivisionError"),
        ("Good", ["--inputs", "(torch.ones(2, 2), 1)"], "do not fit Good.forward"),
        ("Good", ["--other", "1 / 0"], "the inputs of --other (1 / 0) raise ZeroDivisionError"),
        ("Good", ["--check", "nothing"], "no such check: nothing"),
    ],
)
def test_the_command_says_what_is_missing(file, capfd, model, more, message):
    status, printed = run(capfd, f"{file}:{model}", *more)
    assert status == 1
    assert message in printed.err


def test_the_command_on_a_family_of_transformers(capfd):
    pytest.importorskip("transformers")
    status, printed = run(capfd, "llama")
    assert status == 0
    assert "0 errors, 0 warnings" in printed.out
    status, printed = run(capfd, "no-such-family")
    assert status == 1
    assert "neither FILE.py:CLASS, nor a folder, nor a family" in printed.err
