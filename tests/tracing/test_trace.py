"""One trace, any size of a dynamic dimension, no guards."""

from __future__ import annotations

import dataclasses
import gc
import shutil
import sys
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cgkit import compilation_counter, torch_hooks
from cgkit.errors import TraceError
from cgkit.tracing import TracedGraph, find_buffer_writes, trace
from tests.tracing.models import Branchy, Mlp

DISPATCHES = ["bytecode", "guard_filter"]


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_any_size_equals_eager_and_is_traced_once(dispatch):
    model = Mlp()
    with compilation_counter.expect(num_graphs_seen=1):
        traced = trace(model, torch.randn(5, 8), dispatch=dispatch)
        for tokens in (5, 1, 2, 33):
            x = torch.randn(tokens, 8)
            torch.testing.assert_close(traced(x), model(x))


@settings(max_examples=40, deadline=None)
@given(tokens=st.integers(1, 70), first=st.booleans(), seed=st.integers(0, 2**31))
def test_traced_equals_eager_for_random_sizes(tokens, first, seed):
    model, traced = _SHARED
    x = torch.randn(tokens, 8, generator=torch.Generator().manual_seed(seed))
    both = (traced(x), model(x)) if first else tuple(reversed((model(x), traced(x))))
    torch.testing.assert_close(*both)


_mlp = Mlp()
_SHARED = (_mlp, trace(_mlp, torch.randn(6, 8)))


def test_nothing_runs_during_the_trace():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: torch.Tensor):
            self.seen.add_(1)
            return x + self.seen

    model = Model()
    trace(model, torch.randn(3, 2))
    assert model.seen.item() == 0
    model(torch.randn(3, 2))
    assert model.seen.item() == 1


@pytest.mark.parametrize("size", [0, 1])
def test_first_call_of_size_one_or_zero_is_still_dynamic(size):
    model = Mlp()
    traced = trace(model, torch.randn(size, 8))
    assert traced.enlarged == (f"x: ({size}, 8) -> (2, 8)",)
    for tokens in (1, 7):
        x = torch.randn(tokens, 8)
        torch.testing.assert_close(traced(x), model(x))


def test_the_caller_sees_no_mark_on_its_tensor():
    x = torch.randn(3, 8)
    trace(Mlp(), x)
    assert not [name for name in vars(x) if "dynamo" in name]


def test_without_guards_the_branch_of_the_trace_is_taken():
    traced = trace(Branchy(), torch.ones(4))
    assert traced(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]  # eager: 100
    assert any(">=" in guard or "<=" in guard for guard in traced.dropped_guards)


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_without_guards_whichever_way_it_is_dispatched(dispatch):
    traced = trace(Branchy(), torch.ones(4), dispatch=dispatch)
    assert traced(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]


def test_both_dispatches_give_equal_results():
    model = Mlp()
    by_code, by_filter = (trace(model, torch.randn(4, 8), dispatch=dispatch) for dispatch in DISPATCHES)
    for tokens in (1, 4, 9):
        x = torch.randn(tokens, 8)
        assert torch.equal(by_code(x), by_filter(x))


def test_survives_reset_of_dynamo():
    model = Mlp()
    traced = trace(model, torch.randn(3, 8))
    torch._dynamo.reset()
    gc.collect()
    x = torch.randn(5, 8)
    torch.testing.assert_close(traced(x), model(x))
    torch.testing.assert_close(traced.bind(traced.graph_module)(x), model(x))


def test_guard_filter_says_that_a_reset_took_its_graph():
    traced = trace(Mlp(), torch.randn(3, 8), dispatch="guard_filter")
    torch._dynamo.reset()
    with pytest.raises(TraceError, match=r"second time.*reset"):
        traced(torch.randn(3, 8))


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_one_trace_carries_several_executors(dispatch):
    traced = trace(Mlp(), torch.randn(3, 8), dispatch=dispatch)
    seen = []

    def execute(*inputs):
        seen.append(inputs)
        return (torch.full((1,), 7.0),)

    stub, real = traced.bind(execute), traced.bind(traced.graph_module)
    x = torch.randn(4, 8)
    assert stub(x).item() == 7.0
    torch.testing.assert_close(real(x), traced(x))
    assert stub(x).item() == 7.0
    assert len(seen) == 2 and len(seen[0]) == len(traced.inputs)


