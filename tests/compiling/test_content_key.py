"""Equal content has equal keys whatever it is called; anything that changes the code changes the key."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from cgkit import torch_hooks
from cgkit.compiling import PiecewiseCompileInterpreter, content_key, diff_keys
from tests.compiling.toys import split_llama, split_of


def graph(*lines, names=("a", "b"), attributes=None):
    """A graph from ``lines``: (function, args), where an int i in args' list form [i] is an earlier value."""
    module = torch.nn.Module()
    g = fx.Graph()
    values = [g.placeholder(name) for name in names]
    for name, value in (attributes or {}).items():
        module.register_buffer(name, value)
        values.append(g.get_attr(name))
    for function, *args in lines:
        values.append(
            g.call_function(function, tuple(values[a[0]] if isinstance(a, list) else a for a in args))
        )
    g.output((values[-1],))
    return fx.GraphModule(module, g)


def fakes(*tensors):
    mode = torch_hooks.new_fake_mode()
    return [mode.from_tensor(t, static_shapes=True) for t in tensors]


def key(module=None, inputs=None, **kwargs):
    module = module or graph((torch.add, [0], [1]))
    return content_key(module, inputs or fakes(torch.ones(4, 4), torch.ones(4, 4)), **kwargs)


STEPS = st.lists(
    st.tuples(st.sampled_from([torch.add, torch.mul, torch.sub]), st.integers(0, 1), st.integers(0, 1)),
    min_size=1,
)


@given(STEPS, st.lists(st.text("abcxyz", min_size=1, max_size=4), min_size=2, max_size=2, unique=True))
@settings(max_examples=40, deadline=None)
def test_names_do_not_matter(steps, names):
    lines = [(f, [i], [j]) for f, i, j in steps]
    one, other = key(graph(*lines)), key(graph(*lines, names=names))
    assert one == other and one.digest == other.digest and one.portable


@given(STEPS, st.data())
@settings(max_examples=40, deadline=None)
def test_every_operator_and_operand_matters(steps, data):
    lines = [(f, [i], [j]) for f, i, j in steps]
    at = data.draw(st.integers(0, len(lines) - 1))
    changed = data.draw(STEPS)[0]
    changed = (changed[0], [changed[1]], [changed[2]])
    other = [*lines[:at], changed, *lines[at + 1 :]]
    assert (key(graph(*lines)) == key(graph(*other))) == (lines[at] == changed)


def test_numbers_are_told_apart_by_value_and_type():
    values = [0.0, -0.0, 0, False, 1e-6, 1e-5, 1, 1.0, True, None, "1", 2**63, complex(1, 0), (1,), [1]]
    keys = [key(graph((torch.add, [0], value))) for value in values]
    assert len(set(keys)) == len(values)


def test_inputs_are_told_apart_by_dtype_shape_stride_offset_and_grad():
    base = torch.ones(4, 8)
    b = torch.ones(4, 4)
    firsts = [
        b,
        b.double(),
        b.half(),
        torch.ones(4, 5),
        b.t(),
        base[:, :4],
        base[:, 4:],
        b.clone().requires_grad_(),
        torch.ones(4, 4, device="meta"),
    ]
    keys = [key(inputs=fakes(first, torch.ones(4, 4))) for first in firsts]
    assert len(set(keys)) == len(keys)


def test_shared_storage_matters():
    base = torch.ones(8, 4)
    apart = fakes(base[:4].clone(), base[4:].clone())
    mode = torch_hooks.new_fake_mode()
    fake = mode.from_tensor(base, static_shapes=True)
    with mode:
        together = [fake[:4], fake[4:]]
        overlapping = [fake[:4], fake[2:6]]
    keys = {key(inputs=inputs) for inputs in (apart, together, overlapping)}
    assert len(keys) == 3
    assert any("shared storage" in line for line in diff_keys(key(inputs=apart), key(inputs=together)))


