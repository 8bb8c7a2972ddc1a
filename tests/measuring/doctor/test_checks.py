"""Each check fires on a broken model, with the right line, and is silent on its fixed twin."""

from __future__ import annotations

import inspect

import pytest
import torch

import cgkit
from cgkit.compiling.adaptors import make_adaptor
from cgkit.compiling.cache import cache_key
from cgkit.compiling.cache.folder import keys_folder, write_key
from cgkit.measuring.doctor import CHECKS
from cgkit.pipeline import compiled_model
from tests.measuring.doctor import models

X = torch.arange(32.0).reshape(8, 4) / 32
Y = torch.ones(6, 4)
PIECEWISE = {"splitting_ops": ["doctor_test::attention_into"]}


@pytest.fixture(scope="module", autouse=True)
def operators():
    models.register()


def config(**more):
    return cgkit.CompilationConfig(**{"cudagraph_capture_sizes": [1, 2, 4, 8], "max_num_seqs": 8, **more})


def report(model, *inputs, options=None, **more):
    return cgkit.doctor(model, *(inputs or (X,)), config=config(**(options or {})), **more)


def bad(found):
    """(code, severity) of all that is an error or a warning."""
    return {(finding.code, finding.severity) for finding in found if finding.severity != "info"}


def line_of(cls, text):
    lines, first = inspect.getsourcelines(cls)
    return first + next(number for number, line in enumerate(lines) if text in line)


def test_every_code_has_a_check():
    assert len(CHECKS) >= 13
    assert all(check.codes for check in CHECKS.values())


@pytest.mark.parametrize(
    ("broken", "fixed", "code", "at"),
    [
        (models.Prints, models.PrintsNot, "graph-break", "# breaks"),
        (models.Prints, models.PrintsNot, "host-sync", "# breaks"),
        (models.TwoBreaks, models.NoBreaks, "graph-break", "# first"),
        (models.TwoBreaks, models.NoBreaks, "graph-break", "# second"),
        (models.TwoBreaks, models.NoBreaks, "host-sync", "# first"),
        (models.TwoBreaks, models.NoBreaks, "host-sync", "# second"),
        (models.Raises, models.RaisesNot, "trace-failed", "# a row has 4"),
        (models.Branches, models.BranchesToTheSame, "dropped-guard", "# another result"),
        (models.WritesBuffer, models.ReturnsBuffer, "buffer-write", "# writes"),
        (models.SelectsByMask, models.SelectsByNumber, "host-sync", "# nonzero"),
        (models.Inverts, models.RaisesNot, "host-sync", "# checks"),
        (models.OwnGenerator, models.DefaultGenerator, "random-numbers", "# its own"),
    ],
)
def test_an_error_has_its_line_and_the_fixed_twin_has_none(broken, fixed, code, at):
    found = report(broken())
    places = [(f.file, f.line) for f in found.of_code(code) if f.severity == "error"]
    assert (models.__file__, line_of(broken, at)) in places
    assert all(f.what and f.fix for f in found)
    assert bad(report(fixed())) == set()


def test_the_cost_of_breaks_is_measured():
    (first, *_) = report(models.TwoBreaks()).of_code("graph-break")
    assert "segments" in first.cost
    assert "median" in first.cost


def test_specialised_dimensions_are_all_found_and_the_rest_is_checked():
    found = report(models.ReshapesByNumber(), X, Y)
    lines = {f.what.split()[0]: f.line for f in found.of_code("specialised-dim")}
    assert lines == {
        "x.shape[0]": line_of(models.ReshapesByNumber, "# a number"),
        "y.shape[0]": line_of(models.ReshapesByNumber, "# a comparison"),
    }
    assert found.patient.traced is not None
    assert bad(report(models.ReshapesBySize(), X, X + 1)) == set()
    assert bad(report(models.ReshapesBySize(), X, Y)) == {("uneven-sizes", "warning")}


def test_a_batch_of_one_is_told_and_no_warning():
    found = report(models.PrintsNot(), X[:1])
    assert [f.severity for f in found.of_code("zero-one")] == ["info"]
    assert report(models.PrintsNot()).of_code("zero-one") == []


def test_an_argument_that_is_not_annotated():
    assert bad(report(models.NotAnnotated())) == {("nothing-dynamic", "warning")}
    assert bad(report(models.NotAnnotated(), dynamic_arg_dims={"x": 0})) == set()


