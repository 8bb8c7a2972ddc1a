"""Streams, copies, recompilations, a batch of one, what lies outside of the pool: broken models and their twins."""

from __future__ import annotations

import gc
import json
import shlex

import pytest
import torch
from torch import nn

import cgkit
from cgkit import cli, torch_hooks
from cgkit.measuring.doctor.codes import CODES, codes_frame
from cgkit.measuring.doctor.patient import Patient
from cgkit.measuring.doctor.registry import all_codes
from tests.measuring.doctor import models
from tests.measuring.doctor.test_checks import PIECEWISE, X, bad, config, line_of, report


@pytest.fixture(scope="module", autouse=True)
def operators():
    models.register()


def sights(cls, check, *inputs):
    """(code, severity, line) of what one check finds; the model may make streams where there is no GPU."""
    with torch_hooks.stand_in_streams():
        found = report(cls(), *inputs, only=[check])
    assert found.not_checked == {}, found.not_checked
    return [(each.code, each.severity, each.line) for each in found], found


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has streams of its own")
@pytest.mark.parametrize(
    ("cls", "severity", "said"),
    [
        (models.AsideUnwaited, "error", "runs once, while recording"),
        (models.AsideUnjoined, "error", "unjoined work"),
        (models.AsideJoined, "warning", "allocated there"),
        (models.AsideByEvents, "info", "a branch of the graph"),
    ],
)
def test_work_on_another_stream_without_a_gpu(cls, severity, said):
    found, whole = sights(cls, "streams")
    assert found == [("other-stream", severity, line_of(cls, "# aside"))]
    assert said in whole.findings[0].what
    assert whole.findings[0].stream.startswith("a side stream")
    assert any(str(line_of(cls, "# aside")) in frame for frame in whole.findings[0].stack)
    assert sights(models.Together, "streams")[0] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU waits by itself, and capture refuses it")
def test_waiting_for_the_gpu_is_seen_without_one():
    assert sights(models.Waits, "streams")[0] == [("host-sync", "error", line_of(models.Waits, "# waits"))]
    with pytest.raises((AssertionError, RuntimeError)):
        torch.cuda.synchronize()  # the stand-ins are gone


@pytest.mark.parametrize(
    ("cls", "mark", "said"),
    [
        (models.MakesOnCpu, "# copied", "not pinned"),
        (models.MixesCpu, "# beside", "a CPU tensor"),
        (models.Pins, "# pinned", "pin_memory()"),
        (models.ReadsBack, "# back", "to the CPU"),
        (models.Unregistered, "# unregistered", "the attribute scale"),
    ],
)
def test_the_cpu_in_forward_is_seen_without_a_gpu(cls, mark, said):
    found, whole = sights(cls, "host_copies")
    assert ("host-copy", "warning", line_of(cls, mark)) in found
    assert said in whole.findings[0].what + whole.findings[-1].what
    assert sights(models.MakesThere, "host_copies")[0] == []
    assert sights(models.ReadsOwn, "host_copies")[0] == []