def test_constants_matter_by_value_and_not_by_object():
    def of(value):
        return key(graph((torch.add, [0], [2]), attributes={"c": value}))

    one = of(torch.tensor([1.0, 2.0]))
    assert one == of(torch.tensor([1.0, 2.0]))
    others = [
        torch.tensor([1.0, 3.0]),
        torch.tensor([1.0, 2.0]).double(),
        torch.tensor([1, 2]),
        torch.tensor([[1.0, 2.0]]),
        torch.ones(2, 2)[:1, 0],  # one element, contiguous by name, at a stride of 2
    ]
    assert len({one, *map(of, others)}) == 6


def test_shape_and_compiler_settings_matter():
    keys = [
        key(),
        key(shape=1),
        key(shape=2),
        key(compiler={"max_autotune": True}),
        key(compiler={"max_autotune": 1}),
    ]
    assert len(set(keys)) == 5


def test_a_function_without_a_name_equals_itself_only():
    def nameless(scale):
        return lambda x: x * scale

    one, other = nameless(1), nameless(2)
    keys = [key(graph((function, [0]))) for function in (one, one, other)]
    assert keys[0] == keys[1] != keys[2]
    assert not keys[0].portable and keys[0].by_identity == (one,)


def keys_of(split):
    """The keys of the capturable pieces."""
    calls = []
    PiecewiseCompileInterpreter(split, content_key, calls.append).run()
    return [call.key for call in calls]


def test_a_llama_has_three_different_pieces_whatever_its_depth():
    for layers in (2, 3, 6):
        keys = keys_of(split_llama(layers)[1])
        assert len(keys) == layers + 1
        assert len(set(keys)) == 3
        assert len(set(keys[1:-1])) == 1
        assert all(k.portable for k in keys)  # means the same in another process


def test_symbols_are_renamed():
    one, other = (keys_of(split_llama.__wrapped__(2)[1]) for _ in range(2))  # two traces
    assert one == other
    assert any("d0" in line for line in one[0].lines)


def test_one_other_epsilon_is_not_shared_and_the_difference_is_named():
    _, split = split_llama(4, epsilons=(1e-6, 1e-6, 1e-5, 1e-6))
    keys = keys_of(split)
    assert len(set(keys)) == 5  # first; layers 0|1, 1|2, 2|3; last
    difference = diff_keys(keys[1], keys[2])
    assert difference and all("1e-06" in line or "1e-05" in line for line in difference)


def test_one_other_dtype_is_not_shared():
    def forward(self, x, w, w2):
        for weight in (w, w, w2):
            x = torch.ops.aten.mm(x.to(weight.dtype), weight).float()
            out = torch.empty_like(x)
            torch.ops.compiletoy.attention(x, x, x, out)
            x = out
        return x

    args = (torch.ones(8, 4), torch.ones(4, 4), torch.ones(4, 4, dtype=torch.float64))
    split = split_of(forward, *args, x=0)
    first, second, third = keys_of(split)
    assert first == second != third


def test_a_function_of_torch_c_that_knows_no_module_is_known_by_its_name():
    """Dynamo of torch 2.11 keeps such a call where a forward slices a ModuleList."""
    log = torch._C._log_api_usage_once
    key = content_key(
        graph((log, "python.nn_module"), (torch.add, [0], [1])), fakes(torch.ones(2), torch.ones(2))
    )
    assert key.portable and any("torch._C._log_api_usage_once" in line for line in key.lines)


def test_a_triton_kernel_in_the_graph_is_itself_and_not_its_place_in_a_table():
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table as table

    def of(kernel, constants):
        places = {
            "kernel_idx": table.add_kernel(kernel),
            "constant_args_idx": table.add_constant_args(constants),
        }
        g = fx.Graph()
        x = g.placeholder("x")
        op = torch.ops.higher_order.triton_kernel_wrapper_mutation
        g.call_function(op, (), {**places, "grid": [(1, 1, 1)], "kwargs": {"x": x}})
        g.output((x,))
        return content_key(fx.GraphModule(torch.nn.Module(), g), fakes(torch.randn(4)))

    class Kernel:
        pass

    one, other = Kernel(), Kernel()
    first, again = of(one, {"BLOCK": 16}), of(one, {"BLOCK": 16})  # other places in the table
    assert first == again
    assert len({first.lines, of(one, {"BLOCK": 32}).lines, of(other, {"BLOCK": 16}).lines}) == 3
    assert not first.portable  # a second process cannot tell whether it is the same kernel
