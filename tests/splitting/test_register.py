"""register_op: idempotent, replaceable, and nothing left behind when it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from cgkit.errors import SplitError
from cgkit.splitting import register_op, registered_ops, split_graph, unregister_op


def doubled(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * 2)


def tripled(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * 3)


@pytest.fixture(autouse=True)
def clean():
    before = set(registered_ops())
    yield
    for name in set(registered_ops()) - before:
        unregister_op(name)


def run(op):
    out = torch.zeros(2)
    op(torch.ones(2), out)
    return out.tolist()


def test_the_same_schema_replaces_the_implementation_also_in_existing_graphs():
    op = register_op("scale", doubled, ["out"], namespace="regtoy")
    graph = fx.Graph()
    x, out = graph.placeholder("x"), graph.placeholder("out")
    graph.call_function(torch.ops.regtoy.scale.default, (x, out))
    graph.output(out)
    execute = split_graph(fx.GraphModule({}, graph), ["regtoy.scale"]).stitch()
    assert run(op) == [2, 2] and run(execute) == [2, 2]
    again = register_op("scale", tripled, ["out"], namespace="regtoy")
    assert again is op
    assert run(op) == [3, 3] and run(execute) == [3, 3] and run(torch.ops.regtoy.scale) == [3, 3]
    assert registered_ops()["regtoy::scale"].op_func is tripled


def test_a_refused_replacement_leaves_the_operator_as_it_was():
    op = register_op("scale", doubled, ["out"], namespace="regtoy")
    with pytest.raises(SplitError, match="Gpu"):
        register_op("scale", tripled, ["out"], dispatch_key="Gpu", namespace="regtoy")
    assert run(op) == [2, 2] and registered_ops()["regtoy::scale"].op_func is doubled


def test_another_schema_defines_the_operator_anew():
    register_op("scale", doubled, ["out"], namespace="regtoy")

    def by(x: torch.Tensor, out: torch.Tensor, factor: float) -> None:
        out.copy_(x * factor)

    op = register_op("scale", by, ["out"], namespace="regtoy")
    out = torch.zeros(2)
    torch.ops.regtoy.scale(torch.ones(2), out, 5.0)
    assert out.tolist() == [5, 5]
    assert str(op._schema) == "regtoy::scale(Tensor x, Tensor(a1!) out, float factor) -> ()"


def test_tracing_does_not_run_the_implementation():
    ran = []

    def spy(x: torch.Tensor, out: torch.Tensor) -> None:
        ran.append(1)

    op = register_op("spy", spy, ["out"], namespace="regtoy")
    with torch._subclasses.FakeTensorMode() as mode:
        op(mode.from_tensor(torch.ones(2)), mode.from_tensor(torch.ones(2)))
    assert not ran
    op(torch.ones(2), torch.ones(2))
    assert ran


def test_an_operator_that_returns_needs_a_fake_implementation():
    def made(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with pytest.raises(SplitError, match="fake_impl"):
        register_op("made", made, [], namespace="regtoy")
    assert not hasattr(torch.ops.regtoy, "made")
    op = register_op("made", made, [], fake_impl=torch.empty_like, namespace="regtoy")
    assert op(torch.ones(2)).tolist() == [2, 2]


def unannotated(x, out):
    out.copy_(x)


@pytest.mark.parametrize(
    "refused, message",
    [
        (lambda: register_op("bad", unannotated, ["out"], namespace="regtoy"), "schema"),
        (lambda: register_op("bad", doubled, ["output"], namespace="regtoy"), "output"),
        (lambda: register_op("bad", doubled, "out", namespace="regtoy"), "must be a list"),
        (lambda: register_op("bad.name", doubled, ["out"], namespace="regtoy"), "identifiers"),
        (lambda: register_op("bad", doubled, ["out"], dispatch_key="Gpu", namespace="regtoy"), "Gpu"),
        (lambda: register_op("add", doubled, ["out"], namespace="aten"), "aten::add is already"),
        (lambda: unregister_op("regtoy::bad"), "not registered"),
    ],
)
def test_bad_input_is_refused_and_leaves_nothing(refused, message):
    before = registered_ops()
    with pytest.raises(SplitError, match=message):
        refused()
    assert registered_ops() == before
    assert not hasattr(torch.ops.regtoy, "bad")
    register_op("bad", doubled, ["out"], namespace="regtoy")  # the name is still free


def test_graphs_follow_an_operator_that_is_registered_again() -> None:
    """Stitched code calls the implementation without the dispatcher: it must still be the present one."""

    def first(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x + 1)

    def second(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x + 2)

    def other_schema(x: torch.Tensor, out: torch.Tensor, scale: float) -> None:
        out.copy_(x * scale)

    op = register_op("followed", first, ["out"], namespace="splitreg")
    graph = fx.Graph()
    x, out = graph.placeholder("x"), graph.placeholder("out")
    graph.call_function(op, (x, out))
    graph.output((out,))
    split = split_graph(fx.GraphModule({}, graph), ["splitreg::followed"])
    execute, given, written = split.stitch(), torch.zeros(2), torch.zeros(2)
    execute(given, written)
    assert torch.equal(written, torch.ones(2))
    register_op("followed", second, ["out"], namespace="splitreg")
    execute(given, written)
    assert torch.equal(written, torch.full((2,), 2.0))
    register_op("followed", other_schema, ["out"], namespace="splitreg")
    with pytest.raises(Exception):  # noqa: B017 - torch's own error for an operator that is gone
        execute(given, written)
    unregister_op("splitreg::followed")