def test_looking_for_copies_leaves_no_tensor_without_values_behind():
    model = models.Unregistered()
    report(model, only=["host_copies"])
    assert model.scale.device.type == "cpu"

    class Remembers(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = x
            return x * 2

    model = Remembers()
    report(model, only=["host_copies"])
    assert not hasattr(model, "last")


def test_a_buffer_that_forward_replaces_is_put_back_between_two_runs():
    class Last(nn.Module):
        last: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = x + self.last
            self.last = x[:1, :1].reshape(1) * 2
            return out

    model = Last()
    held = model.last
    assert bad(report(model)) == {("buffer-write", "error")}  # and no other answer for one row
    assert model.last is held and not held.any()


def test_a_branch_on_a_batch_of_one_has_its_line_though_it_leaves_no_guard():
    found = report(models.OneByOne())
    assert bad(found) == {("zero-one", "error")}
    (finding,) = found.of_code("zero-one")
    assert finding.line == line_of(models.OneByOne, "# one")
    assert torch_hooks.size_guards(found.patient.traced.fake_mode) == []
    assert bad(report(models.OneLikeMany())) == set()


@pytest.mark.parametrize(
    ("cls", "mark"), [(models.MixesRows, "# mixes"), (models.TakesTheLast, "# the last")]
)
@pytest.mark.parametrize("inputs", [X, torch.ones(2, 4), torch.ones(1, 4)], ids=["rows", "two alike", "one"])
def test_a_model_that_mixes_the_rows_of_a_batch_sees_its_padding(cls, mark, inputs):
    assert sights(cls, "mixed_rows", inputs)[0] == [("mixed-rows", "error", line_of(cls, mark))]
    for right in (models.LooksBack, models.PrintsNot, models.Branches):
        assert sights(right, "mixed_rows", inputs)[0] == []
    gapless = {"cudagraph_capture_sizes": [1, 2, 3, 4]}
    assert not list(report(cls(), inputs, only=["mixed_rows"], options=gapless))


def test_what_would_be_traced_again_and_the_guard_that_triggers_it():
    found = report(models.Counts()).of_code("recompilation")
    (same,) = [each for each in found if "the same call again" in each.what]
    assert same.severity == "warning" and "steps" in same.what
    assert "instead of" in same.cost
    calls = report(models.Branches(), X, other_inputs=[X.double()]).of_code("recompilation")
    assert {each.severity for each in calls} == {"info"}
    by_call = {each.what.split(" would")[0]: each for each in calls}
    assert "dtype" in by_call["under guards, other_inputs[0]"].what.lower()
    assert by_call["under guards, a call of one token"].line
    assert not [f for f in report(models.CountsNot()).of_code("recompilation") if f.severity == "warning"]
    plain = report(models.Branches(), options={"level": 1}).of_code("recompilation")
    assert "a call of one token" in "".join(each.what for each in plain if each.severity == "warning")


def test_every_guard_that_a_new_call_fails_is_named_with_its_source():
    model = models.Kept()
    found = report(model)
    assert found.would_fail(X) == []
    model.scale = 3.0
    model.linear.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
    failed = found.would_fail(X.double())
    assert any("self'].scale" in each and "2.0" in each and "3.0" in each for each in failed)
    assert any("linear.weight" in each and "float64" in each for each in failed)
    assert any("TENSOR_MATCH on L['x']" in each for each in failed)


def test_tensors_outside_of_the_pool_have_an_owner_and_are_looked_at_again():
    model = models.Kept()
    found = report(model)
    frame = found.outside_frame().set_index("source")
    assert set(frame.index) == {"L['self'].linear.weight", "L['self'].linear.bias"}
    assert frame["alive"].all() and frame["in_place"].all() and set(frame["owner"]) == {"the model"}
    with torch.no_grad():
        model.linear.bias.copy_(torch.ones(4))  # in place
    assert found.outside_frame()["in_place"].all()
    model.linear.weight = nn.Parameter(torch.ones(4, 4))
    gc.collect()  # cycles that Dynamo left hold the old one until Python looks for them
    frame = found.outside_frame().set_index("source")
    assert not frame.loc["L['self'].linear.weight", "in_place"]
    assert not frame.loc["L['self'].linear.weight", "alive"]
    assert frame.loc["L['self'].linear.bias", "in_place"]


def test_a_tensor_that_an_operator_fetches_by_itself():
    found = report(models.CallsOperator("fetches"), only=["outside_pool"])
    (fetched,) = [each for each in found if each.severity == "warning"]
    assert "fetches" in fetched.what and "was not given" in fetched.what
    assert fetched.file == models.__file__
    assert bad(report(models.CallsOperator("attention_into"), only=["outside_pool"])) == set()


def test_a_finding_says_how_its_line_was_reached():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = models.TwoBreaks()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)  # outer

    found = report(Outer())
    for code, mark in (("graph-break", "# second"), ("host-sync", "# first")):
        (one,) = [each for each in found.of_code(code) if each.line == line_of(models.TwoBreaks, mark)]
        assert any("# outer" in frame for frame in one.stack[:-1])
        assert mark in one.stack[-1]
        assert "reached through" in repr(one)


