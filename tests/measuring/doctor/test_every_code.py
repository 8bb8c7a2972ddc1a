"""Each code of a finding: ``cgkit doctor`` says it of one model and not of its twin, and the command that the finding
brings parses, runs, and shows it again."""

from __future__ import annotations

import json
import shlex
from typing import NamedTuple

import pytest
import torch

from cgkit import cli
from cgkit.measuring.doctor import CHECKS
from cgkit.measuring.doctor.codes import CODES
from tests.measuring.doctor import one_of_each

X = "torch.ones(8, 4)"
CUT = ["--splitting-ops", "doctor_test::attention_into"]
FRESH = ["--splitting-ops", "doctor_test::fresh"]


class Case(NamedTuple):
    """``options`` are those of the broken model, ``twins`` those of the fixed one (None: the same)."""

    broken: str
    fixed: str
    inputs: str = X
    options: list[str] = []  # noqa: RUF012 - never changed
    twins: list[str] | None = None
    fixed_inputs: str = ""


CASES = {
    "graph-break": Case("TwoBreaks", "NoBreaks"),
    "trace-failed": Case("Raises", "RaisesNot"),
    "specialised-dim": Case("ReshapesByNumber", "ReshapesBySize", f"({X}, {X})"),
    "zero-one": Case("OneByOne", "OneLikeMany"),
    "uneven-sizes": Case("OneSize", "OneSize", f"({X}, torch.ones(6, 4))", fixed_inputs=f"({X}, {X})"),
    "nothing-dynamic": Case("NotAnnotated", "PrintsNot"),
    "dropped-guard": Case("Branches", "BranchesToTheSame"),
    "recompilation": Case("Counts", "CountsNot"),
    "guard-cost": Case("PrintsNot", "PrintsNot", X, ["--set", "level=1"], []),
    "none-argument": Case(
        "MaybeMask", "MaybeMask", X, ["--other", f"({X}, {X})"], ["--other", "torch.ones(5, 4)"]
    ),
    "frozen-number": Case("Counts", "CountsNot"),
    "argument-differs": Case(
        "PrintsNot", "PrintsNot", X, ["--other", f"{X}.double()"], ["--other", "torch.ones(5, 4)"]
    ),
    "buffer-write": Case("WritesBuffer", "ReturnsBuffer"),
    "host-sync": Case("Syncs", "Attends", X, [], CUT),
    "capture-forbidden": Case("Resizes", "Attends", X, [], CUT),
    "other-stream": Case("AsideUnwaited", "Together"),
    "host-copy": Case("MakesOnCpu", "MakesThere"),
    "cpu-tensor": Case("ReadsScalar", "PrintsNot", "torch.ones(8, 4, device='meta')"),
    "random-numbers": Case("OwnGenerator", "RaisesNot"),
    "dynamic-operator": Case("Attends", "Attends", X, [], CUT),
    "outside-pool": Case("ReadsGlobal", "ReadsOwn"),
    "moved-input": Case("CallsFresh", "Attends", X, FRESH, CUT),
    "replay-differs": Case("Counts", "CountsNot"),
    "mixed-rows": Case("MixesRows", "LooksBack"),
    "above-largest": Case(
        "PrintsNot", "PrintsNot", X, ["--sizes", "1", "2", "4"], ["--sizes", "1", "2", "4", "8"]
    ),
    "size-gap": Case("PrintsNot", "PrintsNot", X, ["--sizes", "1", "8"], ["--sizes", "1", "2", "4", "8"]),
    "size-never-run": Case("PrintsNot", "PrintsNot", X, ["--set", "max_num_batched_tokens=4"], []),
    "piece-not-shared": Case("NamedLayers", "LayersNamedWell", X, CUT),
}
#: Tried in every run: those that need what only the command's own options give.
QUICK = {
    "uneven-sizes",
    "guard-cost",
    "none-argument",
    "argument-differs",
    "cpu-tensor",
    "size-never-run",
    "zero-one",
}
#: What is told of right models too, as an info.
ALSO_OF_RIGHT_MODELS = {"dropped-guard", "none-argument", "outside-pool"}


def test_every_code_has_a_case():
    assert set(CASES) | {"cache-miss"} == set(CODES)  # cache-miss: test_checks, with a folder of its own


@pytest.mark.parametrize(
    ("given", "message"),
    [("level", "write NAME=VALUE"), ("nothing=1", "a field of CompilationConfig"), ("level=9", "level=9")],
)
def test_a_field_that_is_none(given, message, capfd):
    assert cli.main(["doctor", f"{one_of_each.__file__}:PrintsNot", "--inputs", X, "--set", given]) == 1
    assert message in capfd.readouterr().err


def told(capfd, code, name, inputs, options):
    words = [
        "doctor",
        f"{one_of_each.__file__}:{name}",
        "--inputs",
        inputs,
        "--set",
        "max_num_seqs=8",
        *options,
    ]
    if "--sizes" not in options:
        words += ["--sizes", "1", "2", "4", "8"]
    for each in CHECKS.values():
        if code in each.codes:
            words += ["--check", each.name]
    status = cli.main([*words, "--json"])
    findings = json.loads(capfd.readouterr().out)["findings"]
    assert status == any(each["severity"] == "error" for each in findings)
    return [each for each in findings if each["code"] == code]


@pytest.mark.parametrize(
    "code", [pytest.param(code, marks=[] if code in QUICK else [pytest.mark.slow]) for code in CASES]
)
def test_a_code_is_said_of_the_broken_model_alone_and_its_command_shows_it_again(code, capfd):
    if code == "other-stream" and torch.cuda.is_available():
        pytest.skip("a GPU has streams of its own; the model is on the CPU")
    case = CASES[code]
    found = told(capfd, code, case.broken, case.inputs, case.options)
    assert found and all(each["what"] and each["fix"] for each in found)
    worst, order = CODES[code][0], ["error", "warning", "info"]
    assert all(order.index(each["severity"]) >= order.index(worst) for each in found)
    words = shlex.split(found[0]["command"])
    assert words[:2] == ["cgkit", "doctor"] and words[-2:] == ["--check", found[0]["check"]]
    cli.main([*words[1:], "--json"])
    again = json.loads(capfd.readouterr().out)["findings"]
    assert (code, found[0]["line"]) in {(each["code"], each["line"]) for each in again}
    twins = case.options if case.twins is None else case.twins
    silent = told(capfd, code, case.fixed, case.fixed_inputs or case.inputs, twins)
    if code in ALSO_OF_RIGHT_MODELS:
        silent = [each for each in silent if each["severity"] != "info"]
    assert not silent, silent
