"""The interpreter computes shapes and nothing else, and meets each piece with the right fakes."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cgkit import torch_hooks
from cgkit.compiling import PiecewiseCompileInterpreter, compile_pieces, content_key
from cgkit.config import CompilationConfig
from cgkit.errors import CompileError
from cgkit.splitting import register_op
from tests.compiling.toys import attend, calls, split_llama, split_of

EAGER = CompilationConfig(compiler="eager")


def interpret(split):
    """The interpreter after its run, the calls that it reported, and all values by name."""
    seen = []
    interpreter = PiecewiseCompileInterpreter(split, content_key, seen.append)
    return interpreter, seen, interpreter.run()


class RealOnes(TorchDispatchMode):
    """Notes every operator that makes or gets a tensor with memory of its own."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        values = [v for v in (*args, result) if isinstance(v, torch.Tensor)]
        if any(not torch_hooks.is_fake(v) and v.device.type != "meta" and v.numel() for v in values):
            self.seen.append(str(func))
        return result


def test_no_kernel_runs_and_no_real_tensor_is_made():
    _, split = split_llama(3)
    before = calls["attention"]
    with RealOnes() as watch:
        torch.ones(1)
        assert watch.seen  # the watch does see real tensors
        watch.seen.clear()
        interpret(split)
    assert watch.seen == []
    assert calls["attention"] == before


def test_a_tensor_larger_than_any_memory_is_no_obstacle():
    def forward(self, x):
        table = torch.empty(10**6, 10**6, device=x.device)  # 4 TB in float32
        y = attend(x, x, x) @ table.narrow(1, 0, 3)
        return (attend(y, y, y) @ table.narrow(0, 0, 3)) + 1

    split = split_of(forward, torch.empty(8, 10**6, device="meta"))
    _, seen, values = interpret(split)
    assert seen[-1].args[-1].shape[-1] >= 3
    assert any(isinstance(v, torch.Tensor) and v.numel() >= 10**12 for v in values.values())
    compile_pieces(split, EAGER)


def layout(value):
    if isinstance(value, torch.Tensor):
        return (
            value.dtype,
            [str(s) for s in value.shape],
            [str(s) for s in value.stride()],
            value.storage_offset(),
        )
    return str(value)


@pytest.mark.parametrize("layers", [1, 4])
def test_every_value_has_the_layout_that_the_trace_saw(layers):
    _, split = split_llama(layers)
    _, _, values = interpret(split)
    traced = {node.name: node.meta.get("example_value") for node in split.graph_module.graph.nodes}
    assert {name: layout(v) for name, v in values.items()} == {name: layout(traced[name]) for name in values}


def test_the_token_count_comes_first():
    _, split = split_llama(2)
    _, seen, _ = interpret(split)
    assert [call.piece.name for call in seen] == ["submod_0", "submod_2", "submod_4"]
    for call in seen:
        assert call.sym_shape_indices[0] == 0 and isinstance(call.args[0], torch.SymInt)


def test_equal_pieces_are_run_once_and_their_outputs_are_apart():
    _, split = split_llama(8)
    interpreter = PiecewiseCompileInterpreter(split, content_key, lambda call: None)
    ran = []
    run = interpreter._run
    interpreter._run = lambda piece, inputs: (ran.append(piece.name), run(piece, inputs))[1]
    values = interpreter.run()
    assert [name for name in ran if not int(name.removeprefix("submod_")) % 2] == [
        "submod_0",
        "submod_2",
        "submod_16",
    ]
    outputs = [
        values[name] for piece in split.pieces if not piece.is_splitting for name in piece.output_names
    ]
    storages = [torch_hooks.storage_key(v) for v in outputs if isinstance(v, torch.Tensor)]
    # v is a view of qkv, everything else has a storage of its own: no two pieces' outputs share one
    assert len(set(storages)) == len(storages)


def test_repeated_outputs_share_storage_among_themselves_as_the_first():
    def forward(self, x):
        for _ in range(3):
            buffer = torch.empty(x.shape[0], 2 * x.shape[1], device=x.device)
            out = buffer[:, : x.shape[1]]
            torch.ops.compiletoy.attention(x, x, x, out)
            x = buffer.narrow(1, 0, x.shape[1]) + 1
        return x

    split = split_of(forward, torch.ones(8, 4))
    _, seen, values = interpret(split)
    pairs = [call.piece.output_names for call in seen[:-1]]
    assert all(len(pair) >= 2 for pair in pairs)
    for names in pairs:
        tensors = [values[n] for n in names if isinstance(values[n], torch.Tensor)]
        by_storage = [torch_hooks.storage_key(t) for t in tensors]
        assert len(set(by_storage)) < len(by_storage)


def test_an_operator_without_a_fake_form_is_named():
    torch.library.define("compiletoy::blind", "(Tensor x) -> Tensor")
    torch.library.impl("compiletoy::blind", "CPU", lambda x: x + 1)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch_hooks.new_fake_mode().from_tensor(torch.ones(4), static_shapes=True)
    graph.output((graph.call_function(torch.ops.compiletoy.blind.default, (x,)),))
    from cgkit.splitting import split_graph

    split = split_graph(torch.fx.GraphModule(torch.nn.Module(), graph), [])
    with pytest.raises(CompileError, match=r"submod_0 .*\n.*blind.*fake_impl"):
        compile_pieces(split, EAGER)


def test_inputs_that_share_memory_with_a_written_one_are_found():
    def touch(x: torch.Tensor) -> None:
        x.add_(1)

    register_op("touch", touch, ["x"], namespace="compiletoy")

    def forward(self, x):
        h = x * 2
        left, right = h.chunk(2, -1)
        torch.ops.compiletoy.touch(h)
        left.add_(1)
        return right + h.chunk(2, -1)[0], left

    split = split_of(forward, torch.ones(8, 4), ops=["compiletoy::touch"])
    _, seen, _ = interpret(split)
    after = seen[1]
    shared = [i for i, v in enumerate(after.args) if isinstance(v, torch.Tensor)]
    assert list(after.written_together) == shared and len(shared) >= 2
    assert seen[0].written_together == ()


def test_the_number_of_examples_is_checked():
    _, split = split_llama(1)
    interpreter = PiecewiseCompileInterpreter(split, content_key, lambda call: None)
    with pytest.raises(CompileError, match="inputs and 1 examples"):
        interpreter.run(torch.ones(1))