def test_marked_dimensions_that_the_trace_did_not_take():
    assert bad(report(models.TakesSlots(), models.Slots(X))) == {("specialised-dim", "error")}
    assert bad(report(models.TakesMany(), X, X + 1)) == set()
    assert bad(report(models.ReshapesBySize(), X, X + 1)) == set()


def test_no_false_alarm_on_a_model_that_writes_its_input_nor_on_an_empty_batch():
    assert bad(report(models.WritesItsInput())) == set()
    empty = report(models.PrintsNot(), X[:0])
    assert bad(empty) == set()
    assert "has no tokens" in empty.not_checked["replayed"]


def test_a_guard_that_no_size_breaks_is_an_info():
    found = report(models.BranchesToTheSame(), options={"cudagraph_capture_sizes": [4, 8]})
    assert bad(found) == set()
    assert "x.shape[0] >= 4" in "".join(f.what for f in found.of_code("dropped-guard"))


def test_a_batch_that_is_padded_past_a_branch_is_an_error():
    """Alone the model takes one path for 3 rows; padded to 4 they take the other."""
    found = report(models.Branches(), options={"cudagraph_capture_sizes": [4, 8]})
    assert bad(found) == {("dropped-guard", "error")}


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"cudagraph_capture_sizes": [1, 2]}, True),
        ({"cudagraph_mode": "NONE"}, True),
        ({"cudagraph_capture_sizes": [1, 2], "max_num_batched_tokens": 3}, False),
    ],
    ids=str,
)
def test_sizes_that_run_without_a_graph_are_tried_too(options, wrong):
    found = report(models.BranchesHigh(), X[:2], options={"max_num_seqs": 2, **options})
    at = [f.what for f in found.of_code("dropped-guard") if f.severity == "error"]
    assert bool(at) == wrong, found


def test_which_guards_a_new_call_would_fail():
    found = report(models.Branches())
    (sentence,) = found.would_fail(X[:3])
    assert "x.shape[0] >= 4" in sentence
    assert f"{models.__file__}:{line_of(models.Branches, '# another')}" in sentence
    assert found.would_fail(X[:5]) == []
    assert "refused by cgkit" in found.would_fail(X.double())[0]
    kinds = found.guards_frame()
    assert {"TENSOR_MATCH", "SIZE"} <= set(kinds["kind"])


def test_other_calls_that_the_trace_cannot_serve():
    model = models.MaybeMask()
    found = report(model, X, other_inputs=[(X, X > 0), {"x": X, "scale": 2.0}, X.double(), X[:3]])
    assert bad(found) == {
        ("none-argument", "error"),
        ("frozen-number", "error"),
        ("argument-differs", "error"),
    }
    assert len(found.errors) == 3
    assert bad(report(model, X, other_inputs=[X[:3], (X, None, 1.0)])) == set()


def test_a_python_value_that_forward_changes():
    found = report(models.Counts())
    (frozen,) = found.of_code("frozen-number")
    assert (frozen.severity, frozen.line) == ("warning", line_of(models.Counts, "# frozen"))
    assert [f.severity for f in found.of_code("replay-differs")] == ["error"]
    assert bad(report(models.CountsNot())) == set()


def test_random_numbers_are_told_where_they_are_drawn():
    (drawn,) = report(models.DefaultGenerator()).of_code("random-numbers")
    assert (drawn.severity, drawn.line) == ("info", line_of(models.DefaultGenerator, "# the default"))
    dropout = torch.nn.Dropout(0.5)
    assert report(_Wrapped(dropout)).of_code("random-numbers")
    assert report(_Wrapped(dropout.eval())).of_code("random-numbers") == []