def test_inputs_say_what_they_are():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Mlp(1)
            self.register_buffer("offset", torch.ones(8))
            self.cache = {"k": torch.ones(8)}

        def forward(this, x: torch.Tensor, mask: torch.Tensor):  # noqa: N805 - any name is a name
            return this.inner(x) + this.offset + this.cache["k"] + mask

    traced = trace(Model(), torch.randn(3, 8), torch.zeros(8), dynamic_arg_dims={"x": 0})
    kinds = {graph_input.source: graph_input.kind for graph_input in traced.inputs}
    assert kinds["L['x']"] == kinds["L['mask']"] == "argument"
    assert kinds["L['self'].inner.layers.0.weight"] == "parameter"
    assert kinds["L['self'].offset"] == "buffer"
    assert kinds["L['self'].cache['k']"] == "attribute"
    assert "symint" in kinds.values()
    (x,) = [graph_input for graph_input in traced.inputs if graph_input.source == "L['x']"]
    assert x.dynamic_dims == (0,) and x.shape[1] == "8" and x.dtype == torch.float32
    assert [graph_input.index for graph_input in traced.inputs] == list(range(len(traced.inputs)))
    frame = traced.to_frame()
    assert len(frame) == len(traced.graph_module.graph.nodes)
    assert frame[frame.operator == "linear"].source.tolist() == ["x = x + torch.relu(layer(x))"]
    assert "L['mask']" in repr(traced) and "2 parameters" in repr(traced)


def test_examples_are_fake_and_the_context_can_be_entered_again():
    from torch._guards import TracingContext
    from torch._subclasses import FakeTensor

    traced = trace(Mlp(), torch.randn(3, 8))
    assert len(traced.example_inputs) == len(traced.inputs)
    assert all(isinstance(e, (FakeTensor, torch.SymInt)) for e in traced.example_inputs)
    assert all(e.fake_mode is traced.fake_mode for e in traced.example_inputs if isinstance(e, FakeTensor))
    with traced.tracing(), traced.fake_mode, torch.no_grad():
        assert TracingContext.get().fake_mode is traced.fake_mode
        (out,) = traced.graph_module(*traced.example_inputs)
    symbol = next(e for e in traced.example_inputs if isinstance(e, torch.SymInt))
    assert str(out.shape[0]) == str(symbol)
    assert TracingContext.try_get() is None


@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="Inductor needs a C++ compiler"
)
def test_standalone_compile_in_the_context_is_dynamic():
    from torch._inductor import standalone_compile

    model = Mlp(1)
    traced = trace(model, torch.randn(3, 8))
    with traced.tracing(), torch._functorch.config.patch(strict_autograd_cache=False), torch.no_grad():
        compiled = standalone_compile(
            traced.graph_module, traced.example_inputs, dynamic_shapes="from_tracing_context"
        )
    run = traced.bind(compiled)
    for tokens in (1, 2, 33):
        x = torch.randn(tokens, 8)
        torch.testing.assert_close(run(x), model(x))


def test_two_models_in_one_process():
    first, second = Mlp(1), Branchy()
    a, b = trace(first, torch.randn(3, 8)), trace(second, torch.randn(5, 8))
    x = torch.randn(4, 8)
    torch.testing.assert_close(a(x), first(x))
    torch.testing.assert_close(b(x), second(x))


def test_twenty_instances_of_one_class_keep_their_own_graph():
    models = [Mlp(depth) for depth in range(1, 21)]
    with compilation_counter.expect(num_graphs_seen=20):
        traced = [trace(model, torch.randn(3, 8)) for model in models]
    x = torch.randn(5, 8)
    for model, graph in zip(models, traced):
        assert graph.operators.count("linear") == len(model.layers)
        torch.testing.assert_close(graph(x), model(x))


def test_two_subclasses_that_inherit_one_forward():
    class Wide(Mlp):
        def __init__(self):
            super().__init__(3)

    class Deep(Mlp):
        def __init__(self):
            super().__init__(5)

    wide, deep = Wide(), Deep()
    a, b = trace(wide, torch.randn(3, 8)), trace(deep, torch.randn(3, 8))
    assert (a.model_name, b.model_name) == ("Wide", "Deep")
    assert Wide.forward is Deep.forward is Mlp.forward
    x = torch.randn(4, 8)
    torch.testing.assert_close(a(x), wide(x))
    torch.testing.assert_close(b(x), deep(x))