def test_the_codes_are_one_table(capfd):
    assert set(all_codes()) == set(CODES)
    assert set(codes_frame()["found_by"]) - {""} and (codes_frame()["found_by"] != "").all()
    assert cli.main(["doctor", "--codes"]) == 0
    printed = capfd.readouterr().out
    assert all(code in printed for code in CODES)
    assert cli.main(["doctor"]) == 1
    assert "say which model" in capfd.readouterr().err


def test_each_findings_command_shows_it_again(tmp_path, capfd):
    file = tmp_path / "model.py"
    text = "import torch\n\n\nclass Bad(torch.nn.Module):\n"
    text += "    def forward(self, x: torch.Tensor) -> torch.Tensor:\n        return x * 2 if x.sum() > 0 else x\n"
    file.write_text(text)
    assert cli.main(["doctor", f"{file}:Bad", "--inputs", "torch.ones(8, 4)", "--sizes", "4", "--json"]) == 1
    findings = json.loads(capfd.readouterr().out)["findings"]
    assert {"graph-break", "host-sync", "above-largest"} <= {each["code"] for each in findings}
    for finding in findings:
        words = shlex.split(finding["command"])
        assert words[:2] == ["cgkit", "doctor"]
        cli.main([*words[1:], "--json"])
        again = json.loads(capfd.readouterr().out)["findings"]
        assert (finding["code"], finding["line"]) in {(each["code"], each["line"]) for each in again}


def test_a_name_on_the_hub_that_was_not_downloaded(capfd):
    assert cli.main(["doctor", "nobody/no-such-model"]) == 1
    assert "no model of that name was downloaded before" in capfd.readouterr().err


def written(folder):
    """A small OPT as ``transformers`` writes it."""
    transformers = pytest.importorskip("transformers")
    shape = transformers.OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2,
        word_embed_proj_dim=32, max_position_embeddings=64,
    )  # fmt: skip
    transformers.OPTForCausalLM(shape).save_pretrained(folder)


def test_a_folder_that_transformers_wrote(tmp_path, capfd):
    written(tmp_path)
    capfd.readouterr()
    assert cli.main(["doctor", str(tmp_path), "--check", "graph_breaks", "--check", "host_copies"]) == 0
    assert "0 errors, 0 warnings" in capfd.readouterr().out


