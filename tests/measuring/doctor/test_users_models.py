"""Models that once broke doctor, or a call under ``debug=True``: refused with the true cause, or right; and after it
all is as it was."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch
from torch import nn

import cgkit
from cgkit import cli
from cgkit.errors import CaptureError, CgkitError, HostReadError, TraceError, WrongResultError
from tests.measuring.doctor import users_models as users
from tests.measuring.doctor.users_models import X, line_of

FILE = users.__file__


@pytest.fixture(autouse=True)
def _clean():
    yield
    cgkit.reset()


def decorated(cls, record=True, **changes):
    """An instance that was called once, and recorded."""
    settings = {"compiler": "eager", "cudagraph_capture_sizes": [2, 4], "debug": True, **changes}
    made = type(cls.__name__, (cls,), {})
    model = cgkit.support_torch_compile(made)(compilation_config=cgkit.CompilationConfig(**settings))
    model(X)
    if record:
        cgkit.capture_model(model)
    return model


# --- doctor ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "checks", "code", "text", "what"),
    [
        (users.Vmaps, "capture_rules", "", "", ""),
        (users.EvenRows, "dropped_guards", "", "", ""),
        (users.Rest, "dimensions", "", "", ""),
        (users.CompilesInside, "streams", "", "", ""),
        (users.Conditional, "capture_rules", "host-sync", "torch.cond", "cond reads"),
        (
            users.WrongFake,
            "capture_rules",
            "capture-forbidden",
            "sums(x)",
            ", 8], and it gives torch.float32[4]",
        ),
        (users.Logs, "graph_breaks", "graph-break", "logging.getLogger", ""),
        (users.Scripted, "graph_breaks", "graph-break", "self.part(x)", ""),
        (users.Counts, "zero_one replayed", "replay-differs", "", "two eager runs differ as well"),
        (users.Takes, "graph_breaks dimensions", "trace-failed", "def forward", "'x' is a nested tensor"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_errors_are_those_and_in_the_users_line(cls, checks, code, text, what):
    model, args = cls(), cls.args
    report = cgkit.doctor(model, *args, only=checks.split())
    assert [error.code for error in report.errors] == [code] * bool(code), report
    for error in report.errors:
        assert what in error.what
        assert not text or (error.file, error.line) == (FILE, line_of(model, text)), error
    assert not set(report.not_checked) & {"capture_rules", "replayed", "streams"}, report
    assert torch.rand(2).shape == (2,)  # no level of vmap was left on
    model(*args)  # works as before


def test_a_branch_on_the_size_is_an_error_in_a_model_that_counts_its_calls_too():
    model = users.CountsItsCalls()
    report = cgkit.doctor(model, X, only=["dropped_guards"])
    assert [error.code for error in report.errors] == ["dropped-guard"] and model.calls == 0
    assert "at 1 the trace computes something else" in report.errors[0].what


def test_what_does_not_repeat_itself_is_not_said_to_agree():
    report = cgkit.doctor(users.CountsElsewhere(), X, only=["dropped_guards"])
    said = [finding.what for finding in report if "shape[0]" in finding.what]
    assert len(said) == 1 and "two runs of the model differ" in said[0] and not report.errors
    assert "the trace gives what" not in said[0]


def test_rows_of_a_model_that_counts_are_not_said_to_be_mixed():
    report = cgkit.doctor(users.Counts(), X, only=["mixed_rows"])
    assert not report.errors and "two runs of the same rows differ" in report.not_checked["mixed_rows"]


def test_a_guard_of_torchs_own_line_has_the_users():
    model = users.Convolves()
    report = cgkit.doctor(model, X, only=["dropped_guards", "recompilations"])
    placed = [finding for finding in report if finding.file]
    assert placed and {(each.file, each.line) for each in placed} == {(FILE, line_of(model, "self.inner(x"))}


def test_nothing_of_the_model_or_the_process_is_changed():
    model = users.Keeps()
    cgkit.doctor(model, X, only=["recompilations", "replayed"])
    assert (model.sizes, model.by_name, model.calls) == ([], {"sizes": []}, 0)
    before = random.getstate(), np.random.get_state()[1].tobytes()
    cgkit.doctor(users.DrawsInPython(), X, only=["streams"])
    assert before == (random.getstate(), np.random.get_state()[1].tobytes())
    with pytest.raises(HostReadError):
        decorated(users.FailsInAutocast, debug=False)
    cgkit.doctor(users.FailsInAutocast(), X, only=["capture_rules"])
    assert not torch.is_autocast_enabled("cpu")


def test_a_model_that_refuses_the_values_that_are_tried():
    report = cgkit.doctor(users.Sorted(), X, only=["replayed"])
    assert not report.errors and "the model fails" in report.not_checked["replayed"], report


@pytest.mark.parametrize(
    ("model", "said"),
    [(nn.LazyLinear(8), "its first call makes"), (nn.Module(), "no forward")],
    ids=["lazy", "none"],
)
def test_models_that_cannot_be_looked_at(model, said):
    with pytest.raises(CgkitError, match=said):
        cgkit.doctor(model, X)


# --- calls under debug=True ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "text"),
    [(users.Conditional, "torch.cond"), (users.ReadsAnItem, "return y * x")],
    ids=["cond", "item"],
)
def test_a_host_read_inside_of_a_piece_has_the_users_line(cls, text):
    model = decorated(cls, record=False)
    assert torch.equal(model(X + 1), cls()(X + 1))
    with pytest.raises(HostReadError, match=re.escape(f"{FILE}:{line_of(cls(), text)}: ")):
        cgkit.capture_model(model)


def test_a_model_that_does_not_work_with_zeros():
    class Inverts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.inv(x.view(-1, 2, 2)).flatten(1)

    example = torch.randn(4, 4)
    config = cgkit.CompilationConfig(compiler="eager", cudagraph_capture_sizes=[4])
    model = cgkit.support_torch_compile(Inverts)(compilation_config=config)
    model(example)
    with pytest.raises(CaptureError, match=r"fails in a run of 4 tokens .*make_inputs"):
        cgkit.capture_model(model)
    with pytest.raises(
        HostReadError, match=r"linalg_inv reads .*\n.*test_users_models.py"
    ):  # a capture refuses it
        cgkit.capture_model(model, make_inputs=lambda n: example)


def test_one_size_of_a_model_that_knows_few():
    model = decorated(users.EvenRows, cudagraph_capture_sizes=[4])
    assert torch.equal(model(X), users.EvenRows()(X))
    assert model(X[:0]).shape == (0, 8)  # its guards have no value there


@pytest.mark.parametrize(
    "settings", [{"level": 0, "debug": False}, {"debug": True}], ids=["level 0", "debug"]
)
def test_an_instances_own_forward(settings):
    level = settings.get("level", 3)
    model = decorated(users.OwnForward, record=level == 3, **settings)
    assert torch.equal(model(X), X * 100)
    own = model.__dict__["forward"]
    model.register_forward_hook(lambda module, args, output: output + 1)
    assert torch.equal(model(X), X * 100 + 1)
    assert model.__dict__["forward"] is own
    if level == 3:
        assert {stage.verdict for stage in cgkit.bisect(model, X).stages} == {"same"}


@pytest.mark.parametrize(
    ("cls", "record", "cause"),
    [(users.Counts, False, "Two runs of forward itself"), (users.WritesInSecret, True, "does not say so")],
    ids=["counts", "writes"],
)
def test_the_cause_is_the_true_one(cls, record, cause):
    with pytest.raises(WrongResultError, match=cause):
        decorated(cls, record)(X.clone())


@pytest.mark.parametrize(
    ("cls", "rows", "stage", "why"),
    [(users.Mixes, 3, "replayed", "padded with"), (users.WritesInSecret, 4, "replayed", "mutates_args"),
     (users.Moves, 4, "traced", "does something else now")],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_bisect_names_the_true_cause_and_changes_nothing(cls, rows, stage, why):
    model = decorated(cls, debug=False)
    before = dict(vars(model))
    found = cgkit.bisect(model, X[:rows].clone())
    assert found.found.stage == stage and why in found.found.why
    assert dict(vars(model)) == before


def test_bisect_compares_nothing_with_what_does_not_repeat_itself():
    with pytest.raises(CgkitError, match="two eager runs of Counts on these arguments differ"):
        cgkit.bisect(users.Counts(), X)


def test_a_part_that_compiles_itself_is_not_given_up():
    model = decorated(users.CompilesInside, record=False)
    for x in (X, -X):
        assert torch.equal(model(x), users.CompilesInside()(x))


def test_a_nested_tensor_is_refused_by_name():
    with pytest.raises(TraceError, match="'x' is a nested tensor"):
        cgkit.trace(
            users.Takes(), torch.nested.nested_tensor([X], layout=torch.jagged), dynamic_arg_dims={"x": 0}
        )


# --- the command -----------------------------------------------------------------------------------

MODEL = """
import sys

import torch
from torch import nn

from ..layers import double


class Net(nn.Module):
    example_inputs = (torch.ones(4, 8),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return double(x)


class Ends(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sys.exit(3)
"""


def test_a_file_inside_of_a_package(tmp_path, capsys):
    folder = tmp_path / "a_users_package" / "models"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    (folder.parent / "layers.py").write_text("def double(x):\n    return x * 2\n")
    file = folder / "net.py"
    file.write_text(MODEL)
    assert cli.main(["doctor", f"{file}:Net", "--check", "graph_breaks"]) == 0
    assert cli.main(["doctor", f"{file}:Ends"]) == 1
    assert "sys.exit(3)" in capsys.readouterr().err
    (tmp_path / "ends.py").write_text("raise SystemExit(4)")
    assert cli.main(["doctor", f"{tmp_path / 'ends.py'}:Net"]) == 1
    assert "SystemExit: 4" in capsys.readouterr().err