def test_nothing_of_the_model_or_its_class_is_changed():
    model = Mlp()
    before, code = set(vars(model)), Mlp.forward.__code__
    trace(model, torch.randn(3, 8))(torch.randn(3, 8))
    assert set(vars(model)) == before and Mlp.forward.__code__ is code
    assert torch_hooks.count_bytecode_hooks() == 0


def test_instance_and_trace_can_be_collected():
    model = Mlp()
    traced = trace(model, torch.randn(3, 8))
    traced(torch.randn(3, 8))
    gone = weakref.ref(model)
    del model, traced
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


def test_dynamos_globals_do_not_pile_up_in_the_module():
    names = lambda: {n for n in vars(sys.modules[Mlp.__module__]) if n.startswith("__compiled_fn")}  # noqa: E731
    before = names()
    for _ in range(3):
        trace(Mlp(), torch.randn(3, 8))
    torch._dynamo.reset()
    gc.collect()
    assert names() <= before


# --- kinds of forward ------------------------------------------------------------------------


def test_class_cell_closure_and_super():
    factor = torch.tensor(3.0)

    class Child(Mlp):
        def forward(self, x: torch.Tensor):
            return super().forward(x) * factor + __class__.__name__.count("C")

    model = Child()
    traced = trace(model, torch.randn(3, 8))
    x = torch.randn(5, 8)
    torch.testing.assert_close(traced(x), model(x))


def test_keyword_only_and_default_arguments():
    model = Mlp()
    traced = trace(model, torch.randn(3, 8), scale=0.5)
    x = torch.randn(5, 8)
    torch.testing.assert_close(traced(x, scale=0.5), model(x, scale=0.5))
    torch.testing.assert_close(traced(x=x, bias=None, scale=0.5), model(x, scale=0.5))
    with pytest.raises(TraceError, match=r"'scale' of Mlp was 0.5"):
        traced(x)


def test_hooks_of_children_are_traced():
    model = Mlp(1)
    model.layers[0].register_forward_hook(lambda module, args, output: output + 10)
    traced = trace(model, torch.randn(3, 8))
    x = torch.randn(2, 8)
    torch.testing.assert_close(traced(x), model(x))


@pytest.mark.parametrize("decorator", [torch.no_grad(), torch.inference_mode()])
def test_forward_behind_a_decorator_of_torch(decorator):
    class Decorated(nn.Module):
        @decorator
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None):
            return x + 1 if y is None else x + y

    traced = trace(Decorated(), torch.randn(3, 8), y=torch.ones(3, 8))
    x = torch.randn(5, 8)
    torch.testing.assert_close(traced(x, y=x), x + x)
    torch.testing.assert_close(traced(x, x), x + x)


def test_forward_behind_a_users_decorator_takes_any_style_of_call():
    import functools

    def counted(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs) * 2

        return wrapper

    class Decorated(nn.Module):
        @counted
        def forward(self, x: torch.Tensor, y: torch.Tensor, *, z: torch.Tensor | None = None):
            return x - y

    model = Decorated()
    x, y = torch.randn(5, 8), torch.randn(5, 8)
    traced = trace(model, torch.randn(3, 8), y=torch.randn(3, 8))
    for call in [((x, y), {}), ((x,), {"y": y}), ((), {"y": y, "x": x}), ((), {"x": x, "y": y, "z": None})]:
        torch.testing.assert_close(traced(*call[0], **call[1]), (x - y) * 2)


def test_forward_set_on_the_instance():
    model = Mlp()
    original = model.forward
    model.forward = lambda x: original(x) + 1
    traced = trace(model, torch.randn(3, 8), dynamic_arg_dims={"x": 0})
    x = torch.randn(5, 8)
    torch.testing.assert_close(traced(x), model(x))


def test_variable_arguments():
    class Sum(nn.Module):
        def forward(self, first: torch.Tensor, *rest: torch.Tensor, **more: torch.Tensor):
            return first + sum(rest) + more["last"]

    a, b, c, d = torch.randn(4, 5, 2)
    dims = dict.fromkeys(("first", "rest", "last"), 0)
    traced = trace(Sum(), *torch.randn(3, 3, 2), last=torch.randn(3, 2), dynamic_arg_dims=dims)
    torch.testing.assert_close(traced(a, b, c, last=d), a + b + c + d)
    with pytest.raises(TraceError, match=r"'rest\[2\]'"):
        traced(a, b, c, c, last=d)