def test_a_name_on_the_hub_that_was_downloaded_before(tmp_path, capfd, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder, commit = tmp_path / "models--somebody--small-opt", "0" * 40
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    written(folder / "snapshots" / commit)
    capfd.readouterr()
    inputs = "(torch.arange(5) + 3, torch.arange(5))"
    words = ["doctor", "somebody/small-opt", "--inputs", inputs, "--sizes", "2", "--check", "sizes", "--json"]
    assert cli.main(words) == 0  # a warning is no error
    (finding,) = json.loads(capfd.readouterr().out)["findings"]
    assert (finding["code"], finding["severity"]) == ("above-largest", "warning")
    assert shlex.split(finding["command"])[:5] == ["cgkit", *words[:4]]
    assert cli.main([*words[:3], "(torch.ones(2, 2), 1)", "--check", "graph_breaks"]) == 1


def test_every_command_in_python_shows_its_finding_again():
    model = models.Counts()
    found = report(model)
    for finding in found:
        scope = {"cgkit": cgkit, "model": models.Counts(), "example_inputs": (X,), "config": config()}
        assert finding.code in eval(finding.command, scope).codes


def test_reads_on_the_host_are_found_where_the_emulated_platform_cannot_record(monkeypatch):
    """A model on a GPU; here the doctor is only told that it is on one."""
    monkeypatch.setattr(Patient, "device", property(lambda self: torch.device("cuda")))

    class Reads(nn.Module):
        def forward(self, x):
            return x / x.max().item()

    class Keeps(nn.Module):
        def forward(self, x):
            return x / x.max()

    config = cgkit.CompilationConfig(compiler="eager", cudagraph_capture_sizes=[1, 2, 4, 8], max_num_seqs=8)
    seen = cgkit.doctor(Reads(), torch.ones(8, 4), config=config, only=["capture_rules"])
    (found,) = seen.of_code("host-sync")
    assert (
        found.source == "return x / x.max().item()"
        and "only reads on the host" in seen.not_checked["capture_rules"]
    )
    quiet = cgkit.doctor(Keeps(), torch.ones(8, 4), config=config, only=["capture_rules"])
    assert not quiet.of_code("host-sync")


class InAutocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.linear(x)


def test_a_model_that_sets_a_mode_is_right_and_the_mode_does_not_outlive_the_report():
    found = report(InAutocast())
    assert bad(found) == set() and set(found.not_checked) <= {
        "host_copies"
    }  # torch has no autocast for "meta"
    assert not torch.is_autocast_enabled("cpu")


def test_a_region_of_autocast_that_would_be_cut_is_a_finding_with_its_line():
    class Cut(InAutocast):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast(x.device.type, torch.bfloat16):
                y = self.linear(x)  # first in the region
                out = torch.empty_like(y)
                torch.ops.doctor_test.attention_into(y, out)
                return out * 2

    found = report(Cut(), options=PIECEWISE)
    assert bad(found) == {("capture-forbidden", "error")}
    (finding,) = found.of_code("capture-forbidden")
    assert finding.line == line_of(Cut, "# first in the region")
    assert bad(report(Cut(), options={"level": 2, "cudagraph_mode": "FULL"})) == set()


def test_memory_that_nobody_wrote_yet_is_not_what_mixes_the_rows():
    class Filled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            torch.ops.doctor_test.attention_into(x, out)
            return out - out.mean(0)  # mixes

    kept = [torch.full((64,), float(n)) for n in range(99)]  # memory with other contents, soon free
    del kept
    assert sights(Filled, "mixed_rows", X)[0] == [("mixed-rows", "error", line_of(Filled, "# mixes"))]


def test_a_parameter_that_forward_writes_is_put_back_and_is_the_only_finding():
    class WritesParameter(InAutocast):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.linear.bias.data.add_(1)
            return self.linear(x)

    model = WritesParameter()
    before = model.linear.bias.detach().clone()
    assert bad(report(model)) == {
        ("buffer-write", "error")
    }  # and no other answer for one row, or for padded ones
    assert torch.equal(model.linear.bias, before)


def test_a_global_that_forward_assigns_has_its_line():
    class Outer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _noted(x) + 1

    (finding,) = report(Outer(), only=["graph_breaks"])
    assert (finding.code, finding.line) == ("trace-failed", line_of(_noted, "# assigned"))
    assert "_latest" in finding.what and finding.source.startswith("_latest = 7")
    assert finding.fix.startswith("return the value instead")


_latest = 0


def _noted(x: torch.Tensor) -> torch.Tensor:
    global _latest
    _latest = 7  # assigned
    return x


def test_what_is_traced_again_has_the_users_line_though_torch_uses_the_size_first():
    class Branches(InAutocast):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return y if y.shape[0] <= 8 else y * 2  # branches

    (finding,) = report(Branches(), only=["recompilations"], options={"cudagraph_capture_sizes": [8, 16]})
    assert (finding.file, finding.line) == (__file__, line_of(Branches, "# branches"))


def test_what_a_finding_says_is_the_same_in_every_process():
    class Counts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.bincount((x[:, 0] > 0).long()).sum() + torch.unique(x).sum()

    found = report(Counts())
    assert len(found.of_code("host-sync")) >= 1 and "mixed-rows" in found.codes
    assert not [each.what for each in found if " at 0x" in each.what or "<locals>" in each.what]


def test_an_array_of_numpy_is_seen_without_a_gpu():
    class ToNumpy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.from_numpy(x.numpy() * 2).sum(-1, keepdim=True)

    found = report(ToNumpy(), only=["host_copies"])
    assert found.not_checked == {} and found.codes == ["host-copy"]
    assert any("numpy()" in each.what for each in found)
