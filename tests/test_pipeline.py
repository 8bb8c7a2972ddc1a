"""The decorator: levels, modes, instances, threads; and the toy models whose counters are known."""

from __future__ import annotations

import copy
import dataclasses
import gc
import threading
import weakref

import pytest
import torch
from torch import nn

import cgkit
from cgkit import (
    BatchDescriptor,
    CompilationConfig,
    CUDAGraphMode,
    compilation_counter,
    register_op,
    set_forward_context,
    support_torch_compile,
    torch_hooks,
)
from cgkit.errors import BufferWriteError, CaptureError, ConfigError, MovedInputError, TraceError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EAGER = {"compiler": "eager"}
calls = {"attention": 0}


def toy_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    calls["attention"] += 1
    out.copy_(q + k + v)


register_op("toy_attention", toy_attention, ["out"], namespace="pipeline_tests")
ATTENTION = "pipeline_tests::toy_attention"


def attention(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    torch.ops.pipeline_tests.toy_attention(x, x, x, out)
    return out


@support_torch_compile
class Silly(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = attention(x + 1 + 2)
        x = attention(x - 2 - 1)
        return x + 1


def silly(x: torch.Tensor) -> torch.Tensor:
    return ((x + 3) * 3 - 3) * 3 + 1


@support_torch_compile
class Layers(nn.Module):
    def __init__(self, layers: int, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = attention(layer(x)) + x
        return x


@support_torch_compile
class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if len(x) >= 4 else x * 100


def config(**changes: object) -> CompilationConfig:
    return CompilationConfig(**{"splitting_ops": [ATTENTION], **EAGER, **changes})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _clean():
    yield
    cgkit.reset()


@pytest.mark.parametrize("device", DEVICES)
def test_silly_model_counters(device: str) -> None:
    model = Silly(compilation_config=config(cudagraph_capture_sizes=[1, 2], cudagraph_copy_inputs=False))
    x = torch.zeros(2, 4, device=device)
    with compilation_counter.expect(
        num_graphs_seen=1,
        num_piecewise_graphs_seen=5,
        num_piecewise_capturable_graphs_seen=3,
        num_backend_compilations=3,
        num_cudagraph_captured=6,
    ):
        model(x)
        for size in (2, 1):
            key = BatchDescriptor(size)
            for mode in (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE):
                with set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=key):
                    model(x[:size])
    x[:2] = 1.5
    before = calls["attention"]
    with set_forward_context(
        cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE, batch_descriptor=BatchDescriptor(2)
    ):
        assert torch.equal(model(x), silly(x))
    assert calls["attention"] == before + 2  # attention runs beside a PIECEWISE replay


@pytest.mark.parametrize("device", DEVICES)
def test_attention_is_inside_a_full_graph(device: str) -> None:
    model = Silly(compilation_config=config(cudagraph_mode="FULL", cudagraph_capture_sizes=[1, 2]))
    model(torch.zeros(2, 4, device=device))
    captured = cgkit.capture_model(model)
    assert captured.num_graphs == 2
    before = calls["attention"]
    for size in (1, 2):
        x = torch.randn(size, 4, device=device)
        torch.testing.assert_close(model(x), silly(x))
    assert calls["attention"] == before


@pytest.mark.parametrize("layers", [1, 4])
def test_counters_of_a_layered_model(layers: int) -> None:
    sizes = [1, 2, 4]
    with compilation_counter.expect(
        num_graphs_seen=1,
        num_piecewise_graphs_seen=2 * layers + 1,
        num_piecewise_capturable_graphs_seen=layers + 1,
        num_cudagraph_captured=(layers + 1) * len(sizes),
        num_gpu_runner_capture_triggers=len(sizes),
    ):
        model = Layers(layers, compilation_config=config(cudagraph_capture_sizes=sizes))
        model(torch.randn(4, 8))
        cgkit.capture_model(model)


def test_counters_unsplit() -> None:
    sizes = [1, 2, 4]
    with (
        pytest.warns(UserWarning, match="becomes FULL"),
        compilation_counter.expect(
            num_graphs_seen=1,
            num_piecewise_graphs_seen=1,
            num_piecewise_capturable_graphs_seen=1,
            num_cudagraph_captured=len(sizes),
        ),
    ):
        model = Layers(3, compilation_config=config(cudagraph_capture_sizes=sizes, splitting_ops=[]))
        model(torch.randn(4, 8))
        cgkit.capture_model(model)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("dispatch", ["bytecode", "guard_filter"])
def test_no_guard_is_wrong_on_purpose(level: int, dispatch: str) -> None:
    model = Branch(
        compilation_config=CompilationConfig(level=level, dispatch=dispatch, cudagraph_mode="NONE", **EAGER)
    )
    assert torch.equal(model(torch.ones(4)), torch.full((4,), 2.0))
    expected = 100.0 if level < 2 else 2.0  # levels 2 and 3 check no guard: the first branch was traced
    assert torch.equal(model(torch.ones(3)), torch.full((3,), expected))


def test_the_ninth_model_at_level_1_is_compiled_as_the_first() -> None:
    """Dynamo compiles a code object eight times and then lets it run as it is."""
    compiled: list[str] = []
    hook = torch_hooks.register_bytecode_hook(lambda code, _: compiled.append(code.co_name))
    try:
        for scale in range(10):

            @support_torch_compile
            class Scaled(nn.Module):
                def forward(self, x: torch.Tensor) -> torch.Tensor:
                    return x * scale  # noqa: B023

            model = Scaled(compilation_config=CompilationConfig(level=1, cudagraph_mode="NONE", **EAGER))
            for rows in (3, 4):
                assert torch.equal(model(torch.ones(rows, 2)), torch.full((rows, 2), float(scale)))
    finally:
        hook.remove()
    assert len(set(compiled)) == 10 and len(compiled) == 20  # and no model knows that another's sizes changed


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("first", [1, 5])
def test_levels_agree_with_eager(level: int, first: int) -> None:
    torch.manual_seed(0)
    compiler = {"compiler": "inductor"} if level == 2 else EAGER
    model = Layers(3, compilation_config=CompilationConfig(level=level, cudagraph_mode="NONE", **compiler))
    counted = {"num_graphs_seen": int(level >= 2), "dynamo_as_is_count": int(level == 1)}
    with compilation_counter.expect(**counted):
        for size in (first, 7, 1, 2):
            x = torch.randn(size, 8)
            torch.testing.assert_close(model(x), eager(model, x))


def eager(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return type(model).forward(model, x)


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"])
@pytest.mark.parametrize("device", DEVICES)
def test_second_call_with_fresh_tensors_is_right(mode: str, device: str) -> None:
    torch.manual_seed(0)
    model = Layers(2, compilation_config=config(cudagraph_mode=mode, cudagraph_capture_sizes=[2, 4])).to(
        device
    )
    model(torch.randn(3, 8, device=device))
    cgkit.capture_model(model)
    for size in (1, 2, 3, 4, 9):  # padded, exact, above the largest
        x = torch.randn(size, 8, device=device)
        torch.testing.assert_close(model(x), eager(model, x))


def test_callers_own_buffers_must_stay() -> None:
    model = Layers(2, compilation_config=config(cudagraph_capture_sizes=[4], cudagraph_copy_inputs=False))
    x = torch.randn(4, 8)
    model(x)
    cgkit.capture_model(model, make_inputs=lambda n: x[:n])
    torch.testing.assert_close(model(x), eager(model, x))
    with pytest.raises(MovedInputError):
        model(torch.randn(4, 8))


def test_two_decorated_models_and_twenty_depths() -> None:
    models = [Layers(1 + i % 5, compilation_config=config(cudagraph_mode="NONE")) for i in range(20)]
    with compilation_counter.expect(num_graphs_seen=21):
        other = Branch(compilation_config=config(cudagraph_mode="NONE", splitting_ops=None))
        other(torch.ones(4))
        for model in models:
            for size in (3, 5):
                x = torch.randn(size, 8)
                torch.testing.assert_close(model(x), eager(model, x))


def test_two_threads() -> None:
    models = [Layers(2 + i, compilation_config=config(cudagraph_mode="NONE")) for i in range(2)]
    wrong: list[str] = []

    def serve(model: nn.Module) -> None:
        for _ in range(100):
            x = torch.randn(3, 8)
            if not torch.allclose(model(x), eager(model, x)):
                wrong.append(type(model).__name__)

    with compilation_counter.expect(num_graphs_seen=2):
        threads = [threading.Thread(target=serve, args=(model,)) for model in (*models, *models)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_subclasses_that_inherit_forward() -> None:
    class Base(nn.Module):
        factor = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    @support_torch_compile
    class Twice(Base):
        factor = 2.0

    @support_torch_compile
    class Thrice(Base):
        factor = 3.0

    x = torch.ones(3)
    cfg = CompilationConfig(cudagraph_mode="NONE", **EAGER)
    assert torch.equal(Twice(compilation_config=cfg)(x), x * 2)
    assert torch.equal(Thrice(compilation_config=cfg)(x), x * 3)
    assert torch.equal(Base()(x), x)


def test_nested_children() -> None:
    @support_torch_compile(config=CompilationConfig(cudagraph_mode="NONE", **EAGER))
    class Child(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Child(), Child()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x) * 2)

    @support_torch_compile(config=CompilationConfig(cudagraph_mode="NONE", **EAGER))
    class Outer(Plain):
        pass

    x = torch.ones(3)
    with compilation_counter.expect(num_graphs_seen=2):
        assert torch.equal(Plain()(x), x * 2 + 3)
    with compilation_counter.expect(num_graphs_seen=1):
        assert torch.equal(Outer()(x), x * 2 + 3)


def test_decorating_twice_is_decorating_once() -> None:
    again = support_torch_compile(support_torch_compile(Branch))
    assert again is Branch
    with compilation_counter.expect(num_graphs_seen=1):
        again(compilation_config=config(cudagraph_mode="NONE", splitting_ops=None))(torch.ones(5))


def test_enable_if_and_bad_decorations() -> None:
    @support_torch_compile(enable_if=lambda cfg: cfg.max_num_seqs > 100)
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    with compilation_counter.expect(num_graphs_seen=0, num_models_seen=0):
        Model(compilation_config=CompilationConfig(max_num_seqs=8))(torch.ones(2))
    with pytest.raises(ConfigError, match="dynamic_arg_dims"):

        @support_torch_compile
        class Unannotated(nn.Module):
            def forward(self, x):  # type: ignore[no-untyped-def]
                return x

    with pytest.raises(ConfigError, match=r"nn\.Module"):
        support_torch_compile(dict)
    with pytest.raises(ConfigError, match="CompilationConfig"):
        Model(compilation_config={"level": 3})


def test_none_argument_stays_none() -> None:
    @support_torch_compile
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            return x if y is None else x + y

    x = torch.ones(3)
    cfg = CompilationConfig(cudagraph_mode="NONE", **EAGER)
    model = Model(compilation_config=cfg)
    model(x)
    with pytest.raises(TraceError, match="'y'"):
        model(x, x)
    model = Model(compilation_config=cfg)
    model(x, x)
    with pytest.raises(TraceError):
        model(x)


def test_dataclass_of_tensors() -> None:
    @dataclasses.dataclass
    class IntermediateTensors:
        hidden: torch.Tensor
        residual: torch.Tensor

    @support_torch_compile
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, between: IntermediateTensors | None = None) -> torch.Tensor:
            return x if between is None else x + between.hidden * between.residual

    Model.forward.__globals__["IntermediateTensors"] = IntermediateTensors
    model = Model(compilation_config=CompilationConfig(cudagraph_mode="NONE", **EAGER))
    with compilation_counter.expect(num_graphs_seen=1):
        for size in (4, 7):
            t = [torch.randn(size, 3) for _ in range(3)]
            assert torch.equal(model(t[0], IntermediateTensors(*t[1:])), t[0] + t[1] * t[2])


def test_buffer_writes_raise_only_with_graphs() -> None:
    @support_torch_compile
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.add_(1)
            return x + self.seen

    with pytest.raises(BufferWriteError, match=r"self\.seen\.add_\(1\)"):
        Counting(compilation_config=config(splitting_ops=None))(torch.ones(2, 3))
    off = Counting(compilation_config=config(splitting_ops=None, cudagraph_mode="NONE"))
    assert torch.equal(off(torch.ones(2, 3)), torch.full((2, 3), 2.0))
    assert torch.equal(off(torch.ones(2, 3)), torch.full((2, 3), 3.0))


def test_hooks_of_the_model_run() -> None:
    model = Branch(compilation_config=config(cudagraph_mode="NONE", splitting_ops=None))
    model.register_forward_hook(lambda module, args, output: output + 1)
    assert torch.equal(model(torch.ones(4)), torch.full((4,), 3.0))
    assert torch.equal(model(torch.ones(5)), torch.full((5,), 3.0))


def test_instances_go_away_and_copies_are_their_own() -> None:
    model = Layers(2, compilation_config=config(cudagraph_capture_sizes=[2]))
    x = torch.randn(2, 8)
    model(x)
    cgkit.capture_model(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.layers[0].weight.zero_()
    torch.testing.assert_close(other(x), eager(other, x))
    torch.testing.assert_close(model(x), eager(model, x))
    ref = weakref.ref(model)
    del model
    gc.collect()
    assert ref() is None


def test_reset_and_again() -> None:
    model = Layers(2, compilation_config=config(cudagraph_capture_sizes=[2]))
    x = torch.randn(2, 8)
    for _ in range(2):
        model(x)
        captured = cgkit.capture_model(model)
        torch.testing.assert_close(model(x), eager(model, x))
        cgkit.reset()
        assert captured.num_graphs == 0
        assert compilation_counter.num_graphs_seen == 0


def test_nothing_to_record() -> None:
    model = Layers(1, compilation_config=config(cudagraph_mode="NONE"))
    model(torch.randn(2, 8))
    with pytest.raises(CaptureError, match="cudagraph_mode"):
        cgkit.capture_model(model)
    with pytest.raises(CaptureError, match="call it once"):
        cgkit.capture_model(Layers(1, compilation_config=config()))


def test_compile_sizes_that_padding_changes_are_refused() -> None:
    model = Layers(1, compilation_config=config(cudagraph_capture_sizes=[2, 4], compile_sizes=[3]))
    with pytest.raises(ConfigError, match="3"):
        model(torch.randn(4, 8))