def test_torchs_own_modules():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    traced = trace(model, torch.randn(3, 8), dynamic_arg_dims={"input": 0})
    x = torch.randn(5, 8)
    torch.testing.assert_close(traced(x), model(x))


def test_a_dataclass_of_tensors_and_a_dict():
    @dataclasses.dataclass
    class Hidden:
        tensors: dict[str, torch.Tensor]
        scale: torch.Tensor

    class Model(nn.Module):
        def forward(self, hidden: Hidden, positions: torch.Tensor) -> Hidden:
            h = hidden.tensors["h"] * hidden.scale + positions[:, None]
            return Hidden({"h": h}, hidden.scale)

    def make(tokens):
        return Hidden({"h": torch.randn(tokens, 4)}, torch.tensor(2.0)), torch.arange(tokens)

    example = make(1)
    kept = example[0].tensors["h"]
    traced = trace(Model(), *example)
    assert example[0].tensors["h"] is kept
    for tokens in (1, 6):
        hidden, positions = make(tokens)
        torch.testing.assert_close(
            traced(hidden, positions).tensors["h"], Model()(hidden, positions).tensors["h"]
        )


def test_one_tensor_for_two_arguments_is_no_assumption():
    class Add(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor):
            return x - y

    x = torch.randn(3, 4)
    traced = trace(Add(), x, x)
    y = torch.randn(3, 4)
    torch.testing.assert_close(traced(x, y), x - y)


@pytest.mark.parametrize("outer", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("inner", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_traced_in_one_gradient_mode_and_called_in_another(outer, inner, dispatch):
    model = Mlp(1)
    with outer():
        traced = trace(model, torch.randn(3, 8), dispatch=dispatch, check_buffer_writes=True)
    with inner():
        x = torch.randn(7, 8)
        out = traced(x)
        torch.testing.assert_close(out, model(x).detach())
    assert not out.requires_grad


def test_higher_order_operators_pass_the_buffer_check():
    class Cond(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("offset", torch.ones(8))

        def forward(self, x: torch.Tensor, flag: torch.Tensor):
            return torch.cond(flag.sum() > 0, lambda x: x + self.offset, lambda x: x * 2, (x,))

    flag = torch.ones(2)
    traced = trace(Cond(), torch.randn(3, 8), flag, check_buffer_writes=True)
    x = torch.randn(5, 8)
    torch.testing.assert_close(traced(x, flag), x + 1)
    torch.testing.assert_close(traced(x, -flag), x * 2)


def test_gradients_are_off_inside_and_as_before_outside():
    model = Mlp()
    traced = trace(model, torch.randn(3, 8))
    assert torch.is_grad_enabled()
    assert not traced(torch.randn(3, 8)).requires_grad
    assert torch.is_grad_enabled()


def test_weights_may_be_replaced_between_calls():
    model = Mlp(1)
    traced = trace(model, torch.randn(3, 8))
    model.layers[0].weight = nn.Parameter(torch.zeros(8, 8))
    x = torch.randn(3, 8)
    torch.testing.assert_close(traced(x), model(x))


def test_registered_operator_with_state_is_one_node_and_no_buffer_write():
    with torch.library._scoped_library("cgkit_test_tracing", "FRAGMENT") as library:
        library.define("bump(Tensor(a!) state, Tensor x, Tensor(b!) out) -> ()")

        def bump(state, x, out):
            state.add_(1)
            out.copy_(x * 2)

        library.impl("bump", bump, "CompositeExplicitAutograd")
        library._register_fake("bump", lambda state, x, out: None)

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("state", torch.zeros(1))

            def forward(self, x: torch.Tensor):
                out = torch.empty_like(x)
                torch.ops.cgkit_test_tracing.bump(self.state, x, out)
                return out + 1

        model = Model()
        traced = trace(model, torch.randn(3, 8), check_buffer_writes=True)
        assert find_buffer_writes(traced) == []
        assert traced.operators.count("cgkit_test_tracing.bump") == 1
        x = torch.randn(5, 8)
        torch.testing.assert_close(traced(x), x * 2 + 1)
        assert model.state.item() == 1


def test_shows_itself():
    traced = trace(Mlp(), torch.randn(1, 8))
    assert isinstance(traced, TracedGraph)
    text = repr(traced)
    assert "TracedGraph of Mlp" in text and "traced larger than called: x: (1, 8) -> (2, 8)" in text
    assert any(file.endswith("models.py") for file in traced.traced_files)