class _Wrapped(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.mark.parametrize(
    ("operator", "code", "where"),
    [
        ("syncs", "host-sync", (models._syncs, "# reads on the host")),
        ("resizes", "capture-forbidden", (models._resizes, "# other memory")),
    ],
)
def test_what_an_operator_does_inside_a_recorded_piece(operator, code, where):
    (finding,) = report(models.CallsOperator(operator)).of_code(code)
    assert finding.severity == "error"
    assert (finding.file, finding.line) == (models.__file__, line_of(*where))
    between = report(models.CallsOperator(operator), options={"splitting_ops": [f"doctor_test::{operator}"]})
    assert bad(between) == set()


def test_an_attention_inside_a_piece_and_between_pieces():
    model = models.CallsOperator("attention_into")
    assert bad(report(model)) == {("dynamic-operator", "warning")}
    assert bad(report(model, options=PIECEWISE)) == set()


def test_an_operator_that_asks_what_the_step_is_inside_a_piece_and_between_pieces():
    model = models.CallsOperator("by_the_step")
    (finding,) = report(model).of_code("dynamic-operator")
    assert finding.severity == "warning" and "reads the forward context" in finding.what
    assert finding.line == line_of(models.CallsOperator, "self.operator(y, out)")
    between = {"splitting_ops": ["doctor_test::by_the_step"]}
    for options in (between, {**between, "cudagraph_mode": "FULL_AND_PIECEWISE"}):
        assert bad(report(model, options=options)) == set()


def test_a_splitting_operator_that_returns_a_new_tensor():
    found = report(models.CallsFresh(), options={"splitting_ops": ["doctor_test::fresh"]})
    assert ("moved-input", "error") in bad(found)
    assert bad(report(models.CallsOperator("attention_into"), options=PIECEWISE)) == set()


def test_a_tensor_that_nobody_is_known_to_hold():
    assert bad(report(models.ReadsGlobal())) == {("outside-pool", "warning"), ("host-copy", "warning")}
    assert bad(report(models.ReadsOwn())) == set()


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"cudagraph_capture_sizes": [1, 2, 4]}, "above-largest"),
        ({"cudagraph_capture_sizes": [1, 8]}, "size-gap"),
        ({"max_num_batched_tokens": 4}, "size-never-run"),
        ({}, None),
    ],
)
def test_sizes(options, code):
    assert bad(report(models.PrintsNot(), options=options)) == ({(code, "warning")} if code else set())


def test_pieces_that_differ_in_a_name_alone():
    (apart,) = report(models.Layers("named"), options=PIECEWISE).of_code("piece-not-shared")
    assert apart.severity == "warning"
    assert "layer.0" in apart.what
    assert report(models.Layers("named_well"), options=PIECEWISE).of_code("piece-not-shared") == []


def test_a_key_that_was_changed_since_pieces_were_stored(tmp_path, monkeypatch):
    monkeypatch.setenv("CGKIT_CACHE_DIR", str(tmp_path))
    assert report(models.PrintsNot()).of_code("cache-miss") == []
    traced = cgkit.trace(models.PrintsNot(), X)
    made = config(inductor_compile_config={"max_autotune": True})
    devices = {torch.device("cpu")}
    for options in (made, config()):
        key = cache_key(options, traced.traced_files, devices, make_adaptor(options, devices).settings(None))
        (keys_folder() / key.digest).mkdir(parents=True)
        write_key(keys_folder() / key.digest, key)
        found = report(models.PrintsNot()).of_code("cache-miss")
        if options is made:
            assert "max_autotune" in found[0].what
    assert found == []  # now that the right key is there


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_tensor_left_on_the_cpu(device):
    found = report(models.ReadsScalar(), X.to(device), only=["outside_pool"])
    assert ("cpu-tensor", "error") in bad(found)
    assert bad(report(models.ReadsOwn().to(device), X.to(device), only=["outside_pool"])) == set()


@pytest.mark.gpu
def test_a_model_on_a_gpu_is_recorded_for_real():
    found = report(models.ReadsOwn().cuda(), X.cuda())
    assert bad(found) == set()
    assert "replayed" not in found.not_checked
    assert bad(report(models.CallsOperator("syncs"), X.cuda())) & {
        ("host-sync", "error"),
        ("capture-forbidden", "error"),
    }


def test_a_decorated_model_is_looked_at_as_it_is_written():
    """Compiled code answers for the trace, and crashes on tensors without values."""

    class Decorated(models.Branches):
        pass

    broken = cgkit.support_torch_compile(Decorated)(compilation_config=config(compiler="eager"))
    found = report(broken)
    assert bad(found) == bad(report(models.Branches())) and found.not_checked == {}
    state = compiled_model(broken)
    assert state.compiled is None, "looking compiles nothing"
    broken(X)
    recorded, call = state.compiled, state.call
    assert bad(report(broken)) == bad(found)
    assert (state.compiled, state.call) == (recorded, call)
