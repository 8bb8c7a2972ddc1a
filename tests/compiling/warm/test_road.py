"""The trace cache in one process: what is loaded, what is traced again, and that neither is ever wrong."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cgkit
from cgkit import CompilationConfig, compilation_counter, compiled_model, explain, why_miss
from cgkit.compiling import compile_model, compiled_graph
from cgkit.compiling.cache import entries, explain_cache, pack, trace_misses, traces, unpack
from cgkit.compiling.warm import road
from cgkit.errors import TraceError
from cgkit.measuring.expected_counters import counters_table
from cgkit.tracing.loaded import LoadedTrace
from tests.compiling.warm import models

X = torch.linspace(-1, 1, 40).view(5, 8)
CONFIG = CompilationConfig(splitting_ops=["warm_toys::cut"], cudagraph_mode="NONE")


@pytest.fixture(autouse=True)
def quick(compile_cache, monkeypatch):
    models.register()
    for module in (road, compiled_graph):
        monkeypatch.setattr(module, "make_adaptor", lambda config, devices: models.PickledAdaptor())
    return compile_cache


def start(model, x=X, config=CONFIG, **options):
    return compile_model(model, (x,), config=config, **options)


def checked(model, x=X, **options):
    """Whether ``model`` was loaded; its outputs are those of its own eager run, to the bit."""
    compiled = start(model, x, **options)
    with torch.no_grad():
        factor = model.factor
        found, expected = compiled(x), model(x)
        model.factor = factor
        assert torch.equal(found, expected)
        for rows in (1, 2, 9):
            other = torch.linspace(-2, 2, rows * 8, dtype=x.dtype).view(rows, 8)
            assert torch.equal(compiled(other), model(other))
    return isinstance(compiled.split.traced, LoadedTrace)


def test_a_second_instance_is_loaded_and_dynamo_sees_nothing():
    first, second = models.Base(), models.Base()
    with torch.no_grad():  # other weights: they are no part of a trace
        for parameter in second.parameters():
            parameter.mul_(0.5)
    with compilation_counter.expect(num_graphs_seen=1, num_traces_saved=1, num_traces_loaded=0):
        assert not checked(first)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs > 0
    wanted = {
        "num_graphs_seen": 0,
        "num_traces_loaded": 1,
        "num_traces_saved": 0,
        "num_compiled_artifacts_loaded": 2,
    }
    with compilation_counter.expect(**wanted, num_piecewise_graphs_seen=3, num_backend_compilations=2):
        assert checked(second)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def attribute(path, value):
    def change(model):
        *owners, name = path.split(".")
        for owner in owners:
            model = getattr(model, owner)
        setattr(model, name, value)

    return change


def add_hook(model):
    model.layers[0].register_forward_hook(lambda module, args, output: output * 2)


def untie(model):
    model.head.weight = torch.nn.Parameter(model.layers[0].weight.detach().clone())


def tie(model):
    model.head.weight = model.layers[0].weight


def transposed(model):
    model.head.weight = torch.nn.Parameter(model.head.weight.detach().t().contiguous().t())


def other_method(model):
    model.middle = torch.relu


def replaced_layer(model):
    model.layers[1] = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())


def no_bias(model):
    model.layers[0].bias = None


CHANGES = {
    "an attribute": attribute("factor", 1.25),
    "a number of another type": attribute("factor", 2),
    "a config field": attribute("config.eps", 0.5),
    "a config flag": attribute("config.residual", False),
    "a class attribute, shadowed": attribute("bias", 1.0),
    "a list's length": lambda model: model.names.append("c"),
    "a hook": add_hook,
    "tied weights": tie,
    "equal weights that are not tied": untie,
    "strides": transposed,
    "a method of the instance": other_method,
    "another layer": replaced_layer,
    "one more layer": lambda model: model.layers.append(torch.nn.Linear(8, 8)),
    "one layer less": lambda model: model.layers.pop(1),
    "a missing bias": no_bias,
    "another dtype": lambda model: model.double(),
    "a frozen weight": lambda model: model.head.weight.requires_grad_(False),
    "a buffer that is shared": lambda model: setattr(model, "shift", model.layers[0].bias.data),
}
#: What changes nothing that is computed, so that outputs cannot tell a wrong hit.
SILENT = {"equal weights that are not tied", "strides", "a frozen weight"}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_traced_again(change):
    changed = models.Base()
    CHANGES[change](changed)
    x = X.double() if change == "another dtype" else X
    if change == "equal weights that are not tied":
        assert not checked(models.Base(tied=True))
    else:
        assert not checked(models.Base())
    assert not checked(changed, x), change
    assert trace_misses()[f"{models.Base.__module__}.Base"]
    again = models.Base()
    CHANGES[change](again)
    # a hook's number, by which the bytecode may reach it, goes on counting in one process
    assert checked(again, x) == (change != "a hook"), trace_misses()
    assert checked(models.Base(tied=change == "equal weights that are not tied"))  # both lie side by side


def test_classes_and_configurations_do_not_share():
    assert not checked(models.Base())
    assert not checked(models.Subclass())
    assert checked(models.Subclass()) and checked(models.Base())
    other = CompilationConfig(splitting_ops=[], cudagraph_mode="NONE")
    assert not checked(models.Base(), config=other)


def test_a_changed_global_a_helper_and_a_class_are_misses(monkeypatch):
    assert not checked(models.Base())
    with monkeypatch.context() as patch:
        patch.setattr(models, "SCALE", 3.0)
        assert not checked(models.Base())
        missed = [each[1:] for each in trace_misses()[f"{models.Base.__module__}.Base"] if "SCALE" in each[0]]
        assert missed and set(missed) == {("float 2.0", "float 3.0")}
    with monkeypatch.context() as patch:
        patch.setattr(models, "helper", lambda x: x + 7)
        assert not checked(models.Base())
    with monkeypatch.context() as patch:
        patch.setattr(models.Base, "bias", 4.0)
        assert not checked(models.Base())
        patch.setattr(models.Base, "middle", lambda self, x: torch.cos(x))
        assert not checked(models.Base())
    assert not checked(
        models.Base()
    )  # the last trace has the place of the first: one entry a code and a name
    assert checked(models.Base())


def test_torchs_state_counts(monkeypatch):
    assert not checked(models.Base())
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "9.9.9")
        assert not checked(models.Base())
    torch.set_default_dtype(torch.float64)
    try:
        assert not isinstance(start(models.Base()).split.traced, LoadedTrace)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert not isinstance(start(models.Base()).split.traced, LoadedTrace)
    assert checked(models.Base()), trace_misses()


def test_an_operator_of_another_kind_is_a_miss():
    assert not checked(models.Base())

    def cut(x: torch.Tensor, out: torch.Tensor, by: float = 1.0) -> None:
        out.copy_(x + by)

    cgkit.register_op("cut", cut, mutates_args=["out"], namespace="warm_toys")
    assert not checked(models.Base())


def test_the_mode_and_what_forward_writes():
    assert not checked(models.Mode())
    assert not checked(models.Mode().eval())
    model = models.Mode().eval()
    compiled = start(model)
    assert isinstance(compiled.split.traced, LoadedTrace)
    with torch.no_grad():
        compiled(X)
    assert model.factor == 3.0  # the side effect is in the bytecode
    model.train()
    with pytest.raises(TraceError, match=r"train\(\)"):
        compiled(X)
    with pytest.raises(TraceError, match=r"does not fit|None"):
        compiled(None)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from(sorted(set(CHANGES) - {"another dtype"})), max_size=3),
    st.sampled_from([1, 2, 5]),
)
def test_whatever_is_mutated_the_output_is_the_models_own(changes, rows):
    """Never a wrong result: each mutated model, whatever the cache holds by then, computes what it computes eagerly."""
    for change in ([], changes):
        model = models.Base()
        for each in change:
            if not (each == "one layer less" and len(model.layers) < 2):
                CHANGES[each](model)
        checked(model, X[:rows])


def test_an_entry_that_was_changed_is_not_used(quick):
    assert not checked(models.Base())
    (path,) = traces.entries_in(next(entries()))
    content = path.read_bytes()
    for broken in (content[:-9], content[:40] + b"x" + content[41:], b"", content + b"!"):
        path.write_bytes(broken)
        with pytest.warns(UserWarning, match="not loaded"):
            assert not checked(models.Base())
        assert checked(models.Base())  # it was stored anew
    path.parent.chmod(0o777)
    with pytest.warns(UserWarning, match="written by others"):
        assert not checked(models.Base())


def test_without_its_pieces_a_trace_is_worth_nothing(quick):
    assert not checked(models.Base())
    next(quick.rglob("piece_*.bin")).unlink()
    assert not checked(models.Base())
    assert checked(models.Base())


def test_what_cannot_be_described_is_not_stored():
    space = {"__name__": __name__, "torch": torch, "models": models}
    exec("def forward(self, x: torch.Tensor):\n    return models.Base.forward(self, x) * 2\n", space)
    cls = type("Made", (models.Base,), {"forward": space["forward"], "__module__": __name__})
    compiled = start(cls())
    assert "belong to no module" in compiled.split.traced.origin
    assert not isinstance(start(cls()).split.traced, LoadedTrace)
    guarded = start(
        models.Base(),
        config=CompilationConfig(
            splitting_ops=["warm_toys::cut"], dispatch="guard_filter", cudagraph_mode="NONE"
        ),
    )
    assert "guard_filter" in guarded.split.traced.origin


def test_what_is_shown_is_made_when_it_is_looked_at():
    reference = start(models.Base())
    loaded = start(models.Base())
    traced, split = loaded.split.traced, loaded.split
    assert (
        "loaded from the trace cache" in repr(traced)
        and "loaded" in repr(split)
        and "3 different" not in repr(loaded)
    )
    assert (
        repr(traced.inputs) == repr(reference.split.traced.inputs) and split.source == reference.split.source
    )
    assert [(p.name, p.kind, p.ops) for p in split.pieces] == [
        (p.name, p.kind, p.ops) for p in reference.split.pieces
    ]
    assert loaded.cache_key == reference.cache_key and not traced.is_remade
    with compilation_counter.expect(num_graphs_seen=1, num_piecewise_graphs_seen=0):
        frame = split.to_frame()
    assert traced.is_remade and frame.equals(reference.split.to_frame())
    assert traced.to_frame().equals(reference.split.traced.to_frame())
    assert [b.call.args[0].node.expr for b in loaded.backends[:1]] == [
        b.call.args[0].node.expr for b in reference.backends[:1]
    ]
    assert torch.equal(split(X), reference(X)) and "trace cache: loaded" in repr(explain(loaded))
    assert "loaded" in repr(counters_table(loaded))


def test_compile_sizes_come_from_the_cache_or_are_compiled_after_all():
    sized = CompilationConfig(splitting_ops=["warm_toys::cut"], cudagraph_mode="NONE", compile_sizes=[4])
    other = CompilationConfig(splitting_ops=["warm_toys::cut"], cudagraph_mode="NONE", compile_sizes=[4, 7])
    assert not checked(models.Base(), config=sized)
    with compilation_counter.expect(num_graphs_seen=0, num_compiled_artifacts_loaded=4):
        assert checked(models.Base(), config=sized)
    with compilation_counter.expect(
        num_graphs_seen=1, num_compiled_artifacts_loaded=4, num_compiled_artifacts_saved=2
    ):
        assert checked(models.Base(), config=other)  # size 7 has the model traced for its graphs


def test_the_decorators_way_and_its_reset(quick):
    config = CompilationConfig(splitting_ops=["warm_toys::cut"], cudagraph_mode="NONE")
    outputs = []
    for loads in (0, 1):
        model = models.Decorated(compilation_config=config)
        with compilation_counter.expect(num_traces_loaded=loads, num_graphs_seen=1 - loads):
            outputs.append(model(X))
        assert isinstance(compiled_model(model).traced, LoadedTrace) == bool(loads)
    assert torch.equal(*outputs)


def test_a_packed_cache_starts_without_a_trace(quick, tmp_path, monkeypatch):
    start(models.Base())
    pack(tmp_path / "class.tgz")
    monkeypatch.setenv("CGKIT_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert not isinstance(start(models.Subclass()).split.traced, LoadedTrace)
    unpack(tmp_path / "class.tgz")
    assert checked(models.Base())


def test_why_a_model_was_traced(quick):
    start(models.Base())
    changed = models.Base()
    changed.factor = 9.0
    compiled = start(changed)
    assert "model.factor was float 1.5 and is float 9.0" in compiled.split.traced.origin
    assert "trace: model.factor was float 1.5" in repr(why_miss())
    a = compiled.cache_key.digest
    assert not list(explain_cache(a, a))


def test_off_is_off(quick, monkeypatch):
    start(models.Base())
    monkeypatch.setenv("CGKIT_DISABLE_COMPILE_CACHE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not isinstance(start(models.Base()).split.traced, LoadedTrace)


class Weighted(models.Base):
    def forward(self, x: torch.Tensor, **more):
        for weight, each in enumerate(more.values(), start=1):
            x = x + weight * each
        return super().forward(x)


def test_the_order_of_keywords_is_checked_by_a_loaded_trace_too():
    sizes = {"x": 0, "a": 0, "b": 0}
    for loaded in (False, True):
        compiled = compile_model(
            Weighted(), (X,), {"a": X, "b": 2 * X}, config=CONFIG, dynamic_arg_dims=sizes
        )
        assert isinstance(compiled.split.traced, LoadedTrace) is loaded
        with torch.no_grad(), pytest.raises(TraceError, match=r"were a, b when .* are b, a now"):
            compiled(X, b=2 * X, a=X)
