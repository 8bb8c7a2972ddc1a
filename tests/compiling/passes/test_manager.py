"""The manager: configuration, identities and keys, reports, and a pass of one's own."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cgkit
from cgkit import CompilationConfig
from cgkit.compiling.adaptors import InductorStandaloneAdaptor
from cgkit.compiling.cache import cache_key
from cgkit.compiling.passes import (
    GraphPass,
    NoOpElimination,
    PassReports,
    PostGradPassManager,
    preview_passes,
)
from cgkit.errors import CompileError, ConfigError

ROOT = Path(__file__).parents[3]
NONE = {"cudagraph_mode": "NONE"}


class Twice(torch.nn.Module):
    def forward(self, x):
        return x.neg().neg() * 2 + 1


def whole(model=None):
    traced = cgkit.trace(model or Twice(), torch.randn(4, 16), dynamic_arg_dims={"x": 0})
    return cgkit.split_graph(traced, [])


class Counts(GraphPass):
    """Counts nodes."""

    name = "counts"

    def __init__(self, target="aten.mul"):
        self.target = target

    def __call__(self, graph):
        return sum(self.target in str(node.target) for node in graph.nodes)


def example_of_the_readme():
    text = (ROOT / "cgkit/compiling/passes/README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    names = {"__name__": "example"}
    exec(compile(code, "example", "exec"), names)
    body = code[code.index("def ") : code.index("\nconfig")].strip().splitlines()
    assert len(body) <= 10
    return names


def test_the_ten_lines_of_the_readme_do_what_they_say(monkeypatch):
    monkeypatch.setenv("CGKIT_DISABLE_COMPILE_CACHE", "1")
    names = example_of_the_readme()
    compiled = cgkit.compile_pieces(whole(), names["config"])
    reports = compiled.pass_reports["submod_0"]
    assert [report.name for report in reports] == ["noop", "double_negation"]
    before = reports["double_negation"].before
    x = torch.randn(3, 16)
    assert torch.equal(compiled(x), Twice()(x))
    # Inductor itself may have seen it first (it did not on 2.13): then there is nothing left to match
    assert reports["double_negation"].matched == (1 if before.count("aten.neg") == 2 else 0)
    assert reports["double_negation"].after.count("aten.neg") <= 1


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"passes": ["fuse_norm"]}, "do you mean 'fuse_norm_quant'"),
        ({"passes": "noop"}, "write passes="),
        ({"passes": [3]}, "function"),
        ({"passes": [NoOpElimination]}, "subclass"),
        ({"passes": ["noop", "noop"]}, "twice"),
        ({"passes": ["noop"], "compiler": "eager"}, "compiler='inductor'"),
        ({"passes": ["noop"], "inductor_compile_config": {"post_grad_custom_post_pass": 1}}, "into passes"),
    ],
)
def test_what_makes_no_sense_is_refused(fields, says):
    with pytest.raises(ConfigError, match=says):
        CompilationConfig(**fields)


def test_a_fusion_without_noop_warns_and_brings_the_fix():
    with pytest.warns(UserWarning, match="without 'noop' before"):
        manager = PostGradPassManager(["fuse_norm_quant"])
    assert [each.name for each in manager.passes] == ["fuse_norm_quant", "fix_functionalization"]
    with pytest.warns(UserWarning, match="without 'noop' before"):
        PostGradPassManager(["fuse_act_quant", "noop"])


def test_the_fix_before_a_fusion_is_refused():
    with pytest.raises(ConfigError, match="put it after"):
        PostGradPassManager(["noop", "fix_functionalization", "fuse_norm_quant"])


def test_v2_is_off_only_where_a_pass_needs_it():
    assert "enable_auto_functionalized_v2" not in PostGradPassManager(["noop"]).inductor_options()
    options = PostGradPassManager(["noop", "fuse_act_quant"]).inductor_options()
    assert options["enable_auto_functionalized_v2"] is False


def test_identity_is_source_and_options():
    assert Counts().uuid() == Counts().uuid() != Counts("aten.add").uuid()
    other = type("Counts", (Counts,), {"__call__": lambda self, graph: 0, "__module__": __name__})
    assert other().uuid() != Counts().uuid()
    orders = [PostGradPassManager(p).uuid() for p in (["noop", Counts()], [Counts(), "noop"], ["noop"])]
    assert len(set(orders)) == 3


TIMES = 2


def helped(graph):
    return TIMES * helper(graph)


def helper(graph):
    return 1


def test_identity_is_all_that_a_function_holds_and_names(monkeypatch):
    def closure(number):
        return lambda graph: number

    def default(number):
        def ours(graph, number=number):
            return number

        return ours

    def several(graph, number):
        return number

    class Callable:
        def __init__(self, number):
            self.number = number

        def __call__(self, graph):
            return self.number

    def uuids(*passes):
        return [PostGradPassManager([each]).uuid() for each in passes]

    for make in (closure, default, lambda n: functools.partial(several, number=n), Callable):
        one, same, other = uuids(make(1), make(1), make(2))
        assert one == same != other
    one, other = [lambda graph: 1, lambda graph: 2]  # of one line
    assert len(set(uuids(one, other, Callable(1).__call__, Callable(2).__call__))) == 4
    (before,) = uuids(helped)
    monkeypatch.setitem(globals(), "TIMES", 3)
    (constant,) = uuids(helped)
    monkeypatch.setitem(globals(), "helper", lambda graph: 2)
    assert len({before, constant, *uuids(helped)}) == 3


def test_a_pass_that_counts_is_the_same_one_for_every_piece():
    class Counting(GraphPass):
        name, seen = "counting", 0

        def __call__(self, graph):
            self.seen += 1
            return 0

    counting = Counting()
    manager = PostGradPassManager([counting])
    before = manager.uuid()
    counting(None)
    assert manager.uuid() == before


def test_identities_are_the_same_in_another_process():
    code = (
        "from cgkit.compiling.passes import *; print(PostGradPassManager(['noop', 'fuse_norm_quant']).uuid())"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert said.stdout.strip() == PostGradPassManager(["noop", "fuse_norm_quant"]).uuid()


def test_passes_are_part_of_every_key(monkeypatch):
    monkeypatch.setenv("CGKIT_DISABLE_COMPILE_CACHE", "1")
    keys, content = [], []
    for passes in ((), ("noop",), (Counts(),), (Counts("aten.add"),)):
        config = CompilationConfig(passes=passes, **NONE)
        adaptor = InductorStandaloneAdaptor(passes=passes)
        keys.append(cache_key(config, (), [torch.device("cpu")], adaptor.settings(None)))
        content.append(cgkit.compile_pieces(whole(), config).backends[0].general.key)
    assert len({key.digest for key in keys}) == 4
    assert len({key.hashes["compiler"] for key in keys}) == 4
    assert len({key.lines for key in content}) == 4 and all(key.portable for key in content)


def test_a_pass_that_fails_is_named():
    def broken(graph):
        raise ValueError("no such node")

    with pytest.raises(CompileError, match=r"'broken' failed .* ValueError: no such node"):
        preview_passes(whole(), [broken])


def test_a_pass_that_breaks_the_graph_is_named_when_it_compiles(monkeypatch):
    monkeypatch.setenv("CGKIT_DISABLE_COMPILE_CACHE", "1")

    def breaks(graph):
        first, *_ = [node for node in graph.nodes if node.op == "call_function"]
        first.append(first.all_input_nodes[0])  # an input after its use
        return 1

    with pytest.raises(CompileError, match="'breaks' failed"):
        cgkit.compile_pieces(whole(), CompilationConfig(passes=[breaks], **NONE))


def test_reports_show_themselves_and_survive_json():
    (reports,) = preview_passes(whole(), [Counts(), NoOpElimination()]).values()
    assert reports.matched["counts"] == 1 and list(reports.to_frame()["name"]) == ["counts", "noop"]
    assert "counts" in repr(reports) and "matched" in repr(reports[0])
    html = reports._repr_mimebundle_()
    assert "could not be drawn" not in html["text/plain"] and "<table" in html["text/html"]
    assert "as it was" in reports[0]._repr_mimebundle_()["text/html"]
    again = PassReports.from_dicts(reports.as_dicts())
    assert repr(again) == repr(reports) and again["noop"].diff == reports["noop"].diff
    with pytest.raises(KeyError, match="these did"):
        reports["nothing"]


def test_a_report_holds_the_diff():
    class Same(torch.nn.Module):
        def forward(self, x):
            return x * 2 + 1

    def drop_sum(graph):
        for node in list(graph.nodes):
            if "aten.add" in str(node.target):
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
                return 1
        return 0

    (reports,) = preview_passes(whole(Same()), [drop_sum]).values()
    (report,) = reports
    assert report.nodes_after == report.nodes_before - 1
    frame = report.to_frame()
    assert any("aten.add" in line for line in frame[frame["change"] == "removed"]["line"])
    assert "aten.add" in report._repr_mimebundle_()["text/html"]


def test_loaded_from_the_cache_the_reports_come_back(compile_cache):
    config = CompilationConfig(passes=["noop", Counts()], **NONE)
    first = cgkit.compile_pieces(whole(), config)
    second = cgkit.compile_pieces(whole(), config)
    assert second.backends[0].general.loaded and not first.backends[0].general.loaded
    assert repr(second.pass_reports) == repr(first.pass_reports) and second.pass_reports
    assert list(second.passes_frame()["pass"]) == ["noop", "counts"]


def test_without_passes_nothing_is_reported(monkeypatch):
    monkeypatch.setenv("CGKIT_DISABLE_COMPILE_CACHE", "1")
    compiled = cgkit.compile_pieces(whole(), CompilationConfig(**NONE))
    assert compiled.pass_reports == {} and len(compiled.passes_frame()) == 0
